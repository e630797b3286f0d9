"""Softmax to first order at zero logits (Bao et al. 2024, section 2): its clamp, and which keys it lets through."""

from __future__ import annotations

from jaxtyping import Bool, Float, Float64
from torch import Tensor


def piecewise_softmax(logits: Float[Tensor, "*batch keys"]) -> Float64[Tensor, "*batch keys"]:
    """Compute S̃(ω)_i = clamp(ω_i/T − mean(ω)/T + 1/T, 0, 1) of the T visible keys (Bao et al. 2024, section 2)."""
    return _expansion(logits).clamp(0, 1)


def empirical_propagation(logits: Float[Tensor, "*batch keys"]) -> Bool[Tensor, "*batch keys"]:
    """Mark the visible keys that propagate for one query: s_i = ω_i/T − mean(ω)/T + 1/T in [0, 1].

    Averaged over contexts, this is the measured ρ_i (Bao et al. 2024, definition 1 and Fig. 7). A NaN logit makes the
    whole row false.
    """
    value = _expansion(logits)
    return (value >= 0) & (value <= 1)


def _expansion(logits: Tensor) -> Tensor:
    """Expand softmax to first order at zero logits, along the last dimension."""
    logits = logits.double()
    return (logits - logits.mean(-1, keepdim=True) + 1) / logits.shape[-1]
