"""Spearman's rank correlation and its standard error."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from scipy.stats import rankdata

Floats = npt.NDArray[np.float64]


def rank_correlation(x: Floats, y: Floats) -> Floats:
    """Spearman's correlation along the last axis, ties at their mean rank; NaN where one of the two does not vary.

    Args:
        x, y: of one shape, finite; batches lead.
    """
    first, second = (rankdata(values, axis=-1) for values in (x, y))
    first, second = (ranks - ranks.mean(axis=-1, keepdims=True) for ranks in (first, second))
    scale = np.sqrt((first**2).sum(axis=-1) * (second**2).sum(axis=-1))
    products = np.asarray((first * second).sum(axis=-1))
    return np.divide(products, scale, out=np.full(products.shape, np.nan), where=scale > 0)


def error_under_independence(count: int) -> float:
    """Standard error of a rank correlation of `count` independent pairs."""
    return float((count - 1) ** -0.5)
