"""What the spectra predict of every head, and numbers over heads that say what the predictions are worth.

Predictions are of random walks: from W_QK alone, from W_QK Σ̂ with the covariance of what the head reads, and from
W_QK Σ̂ with that of its increments. Nothing is judged or drawn here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from theodolite.errors import WorkError
from theodolite.judging import Estimate
from theodolite.papers.localization.text_as_walk import text_walk
from theodolite.papers.rank_correlation import rank_correlation
from theodolite.report.data import Floats, need
from theodolite.theory.propagation import propagation_finite
from theodolite.theory.regimes import END_SHARE, UNDEFINED, UNIFORM_SPREAD, VANISHING_LEVEL, regime
from theodolite.theory.spectrum import qk_moments

if TYPE_CHECKING:
    from theodolite.papers.experiment import Study
    from theodolite.passes.run import Run

SOURCES = {
    "weights": "W_QK",
    "text": "W_QK Σ̂, Σ̂ of what the head reads",
    "increments": "W_QK Σ̂, Σ̂ of its increments",
}
"""Where a prediction comes from → how it is called."""

SUFFIX = {"weights": "", "text": "_data"}
"""Of the survey's columns and arrays, for the two predictions that it has."""

LEAST_HEADS = 8  # below that, a rank correlation over heads says nothing
BINS = 16
"""Of a measured curve, whose single positions are shares of few contexts: its regime is read off their means."""

RESAMPLES, CENTRAL = 2000, (2.5, 97.5)  # of the bootstrap over heads; percentiles of its interval


@dataclass(frozen=True)
class Prediction:
    """What one source says of all heads in the table's order.

    Attributes:
        curve: ρ_1 … ρ_T, (heads, T); NaN where the family's queries and keys have no W_QK.
        regime: its name by the source's ξ and η. eta: √tr(W²)/λ of the symmetric part.
    """

    curve: Floats
    regime: np.ndarray
    eta: Floats


@dataclass(frozen=True)
class OverHeads(Estimate):
    """A number over heads with its bootstrap standard error and central 95 % interval; NaN where it has none."""

    low: float = math.nan
    high: float = math.nan


def from_increments(study: Study) -> Prediction:
    """Predictions from the second moment of the increments x_{t+1} − x_t of what each attention module reads."""
    model, walk = study.require_model(), text_walk(study)
    length = int(need(study.run, "propagation_by_position").shape[2])
    curves, names, etas = [], [], []
    for layer in range(model.layers):
        try:
            weights = model.head_weights(layer)
        except WorkError:
            weights = None
        if weights is None or not weights.exact:
            curves.append(torch.full((model.heads, length), torch.nan, dtype=torch.float64))
            names += [UNDEFINED] * model.heads
            etas.append(torch.full((model.heads,), torch.nan, dtype=torch.float64))
            continue
        sigma = walk.inputs.covariance(walk.input_state, layer)
        temperature = 1 / weights.scaling
        moments = qk_moments(weights.w_q, weights.w_k, sigma, temperature)
        curves.append(
            propagation_finite(
                moments.trace, moments.form_squared, moments.trace_of_square, length, temperature
            )
        )
        names += regime(moments.xi_symmetric, moments.eta_symmetric).tolist()
        etas.append(moments.eta_symmetric)
    return Prediction(torch.cat(curves).cpu().numpy(), np.array(names), torch.cat(etas).cpu().numpy())


def from_survey(run: Run, source: str) -> Prediction:
    """What the survey itself predicts, from `weights` or from `text`."""
    suffix = SUFFIX[source]
    return Prediction(
        need(run, f"propagation_predicted{suffix}").reshape(len(run.heads), -1).astype(np.float64),
        run.heads[f"regime{suffix}"].to_numpy(),
        run.heads[f"eta_symmetric{suffix}"].to_numpy(dtype=np.float64),
    )


def regime_of_curve(curve: Floats) -> np.ndarray:
    """The name of the regime that a curve has, by the rules of `theory.regimes.regime`, off its means in `BINS` bins.

    Args:
        curve: (heads, T); positions that are NaN (beyond a window) are left out. A head without any is undefined.
    """
    bins = np.array_split(np.arange(curve.shape[1]), min(BINS, curve.shape[1]))
    names = []
    for row in curve:
        binned_values = [row[positions][np.isfinite(row[positions])] for positions in bins]
        binned = np.array([positions.mean() for positions in binned_values if len(positions)])
        if not len(binned):
            names.append(UNDEFINED)
            continue
        highest = binned.max()
        if highest < VANISHING_LEVEL:
            names.append("vanishing")
        elif highest - binned.min() <= UNIFORM_SPREAD * highest:
            names.append("uniform")
        elif binned[-1] >= END_SHARE * highest:
            names.append("late-site")
        elif binned[0] >= END_SHARE * highest:
            names.append("early-site")
        else:
            names.append("middle-site")
    return np.array(names)


