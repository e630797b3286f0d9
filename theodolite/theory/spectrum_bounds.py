"""The inequalities (7) and (10) of Bao et al. 2024 between the eigenspectrum of W = W_QK Σ and norms of W_QK.

Neither holds as printed (docs/errata.md). Each function gives all sides of the printed chain, the sides of the
one that holds, and which links hold for these heads. This module must not judge what a norm is good for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float64
from torch import Tensor

from theodolite.theory.checks import check_finite
from theodolite.theory.spectrum import qk_moments, qk_spectral_norm

_ROUNDING = 1e-10
"""A link that is violated by less than this share of its larger side counts as holding."""

_ELEMENTS = 1 << 22
"""Elements of the largest block of W_QK that is formed at a time."""


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
    """Eq. (7) of Bao et al. 2024: how |tr W| bounds norms of W_QK from below.

    W_QK is never formed as a whole; its entries are summed in blocks of rows, O(d² d_h). The numbers are
    differentiable in the factors except where the trace or an entry is zero and, for the spectral norm, where two
    largest singular values meet.

    Args:
        w_q: query factors (..., d, d_h).
        w_k: key factors, same shape.
        covariance: symmetric Σ, (d, d) or with leading dimensions that broadcast; None: the identity.

    Raises:
        UsageError: the shapes do not fit, numbers are complex, NaN or infinite, or Σ is not symmetric or has a
            negative eigenvalue.
    """
    _check_covariance_finite(covariance)
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
    by_root, by_width, spectral, frobenius, entry_sum, column_sum = torch.broadcast_tensors(
        by_root, by_width, spectral, frobenius, entry_sum, column_sum
    )
    last = _at_most(frobenius, entry_sum)
    return TraceBound(
        trace_by_root=by_root,
        trace_by_width=by_width,
        spectral=spectral,
        frobenius=frobenius,
        entry_sum=entry_sum,
        column_sum=column_sum,
        printed=torch.stack([_at_most(by_root, spectral), _at_most(spectral, frobenius), last], dim=-1),
        corrected=torch.stack([_at_most(by_width, spectral), _at_most(by_root, frobenius), last], dim=-1),
    )


def scale_bound(w_q: Tensor, w_k: Tensor, covariance: Tensor | None = None) -> ScaleBound:
    """Eq. (10) of Bao et al. 2024: how the scale of the spectrum bounds norms of W_QK from above.

    Nothing d×d is formed besides Σ. Differentiable in the factors where the sides are positive and, for the
    spectral norm, the largest singular value is simple.

    Args:
        w_q, w_k, covariance: as for `trace_bound`.

    Raises:
        UsageError: as for `trace_bound`.
    """
    _check_covariance_finite(covariance)
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
    square = moments.trace_of_square
    roots = torch.where(square >= 0, square, math.nan).sqrt()
    by_trace = _product(inverse_frobenius, roots, frobenius)
    by_norm = _product(inverse_frobenius, moments.frobenius_squared.clamp_min(0).sqrt(), frobenius)
    by_form = _product(inverse_spectral, moments.form_squared.clamp_min(0).sqrt(), frobenius)
    by_trace, by_norm, by_form, frobenius, spectral = torch.broadcast_tensors(
        by_trace, by_norm, by_form, frobenius, spectral
    )
    equal = _at_most(by_trace, by_norm) & _at_most(by_norm, by_trace)
    above, last = _at_most(frobenius, by_norm), _at_most(spectral, frobenius)
    return ScaleBound(
        by_trace=by_trace,
        by_norm=by_norm,
        by_form=by_form,
        frobenius=frobenius,
        spectral=spectral,
        printed=torch.stack([equal, above, last], dim=-1),
        corrected=torch.stack([above, _at_most(frobenius, by_form), last], dim=-1),
    )


def _check_covariance_finite(covariance: Tensor | None) -> None:
    if isinstance(covariance, Tensor):
        check_finite("covariance", covariance)


def _product(inverse: Tensor, norm: Tensor, frobenius: Tensor) -> Tensor:
    """inverse · norm where an infinite inverse meets a norm of 0: 0 for W_QK = 0, else infinite."""
    singular = inverse.isinf() & (norm == 0)
    limit = torch.where(frobenius == 0, 0.0, math.inf)
    return torch.where(singular, limit, inverse * norm)


def _at_most(smaller: Tensor, larger: Tensor) -> Tensor:
    return smaller <= larger * (1 + _ROUNDING)


def _sums(w_q: Tensor, w_k: Tensor) -> tuple[Tensor, Tensor]:
    """Sum of |entries| of W_q W_kᵀ, and the largest sum of a column, from blocks of rows."""
    width = w_q.shape[-2]
    rows = max(1, _ELEMENTS // max(1, math.prod(w_q.shape[:-2]) * width))
    columns = torch.zeros_like(w_k[..., 0])
    for first in range(0, width, rows):
        columns = columns + (w_q[..., first : first + rows, :] @ w_k.mT).abs().sum(-2)
    return columns.sum(-1), columns.amax(-1)
