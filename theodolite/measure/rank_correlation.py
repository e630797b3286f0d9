"""Spearman's rank correlation and its standard error."""

from __future__ import annotations

import numpy as np
from scipy.stats import rankdata

from theodolite.estimates import Floats


def rank_correlation(x: Floats, y: Floats) -> Floats:
    """Compute Spearman's correlation along the last axis, ties at their mean rank; NaN where one does not vary."""
    first, second = (rankdata(values, axis=-1) for values in (x, y))
    first, second = (ranks - ranks.mean(axis=-1, keepdims=True) for ranks in (first, second))
    scale = np.sqrt((first**2).sum(axis=-1) * (second**2).sum(axis=-1))
    products = np.asarray((first * second).sum(axis=-1))
    return np.divide(products, scale, out=np.full(products.shape, np.nan), where=scale > 0)


def partial_rank_correlation(x: Floats, y: Floats, given: Floats) -> Floats:
    """Compute Spearman's correlation of x and y with the ranks of a third number held fixed; as `rank_correlation`."""
    xy, xz, yz = rank_correlation(x, y), rank_correlation(x, given), rank_correlation(y, given)
    left = np.sqrt((1 - xz**2) * (1 - yz**2))
    return np.divide(xy - xz * yz, left, out=np.full(np.shape(xy), np.nan), where=left > 1e-9)


def error_under_independence(count: int) -> float:
    """Return the standard error of a rank correlation of `count` independent pairs."""
    return float((count - 1) ** -0.5)
