"""Find out why the spectrum does not predict propagation: replace each assumption in turn by what is measured.

Bao et al. 2024 have tokens walk at random, at every position turned alike, so that logits are Gaussian and grow along
the context. Each step here leaves one of these assumptions out.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch
from jaxtyping import Float
from torch import Tensor

from theodolite import Corpus, OpenModel
from theodolite.accumulate.second_moments import SecondMoments, covariance
from theodolite.attention.inputs import MASKED, AttentionInputs
from theodolite.attention.summary import summarise
from theodolite.errors import WorkError
from theodolite.measure.rank_correlation import rank_correlation_of_heads
from theodolite.models.guard import measures
from theodolite.models.hooks import Hooks, hooked
from theodolite.report.data import need, need_column
from theodolite.system.wording import number, with_error
from theodolite.theory.propagation import propagation_of_draws
from theodolite_papers import drawing
from theodolite_papers.experiment import Outcome, Study, by_name, declared
from theodolite_papers.localization.head_behaviour import curve_errors, from_increments, others_median
from theodolite_papers.localization.text_as_walk import text_walk

STEPS = {
    "walk": "a random walk with the text's increments (Assumption 1)",
    "draws": "independent draws with the covariance of what the head reads",
    "mean": "independent draws with its mean, too",
    "used": "independent draws of queries and keys as the head uses them, normed and turned by position",
    "query": "Gaussian logits with the variance over keys of each query",
    "later": "Gaussian logits with that variance, the first key left out",
    "position": "Gaussian logits with the mean and variance of each position",
}
"""What ρ is predicted from: its first entry is the theory, and each of the others assumes less."""

BATCH = 8


@dataclass(frozen=True)
class Sample:
    """The last query's logits of some contexts by layer, NaN where masked, and the moments of what each layer reads."""

    logits: dict[int, Float[Tensor, "contexts heads keys"]]
    inputs: SecondMoments


class _LastLogits(Hooks):
    def __init__(self, sample: Sample, trailing: int) -> None:
        self.sample, self.trailing = sample, trailing

    def attention_input(self, layer: int, hidden: Tensor) -> None:
        self.sample.inputs.update(layer, hidden[:, 1 : hidden.shape[1] - self.trailing].flatten(0, 1))

    def attention(self, layer: int, inputs: AttentionInputs) -> Tensor:
        end = inputs.query.shape[2] - self.trailing
        logits = inputs.of_queries(slice(end - 1, end)).logits()[:, :, 0].double().cpu()
        logits = logits.masked_fill(logits <= MASKED / 2, torch.nan)
        before = self.sample.logits.get(layer)
        self.sample.logits[layer] = logits if before is None else torch.cat([before, logits])
        return summarise(inputs).output


@measures("model")
def last_logits(model: OpenModel, corpus: Corpus) -> Sample:
    """Read some contexts: what each layer reads of them, and the logits of each last query."""
    sample = Sample({}, SecondMoments(model.layers, model.structure.attention_width))
    trailing = corpus.trailing(model.tokenizer)
    with hooked(model, _LastLogits(sample, trailing)):
        for ids in corpus.contexts.split(BATCH):
            model.forward(ids)
    return sample


