"""Compute the propagation probability of a finite context without the Gaussian approximation of `propagation`.

For tokens that walk at random with Gaussian steps, s_i − 1/T is a quadratic form of Gaussians, and ρ_i the
probability that it lies in an interval. This module finds the form's weights and follows ρ along the context;
it must not invert characteristic functions itself (see `quadratic_form`).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from theodolite.theory.checks import check_length, check_real, checked_temperature
from theodolite.theory.propagation import walk_moments
from theodolite.theory.quadratic_form import probability_between

_FIRST_DEGREE = 32
_TOLERANCE = 1e-11
"""A curve's Chebyshev series is long enough when no coefficient of its last quarter is above this."""

_BIN_RATIO = 4.0
_BIN_NODES = 20
"""Eigenvalues within a factor of 4 are replaced by 20 Chebyshev nodes of their logarithm, if they are more. As
a function of ln w, ln(1 − z w) is analytic up to |Im ln w| = |arg z| ≥ 3π/8 for the z that occur; half the
bin's width is 0.69, so the error of a sum over the bin is (1.7 + √(1 + 1.7²))^−20 = 1e-11 of its size."""

_VANISHED = 1e-16
_CENTRAL = 0.25
"""Eigenvalues that are small where |φ| has vanished, |z w| ≤ 0.25, share 20 nodes of w itself, whatever their
signs: the nearest singularity of ln(1 − z w) is 4 half-widths away, an error of (4 + √15)^−20 = 1e-18."""

Curve = Callable[[Tensor], Tensor]


@torch.no_grad()
def propagation_exact(
    eigenvalues: Float[Tensor, "*heads values"],
    length: int,
    temperature: float | Float[Tensor, "*#heads"],
) -> Float64[Tensor, "*heads {length}"]:
    """Compute ρ_1 … ρ_T of a symmetric Σ^½ W_QK Σ^½ with these eigenvalues, exact for random walks at finite T.

    With s_ab and g² = s_aa s_bb of `propagation_finite`, s_i − 1/T is the quadratic form

        Σ_j (w_j/λ) (ℓ₊ χ²₁ + ℓ₋ χ²₁′),   ℓ± = (s_ab ± g)/2,

    with independent χ² of one degree of freedom, so that ρ_i (Bao et al. 2024, definition 1, for tokens of their
    assumption 1) is a probability that `probability_between` gives. Contexts of more than 64 tokens are
    evaluated at Chebyshev nodes of i, as many as the curve needs, and interpolated.

    The absolute error is below 1e-9. Values below that are not resolved, except where the logits are so
    large that ρ itself is small everywhere. A head with zero weights propagates every key: ρ = 1. NaN or an
    infinite eigenvalue gives NaN. No gradient passes; `propagation_finite` has one.

    Cost, for one curve at any T: O(d) to bin the eigenvalues, then mostly 0.02 to 0.3 s of one core at
    d = T = 4096 (`benchmarks/propagation.py`). One or two eigenvalues above thousands of small ones whose sum is far
    from zero take a few seconds: the curve then has steps as narrow as the spread of the small ones' sum.

    Args:
        eigenvalues: w, (..., d), those of W = W_QK Σ; zeros may be left out. Not divided by the temperature.
        length: T ≥ 1.
        temperature: λ > 0.

    Raises:
        UsageError: `length` is below 1 or no whole number, the temperature is not positive, or the eigenvalues are
            complex or no tensor.
    """
    check_length(length)
    check_real("eigenvalues", eigenvalues, "give those of the symmetric part")
    scaled = eigenvalues.double() / checked_temperature(temperature, eigenvalues.device)[..., None]
    heads = scaled.shape[:-1]
    curves = [_symmetric_curve(head, length) for head in scaled.reshape(math.prod(heads), scaled.shape[-1])]
    if not curves:
        return scaled.new_zeros(*heads, length)
    return torch.stack(curves).reshape(*heads, length)


def _symmetric_curve(eigenvalues: Tensor, length: int) -> Tensor:
    """Compute ρ_1 … ρ_T of one head from its eigenvalues over λ."""
    if not bool(eigenvalues.isfinite().all()):
        return eigenvalues.new_full((length,), math.nan)
    if not bool(eigenvalues.any()):
        return eigenvalues.new_ones(length)
    nodes, counts = _binned(eigenvalues)

    def curve(positions: Tensor) -> Tensor:
        cross, variance_product = walk_moments(positions, length)
        halves = torch.stack([cross + variance_product.sqrt(), cross - variance_product.sqrt()], dim=-1) / 2
        weights = halves[:, :, None] * nodes
        return _propagates(weights.flatten(1), counts.repeat(2), length)

    return _along_context(curve, length, eigenvalues.device)


