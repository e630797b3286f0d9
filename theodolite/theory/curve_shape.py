"""The shape of a propagation curve ρ(θ) in single numbers: how wide, how uneven, where.

Positions that are NaN (keys beyond a window) are left out of means.
"""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor


def curve_width(curve: Float[Tensor, "*batch positions"]) -> Float[Tensor, "*batch"]:
    """Effective share of the positions that propagate, (∫ρ)²/∫ρ²: 1 for a flat curve; NaN where none does."""
    return curve.nanmean(-1) ** 2 / curve.square().nanmean(-1)


def curve_spread(curve: Float[Tensor, "*batch positions"]) -> Float[Tensor, "*batch"]:
    """(max ρ − min ρ)/max ρ: 0 for a flat curve, 1 where some positions never propagate."""
    return 1 - curve.amin(-1) / curve.amax(-1)


def curve_centre(
    curve: Float[Tensor, "*batch positions"], theta: Float[Tensor, " positions"]
) -> Float[Tensor, "*batch"]:
    """∫θρ/∫ρ, in the unit of θ."""
    return (curve * theta).nanmean(-1) / curve.nanmean(-1)
