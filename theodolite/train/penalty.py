"""LocAteR, the penalty of Bao et al. 2024 (section 6) that narrows the spectrum of every head's query-key matrix.

It works on the factors W_q and W_k, whoever holds them, and forms no d×d matrix. Bao et al. keep tokens in columns and
write W_QK = W_Qᵀ W_K with factors of shape (d_h, d); ours are (d, d_h) and W_QK = W_q W_kᵀ, the transpose of theirs.
Both terms are the same for a matrix and its transpose.
"""

from __future__ import annotations

import math
import numbers
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from theodolite.errors import UsageError
from theodolite.theory.checks import check_real

Gradient = Literal["exact", "published"]


def locater_penalty(
    w_q: Float[Tensor, "*layers heads width head_width"],
    w_k: Float[Tensor, "*layers key_heads width head_width"],
    scale: float,
    mean: float,
    *,
    gradient: Gradient = "exact",
) -> Float[Tensor, ""]:
    """Compute κ₁ tr(W_QKᵀ W_QK) + κ₂ (tr W_QK − 1)², W_QK = W_q W_kᵀ, over all heads: a differentiable scalar.

    Args:
        w_q: query factors (..., H, d, d_h), logit = x W_q W_kᵀ yᵀ/λ. Biases and the temperature λ have no part.
        w_k: key factors (..., H, d, d_h), or (..., G, d, d_h) where each of G key heads serves H/G query heads
            that follow one another; the pair of every query head counts.
        scale: κ₁, the strength on the scale of the spectrum, in units of the loss.
        mean: κ₂, the strength on its mean.
        gradient: "exact", or "published" for the second term's gradient as printed in section 6,
            κ₂ (tr W_QK − 1) tr(W_QK) W_k in place of 2 κ₂ (tr W_QK − 1) W_k, which is no gradient of this value. For
            comparison with the paper only; the value is the same.

    Computed with autocast off, in float32, or in float64 where the factors are; the result has that dtype.

    Raises:
        UsageError: the shapes do not fit, the factors are no real tensors, a strength is negative or no number, or
            `gradient` is neither of the two.
    """
    check_gradient(gradient)
    check_strength("scale", scale)
    check_strength("mean", mean)
    return penalty_of_moments(*head_moments(w_q, w_k), scale, mean, gradient)


def check_gradient(gradient: str) -> None:
    """Raise `UsageError` unless it is exact or published."""
    if gradient not in ("exact", "published"):
        raise UsageError(f"gradient is '{gradient}'; choose exact or published.")


def check_strength(name: str, strength: float) -> None:
    """Raise `UsageError` unless it is one finite number of 0 or more."""
    if not (isinstance(strength, numbers.Real) and math.isfinite(strength) and strength >= 0):
        raise UsageError(f"{name} is {strength!r}: give a number of 0 or more")


def penalty_of_moments(
    traces: Float[Tensor, "*heads"],
    squares: Float[Tensor, "*heads"],
    scale: float,
    mean: float,
    gradient: Gradient,
) -> Float[Tensor, ""]:
    """Compute `locater_penalty` from `head_moments`."""
    away = (traces - 1).square()
    if gradient == "published":
        # The derivative of t³/3 − t²/2 is the printed (t − 1) t; the difference is exactly zero in value.
        printed = traces.pow(3) / 3 - traces.square() / 2
        away = away.detach() + (printed - printed.detach())
    return scale * squares.sum() + mean * away.sum()