def of_layer(model: OpenModel, layer: int, sample: Sample) -> dict[str, Float[Tensor, "heads positions"]]:
    """Predict a layer's curves by the steps that need its weights or its logits alone; NaN where it has no matrix."""
    logits = sample.logits[layer]
    keys = logits.isfinite().sum(dim=-1).double()
    later = logits[:, :, 1:]
    flat = {
        "query": propagation_of_draws(_variance(logits), keys).nanmean(dim=0),
        "later": propagation_of_draws(_variance(later), later.isfinite().sum(dim=-1)).nanmean(dim=0),
    }
    unknown = torch.full_like(flat["query"], torch.nan)
    flat |= {"draws": unknown, "mean": unknown}
    try:
        weights = model.head_weights(layer)
    except WorkError:
        weights = None
    if weights is not None and weights.exact:
        state = sample.inputs.state()
        sigma, mean = covariance(state, layer), state["mean"][layer]
        query, key = (w.mT @ sigma @ w for w in (weights.w_q, weights.w_k))
        of_mean = mean @ weights.w_q + weights.b_q
        for name, moment in (("draws", query), ("mean", query + of_mean[:, :, None] * of_mean[:, None])):
            variance = (moment * key).sum(dim=(-2, -1)) * weights.scaling**2
            flat[name] = propagation_of_draws(variance, keys.mean(dim=0))
    curves = {name: values[:, None].expand(-1, logits.shape[-1]) for name, values in flat.items()}
    centred = logits - logits.nanmean(dim=-1, keepdim=True)
    mean = centred.nanmean(dim=0)
    spread = (centred - mean).square().nanmean(dim=0).sqrt()
    normal = torch.distributions.Normal(mean, spread.clamp_min(1e-12), validate_args=False)
    length = keys.mean(dim=0)[:, None]
    return curves | {"position": normal.cdf(length - 1) - normal.cdf(-torch.ones_like(length))}


def _variance(logits: Tensor) -> Tensor:
    """Compute the variance over keys of each query's logits, NaN left out."""
    return (logits - logits.nanmean(dim=-1, keepdim=True)).square().nanmean(dim=-1)


def predicted(study: Study, length: int) -> dict[str, Float[Tensor, "heads positions"]]:
    """Predict the curves of all heads by each of `STEPS`, in the order of the table `heads`."""
    model, walk = study.require_model(), text_walk(study)
    sample = last_logits(model, walk.corpus)
    by_layer = [of_layer(model, layer, sample) for layer in model.attending]
    curves = {name: torch.cat([of[name] for of in by_layer]) for name in by_layer[0]}
    used = torch.tensor(need_column(study.run.heads, "propagation_independent"))
    curves |= {
        "walk": from_increments(model, walk, length).curve,
        "used": used[:, None].expand(-1, length),
    }
    return {name: curves[name] for name in STEPS}


@declared("localization/assumptions")
def assumptions(study: Study, outcome: Outcome) -> None:
    run = study.run
    layers, heads = run.heads["layer"].to_numpy(), run.heads["head"].to_numpy()
    measured = torch.from_numpy(need(run, "propagation_by_position")[layers, heads]).double()
    level = measured.nanmean(dim=1).numpy()
    table, rows = run.heads[["layer", "head"]].assign(measured=level), []
    for name, curve in predicted(study, measured.shape[1]).items():
        step, mean = STEPS[name], curve.nanmean(dim=1).numpy()
        table[name] = mean
        if not np.isfinite(mean).any():
            outcome.cannot_judge("order", "no matrix gives the logits of these heads", step=step)
            continue
        known = rank_correlation_of_heads(mean, level, layers)
        off = float(np.nanmean(np.abs(mean - level))), float(np.nanmean(curve_errors(curve, measured)))
        outcome.judge("order", known, step=step)
        rows.append((step, known.value, known.error, *off))
        shown = with_error(known.value, known.error), *map(number, off)
        outcome.read(step, "rank correlation {}; mean ρ off by {}, the curve by {}".format(*shown))
    none = float(np.nanmean(curve_errors(others_median(measured), measured)))
    outcome.read("the median curve of all other heads", f"the curve off by {number(none)}")
    columns = ["step", "rank_correlation", "standard_error", "error_of_mean", "error_of_curve"]
    outcome.tables |= {"steps": pd.DataFrame(rows, columns=columns), "heads": table}

    def scatter(place: int) -> go.Figure:
        values = table[list(STEPS)[place]].to_numpy()
        return drawing.head_scatter(values, level, layers, heads, ("predicted mean ρ", "measured mean ρ"))

    outcome.draw("heads", by_name("from", list(STEPS.values()), scatter, grid=True))
