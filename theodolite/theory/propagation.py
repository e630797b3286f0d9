"""Compute signal propagation: how likely a key's value passes through linearised attention unclamped.

Bao et al. 2024 replace softmax by its first-order expansion at zero logits, clamped to [0, 1]. Key i
"propagates" when its unclamped value s_i lies in [0, 1]; ρ_i is the probability of that for tokens that walk
at random with Gaussian steps of covariance Σ. The temperature λ is part of the logits.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Float64, Real
from torch import Tensor

from theodolite.errors import UsageError
from theodolite.theory.checks import check_length, checked_temperature, holds


def propagation(
    theta: Float[Tensor, " positions"],
    xi: Float[Tensor, "*#heads"],
    eta: Float[Tensor, "*#heads"],
    variant: str = "corrected",
) -> Float64[Tensor, "... positions"]:
    """Compute ρ(θ), the limit T → ∞ at relative position θ = i/T of the key, for the last query.

    s has mean (θ − ½) ξη and variance v(θ) η²; ρ = P(0 ≤ s ≤ 1) under the Gaussian of these moments.
    `corrected`: v = 2θ² − 2θ + 7/12. `published` (Bao et al. 2024, eq. 6): v = 2θ² + 7/12; see
    docs/errata.md. Both are for a symmetric W: give `xi_symmetric` and `eta_symmetric` for a real head.
    Differentiable in θ, ξ and η where η > 0.

    Raises:
        UsageError: unknown variant, or a negative η; NaN gives NaN.
    """
    if not holds(~(eta.detach() < 0)):
        least = eta.detach().nan_to_num(torch.inf).min().item()
        raise UsageError(f"eta is {least:g}: a scale is not negative, give 0 or more")
    # Adding 0 makes −0 a 0, whose reciprocal is +∞.
    theta, xi, eta = theta.double(), xi.double()[..., None], eta.double()[..., None] + 0.0
    if variant not in ("corrected", "published"):
        raise UsageError(f"unknown variant {variant!r}: use 'corrected' or 'published'")
    spread = (2 * theta**2 - (2 * theta if variant == "corrected" else 0) + 7 / 12).sqrt()
    mean = (theta - 0.5) * xi
    return _normal_between(-mean / spread, (1 / eta - mean) / spread)


def propagation_finite(
    trace: Float[Tensor, "*heads"],
    form_squared: Float[Tensor, "*heads"],
    trace_of_square: Float[Tensor, "*heads"],
    length: int,
    temperature: float | Float[Tensor, "*heads"],
) -> Float64[Tensor, "*heads {length}"]:
    """Compute ρ_1 … ρ_T from the exact first two moments of s_i at finite T, for any W_QK (symmetric or not).

    For tokens that walk with steps of covariance Σ, s_i = u W_QKᵀ vᵀ/λ + 1/T of u = Σ_t a_t x_t, a = e_i/T − 1/T², and
    v = x_T has cov(u) = s_aa Σ, cov(v) = s_bb Σ and cov(u, v) = s_ab Σ, so (Isserlis)

        E s_i   = s_ab tr W / λ + 1/T
        Var s_i = (s_aa s_bb ‖Σ^½ W_QK Σ^½‖_F² + s_ab² tr W²) / λ²

    where, with K[s, t] = min(s, t), row sums (K1)_i = i (2T+1−i)/2 and 1ᵀK1 = T (T+1)(2T+1)/6,

        s_ab = aᵀK e_T = i/T − (T+1)/(2T)
        s_aa = aᵀK a   = i/T² − i (2T+1−i)/T³ + (T+1)(2T+1)/(6T³)
        s_bb = T.

    The distribution is taken as Gaussian; `propagation_exact` does without that. As T → ∞ this is, for a symmetric W,
    the corrected form of Lemma 1 of Bao et al. 2024. Differentiable; where the variance is 0, so is the gradient.

    Args:
        trace, form_squared, trace_of_square: fields of `QKMoments`.
        length, temperature: T and λ.

    Raises:
        UsageError: T is below 1, or λ not positive.
    """
    check_length(length)
    positions = torch.arange(1, length + 1, dtype=torch.float64, device=trace.device)
    cross, variance_product = walk_moments(positions, length)
    scale = checked_temperature(temperature, trace.device)[..., None]
    mean = cross * (trace.double()[..., None] / scale) + 1 / length
    variance = (
        variance_product * form_squared.double()[..., None] + cross**2 * trace_of_square.double()[..., None]
    ) / scale**2
    certain = variance <= 0
    spread = torch.where(certain, 1.0, variance).sqrt()
    inside = ((mean >= 0) & (mean <= 1)).double()
    return torch.where(certain, inside, _normal_between(-mean / spread, (1 - mean) / spread))


def propagation_of_draws(
    variance: Float[Tensor, "*heads"], keys: int | float | Real[Tensor, "*#heads"]
) -> Float64[Tensor, "*heads"]:
    """Compute ρ where keys are drawn without regard to the query and to their place: the same for each of T keys.

    s = (ω − mean ω + 1)/T of a logit ω has mean 1/T; it is taken as Gaussian. `variance`: of a query's logits,
    temperature included: tr(E[q qᵀ] Cov(k)) scaling² for independent q and k.
    """
    spread = variance.double().clamp_min(0).sqrt() + 0.0  # Adding 0 makes −0 a 0, whose reciprocal is +∞.
    alone = torch.as_tensor(keys) <= 1
    return torch.where(alone, 1.0, _normal_between(-1 / spread, (torch.as_tensor(keys) - 1) / spread))


def curve_width(curve: Float[Tensor, "*batch positions"]) -> Float[Tensor, "*batch"]:
    """Measure the effective share of positions that propagate, (∫ρ)²/∫ρ²: 1 for a flat curve; NaN where none does.

    Positions that are NaN are left out.
    """
    return curve.nanmean(-1) ** 2 / curve.square().nanmean(-1)


def walk_moments(
    positions: Float64[Tensor, " positions"], length: int
) -> tuple[Float64[Tensor, " positions"], Float64[Tensor, " positions"]]:
    """Compute s_ab and s_aa·s_bb of `propagation_finite` at positions 1 to T, which need not be whole numbers."""
    size = float(length)
    cross = (positions - (size + 1) / 2) / size
    visible = positions * (2 * size + 1 - positions) / size
    variance_product = (positions - visible + (size + 1) * (2 * size + 1) / (6 * size)) / size
    return cross, variance_product


def _normal_between(low: Tensor, high: Tensor) -> Tensor:
    """Compute P(low ≤ z ≤ high) of a standard normal z, accurate in both tails.

    Small probabilities are subtracted, never two numbers next to one. (`torch.special.ndtr` gives 0 at −10.)
    """
    mirrored = low > 0
    low, high = torch.where(mirrored, -high, low), torch.where(mirrored, -low, high)
    root_two = math.sqrt(2)
    return (torch.erfc(-high / root_two) - torch.erfc(-low / root_two)) / 2
