"""Compute the eigenspectrum of a head's query-key matrix from its two thin factors, and bounds on its norms.

One head's logit of query x and key y (rows of width d) is `x W_QK yᵀ / λ` with `W_QK = W_q W_kᵀ`; `W_q` and
`W_k` have shape (d, d_h) and λ is the temperature. Everything here follows from d_h×d_h products, so no d×d
matrix is formed besides the token covariance Σ that the caller may give; `W = W_QK Σ`.

Bao et al. 2024 keep tokens in columns, so their W_QK is the transpose of ours. Traces, eigenvalues and
singular values are the same for both.

With rotary positions the matrix depends on the distance between query and key. The factors given here are
unrotated, so every number is that of relative distance 0. This module must not know of a model's layout.

The inequalities (7) and (10) of Bao et al. 2024 between the spectrum and norms do not hold as printed (docs/errata.md):
`trace_bound` and `scale_bound` give all sides of the printed chain and of the one that holds, and which links hold.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Complex128, Float64
from torch import Tensor

from theodolite.errors import UsageError
from theodolite.theory.checks import check_covariance, check_finite, check_real, checked_temperature

_ROUNDING = 1e-10
"""A link of a bound that is violated by less than this share of its larger side counts as holding."""

_ELEMENTS = 1 << 22
"""Elements of the largest block of W_QK that is formed at a time."""


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
        w_q: query factors (..., d, d_h).
        w_k: key factors, same shape.
        covariance: symmetric Σ, (d, d) or with leading dimensions that broadcast; None: the identity.
        temperature: λ of the logit, a positive number or a tensor of the batch's shape; None: √d_h.

    With Σ: tr W = tr(W_kᵀ Σ W_q), tr W² = tr((W_kᵀ Σ W_q)²), ‖W‖_F² = ⟨W_qᵀ W_q, W_kᵀ Σ² W_k⟩ and
    form_squared = ⟨W_qᵀ Σ W_q, W_kᵀ Σ W_k⟩. Differentiable in all tensors where the result is a number.

    Raises:
        UsageError: the shapes do not fit, numbers are complex, Σ is not symmetric or has a negative eigenvalue, or
            the temperature is not positive.
    """
    w_q, w_k, sigma = _factors(w_q, w_k, covariance)
    width, head_width = w_q.shape[-2:]
    temperature = checked_temperature(
        math.sqrt(head_width) if temperature is None else temperature, w_q.device
    )
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
    w_q: Tensor,
    w_k: Tensor,
    covariance: Tensor | None = None,
) -> Complex128[Tensor, "*heads head_width"]:
    """Compute the eigenvalues of `W_q W_kᵀ Σ` as those of the d_h×d_h matrix `W_kᵀ Σ W_q`, (..., d_h).

    Sorted by decreasing real part, then by decreasing imaginary part. The other d − d_h eigenvalues of the
    d×d matrix are zero (where d_h > d, the surplus ones returned here are). Shapes as in `qk_moments`, but Σ is
    not looked at; relative distance 0 only; not divided by the temperature.

    Raises:
        UsageError: the shapes do not fit, or numbers are complex, NaN or infinite.
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

    Shapes as in `qk_moments`; relative distance 0 only; not divided by the temperature.

    Raises:
        UsageError: the shapes do not fit, or numbers are complex, NaN or infinite.
    """
    w_q, w_k, _ = _factors(w_q, w_k, None)
    check_finite("w_q", w_q)
    check_finite("w_k", w_k)
    r_q = torch.linalg.qr(w_q).R
    r_k = torch.linalg.qr(w_k).R
    return torch.linalg.svdvals(r_q @ r_k.mT)


def qk_spectral_norm(w_q: Tensor, w_k: Tensor) -> Float64[Tensor, "*heads"]:
    """Compute ‖W_q W_kᵀ‖₂, the largest of `qk_singular_values`, of the batch's shape."""
    return qk_singular_values(w_q, w_k)[..., 0]


