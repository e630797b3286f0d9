"""How well a prediction agrees with what is measured, head by head, with the error of drawing heads anew."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float
from torch import Tensor

from theodolite.measure.rank_correlation import partial_rank_correlation, rank_correlation
from theodolite.theory.regimes import UNDEFINED

Floats = npt.NDArray[np.float64]

LEAST_HEADS = 8
"""Below that, a number over heads has no error worth giving, and a rank correlation says nothing."""

RESAMPLES, CENTRAL = 2000, (2.5, 97.5)  # of the bootstrap over heads; percentiles of its interval


@dataclass(frozen=True)
class OverHeads:
    """A number over `n` heads with its bootstrap standard error and central 95 % interval; NaN where it has none."""

    value: float
    n: int
    error: float = math.nan
    low: float = math.nan
    high: float = math.nan


def bootstrap(statistic: Callable[[np.ndarray], np.ndarray], heads: int, seed: int) -> OverHeads:
    """A number over heads with its error from drawing heads anew; none below `LEAST_HEADS`.

    Heads of one layer are not independent, so that the error is too small rather than too large.

    Args:
        statistic: indices of heads (draws, heads) → the number for each draw (draws,).
    """
    value = float(statistic(np.arange(heads)[None])[0]) if heads else math.nan
    if heads < LEAST_HEADS or not math.isfinite(value):
        return OverHeads(value, heads)
    drawn = statistic(np.random.default_rng(seed).integers(heads, size=(RESAMPLES, heads)))
    drawn = drawn[np.isfinite(drawn)]
    low, high = np.percentile(drawn, CENTRAL)
    return OverHeads(value, heads, float(drawn.std(ddof=1)), float(low), float(high))


def mean_over_heads(values: Floats, seed: int) -> OverHeads:
    """The mean over the heads that have a number, (heads,)."""
    values = values[np.isfinite(values)]
    return bootstrap(lambda drawn: values[drawn].mean(axis=1), len(values), seed)


def rank_correlation_of_heads(x: Floats, y: Floats, seed: int) -> OverHeads:
    """Rank correlation over the heads that have both, (heads,) each; NaN below `LEAST_HEADS`."""
    both = np.isfinite(x) & np.isfinite(y)
    x, y = x[both], y[both]
    if len(x) < LEAST_HEADS:
        return OverHeads(math.nan, len(x))
    return bootstrap(lambda drawn: rank_correlation(x[drawn], y[drawn]), len(x), seed)


def partial_rank_correlation_of_heads(x: Floats, y: Floats, given: Floats, seed: int) -> OverHeads:
    """Rank correlation of x and y over heads with the ranks of `given` held fixed, (heads,) each; NaN as above."""
    known = np.isfinite(x) & np.isfinite(y) & np.isfinite(given)
    x, y, given = x[known], y[known], given[known]
    if len(x) < LEAST_HEADS:
        return OverHeads(math.nan, len(x))
    return bootstrap(lambda drawn: partial_rank_correlation(x[drawn], y[drawn], given[drawn]), len(x), seed)


def agreement(first: np.ndarray, second: np.ndarray, seed: int) -> tuple[OverHeads, float]:
    """Cohen's κ of two namings of the same heads (Cohen 1960), and the share of heads in which they agree.

    Args:
        first, second: names, (heads,); heads that are `UNDEFINED` in either are left out.
    """
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


def curve_errors(
    predicted: Float[Tensor, "heads positions"], measured: Float[Tensor, "heads positions"]
) -> Float[Tensor, " heads"]:
    """Mean absolute error of each head's curve over the positions that both have; NaN where there is none."""
    return (predicted - measured).abs().nanmean(1)


def others_median(curve: Float[Tensor, "heads positions"]) -> Float[Tensor, "heads positions"]:
    """For every head the median of all others, at each position: a prediction that knows nothing of the head.

    No one curve has a smaller mean absolute error over the others. NaN where no other head has a number.
    """
    ordered, order = curve.sort(dim=0)  # NaN last
    rank, known = order.argsort(dim=0), curve.isfinite()
    others = known.sum(dim=0) - known.long()
    middle = [((others - 1) // 2).clamp_min(0), others // 2]
    # From a head's own place on, the others are one further in the order of all.
    low, high = (ordered.gather(0, (at + (rank <= at)).clamp_max(len(curve) - 1)) for at in middle)
    return torch.where(others > 0, (low + high) / 2, torch.nan)
