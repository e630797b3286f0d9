"""Compute the propagation probability of a finite context without the Gaussian approximation of `propagation`.

ρ_i is the probability that a quadratic form of Gaussians lies in an interval; its characteristic function is inverted.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from jaxtyping import Float, Float64
from torch import Tensor

from theodolite.theory.checks import check_length, check_real, checked_temperature
from theodolite.theory.propagation import walk_moments

_TOLERANCE = 1e-11  # of the last quarter of a curve's Chebyshev series that is long enough

# Eigenvalues within a factor of 4 are replaced by 20 Chebyshev nodes of their logarithm, if they are more. As a
# function of ln w, ln(1 − z w) is analytic up to |Im ln w| = |arg z| ≥ 3π/8 for the z that occur; half the bin's width
# is 0.69, so the error of a sum over the bin is (1.7 + √(1 + 1.7²))^−20 = 1e-11 of its size.
_BIN_RATIO = 4.0
_BIN_NODES = 20

# Eigenvalues that are small where |φ| has vanished, |z w| ≤ 0.25, share 20 nodes of w itself, whatever their signs: the
# nearest singularity of ln(1 − z w) is 4 half-widths away, an error of (4 + √15)^−20 = 1e-18.
_VANISHED = 1e-16
_CENTRAL = 0.25

_TAIL = 1e-13  # probability beyond the two ends of the window in which Q is resolved; it bounds the aliasing error
_TRUNCATION = 1e-12  # bounds what the quadrature leaves out beyond its last node
# Of the largest argument, where Chernoff's bound is tried.
_FRACTIONS = (0.8, 0.6, 0.4, 0.25, 0.15, 0.08, 0.04, 0.02)
_CHUNK = 64
_STRAIGHT_NODES = 512  # 40 to 200 do where a few weights are alike; beyond, the bent contour takes over

# The bent contour leans towards 22.5° from the vertical, half-way between two limits: at 0° the oscillation of
# e^(−s·end) is not damped, and from 45° on many small weights, which act like one Gaussian, make it grow.
_BEND = math.tan(math.pi / 8)
# exp(−2π·(π/8)/0.04) = 2e-27 would be the error of the midpoint rule if the integrand were no larger in the strip of
# half-width π/8 around u than on the contour. Near the strip's edges it is larger; this leaves room.
_BENT_STEP = 0.04
_BENT_LENGTH = 72.0  # where u ends at the latest: a single weight's integrand, like e^(−u/2), is then 2e-16
_BENT_VANISHED = 1e-15  # modulus of the bent contour's integrand that counts as zero
_ELEMENTS = 1 << 21  # of the largest temporary array


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
    assumption 1) is what `probability_between` gives: in long contexts at Chebyshev nodes of i, as many as the curve
    needs, between which it is interpolated.

    The absolute error is below 1e-9. A head with zero weights propagates every key: ρ = 1. NaN or an infinite
    eigenvalue gives NaN. No gradient passes; `propagation_finite` has one.

    Args:
        eigenvalues: w, those of W = W_QK Σ; zeros may be left out. Not divided by the temperature.
        length, temperature: T and λ.

    Raises:
        UsageError: T is below 1, λ not positive, or the eigenvalues are complex or no tensor.
    """
    check_length(length)
    check_real("eigenvalues", eigenvalues, "give those of the symmetric part")
    scaled = eigenvalues.double() / checked_temperature(temperature, eigenvalues.device)[..., None]
    result = scaled.new_zeros(*scaled.shape[:-1], length)
    for head in np.ndindex(scaled.shape[:-1]):
        result[head] = _symmetric_curve(scaled[head], length)
    return result


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
        weights = (halves[:, :, None] * nodes).flatten(1)
        # P(0 ≤ s ≤ 1) of s = 1/T + Q. −1/T is the exact end: with no weights at all every key propagates, also where
        # T = 1 makes 1 − 1/T zero.
        low = weights.new_full(weights.shape[:1], -1 / length)
        return probability_between(weights, counts.repeat(2), low, low + 1)

    return _along_context(curve, length, eigenvalues.device)


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


