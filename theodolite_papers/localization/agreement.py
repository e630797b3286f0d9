"""How well a prediction agrees with what is measured, head by head, with the error that layers show."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float
from torch import Tensor

from theodolite.estimates import Estimate, jackknife_error
from theodolite.measure.rank_correlation import partial_rank_correlation, rank_correlation
from theodolite.theory.regimes import UNDEFINED

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]

LEAST_HEADS = 8
"""Below that, a number over heads has no error worth giving, and a rank correlation says nothing."""


def over_heads(statistic: Callable[[Indices], float], layers: Indices) -> Estimate:
    """A number over heads, with its error from leaving out one layer after the other (jackknife).

    Heads of one layer are not independent: they read one stream, and what is predicted from it may miss them alike.

    Args:
        statistic: indices of some of the heads → the number of these.
        layers: the layer of each head, (heads,).

    Returns:
        No error below `LEAST_HEADS`.
    """
    heads, of = np.arange(len(layers)), np.unique(layers)
    value = statistic(heads) if len(heads) else math.nan
    if len(heads) < LEAST_HEADS or not math.isfinite(value):
        return Estimate(value)
    if len(of) == 1:
        return Estimate(value, n=1, of="layers")
    error = jackknife_error([statistic(heads[layers != layer]) for layer in of])
    return Estimate(value, float(error), len(of), "layers")


def mean_over_heads(values: Floats, layers: Indices) -> Estimate:
    """The mean over the heads that have a number, (heads,)."""
    known = np.isfinite(values)
    values = values[known]
    return over_heads(lambda heads: float(values[heads].mean()), layers[known])


def rank_correlation_of_heads(x: Floats, y: Floats, layers: Indices) -> Estimate:
    """Rank correlation over the heads that have both, (heads,) each; NaN below `LEAST_HEADS`."""
    return _correlation(rank_correlation, (x, y), layers)


def partial_rank_correlation_of_heads(x: Floats, y: Floats, given: Floats, layers: Indices) -> Estimate:
    """Rank correlation of x and y over heads with the ranks of `given` held fixed, (heads,) each; NaN as above."""
    return _correlation(partial_rank_correlation, (x, y, given), layers)


def _correlation(of: Callable[..., Floats], columns: tuple[Floats, ...], layers: Indices) -> Estimate:
    known = np.isfinite(columns).all(axis=0)
    if known.sum() < LEAST_HEADS:
        return Estimate(math.nan)
    x = np.stack(columns)[:, known]
    return over_heads(lambda heads: float(of(*x[:, heads])), layers[known])


def agreement(first: np.ndarray, second: np.ndarray, layers: Indices) -> tuple[Estimate, float]:
    """Cohen's κ of two namings of the same heads (Cohen 1960), and the share of heads in which they agree.

    Args:
        first, second: names, (heads,); heads that are `UNDEFINED` in either are left out.
    """
    known = (first != UNDEFINED) & (second != UNDEFINED)
    names = np.unique(np.concatenate([first[known], second[known]]))
    first_codes, second_codes = (np.searchsorted(names, values[known]) for values in (first, second))

    def kappa(heads: Indices) -> float:
        one, two = first_codes[heads], second_codes[heads]
        same, chance = (
            (one == two).mean(),
            sum((one == name).mean() * (two == name).mean() for name in range(len(names))),
        )
        # Where both have one name throughout, chance alone agrees fully: no agreement beyond it can be seen.
        return float((same - chance) / (1 - chance)) if chance < 1 else math.nan

    share = float((first_codes == second_codes).mean()) if known.any() else np.nan
    return over_heads(kappa, layers[known]), share


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
