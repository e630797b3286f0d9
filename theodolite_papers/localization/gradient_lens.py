"""Section 3 of Bao et al. 2024: does a token that propagates contribute to the gradient of W_QK?

∇_{W_QK} J = λ⁻¹ Σ_i (∂J/∂ω_i) x_i x_Tᵀ for the last query's logits ω: token i's share is |∂J/∂ω_i|·‖x_i‖ over the
sum of all. The paper drops all terms but those of ρ_i; here nothing is approximated.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional

from theodolite import OpenModel
from theodolite.attention.inputs import AttentionInputs, attend, softmax, weigh
from theodolite.errors import UsageError
from theodolite.estimates import Estimates, Floats
from theodolite.models.guard import measures
from theodolite.models.hooks import Hooks, hooked
from theodolite.report import style
from theodolite.system.wording import head_name, number
from theodolite.theory import empirical_propagation
from theodolite_papers import drawing
from theodolite_papers.drawing import Line
from theodolite_papers.experiment import Outcome, Study, by_name, declared
from theodolite_papers.rank_correlation import rank_correlation

CONTEXTS = 128  # read at most: a backward pass each
BATCH = 8
PARTS = 8  # of the contexts, each of which gives a rank correlation over positions
LEAST_CONTEXTS = 2 * PARTS


@dataclass(frozen=True)
class Shares:
    """The last query's propagating keys, and their shares of the gradient; layer and head of each."""

    propagates: Bool[Tensor, "contexts heads keys"]
    share: Float[Tensor, "contexts heads keys"]
    places: list[tuple[int, int]]


class _LastQuery(Hooks):
    """Attends as the model does, with a leaf added to the last query's logits, whose gradient is that of the logits."""

    def __init__(self) -> None:
        self.logits: dict[int, Tensor] = {}
        self.norms: dict[int, Tensor] = {}
        self.leaves: dict[int, Tensor] = {}

    def attention_input(self, layer: int, hidden: Tensor) -> None:
        self.norms[layer] = hidden.detach().double().norm(dim=-1)

    def attention(self, layer: int, inputs: AttentionInputs) -> Tensor:
        count = inputs.query.shape[2]
        logits = inputs.of_queries(slice(count - 1, count)).logits()
        leaf = torch.zeros_like(logits).requires_grad_()
        self.logits[layer], self.leaves[layer] = logits[:, :, 0].detach(), leaf
        last = weigh(softmax(logits + leaf, inputs.sink), inputs.value).transpose(1, 2)
        return torch.cat([self._others(inputs), last.to(inputs.value.dtype)], dim=1)

    def _others(self, inputs: AttentionInputs) -> Tensor:
        """Attend from the queries before the last; without a gradient where none of them sees the last token.

        There, no leaf reaches them.
        """
        sees_last = not inputs.causal if inputs.mask is None else bool(inputs.mask[..., :-1, -1].any())
        if not sees_last:
            with torch.no_grad():
                return attend(inputs)[:, :-1]
        weights = softmax(inputs.logits(), inputs.sink)[:, :, :-1]
        return weigh(weights, inputs.value).transpose(1, 2).to(inputs.value.dtype)


