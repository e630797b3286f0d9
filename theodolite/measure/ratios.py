"""Ratios of sums over contexts, and their differences, with their errors: from sums of pairs that accumulators keep."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor


def ratio(pairs: Float[Tensor, "*rows 5"]) -> tuple[Tensor, Tensor]:
    """Compute Σb/Σt with its standard error (ratio of means over independent pairs, to first order), from `PAIRS`."""
    value, variance, effective = _ratio(pairs)
    return value, _error(variance, effective)


def ratio_by_context(
    parts: Float[Tensor, "*rows contexts"], wholes: Float[Tensor, "*rows contexts"]
) -> tuple[Tensor, Tensor]:
    """Compute `ratio` of what each context has, b and t."""
    pairs = (parts, wholes, parts.square(), parts * wholes, wholes.square())
    return ratio(torch.stack([each.sum(dim=-1) for each in pairs], dim=-1))


def difference(
    pairs: Float[Tensor, "*rows 5"], others: Float[Tensor, "*rows 5"], crossed: Float[Tensor, "*rows 4"]
) -> tuple[Tensor, Tensor]:
    """Compute Σb/Σt − Σb′/Σt′ over the same contexts with paired standard error, from `PAIRS`, `CROSSED` of both."""
    (value, variance, effective), (other, other_variance, other_effective) = _ratio(pairs), _ratio(others)
    bb, bt, tb, tt = crossed.unbind(-1)
    common = (bb - other * bt - value * tb + value * other * tt) / (pairs[..., 1] * others[..., 1])
    variance = (variance + other_variance - 2 * common).clamp_min(0)
    return value - other, _error(variance, torch.minimum(effective, other_effective))


def _ratio(pairs: Float[Tensor, "*rows 5"]) -> tuple[Tensor, Tensor, Tensor]:
    """Compute Σb/Σt, Σ(b − Σb/Σt t)²/(Σt)², and as how many independent pairs these are: (Σt)²/Σt²."""
    b, t, bb, bt, tt = pairs.unbind(-1)
    value = b / t
    residual = (bb - 2 * value * bt + value.square() * tt).clamp_min(0)
    return value, residual / t.square(), t.square() / tt


def _error(variance: Tensor, effective: Tensor) -> Tensor:
    # Of the independent pairs, one is used up.
    error = (variance * effective / (effective - 1).clamp_min(0)).sqrt()
    return torch.where(effective > 1.5, error, torch.nan)
