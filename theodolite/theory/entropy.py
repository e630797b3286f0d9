"""Bound the Shannon entropy of a row of attention from below, by the spectral norms of tokens and weights."""

from __future__ import annotations

import torch
from torch import Tensor

from theodolite.errors import UsageError


def entropy_lower_bound(nu: float | Tensor, length: int | Tensor, variant: str = "corrected") -> Tensor:
    """Compute the least entropy (nats) of a softmax row over T logits whose norm is at most ν.

    `corrected` is the exact and attained bound of Zhai et al. 2023, theorem 3.1,

        ln(1 + (T−1)β) + ν √(T(T−1)) β / (1 + (T−1)β),   β = exp(−ν √(T/(T−1))),

    which falls from ln T at ν = 0 to 0. `asymptotic` is its form for large T,

        ln(1 + T e^(−ν)) + ν e^(−ν)/(1/T + e^(−ν)),

    slightly above it (by at most 0.064 nats at T = 64), so no bound. `published` is eq. 9 of Bao et al. 2024 as
    printed, with exp(−ν/2) in the numerator of the second term (see docs/errata.md). All are differentiable in ν.

    Args:
        nu: ν = ‖X Xᵀ‖₂ ‖W_QK‖₂ / λ ≥ 0, any shape: the theorem's logits carry no temperature.
        length: T ≥ 1, a number or a tensor that broadcasts against ν.

    Raises:
        UsageError: T < 1, ν < 0, or an unknown variant.
    """
    nu = torch.as_tensor(nu, dtype=torch.float64)
    size = torch.as_tensor(length, dtype=torch.float64, device=nu.device)
    if bool((size < 1).any()):
        raise UsageError(f"length is {size.min().item():g}: a context has at least one token")
    if bool((nu < 0).any()):
        raise UsageError(f"nu is {nu.min().item():g}: a product of norms is not negative")
    nu = nu.clamp(max=1e300)  # so that ν times a vanished probability is 0 and not NaN
    if variant == "corrected":
        # softplus(m) + x sigmoid(m), with the gap x between one logit and the others and m = ln(T−1) − x, neither
        # overflows nor cancels. T = 1 is computed as T = 2, so that no gradient passes through ln 0.
        remaining = (size - 1).clamp_min(1)
        gap = nu * ((remaining + 1) / remaining).sqrt()
        excess = remaining.log() - gap
        # Not torch's softplus, which cuts to the identity at 20 and is then wrong by 2e-9.
        bound = torch.logaddexp(excess, torch.zeros_like(excess)) + gap * excess.sigmoid()
        return torch.where(size == 1, 0.0, bound)
    if variant in ("asymptotic", "published"):
        numerator = -nu if variant == "asymptotic" else -nu / 2
        most = torch.logaddexp(size.log() - nu, torch.zeros_like(nu))
        return most + nu * (numerator - torch.logaddexp(-size.log(), -nu)).exp()
    raise UsageError(f"unknown variant {variant!r}: use 'corrected', 'asymptotic' or 'published'")