@measures("model")
def last_query(
    model: OpenModel, contexts: Int[Tensor, "contexts positions"]
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Compute by layer the last query's logits ω and ∂J/∂ω, (contexts, heads, keys), and the input's norms."""
    if model.source.predict is None:
        raise UsageError(f"{model.id} has no output head that is read, so that it has no loss")
    hooks = _LastQuery()
    with hooked(model, hooks), torch.enable_grad():
        last = (torch.arange(1, contexts.shape[1]) == contexts.shape[1] - 1).expand(len(contexts), -1)
        logits = model.source.predict(contexts[:, :-1].to(model.device), last).float()
        loss = functional.cross_entropy(logits, contexts[:, -1].to(logits.device), reduction="sum")
        gradients = torch.autograd.grad(loss, list(hooks.leaves.values()))
    pairs = zip(hooks.leaves, gradients, strict=True)
    return [(hooks.logits[layer], gradient[:, :, 0], hooks.norms[layer]) for layer, gradient in pairs]


def gradient_shares(model: OpenModel, contexts: Int[Tensor, "contexts positions"]) -> Shares:
    """Measure how much of the gradient of each context's last prediction comes through each key, head by head."""
    propagates, shares = [], []
    for batch in contexts.split(BATCH):
        layers = last_query(model, batch)
        sizes = [gradient.double().abs() * norms[:, None] for _, gradient, norms in layers]
        size = torch.cat(sizes, dim=1).cpu()
        shares.append(size / size.sum(-1, keepdim=True))
        propagates.append(torch.cat([empirical_propagation(logits) for logits, *_ in layers], dim=1).cpu())
    return Shares(torch.cat(propagates), torch.cat(shares), model.places)


def advantage(shares: Shares) -> Estimates:
    """Compute ln of a propagating key's mean share over another's, by head: mean over contexts that have both."""
    inside, share = shares.propagates.double(), shares.share
    # NaN where none is chosen.
    mean_in, mean_out = ((share * chosen).sum(-1) / chosen.sum(-1) for chosen in (inside, 1 - inside))
    log = (mean_in / mean_out).log().numpy()
    log[~np.isfinite(log)] = np.nan
    count = np.isfinite(log).sum(0)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = np.nansum(log, 0) / count
        error = np.sqrt(np.nansum((log - mean) ** 2, 0) / (count - 1) / count)
    mean[count < LEAST_CONTEXTS] = np.nan
    least = max(2, int(count[count >= LEAST_CONTEXTS].min(initial=LEAST_CONTEXTS)))
    return Estimates(mean, error, least, "contexts", "heads")


def order(shares: Shares) -> Estimates:
    """Correlate ρ_i over positions with token i's mean share, by head, by ranks: mean over parts of the text."""
    by_part = []
    for part in torch.arange(len(shares.share)).chunk(PARTS):
        rho, share = shares.propagates[part].double().mean(0), shares.share[part].nanmean(0)
        by_part.append(rank_correlation(rho.numpy(), share.numpy()))
    values = np.stack(by_part)
    return Estimates(values.mean(0), values.std(0, ddof=1) / PARTS**0.5, PARTS, "parts of the text", "heads")


@declared("localization/gradient")
def gradient(study: Study, outcome: Outcome) -> None:
    corpus = study.require_corpus()
    contexts = corpus.contexts[:CONTEXTS]
    if len(contexts) < LEAST_CONTEXTS or contexts.shape[1] < 3:
        raise UsageError(f"give {LEAST_CONTEXTS} contexts or more, of 3 tokens or more")
    shares = gradient_shares(study.require_model(), contexts)
    gains, orders = advantage(shares), order(shares)
    tokens = shares.propagates.double()
    outcome.read("contexts; keys of the last query", f"{len(contexts)}; {contexts.shape[1] - 1}")
    outcome.read("share of keys that propagate, mean over heads", number(float(tokens.mean())))
    of_gradient = number(float((shares.share * tokens).sum(-1).nanmean()))
    outcome.read("their share of the gradient, mean over heads", of_gradient)
    outcome.judge("larger-share", gains)
    outcome.judge("same-order", orders)
    outcome.tables["heads"] = pd.DataFrame(shares.places, columns=["layer", "head"]).assign(
        propagation=tokens.mean((0, 2)).numpy(),
        log_share_ratio=gains.values,
        log_share_ratio_se=gains.errors,
        rank_correlation=orders.values,
        rank_correlation_se=orders.errors,
    )
    rho, share = tokens.mean(0).numpy(), shares.share.nanmean(0).numpy()
    keys = share.shape[1]
    theta: Floats = (np.arange(keys) + 1) / keys
    lines = (Line("ρ_i", style.MEASURED, width=2.6), Line("share of ∇W_QK, over the largest", style.BLUE))

    def draw(place: int) -> go.Figure:
        curves = [rho[place], share[place] / share[place].max()]
        return drawing.curves(theta, lines, curves, ("position i/T of the key", ""))

    names = [head_name(*place) for place in shares.places]
    outcome.draw("heads", by_name("head", names, draw, grid=True))
