"""How well two rankings or two namings agree: Spearman's correlation and Cohen's κ, over heads with an error."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pandas as pd

from theodolite.estimates import Estimate, Floats, jackknife_error
from theodolite.theory.regimes import UNDEFINED

Indices = npt.NDArray[np.int64]

LEAST_HEADS = 8  # below that, a number over heads has no error worth giving


def rank_correlation(x: Floats, y: Floats) -> Floats:
    """Compute Spearman's correlation along the last axis, ties at their mean rank; NaN where one does not vary."""
    first, second = (_ranks(np.asarray(values, np.float64)) for values in (x, y))
    first, second = (ranks - ranks.mean(axis=-1, keepdims=True) for ranks in (first, second))
    scale = np.sqrt((first**2).sum(axis=-1) * (second**2).sum(axis=-1))
    products = np.asarray((first * second).sum(axis=-1))
    return np.divide(products, scale, out=np.full(products.shape, np.nan), where=scale > 0)


def _ranks(values: Floats) -> Floats:
    rows = values.reshape(-1, values.shape[-1]) if values.size else np.zeros((1, 0))
    # Of `scipy.stats`, which has this too, the import takes as long as a page.
    return pd.DataFrame(rows).rank(axis=1).to_numpy().reshape(values.shape)


def partial_rank_correlation(x: Floats, y: Floats, given: Floats) -> Floats:
    """Compute Spearman's correlation of x and y with the ranks of a third number held fixed; as `rank_correlation`."""
    xy, xz, yz = rank_correlation(x, y), rank_correlation(x, given), rank_correlation(y, given)
    left = np.sqrt((1 - xz**2) * (1 - yz**2))
    return np.divide(xy - xz * yz, left, out=np.full(np.shape(xy), np.nan), where=left > 1e-9)


def error_under_independence(count: int) -> float:
    """Return the standard error of a rank correlation of `count` independent pairs."""
    return float((count - 1) ** -0.5)


def over_heads(statistic: Callable[[Indices], float], layers: Indices) -> Estimate:
    """Estimate a statistic of heads, by their indices, with a jackknife's error over layers from `LEAST_HEADS` on."""
    heads, of = np.arange(len(layers)), np.unique(layers)
    value = statistic(heads) if len(heads) else math.nan
    if len(heads) < LEAST_HEADS or not math.isfinite(value):
        return Estimate(value)
    if len(of) == 1:
        return Estimate(value, n=1, of="layers")
    error = jackknife_error([statistic(heads[layers != layer]) for layer in of])
    return Estimate(value, float(error), len(of), "layers")


def rank_correlation_of_heads(x: Floats, y: Floats, layers: Indices, given: Floats | None = None) -> Estimate:
    """Correlate ranks over heads that have both, with the ranks of `given` held fixed; NaN below `LEAST_HEADS`."""
    columns = (x, y) if given is None else (x, y, given)
    known = np.isfinite(columns).all(axis=0)
    if known.sum() < LEAST_HEADS:
        return Estimate(math.nan)
    of, values = rank_correlation if given is None else partial_rank_correlation, np.stack(columns)[:, known]
    return over_heads(lambda heads: float(of(*values[:, heads])), layers[known])


def agreement(first: np.ndarray, second: np.ndarray, layers: Indices) -> tuple[Estimate, float]:
    """Compute κ of two namings of the heads (Cohen 1960), `UNDEFINED` left out, and the share that agree."""
    known = (first != UNDEFINED) & (second != UNDEFINED)
    names = np.unique(np.concatenate([first[known], second[known]]))
    first_codes, second_codes = (np.searchsorted(names, values[known]) for values in (first, second))

    def kappa(heads: Indices) -> float:
        one, two = first_codes[heads], second_codes[heads]
        same = (one == two).mean()
        chance = sum((one == name).mean() * (two == name).mean() for name in range(len(names)))
        # Where both have one name throughout, chance alone agrees fully: no agreement beyond it can be seen.
        return float((same - chance) / (1 - chance)) if chance < 1 else math.nan

    share = float((first_codes == second_codes).mean()) if known.any() else np.nan
    return over_heads(kappa, layers[known]), share
