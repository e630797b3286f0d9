"""Compute the distribution of a quadratic form of Gaussians by inverting its characteristic function.

Q = Σ_k μ_k χ²_k with independent χ² of one degree of freedom is what any quadratic form of centred Gaussian
vectors is in its eigenbasis. This module only inverts; it must not know where the weights μ come from.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float64
from torch import Tensor

_TAIL = 1e-13
"""Probability beyond the two ends of the window in which Q is resolved; it bounds the aliasing error."""

_TRUNCATION = 1e-12
"""Bound on what the quadrature leaves out beyond its last node."""

_FRACTIONS = (0.8, 0.6, 0.4, 0.25, 0.15, 0.08, 0.04, 0.02)
"""Where Chernoff's bound is tried, in units of the largest argument that the generating function has."""

_CHUNK = 64
_STRAIGHT_NODES = 512
"""Nodes that the straight contour may take. It needs 40 to 200 where a few weights are of similar size; with
one or two weights above all others |φ| falls like a small power of t, and the bent contour takes over."""

_BEND = math.tan(math.pi / 8)
"""The bent contour leans towards 22.5° from the vertical, half-way between two limits: at 0° the oscillation of
e^(−s·end) is not damped, and from 45° on many small weights, which act like one Gaussian, make it grow."""

_BENT_STEP = 0.04
"""exp(−2π·(π/8)/0.04) = 2e-27 would be the error of the midpoint rule if the integrand were no larger in the
strip of half-width π/8 around u than on the contour. Near the strip's edges it is larger; this leaves room."""

_BENT_LENGTH = 72.0
"""Where u ends at the latest: a single weight's integrand falls like e^(−u/2), which is then 2e-16."""

_VANISHED = 1e-15
"""Modulus of the bent contour's integrand that counts as zero."""

_ELEMENTS = 1 << 21
"""Elements of the largest temporary array."""


def probability_between(
    weights: Float64[Tensor, "forms terms"],
    counts: Float64[Tensor, " terms"],
    low: Float64[Tensor, " forms"],
    high: Float64[Tensor, " forms"],
) -> Float64[Tensor, " forms"]:
    """Compute P(low ≤ Q ≤ high) for each Q = Σ_k μ_k χ²(m_k), with an absolute error below 1e-10.

    Where |φ| falls fast, the midpoint rule of Davies 1973 on the real axis of φ(t) = Π (1 − 2itμ_k)^(−m_k/2):

        P = (2/π) Σ_k Δ sin(t_k (high − low)/2)/t_k · Re[φ(t_k) e^(−i t_k (low + high)/2)],  t_k = (k + ½)Δ.

    It is one sum of the two ends' integrands, so that an improbable interval loses nothing to cancellation.
    With Δ = 2π/(length of a window that Q leaves with probability 1e-13, by Chernoff) the aliasing error is
    below that; the sum stops at t with (2/π) |φ(t)|/p(t) < 1e-12, where p = −d ln|φ|/d ln t only grows.

    Where |φ| falls slowly (one or two weights above all others), each end separately along
    s = it = R (i sinh u ± tan 22.5° (cosh u − 1)): a contour through the pole at 0 that leans to the side on
    which e^(K(s) − sx) falls exponentially; the midpoint rule in u then converges geometrically.

    Args:
        weights: μ, (n, K); any sign, zeros allowed. A row of zeros is the constant Q = 0. NaN gives NaN.
        counts: degrees of freedom m of each column, (K,). They may be fractions, of either sign, as long as
            φ stays a characteristic function (quadratures over many weights are such).
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
    best = torch.full_like(limit, math.inf)
    for fraction in _FRACTIONS:
        argument = fraction * limit
        generating = -0.5 * (torch.log1p(-2 * argument[:, None] * weights) @ counts)
        best = torch.minimum(best, (generating - math.log(_TAIL)) / argument)
    return best


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
        modulus = torch.where(modulus.cummin(-1).values > _VANISHED, modulus, 0.0)
        values = modulus * (phase.cos() * ratio.imag + phase.sin() * ratio.real)
        total[active] += step / math.pi * values.sum(-1)
        size[active] += (modulus * u.cosh()).sum(-1)
        active = active[modulus[:, -1] > 0]
        if len(active) == 0:
            break
    return total, size