@dataclass(frozen=True)
class TraceBound:
    """Both sides of eq. (7), each of the batch's shape, in units of W_QK.

    trace_by_root: |tr W|/(√d ‖Σ‖₂), the printed left side.
    trace_by_width: |tr W|/(d ‖Σ‖₂), what bounds the spectral norm.
    spectral: ‖W_QK‖₂.
    frobenius: ‖W_QK‖_F.
    entry_sum: Σ |entries|, which the paper means by ‖W_QK‖₁.
    column_sum: the largest column sum of |entries|, the operator norm that is written ‖·‖₁ elsewhere (tokens as
        rows, as here and in Dong et al. 2021). It may lie below ‖W_QK‖_F: for the identity it is 1, and that √d.
    printed: (..., 3), whether trace_by_root ≤ spectral ≤ frobenius ≤ entry_sum, link by link. The first may fail.
    corrected: (..., 3), whether trace_by_width ≤ spectral, trace_by_root ≤ frobenius, frobenius ≤ entry_sum.
    """

    trace_by_root: Float64[Tensor, "*heads"]
    trace_by_width: Float64[Tensor, "*heads"]
    spectral: Float64[Tensor, "*heads"]
    frobenius: Float64[Tensor, "*heads"]
    entry_sum: Float64[Tensor, "*heads"]
    column_sum: Float64[Tensor, "*heads"]
    printed: Bool[Tensor, "*heads 3"]
    corrected: Bool[Tensor, "*heads 3"]


@dataclass(frozen=True)
class ScaleBound:
    """Both sides of eq. (10), each of the batch's shape, in units of W_QK.

    by_trace: ‖Σ⁻¹‖_F √tr(W²), the printed left side; NaN where tr(W²) < 0.
    by_norm: ‖Σ⁻¹‖_F ‖W‖_F, printed as its equal.
    by_form: ‖Σ⁻¹‖₂ ‖Σ^½ W_QK Σ^½‖_F, also a bound, and the sharper one. For a symmetric W_QK the second factor
        is √tr(W²), so that the ends of the printed chain are in order then.
    frobenius: ‖W_QK‖_F.
    spectral: ‖W_QK‖₂.
    printed: (..., 3), whether by_trace = by_norm, by_norm ≥ frobenius, frobenius ≥ spectral. The first holds for a
        symmetric W = W_QK Σ only.
    corrected: (..., 3), whether by_norm ≥ frobenius, by_form ≥ frobenius, frobenius ≥ spectral.

    With a singular Σ the left sides are infinite, but 0 for W_QK = 0, which has all norms 0.
    """

    by_trace: Float64[Tensor, "*heads"]
    by_norm: Float64[Tensor, "*heads"]
    by_form: Float64[Tensor, "*heads"]
    frobenius: Float64[Tensor, "*heads"]
    spectral: Float64[Tensor, "*heads"]
    printed: Bool[Tensor, "*heads 3"]
    corrected: Bool[Tensor, "*heads 3"]


def trace_bound(w_q: Tensor, w_k: Tensor, covariance: Tensor | None = None) -> TraceBound:
    """Compute both sides of eq. (7) of Bao et al. 2024: how |tr W| bounds norms of W_QK from below.

    Arguments as of `qk_moments`. W_QK is never formed as a whole; its entries are summed in blocks of rows,
    O(d² d_h). Differentiable in the factors except where the trace or an entry is zero and, for the spectral norm,
    where two largest singular values meet.

    Raises:
        UsageError: the shapes do not fit, numbers are complex, NaN or infinite, or Σ is not symmetric or has a
            negative eigenvalue.
    """
    if isinstance(covariance, Tensor):
        check_finite("covariance", covariance)
    trace = qk_moments(w_q, w_k, covariance).trace.abs()
    frobenius = qk_moments(w_q, w_k).frobenius_squared.clamp_min(0).sqrt()
    spectral = qk_spectral_norm(w_q, w_k)
    width = w_q.shape[-2]
    largest = (
        torch.ones_like(trace) if covariance is None else torch.linalg.eigvalsh(covariance.double())[..., -1]
    )
    entry_sum, column_sum = _sums(w_q.double(), w_k.double())
    # Σ = 0 makes the trace 0, and both left sides with it.
    largest = torch.where(largest > 0, largest, 1.0)
    by_root, by_width = trace / (math.sqrt(width) * largest), trace / (width * largest)
    by_root, by_width, spectral, frobenius, entry_sum, column_sum = sides = torch.broadcast_tensors(
        by_root, by_width, spectral, frobenius, entry_sum, column_sum
    )
    last = _at_most(frobenius, entry_sum)
    printed = [_at_most(by_root, spectral), _at_most(spectral, frobenius), last]
    corrected = [_at_most(by_width, spectral), _at_most(by_root, frobenius), last]
    return TraceBound(*sides, *(torch.stack(links, dim=-1) for links in (printed, corrected)))


