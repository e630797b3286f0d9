"""Softmax to first order at zero logits (Bao et al. 2024, section 2): its clamp, and which keys it lets through."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor


def piecewise_softmax(logits: Float[Tensor, "*batch keys"]) -> Float64[Tensor, "*batch keys"]:
    """Compute S̃(ω)_i = clamp(ω_i/T − mean(ω)/T + 1/T, 0, 1) of the T visible keys (Bao et al. 2024, section 2)."""
    return _expansion(logits, logits.shape[-1]).clamp(0, 1)


def empirical_propagation(
    logits: Float[Tensor, "*batch keys"], visible: Bool[Tensor, "*batch keys"] | None = None
) -> Bool[Tensor, "*batch keys"]:
    """Mark the visible keys that propagate for one query (None: all are): s_i = ω_i/T − mean(ω)/T + 1/T in [0, 1].

    Averaged over contexts, this is the measured ρ_i (Bao et al. 2024, definition 1 and Fig. 7). A NaN logit makes the
    whole row false.
    """
    visible = torch.ones_like(logits, dtype=torch.bool) if visible is None else visible
    value = _expansion(logits.masked_fill(~visible, 0), visible.sum(-1, keepdim=True))
    return visible & (value >= 0) & (value <= 1)


def _expansion(logits: Tensor, keys: Tensor | int) -> Tensor:
    """Expand softmax of so many keys to first order at zero logits, along the last dimension; others are 0."""
    logits = logits.double()
    return (logits - logits.sum(-1, keepdim=True) / keys + 1) / keys
