"""Colour vectors by their principal components as red, green and blue, so that similar vectors look alike.

As Zhang, Khan & Papyan 2025 draw tokens (section 2, Figs. 2c and 2d); a second set of vectors can be turned to the
colours of the first, since components have neither sign nor, where their sizes are close, order.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, UInt8
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
        sign = scores[kept].gather(0, farthest[None]).sign()
        scores *= torch.where(sign == 0, 1.0, sign)
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
