"""What one forward pass tells of a model in training: sums over the contexts of a batch, and over all processes.

The accumulators of a survey, and what a few queries tell. No column is made here.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from theodolite.accumulate.attention import AttentionStatistics, Tokens
from theodolite.accumulate.means import Means, Sample
from theodolite.accumulate.outliers import OutlierCounts
from theodolite.accumulate.sums import State
from theodolite.attention.inputs import MASKED, AttentionInputs, softmax
from theodolite.attention.piecewise import empirical_propagation
from theodolite.errors import WorkError
from theodolite.models import OpenModel
from theodolite.models.hooks import Hooks
from theodolite.train.ranks import Ranks

QUERIES = 8
"""Queries of a context, evenly spaced, whose own propagation is measured; the last query is one of them."""

RESIDUAL = (
    "contexts",
    "readers",
    "norm_sum",
    "norm_first_sum",
    "cosine_sum",
    "collapse_sum",
    "outlier",
    "massive",
    "massive_first",
)
"""Sums over the contexts of one layer of the residual stream; those by position are as large as a batch of its own."""


class LookSums(Hooks):
    """Feeds one forward pass to the accumulators of a survey, a layer of the residual stream at a time."""

    def __init__(self, model: OpenModel, tokens: Tokens, spectra: bool) -> None:
        contexts, length = tokens.ids.shape
        self.attention_statistics = AttentionStatistics(model.layers, model.heads, length, examples=0)
        self.queries: list[State] = [{} for _ in range(model.layers)]
        self._heads = model.heads
        self.residual: list[State] = []
        self._tokens = tokens
        self._spectra = spectra
        none = torch.empty(0, dtype=torch.int64)
        self._sample = Sample(torch.full((contexts,), -1), none, none)

    def stream(self, layer: int, hidden: Tensor) -> None:
        """Measure one layer, and keep what the layers table is made of."""
        if not torch.isfinite(hidden.sum(dtype=torch.float32)):
            raise WorkError(f"hidden states {residual_place(layer)} hold NaN or infinite values")
        contexts, length, width = hidden.shape
        means = Means(1, length, width, self._sample)
        outliers = OutlierCounts(1, width, contexts)
        means.update(0, hidden, 0)
        outliers.update(0, hidden, 0)
        sums = {name: tensor[0] for name, tensor in (means.state() | outliers.state()).items()}
        self.residual.append({name: sums[name] for name in RESIDUAL})

    def attention_input(self, layer: int, hidden: Tensor) -> None:
        """Only the entropy bound needs the norm of what attention reads."""
        if self._spectra:
            self.attention_statistics.update_input(layer, hidden)

    def attention(self, layer: int, inputs: AttentionInputs) -> Tensor:
        """Measure one layer's attention, and compute its output."""
        sums = query_sums(inputs)
        missing = self._heads - inputs.query.shape[1]  # heads that another layer has
        self.queries[layer] = {
            name: functional.pad(tensor, (*(0, 0) * (tensor.ndim - 1), 0, missing))
            for name, tensor in sums.items()
        }
        return self.attention_statistics.update(layer, inputs, self._tokens, 0)

    def merge(self, other: LookSums, *, largest_only: bool = False) -> None:
        """Take in another pass: all that it has summed, or of contexts of another length only the largest logits."""
        if largest_only:
            for layer, largest in enumerate(other.attention_statistics.state()["largest_logit"]):
                self.attention_statistics.add("largest_logit", layer, largest)
            return
        self.attention_statistics.merge(other.attention_statistics)
        for own, more in zip(self.queries + self.residual, other.queries + other.residual, strict=True):
            for name, tensor in more.items():
                own[name] = own[name] + tensor

    def totals(self, ranks: Ranks, *, counts: bool) -> State:
        """All sums over contexts of all processes, leading with layers; this one's only if it `counts`.

        The spread of entropies is one about a mean. So that of all processes is known first.
        """
        attention = self.attention_statistics.state()
        del attention["sink_tokens"]  # rows that differ from process to process; no column is made of them
        names = ("entropy_spread", "squared_lengths", "squared_entropy")
        spread, weight, weighted = (attention[name] for name in names)
        parts = {"attention.": attention}
        for prefix, layers in (("queries.", self.queries), ("residual.", self.residual)):
            some = next(layer for layer in layers if layer)
            # A layer that does not attend adds nothing, to no context.
            parts[prefix] = {
                name: torch.stack([layer.get(name, torch.zeros_like(tensor)) for layer in layers])
                for name, tensor in some.items()
            }
        maxima = frozenset("attention." + name for name in self.attention_statistics.maxima)
        local_sums = {
            prefix + name: tensor for prefix, state in parts.items() for name, tensor in state.items()
        }
        local_sums = {
            name: tensor if counts or name in maxima else 0 * tensor for name, tensor in local_sums.items()
        }
        sums = ranks.totals(local_sums, maxima)
        whole = sums["attention.squared_entropy"] / sums["attention.squared_lengths"][:, None]
        between = weight[:, None] * (weighted / weight[:, None] - whole).square()
        return sums | ranks.totals({"attention.entropy_spread": (spread + between) * counts})


def query_sums(inputs: AttentionInputs) -> State:
    """What `QUERIES` queries of each context, evenly spaced up to the last, tell of every head, summed over contexts.

    propagation_queries (H): mean empirical ρ of each query over the keys that it sees (Bao et al. 2024, definition 1,
    with T := t for query t); over keys first, then over queries. by_distance (H, D): mean attention over queries to
    the key at one distance, of the distances that half of the queries have.
    """
    batch, heads, length, _ = inputs.query.shape
    keys, device = inputs.key.shape[2], inputs.query.device
    rows = torch.arange(1, QUERIES + 1, device=device) * length // QUERIES - 1
    mask, bias = inputs.mask, inputs.bias
    if mask is not None:
        mask = mask[:, :, rows].expand(batch, heads, -1, -1)
    elif inputs.causal:
        mask = (torch.arange(keys, device=device) <= rows[:, None]).expand(batch, heads, -1, -1)
    if bias is not None:
        bias = (bias[:, :, rows] if bias.shape[2] > 1 else bias).expand(batch, heads, -1, -1)
    few = replace(inputs, query=inputs.query[:, :, rows], mask=mask, bias=bias, causal=False)
    # The rows are a block of their own, so that key j stands in column j but for the keys that none of them sees.
    (block,) = few.blocks(QUERIES)
    shares = []
    for row in block.logits.unbind(dim=2):
        visible = row[0, 0] > MASKED / 2
        shares.append(empirical_propagation(row[..., visible]).double().mean(dim=2).sum(dim=0))
    weights = softmax(block.logits.double(), inputs.sink)
    distances = rows[:, None] - torch.arange(block.first, block.last, device=device)
    return {
        "propagation_queries": torch.stack(shares).mean(dim=0).cpu(),
        "by_distance": _by_distance(weights.sum(dim=0), distances).cpu(),
    }


def _by_distance(
    weights: Float[Tensor, "heads queries keys"], distances: Int[Tensor, "queries keys"]
) -> Float[Tensor, "heads distances"]:
    """The mean weight at each distance that half of the queries have."""
    index = (distances - distances.min()).flatten()
    counts = torch.bincount(index)
    sums = weights.new_zeros(weights.shape[0], len(counts)).index_add_(1, index, weights.flatten(1))
    return (sums / counts)[:, counts >= QUERIES // 2]


def residual_place(layer: int) -> str:
    """Where residual layer ℓ is: it leaves block ℓ − 1, and layer 0 enters block 0."""
    return f"after block {layer - 1}" if layer else "before block 0"