def _along_context(curve: Callable[[Tensor], Tensor], length: int, device: torch.device) -> Tensor:
    """Evaluate a curve at i = 1 … T, or at Chebyshev nodes of an interpolant that has converged."""
    positions = torch.arange(1, length + 1, dtype=torch.float64, device=device)
    middle, half = (length + 1) / 2, (length - 1) / 2
    degree = 32
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
        # Of the interpolant through values at cos(πk/n), k = 0 … n.
        coefficients = torch.fft.rfft(torch.cat([values, values[1:-1].flip(0)])).real / degree
        coefficients[[0, -1]] /= 2
        if coefficients[-(degree // 4) :].abs().max() < _TOLERANCE:
            angles = ((positions - middle) / half).clamp(-1, 1).acos()
            return ((angles[:, None] * order).cos() @ coefficients).clamp(0, 1)
        degree *= 2
    return curve(positions)


def probability_between(
    weights: Float64[Tensor, "forms terms"],
    counts: Float64[Tensor, " terms"],
    low: Float64[Tensor, " forms"],
    high: Float64[Tensor, " forms"],
) -> Float64[Tensor, " forms"]:
    """Compute P(low ≤ Q ≤ high) for each Q = Σ_k μ_k χ²(m_k), with an absolute error below 1e-10.

    Where |φ| falls fast by the midpoint rule of Davies 1973 on the real axis of φ(t) = Π (1 − 2itμ_k)^(−m_k/2),

        P = (2/π) Σ_k Δ sin(t_k (high − low)/2)/t_k · Re[φ(t_k) e^(−i t_k (low + high)/2)],  t_k = (k + ½)Δ,

    with Δ = 2π/(length of a window that Q leaves with probability 1e-13). Where it falls slowly (one or two weights
    above all others), each end separately along s = it = R (i sinh u ± tan 22.5° (cosh u − 1)), a contour through the
    pole at 0 that leans to the side on which e^(K(s) − sx) falls exponentially.

    Args:
        weights: μ, (n, K); any sign. A row of zeros is the constant Q = 0. NaN gives NaN.
        counts: degrees of freedom m of each column, (K,); fractions of either sign, as long as φ stays a
            characteristic function (quadratures over many weights are such).
        low, high: (n,), low ≤ high; infinite ends are allowed.
    """
    size = weights.abs().amax(-1)
    result = ((low <= 0) & (high >= 0)).double()
    regular = (size > 0) & size.isfinite()
    if regular.any():
        scale = size[regular]
        ends = (low[regular] / scale, high[regular] / scale)
        result[regular] = _between(weights[regular] / scale[:, None], counts, *ends)
    return torch.where(size.isfinite(), result, math.nan)


def _between(weights: Tensor, counts: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Compute `probability_between` for weights whose largest modulus is 1, in blocks of bounded memory."""
    rows = max(1, _ELEMENTS // (weights.shape[-1] * _CHUNK))
    parts = []
    for first in range(0, len(weights), rows):
        block = slice(first, first + rows)
        part, lower, upper = _straight(weights[block], counts, low[block], high[block])
        slow = part.isnan()
        if slow.any():
            above = [
                _bent(weights[block][slow], counts, end[block][slow], lower[slow], upper[slow])
                for end in (low, high)
            ]
            part[slow] = above[0] - above[1]
        parts.append(part)
    return torch.cat(parts).clamp(0, 1)


def _straight(weights: Tensor, counts: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Integrate by the midpoint rule on the real axis, NaN where it needs too many nodes; also give Q's window."""
    lower, upper = -_quantile(-weights, counts), _quantile(weights, counts)
    step = 2 * math.pi / (upper - lower)
    # An end beyond the window may be moved to its edge; then no frequency of the integrand exceeds the step's.
    low, high = low.clamp(lower, upper), high.clamp(lower, upper)
    centre, half = (low + high) / 2, (high - low) / 2
    total = torch.zeros_like(low)
    certain = (high == low) | ((low == lower) & (high == upper))
    result = torch.where(certain, (high > low).double(), math.nan)
    active = torch.arange(len(low), device=low.device)[~certain]
    for first in range(0, _STRAIGHT_NODES, _CHUNK):
        index = torch.arange(first, first + _CHUNK, dtype=torch.float64, device=low.device) + 0.5
        time = step[active, None] * index
        double = 2 * time[..., None] * weights[active, None, :]
        modulus = torch.exp(double.square().log1p() @ counts / -4)
        phase = double.atan() @ counts / 2 - time * centre[active, None]
        kernel = torch.sin(time * half[active, None]) / index
        total[active] += (2 / math.pi) * (kernel * modulus * phase.cos()).sum(-1)
        last = double[:, -1].square()
        decay = (last / (1 + last)) @ counts / 2
        done = (2 / math.pi) * modulus[:, -1] < _TRUNCATION * decay
        result[active[done]] = total[active[done]]
        active = active[~done]
        if len(active) == 0:
            break
    return result, lower, upper


def _quantile(weights: Tensor, counts: Tensor) -> Tensor:
    """Bound Q: a value exceeded with probability below `_TAIL`, the least (K(s) − ln tail)/s tried (Chernoff)."""
    # Where no weight is positive, any s > 0 is allowed; one hundredth of the largest modulus keeps it finite.
    limit = 0.5 / weights.amax(-1).clamp_min(0.01)
    arguments = limit * limit.new_tensor(_FRACTIONS)[:, None]
    generating = -0.5 * (torch.log1p(-2 * arguments[..., None] * weights) @ counts)
    return ((generating - math.log(_TAIL)) / arguments).amin(0)


def _bent(weights: Tensor, counts: Tensor, end: Tensor, lower: Tensor, upper: Tensor) -> Tensor:
    """Compute P(Q > end) along the contour that leans to the side where the integrand stays smaller."""
    result = (end <= lower).double()
    inside = (end > lower) & (end < upper)
    if inside.any():
        weights, end = weights[inside], end[inside]
        spread = (2 * weights.square() @ counts).sqrt()
        contour = weights, counts, end, 1 / (math.sqrt(2) * spread + (end - weights @ counts).abs())
        _, right = _along(*contour, torch.full_like(end, _BEND), 4 * _BENT_STEP)
        _, left = _along(*contour, torch.full_like(end, -_BEND), 4 * _BENT_STEP)
        result[inside], _ = _along(*contour, torch.where(right <= left, _BEND, -_BEND), _BENT_STEP)
    return result


def _along(
    weights: Tensor, counts: Tensor, end: Tensor, radius: Tensor, lean: Tensor, step: float
) -> tuple[Tensor, Tensor]:
    """Integrate ½ + (1/π) ∫ Im[e^(K(s) − s·end) s′/s] du over one contour, and ∫ |e^(…)| |ds| on it, up to a factor."""
    total, size = torch.full_like(end, 0.5), torch.zeros_like(end)
    active = torch.arange(len(end), device=end.device)
    for first in range(0, round(_BENT_LENGTH / step), _CHUNK):
        u = step * (torch.arange(first, first + _CHUNK, dtype=torch.float64, device=end.device) + 0.5)
        # s/R and s′/s; cosh u − 1 = 2 sinh²(u/2) keeps its digits near the pole.
        real, imaginary = lean[active, None] * 2 * (u / 2).sinh() ** 2, u.sinh()
        ratio = torch.complex(lean[active, None] * u.sinh(), u.cosh()) / torch.complex(real, imaginary)
        reach, away = radius[active, None], (radius * end)[active, None]
        double = 2 * reach * weights[active]
        across, along = 1 - double[:, None] * real[..., None], double[:, None] * imaginary[:, None]
        exponent = (across.square() + along.square()).log() @ counts / -4 - real * away
        phase = torch.atan2(along, across) @ counts / 2 - imaginary * away
        # Where the integrand has vanished the contour goes on straight up, where it stays so: beyond, a lean
        # against the sign of `end` would let it grow again. A lean that is not taken may overflow.
        modulus = exponent.clamp(max=300).exp()
        modulus = torch.where(modulus.cummin(-1).values > _BENT_VANISHED, modulus, 0.0)
        values = modulus * (phase.cos() * ratio.imag + phase.sin() * ratio.real)
        total[active] += step / math.pi * values.sum(-1)
        size[active] += (modulus * u.cosh()).sum(-1)
        active = active[modulus[:, -1] > 0]
        if len(active) == 0:
            break
    return total, size
