"""The shape of a propagation curve ρ(θ) in single numbers: how wide, how uneven, where. Nothing is judged here."""

from __future__ import annotations

import torch
from torch import Tensor

THETA = torch.linspace(0, 1, 401, dtype=torch.float64)
"""Where curves of theory are drawn and integrated."""


def width(curve: Tensor) -> Tensor:
    """Effective share of the positions that propagate, (∫ρ)²/∫ρ², over the last dimension: 1 for a flat curve."""
    return curve.mean(-1) ** 2 / curve.square().mean(-1)


def spread(curve: Tensor) -> Tensor:
    """(max ρ − min ρ)/max ρ over the last dimension: 0 for a flat curve, 1 where some positions never propagate."""
    return 1 - curve.amin(-1) / curve.amax(-1)


def centre(curve: Tensor, theta: Tensor) -> Tensor:
    """∫θρ/∫ρ over the last dimension."""
    return (curve * theta).mean(-1) / curve.mean(-1)