def scale_bound(w_q: Tensor, w_k: Tensor, covariance: Tensor | None = None) -> ScaleBound:
    """Compute both sides of eq. (10) of Bao et al. 2024: how the spectrum's scale bounds norms of W_QK from above.

    Arguments and errors as of `trace_bound`. Nothing d×d is formed besides Σ. Differentiable in the factors where
    the sides are positive and, for the spectral norm, the largest singular value is simple.
    """
    if isinstance(covariance, Tensor):
        check_finite("covariance", covariance)
    moments = qk_moments(w_q, w_k, covariance)
    frobenius = qk_moments(w_q, w_k).frobenius_squared.clamp_min(0).sqrt()
    spectral = qk_spectral_norm(w_q, w_k)
    if covariance is None:
        inverse_frobenius = torch.full_like(frobenius, math.sqrt(w_q.shape[-2]))
        inverse_spectral = torch.ones_like(frobenius)
    else:
        values = torch.linalg.eigvalsh(covariance.double())
        values = torch.where(
            values > values[..., -1:] * values.shape[-1] * torch.finfo(values.dtype).eps, values, 0.0
        )
        inverse_frobenius, inverse_spectral = (1 / values).norm(dim=-1), (1 / values).amax(-1)
    by_trace = _product(inverse_frobenius, _root(moments.trace_of_square), frobenius)
    by_norm = _product(inverse_frobenius, moments.frobenius_squared.clamp_min(0).sqrt(), frobenius)
    by_form = _product(inverse_spectral, moments.form_squared.clamp_min(0).sqrt(), frobenius)
    by_trace, by_norm, by_form, frobenius, spectral = sides = torch.broadcast_tensors(
        by_trace, by_norm, by_form, frobenius, spectral
    )
    equal = _at_most(by_trace, by_norm) & _at_most(by_norm, by_trace)
    above, last = _at_most(frobenius, by_norm), _at_most(spectral, frobenius)
    printed, corrected = [equal, above, last], [above, _at_most(frobenius, by_form), last]
    return ScaleBound(*sides, *(torch.stack(links, dim=-1) for links in (printed, corrected)))


def _product(inverse: Tensor, norm: Tensor, frobenius: Tensor) -> Tensor:
    """Multiply; where an infinite inverse meets a norm of 0: 0 for W_QK = 0, else infinite."""
    singular = inverse.isinf() & (norm == 0)
    limit = torch.where(frobenius == 0, 0.0, math.inf)
    return torch.where(singular, limit, inverse * norm)


def _at_most(smaller: Tensor, larger: Tensor) -> Tensor:
    return smaller <= larger * (1 + _ROUNDING)


def _sums(w_q: Tensor, w_k: Tensor) -> tuple[Tensor, Tensor]:
    """Sum the |entries| of W_q W_kᵀ, all and of the largest column, from blocks of rows."""
    width = w_q.shape[-2]
    rows = max(1, _ELEMENTS // max(1, math.prod(w_q.shape[:-2]) * width))
    columns = torch.zeros_like(w_k[..., 0])
    for first in range(0, width, rows):
        columns = columns + (w_q[..., first : first + rows, :] @ w_k.mT).abs().sum(-2)
    return columns.sum(-1), columns.amax(-1)


def _factors(w_q: Tensor, w_k: Tensor, covariance: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Check that the shapes fit, and give the three tensors in float64."""
    check_real("w_q", w_q)
    check_real("w_k", w_k)
    if w_q.ndim < 2 or w_q.shape != w_k.shape or 0 in w_q.shape[-2:]:
        raise UsageError(
            f"w_q has shape {tuple(w_q.shape)} and w_k {tuple(w_k.shape)}: give both as (..., d, d_h)"
        )
    if covariance is None:
        return w_q.double(), w_k.double(), None
    check_real("covariance", covariance)
    width = w_q.shape[-2]
    if covariance.ndim < 2 or covariance.shape[-2:] != (width, width):
        raise UsageError(
            f"covariance has shape {tuple(covariance.shape)}: give (..., {width}, {width}) for these heads"
        )
    return w_q.double(), w_k.double(), covariance.double()


def _inner(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum((-2, -1))


def _root(square: Tensor) -> Tensor:
    return torch.where(square >= 0, square, math.nan).sqrt()


def _over_root(value: Tensor, square: Tensor) -> Tensor:
    return value / torch.where(square > 0, square, math.nan).sqrt()
