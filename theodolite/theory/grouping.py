"""Measure how much of the variance of vectors a grouping explains, and how much it would by chance."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor


def variance_explained(x: Float[Tensor, "tokens width"], group: Int[Tensor, " tokens"]) -> float:
    """Compute η²: the sum of squares between groups over the total, both about the mean of all.

    In [0, 1]; NaN where there is one group only, or no variance.
    """
    return float(explained_elsewhere(x, group, [0])[0])


def chance_explained(group: Int[Tensor, " tokens"]) -> float:
    """Compute the mean of η² under a random permutation of the groups: (groups − 1)/(tokens − 1), exactly."""
    return (len(group.unique()) - 1) / (len(group) - 1) if len(group) > 1 else math.nan


def explained_elsewhere(
    x: Float[Tensor, "tokens width"], group: Int[Tensor, " tokens"], shifts: Iterable[int]
) -> Float64[Tensor, " shifts"]:
    """Compute η² of the same groups moved round the tokens by each of `shifts`: their runs are as long, but elsewhere.

    Vectors of text are alike where they are near, so that any grouping by runs explains some of their variance.
    """
    names, of, sizes = group.unique(return_inverse=True, return_counts=True)
    centred = x.double() - x.double().mean(dim=0)
    total = centred.square().sum()
    explained = []
    for shift in shifts:
        sums = centred.new_zeros(len(names), x.shape[1]).index_add_(0, of.roll(shift), centred)
        explained.append(float((sums.square().sum(dim=1) / sizes).sum() / total))
    if len(names) < 2 or not total > 0:
        explained = [math.nan] * len(explained)
    return torch.tensor(explained, dtype=torch.float64)