def mean_of(curve: Floats) -> Floats:
    """Mean over the finite positions, (heads,); NaN where none is."""
    known = np.isfinite(curve)
    count = known.sum(axis=1)
    means: Floats = np.divide(
        np.where(known, curve, 0.0).sum(axis=1), count, out=np.full(len(curve), np.nan), where=count > 0
    )
    return means


def width_of(curve: Floats) -> Floats:
    """Effective share of the positions that propagate, (Σρ)²/(TΣρ²), (heads,); NaN where none does."""
    square = mean_of(curve**2)
    widths: Floats = mean_of(curve) ** 2 / np.where(square > 0, square, np.nan)
    return widths


def bootstrap(statistic: Callable[[np.ndarray], np.ndarray], heads: int, seed: int) -> OverHeads:
    """A number over heads with its error from drawing heads anew.

    Args:
        statistic: indices of heads (draws, heads) → the number for each draw.
    """
    value = float(statistic(np.arange(heads)[None])[0]) if heads else np.nan
    if heads < LEAST_HEADS or not np.isfinite(value):
        return OverHeads(value, math.nan, heads, "heads")
    drawn = statistic(np.random.default_rng(seed).integers(heads, size=(RESAMPLES, heads)))
    drawn = drawn[np.isfinite(drawn)]
    low, high = np.percentile(drawn, CENTRAL)
    return OverHeads(value, float(drawn.std(ddof=1)), heads, "heads", float(low), float(high))


def rank_correlation_of_heads(x: Floats, y: Floats, seed: int) -> OverHeads:
    """Rank correlation over the heads that have both, NaN below `LEAST_HEADS`, with its bootstrap."""
    both = np.isfinite(x) & np.isfinite(y)
    x, y = x[both], y[both]
    if len(x) < LEAST_HEADS:
        return OverHeads(math.nan, math.nan, len(x), "heads")
    return bootstrap(lambda drawn: rank_correlation(x[drawn], y[drawn]), len(x), seed)


def agreement(first: np.ndarray, second: np.ndarray, seed: int) -> tuple[OverHeads, float]:
    """Cohen's κ of two namings of the same heads, and the share of heads in which they agree; undefined left out."""
    known = (first != UNDEFINED) & (second != UNDEFINED)
    names = np.unique(np.concatenate([first[known], second[known]]))
    first_codes, second_codes = (np.searchsorted(names, values[known]) for values in (first, second))

    def kappa(drawn: np.ndarray) -> np.ndarray:
        same = (first_codes[drawn] == second_codes[drawn]).mean(axis=1)
        chance = sum(
            (
                (first_codes[drawn] == name).mean(axis=1) * (second_codes[drawn] == name).mean(axis=1)
                for name in range(len(names))
            ),
            start=np.zeros(len(drawn)),
        )
        # Where both have one name throughout, chance alone agrees fully: no agreement beyond it can be seen.
        return np.divide(same - chance, 1 - chance, out=np.full(len(drawn), np.nan), where=chance < 1)

    share = float((first_codes == second_codes).mean()) if known.any() else np.nan
    return bootstrap(kappa, int(known.sum()), seed), share


def curve_error(predicted: Floats, measured: Floats, seed: int) -> OverHeads:
    """Mean over heads of the mean absolute error of ρ over the keys that the last query sees."""
    errors = mean_of(np.abs(predicted - measured))
    errors = errors[np.isfinite(errors)]
    return bootstrap(lambda drawn: errors[drawn].mean(axis=1), len(errors), seed)


def others_mean(curve: Floats) -> Floats:
    """For every head the mean curve of all others: a prediction that knows nothing of the head."""
    known = np.isfinite(curve)
    total, count = np.where(known, curve, 0.0).sum(axis=0), known.sum(axis=0)
    others = count - known
    means: Floats = np.divide(
        total - np.where(known, curve, 0.0), others, out=np.full(curve.shape, np.nan), where=others > 0
    )
    return means
