"""Compute the eigenspectrum of a head's query-key matrix, and its norms, from its two thin factors.

One head's logit of query x and key y (rows of width d) is `x W_QK yᵀ / λ` with `W_QK = W_q W_kᵀ`; `W_q` and
`W_k` have shape (d, d_h) and λ is the temperature. Everything here follows from d_h×d_h products, so no d×d
matrix is formed besides the token covariance Σ that the caller may give; `W = W_QK Σ`. Bao et al. 2024 keep tokens in
columns, so their W_QK is the transpose of ours. With rotary positions, every number is that of relative distance 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Complex128, Float64
from torch import Tensor

from theodolite.errors import UsageError
from theodolite.theory.checks import check_covariance, check_finite, checked_temperature


@dataclass(frozen=True)
class QKMoments:
    """Moments of `W = W_QK Σ` of every head, each of the batch's shape, float64, in the logit's own units.

    trace: tr W.
    trace_of_square: tr W² = Σ w², over the eigenvalues; an asymmetric W can make it negative.
    frobenius_squared: ‖W‖_F²; the one number here that would change with Σ on the other side of W_QK.
    form_squared: ‖Σ^½ W_QK Σ^½‖_F², what the form x W_QK yᵀ sees of tokens of covariance Σ; equal to
        `frobenius_squared` where Σ is the identity.
    mean: tr W / d, over all d eigenvalues (d − d_h of them are zero).
    variance: tr W² / d − (tr W / d)² (Bao et al. 2024, eq. 8); negative only for an asymmetric W.
    xi: tr W / √tr W² (eq. 6); NaN where tr W² ≤ 0.
    eta: √tr W² / λ (eq. 6); NaN where tr W² < 0.
    xi_symmetric, eta_symmetric: the same with the symmetric part of `Σ^½ W_QK Σ^½`, whose trace is tr W and
        whose trace of square is (tr W² + form_squared) / 2, never negative; `xi_symmetric` is NaN only where
        that is zero.
    r: tr W / λ = ξη.
    core: W_kᵀ Σ W_q, of which `core_eigenvalues` are those of W.
    """

    trace: Float64[Tensor, "*heads"]
    trace_of_square: Float64[Tensor, "*heads"]
    frobenius_squared: Float64[Tensor, "*heads"]
    form_squared: Float64[Tensor, "*heads"]
    mean: Float64[Tensor, "*heads"]
    variance: Float64[Tensor, "*heads"]
    xi: Float64[Tensor, "*heads"]
    eta: Float64[Tensor, "*heads"]
    xi_symmetric: Float64[Tensor, "*heads"]
    eta_symmetric: Float64[Tensor, "*heads"]
    r: Float64[Tensor, "*heads"]
    core: Float64[Tensor, "*heads head_width head_width"]


def qk_moments(
    w_q: Tensor,
    w_k: Tensor,
    covariance: Tensor | None = None,
    temperature: float | Tensor | None = None,
) -> QKMoments:
    """Compute trace, trace of square, norms and scales of every head's `W = W_q W_kᵀ Σ` at relative distance 0.

    Args:
        w_q, w_k: query and key factors (..., d, d_h).
        covariance: symmetric Σ, (d, d) or with leading dimensions that broadcast; None: the identity.
        temperature: λ of the logit, a positive number or a tensor of the batch's shape; None: √d_h.

    Differentiable in all tensors where the result is a number.

    Raises:
        UsageError: the shapes of the factors differ, Σ is not symmetric, or the temperature is not positive.
    """
    w_q, w_k, sigma = _factors(w_q, w_k, covariance)
    width, head_width = w_q.shape[-2:]
    given = math.sqrt(head_width) if temperature is None else temperature
    temperature = checked_temperature(given, w_q.device)
    if covariance is not None:
        check_covariance(covariance)
    seen_q = w_q if sigma is None else sigma @ w_q
    seen_k = w_k if sigma is None else sigma @ w_k

    core = w_k.mT @ seen_q
    trace = core.diagonal(dim1=-2, dim2=-1).sum(-1)
    trace_of_square = _inner(core, core.mT)
    frobenius_squared = _inner(w_q.mT @ w_q, seen_k.mT @ seen_k)
    form_squared = _inner(w_q.mT @ seen_q, w_k.mT @ seen_k)
    # An antisymmetric W cancels exactly; rounding must not turn its zero into a negative number.
    symmetric_square = ((trace_of_square + form_squared) / 2).clamp_min(0)
    mean = trace / width
    return QKMoments(
        trace=trace,
        trace_of_square=trace_of_square,
        frobenius_squared=frobenius_squared,
        form_squared=form_squared,
        mean=mean,
        variance=trace_of_square / width - mean**2,
        xi=_over_root(trace, trace_of_square),
        eta=_root(trace_of_square) / temperature,
        xi_symmetric=_over_root(trace, symmetric_square),
        eta_symmetric=_root(symmetric_square) / temperature,
        r=trace / temperature,
        core=core,
    )


def qk_eigenvalues(
    w_q: Tensor, w_k: Tensor, covariance: Tensor | None = None
) -> Complex128[Tensor, "*heads head_width"]:
    """Compute the eigenvalues of `W_q W_kᵀ Σ` as those of the d_h×d_h matrix `W_kᵀ Σ W_q`, (..., d_h).

    Sorted by decreasing real part, then by decreasing imaginary part. The other d − d_h eigenvalues of the
    d×d matrix are zero. Shapes as in `qk_moments`, but Σ is not looked at; not divided by the temperature.

    Raises:
        UsageError: the shapes do not fit, or numbers are NaN or infinite.
    """
    w_q, w_k, covariance = _factors(w_q, w_k, covariance)
    core = w_k.mT @ (w_q if covariance is None else covariance @ w_q)
    return core_eigenvalues(core, "W_QK" if covariance is None else "W_QK or Σ")


def core_eigenvalues(
    core: Float64[Tensor, "*heads head_width head_width"], of: str
) -> Complex128[Tensor, "*heads head_width"]:
    """Compute `qk_eigenvalues` from the core W_kᵀ Σ W_q, where `qk_moments` has made it; `of`: its name in an error."""
    check_finite(of, core)
    values = torch.linalg.eigvals(core)
    # Two stable sorts, the minor key first, order by (real, imaginary).
    values = values.gather(-1, values.imag.argsort(dim=-1, descending=True, stable=True))
    return values.gather(-1, values.real.argsort(dim=-1, descending=True, stable=True))


def qk_singular_values(w_q: Tensor, w_k: Tensor) -> Float64[Tensor, "*heads values"]:
    """Compute the singular values of `W_q W_kᵀ`, decreasing, (..., min(d, d_h)), from two QR factors.

    Shapes as in `qk_moments`; not divided by the temperature.

    Raises:
        UsageError: the shapes do not fit, or numbers are NaN or infinite.
    """
    w_q, w_k, _ = _factors(w_q, w_k, None)
    check_finite("w_q", w_q)
    check_finite("w_k", w_k)
    return torch.linalg.svdvals(torch.linalg.qr(w_q).R @ torch.linalg.qr(w_k).R.mT)


def qk_spectral_norm(w_q: Tensor, w_k: Tensor) -> Float64[Tensor, "*heads"]:
    """Compute ‖W_q W_kᵀ‖₂, the largest of `qk_singular_values`, of the batch's shape."""
    return qk_singular_values(w_q, w_k)[..., 0]


def _factors(w_q: Tensor, w_k: Tensor, covariance: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Check that the shapes fit, and give the three tensors in float64."""
    if w_q.ndim < 2 or w_q.shape != w_k.shape or 0 in w_q.shape[-2:]:
        raise UsageError(
            f"w_q has shape {tuple(w_q.shape)} and w_k {tuple(w_k.shape)}: give both as (..., d, d_h)"
        )
    return w_q.double(), w_k.double(), None if covariance is None else covariance.double()


def _inner(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum((-2, -1))


def _root(square: Tensor) -> Tensor:
    return torch.where(square >= 0, square, math.nan).sqrt()


def _over_root(value: Tensor, square: Tensor) -> Tensor:
    return value / torch.where(square > 0, square, math.nan).sqrt()