def head_moments(
    w_q: Float[Tensor, "*layers heads width head_width"],
    w_k: Float[Tensor, "*layers key_heads width head_width"],
) -> tuple[Float[Tensor, "*layers heads"], Float[Tensor, "*layers heads"]]:
    """Compute tr W_QK and ‖W_QK‖_F² = ⟨W_qᵀ W_q, W_kᵀ W_k⟩ of every query head, as in `locater_penalty`."""
    check_real("w_q", w_q)
    check_real("w_k", w_k)
    fits = w_q.ndim == w_k.ndim >= 3 and w_q.shape[:-3] == w_k.shape[:-3] and w_q.shape[-2:] == w_k.shape[-2:]
    if not fits or w_k.shape[-3] == 0 or w_q.shape[-3] % w_k.shape[-3]:
        raise UsageError(
            f"w_q has shape {tuple(w_q.shape)} and w_k {tuple(w_k.shape)}: give (heads, d, d_h) for both, with the "
            "same leading layers if any, and as many query heads as key heads or a multiple"
        )
    heads, key_heads = w_q.shape[-3], w_k.shape[-3]
    with torch.autocast(w_q.device.type, enabled=False):
        dtype = torch.promote_types(torch.promote_types(w_q.dtype, w_k.dtype), torch.float32)
        # A key head is multiplied out once, and meets its query heads by broadcasting.
        w_q = w_q.to(dtype).unflatten(-3, (key_heads, heads // key_heads))
        w_k = w_k.to(dtype).unsqueeze(-3)
        traces = (w_q * w_k).sum((-2, -1))
        squares, _, _ = _FrobeniusSquared.apply(w_q, w_k)
    return traces.flatten(-2), squares.flatten(-2)


def add_penalty_gradient(
    w_q: Float[Tensor, "heads width head_width"],
    w_k: Float[Tensor, "key_heads width head_width"],
    into_q: Float[Tensor, "heads width head_width"] | None,
    into_k: Float[Tensor, "key_heads width head_width"] | None,
    scale: float,
    mean: float,
    gradient: Gradient,
    factor: float = 1.0,
) -> Float[Tensor, ""]:
    """Add the penalty's gradients, times `factor`, to views of gradients, or None of what is not trained; returns it.

    2κ₁ W_q (W_kᵀ W_k) + 2κ₂ (t − 1) W_k, t = tr W_QK, and the same for W_k: without a graph or a copy of them, which
    is half of what automatic differentiation takes.
    """
    with torch.autocast(w_q.device.type, enabled=False):
        groups = w_k.shape[0]
        grouped_q, shared_k = w_q.unflatten(0, (groups, -1)), w_k.unsqueeze(1)
        gram_q, gram_k = grouped_q.mT @ grouped_q, w_k.mT @ w_k
        traces = (grouped_q * shared_k).sum((-2, -1))
        value = penalty_of_moments(
            traces, (gram_q * gram_k.unsqueeze(1)).sum((-2, -1)), scale, mean, gradient
        )
        # Of the exact gradient t − 1, of the published (t − 1) t.
        slope = 2 * (traces - 1) if gradient == "exact" else (traces - 1) * traces
        slope = (factor * mean * slope)[..., None, None]
        strength = 2 * factor * scale
        if into_q is not None:
            _add_product(into_q, w_q, (strength * gram_k).repeat_interleave(len(w_q) // groups, dim=0))
            into_q.unflatten(0, (groups, -1)).addcmul_(shared_k, slope)
        if into_k is not None:
            _add_product(into_k, w_k, strength * gram_q.sum(dim=1))
            for query, by_head in zip(grouped_q.unbind(1), slope.unbind(1), strict=True):
                into_k.addcmul_(query, by_head)
        return value


def _add_product(into: Tensor, w: Tensor, gram: Tensor) -> None:
    """Add w @ gram in the layout of the matrix that `into` is a view of; a Gram matrix is its own transpose."""
    if into.stride(-2) == 1:
        into.mT.baddbmm_(gram, w.mT)
    else:
        into.baddbmm_(w, gram)


class _FrobeniusSquared(torch.autograd.Function):
    """‖W_q W_kᵀ‖_F² of w_q (..., G, n, d, d_h) and w_k (..., G, 1, d, d_h), and the two Gram matrices.

    Its gradients 2 W_q (W_kᵀ W_k) and 2 W_k (W_qᵀ W_q) take one product each, where automatic differentiation of
    the Gram matrices takes two and adds: half of the penalty's whole cost.
    """

    @staticmethod
    def forward(w_q: Tensor, w_k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        gram_q, gram_k = w_q.mT @ w_q, w_k.mT @ w_k
        return (gram_q * gram_k).sum((-2, -1)), gram_q, gram_k

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: tuple[Tensor, Tensor, Tensor]) -> None:
        _, gram_q, gram_k = output
        ctx.mark_non_differentiable(gram_q, gram_k)
        ctx.save_for_backward(*inputs, gram_q, gram_k)

    @staticmethod
    def backward(ctx: Any, slope: Tensor, *_: Tensor) -> tuple[Tensor, Tensor]:
        w_q, w_k, gram_q, gram_k = ctx.saved_tensors
        if torch.is_grad_enabled():  # a second derivative is wanted: the Gram matrices depend on the weights
            gram_q, gram_k = w_q.mT @ w_q, w_k.mT @ w_k
        slope = 2 * slope[..., None, None]
        return w_q @ (slope * gram_k), w_k @ (slope * gram_q).sum(dim=-3, keepdim=True)
