"""Colour vectors so that similar ones look alike, and measure how much of their variance a grouping explains.

The colours are the principal components as red, green and blue, as Zhang, Khan & Papyan 2025 draw tokens (section 2,
Figs. 2c and 2d). Those of a second set of vectors can be turned to the first's, since components have neither sign
nor, where their sizes are close, order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from jaxtyping import Bool, Float, Float64, Int, UInt8
from torch import Tensor

COLOURS = 3


def principal_scores(
    x: Float[Tensor, "tokens width"], kept: Bool[Tensor, " tokens"]
) -> Float[Tensor, "tokens 3"]:
    """Project every token on the three leading principal components of the kept ones, each scaled to unit deviation.

    0 where there are fewer components. Signs are such that the farthest kept token is positive.
    """
    x = x.double()
    centred = x - x[kept].mean(dim=0)
    _, values, directions = torch.linalg.svd(centred[kept], full_matrices=False)
    number = min(COLOURS, int((values > values.amax() * 1e-9).sum())) if values.numel() else 0
    scores = x.new_zeros(len(x), COLOURS)
    if number:
        scale = values[:number] / int(kept.sum()) ** 0.5
        scores[:, :number] = centred @ directions[:number].T / scale
        farthest = scores[kept].abs().argmax(dim=0)
        scores *= torch.where(scores[kept].gather(0, farthest[None]) < 0, -1.0, 1.0)
    return scores


def turned(
    scores: Float[Tensor, "tokens 3"], reference: Float[Tensor, "tokens 3"], kept: Bool[Tensor, " tokens"]
) -> Float[Tensor, "tokens 3"]:
    """Rotate (and mirror) the scores as near to the reference as possible: orthogonal Procrustes."""
    left, _, right = torch.linalg.svd(scores[kept].T @ reference[kept])
    return scores @ (left @ right)


def rgb(scores: Float[Tensor, "tokens 3"], kept: Bool[Tensor, " tokens"]) -> UInt8[Tensor, "tokens 3"]:
    """Scale each component from its smallest to its largest value over kept tokens to 0 … 255; others are clipped."""
    low, high = scores[kept].amin(dim=0), scores[kept].amax(dim=0)
    share = (scores - low) / torch.where(high > low, high - low, 1.0)
    middle = torch.where(high > low, share, 0.5)
    return (middle.clamp(0, 1) * 255).round().to(torch.uint8)


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