def _propagates(weights: Tensor, counts: Tensor, length: int) -> Tensor:
    """Compute P(0 ≤ s ≤ 1) of s = 1/T + Σ μ χ², for each row of weights."""
    # −1/T is the exact end: with no weights at all every key propagates, also where T = 1 makes 1 − 1/T zero.
    low = weights.new_full(weights.shape[:1], -1 / length)
    return probability_between(weights, counts, low, low + 1)


def _binned(eigenvalues: Tensor) -> tuple[Tensor, Tensor]:
    """Replace eigenvalues by few nodes with multiplicities that have the same sums of ln(1 − z w)."""
    magnitude = eigenvalues.abs()
    central = magnitude * _vanishing(magnitude) <= _CENTRAL
    parts = [_quadrature(eigenvalues[central])]
    for sign in (1.0, -1.0):
        logarithms = magnitude[~central & (sign * eigenvalues > 0)].log()
        if len(logarithms) > 0:
            bins = ((logarithms.max() - logarithms) / math.log(_BIN_RATIO)).long()
            for index in bins.unique():
                nodes, counts = _quadrature(logarithms[bins == index])
                parts.append((sign * nodes.exp(), counts))
    return torch.cat([nodes for nodes, _ in parts]), torch.cat([counts for _, counts in parts])


def _vanishing(magnitude: Tensor) -> float:
    """Find the y at which Π (1 + y² w²)^−¼ is `_VANISHED`, to a factor of 2 above it; at most 1e16/max |w|."""
    largest = magnitude.max().item()
    y = 1 / largest
    while y * largest < 1e16 and (y * magnitude).square().log1p().sum().item() < -4 * math.log(_VANISHED):
        y *= 2
    return y


def _quadrature(points: Tensor) -> tuple[Tensor, Tensor]:
    """Find nodes and weights that sum every polynomial of degree below `_BIN_NODES` as the points do."""
    if len(points) <= _BIN_NODES:
        return points, torch.ones_like(points)
    centre, half = (points.max() + points.min()) / 2, (points.max() - points.min()) / 2
    orders = torch.arange(_BIN_NODES, dtype=torch.float64, device=points.device)
    angles = (orders + 0.5) * math.pi / _BIN_NODES
    inside = ((points - centre) / half.clamp_min(1e-300)).clamp(-1, 1).acos()
    moments = (orders[:, None] * inside).cos().sum(-1)
    moments[1:] *= 2
    return centre + half * angles.cos(), (angles[:, None] * orders).cos() @ moments / _BIN_NODES


def _along_context(curve: Curve, length: int, device: torch.device) -> Tensor:
    """Evaluate a curve at i = 1 … T, or at Chebyshev nodes of an interpolant that has converged."""
    positions = torch.arange(1, length + 1, dtype=torch.float64, device=device)
    middle, half = (length + 1) / 2, (length - 1) / 2
    degree = _FIRST_DEGREE
    values = torch.empty(0)
    while 2 * degree <= length:
        order = torch.arange(degree + 1, dtype=torch.float64, device=device)
        nodes = middle + half * (order * math.pi / degree).cos()
        if len(values) == 0:
            values = curve(nodes)
        else:  # every second node was there before
            finer = torch.empty_like(nodes)
            finer[::2], finer[1::2] = values, curve(nodes[1::2])
            values = finer
        coefficients = _chebyshev_coefficients(values)
        if coefficients[-(degree // 4) :].abs().max() < _TOLERANCE:
            angles = ((positions - middle) / half).clamp(-1, 1).acos()
            return ((angles[:, None] * order).cos() @ coefficients).clamp(0, 1)
        degree *= 2
    return curve(positions)


def _chebyshev_coefficients(values: Tensor) -> Tensor:
    """Compute coefficients of the interpolant through values at cos(πk/n), k = 0 … n."""
    degree = len(values) - 1
    spectrum = torch.fft.rfft(torch.cat([values, values[1:-1].flip(0)])).real / degree
    spectrum[[0, -1]] /= 2
    return spectrum
