"""`locater_penalty` against the d×d matrices, the paper's printed gradients and closed forms; `Locater` on models."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from theodolite.errors import UsageError
from theodolite.train import locater_penalty


def factors(*shape: int, key_heads: int | None = None, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Gaussian factors in float64 that ask for gradients; the third last size is the number of heads."""
    generator = torch.Generator().manual_seed(seed)
    key_shape = (*shape[:-3], shape[-3] if key_heads is None else key_heads, *shape[-2:])
    return tuple(
        (0.4 * torch.randn(size, generator=generator, dtype=torch.float64)).requires_grad_()
        for size in (shape, key_shape)
    )


def dense(w_q: Tensor, w_k: Tensor, scale: float, mean: float) -> Tensor:
    """The definition, head by head, with the d×d matrix."""
    total = torch.zeros((), dtype=torch.float64)
    groups = w_q.shape[-3] // w_k.shape[-3]
    for layer_q, layer_k in zip(
        w_q.reshape(-1, *w_q.shape[-3:]), w_k.reshape(-1, *w_k.shape[-3:]), strict=True
    ):
        for head in range(len(layer_q)):
            matrix = layer_q[head] @ layer_k[head // groups].T
            total = total + scale * torch.trace(matrix.T @ matrix) + mean * (torch.trace(matrix) - 1) ** 2
    return total


@pytest.mark.parametrize(("shape", "key_heads"), [((3, 12, 4), 3), ((4, 12, 5), 2), ((2, 4, 9, 9), 1)])
def test_value_and_gradient_are_those_of_the_dense_computation(shape, key_heads):
    """Oracle: the d×d matrices in float64, and autograd through them; grouped keys and leading layers too."""
    w_q, w_k = factors(*shape, key_heads=key_heads)
    ours, theirs = locater_penalty(w_q, w_k, 100.0, 0.3), dense(w_q, w_k, 100.0, 0.3)
    torch.testing.assert_close(ours, theirs, rtol=1e-13, atol=0)
    for got, expected in zip(*(torch.autograd.grad(p, (w_q, w_k)) for p in (ours, theirs)), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def test_published_gradient_of_the_second_term_is_the_printed_one_and_the_value_is_not_changed():
    """Oracle: section 6 as printed, (tr − 1) tr W_K and (tr − 1) tr W_Q, head by head."""
    w_q, w_k = factors(3, 12, 4)
    published = locater_penalty(w_q, w_k, 0.0, 0.7, gradient="published")
    torch.testing.assert_close(published, dense(w_q, w_k, 0.0, 0.7), rtol=1e-13, atol=0)
    trace = (w_q * w_k).sum((-2, -1), keepdim=True)
    got_q, got_k = torch.autograd.grad(published, (w_q, w_k))
    torch.testing.assert_close(got_q, 0.7 * (trace - 1) * trace * w_k)
    torch.testing.assert_close(got_k, 0.7 * (trace - 1) * trace * w_q)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_half_precision_and_autocast_do_not_round_the_products(dtype):
    """Oracle: the float64 value of the same rounded weights; bfloat16 products would be off by about 1e-3."""
    w_q, w_k = (w.detach().to(dtype).requires_grad_() for w in factors(3, 64, 16))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        penalty = locater_penalty(w_q, w_k, 2.0, 0.5)
    assert penalty.dtype == torch.float32
    torch.testing.assert_close(
        penalty.double(), dense(w_q.double(), w_k.double(), 2.0, 0.5), rtol=1e-6, atol=0
    )
    assert torch.autograd.grad(penalty, w_q)[0].dtype == dtype


def test_what_does_not_fit_is_refused():
    ones = torch.ones(1, 3, 2)
    for query, key, gradient, words in (
        ((12, 4), (12, 4), "exact", r"\(12, 4\)"),
        ((3, 12, 4), (3, 12, 5), "exact", r"\(3, 12, 5\)"),
        ((3, 12, 4), (2, 12, 4), "exact", "multiple"),
        ((2, 3, 12, 4), (1, 3, 12, 4), "exact", "same leading layers"),
        ((3, 12, 4), (3, 12, 4), "printed", "choose exact or published"),
    ):
        with pytest.raises(UsageError, match=words):
            locater_penalty(torch.ones(query), torch.ones(key), 1.0, 1.0, gradient=gradient)
    for wrong in (-1, float("nan"), "a", None, 1j, torch.tensor(-1.0), torch.ones(2)):
        with pytest.raises(UsageError, match=r"scale is .*: give a number of 0 or more"):
            locater_penalty(ones, ones, wrong, 1.0)
        with pytest.raises(UsageError, match="mean is "):
            locater_penalty(ones, ones, 1.0, wrong)
    with pytest.raises(UsageError, match="w_k is complex: give real numbers"):
        locater_penalty(ones, ones * 1j, 1.0, 1.0)
    with pytest.raises(UsageError, match="w_q is a ndarray: give a tensor"):
        locater_penalty(np.ones((1, 3, 2)), ones, 1.0, 1.0)


def test_strengths_may_be_tensors_also_under_vmap():
    """Oracle: the same strengths as numbers, and the penalty's gradient in κ₁, ‖W_QK‖_F²."""
    w_q, w_k = (w.detach() for w in factors(2, 5, 3))
    strengths = torch.tensor([0.0, 0.3, 2.0], dtype=torch.float64)
    together = torch.func.vmap(lambda s: locater_penalty(w_q, w_k, s, 0.7))(strengths)
    expected = [locater_penalty(w_q, w_k, s, 0.7) for s in strengths.tolist()]
    torch.testing.assert_close(together, torch.stack(expected))
    slope = torch.func.grad(lambda s: locater_penalty(w_q, w_k, s, 0.7))(strengths[1])
    torch.testing.assert_close(slope, (w_q @ w_k.mT).square().sum())


def test_second_derivatives_and_function_transforms():
    """Oracle: finite differences of the gradient (gradgradcheck), and each head by itself under vmap."""
    w_q, w_k = factors(2, 5, 3, key_heads=1)
    assert torch.autograd.gradcheck(lambda q, k: locater_penalty(q, k, 0.3, 0.7), (w_q, w_k))
    assert torch.autograd.gradgradcheck(lambda q, k: locater_penalty(q, k, 0.3, 0.7), (w_q, w_k))
    many_q, many_k = (w.detach() for w in factors(4, 2, 5, 3))
    slope = torch.func.grad(lambda q, k: locater_penalty(q, k, 0.3, 0.7))
    together = torch.func.vmap(slope)(many_q, many_k)
    for gradient, q, k in zip(together, many_q, many_k, strict=True):
        leaf = q.clone().requires_grad_()
        (alone,) = torch.autograd.grad(dense(leaf, k, 0.3, 0.7), leaf)
        torch.testing.assert_close(gradient, alone)
