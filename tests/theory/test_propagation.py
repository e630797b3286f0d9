"""Propagation probabilities against simulated random walks, scipy's normal distribution and closed forms."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.stats
import torch
from torch import Tensor

from theodolite.theory import (
    curve_width,
    empirical_propagation,
    piecewise_softmax,
    propagation,
    propagation_finite,
    qk_moments,
)

DOUBLE = torch.float64


def walk_values(matrix, root, length, draws, temperature, seed):
    """s_1 … s_T of the last query over simulated walks with steps of covariance root·rootᵀ, (draws, T)."""
    generator = torch.Generator().manual_seed(seed)
    steps = torch.randn(draws, length, len(matrix), generator=generator, dtype=DOUBLE) @ root.mT
    tokens = steps.cumsum(1)
    logits = torch.einsum("ntd,nd->nt", tokens, tokens[:, -1] @ matrix) / temperature
    return (logits - logits.mean(1, keepdim=True) + 1) / length


def test_piecewise_softmax_is_the_clamped_expansion() -> None:
    """Oracle: S(0) + ∇S(0)·ω with the softmax's Jacobian at zero from autograd."""
    logits = 30 * torch.randn(3, 5, generator=torch.Generator().manual_seed(0), dtype=DOUBLE)
    jacobian = torch.autograd.functional.jacobian(lambda w: w.softmax(-1), torch.zeros(5, dtype=DOUBLE))
    expansion = logits @ jacobian.mT + 1 / 5
    torch.testing.assert_close(piecewise_softmax(logits), expansion.clamp(0, 1))
    assert ((expansion < 0) | (expansion > 1)).any()
    assert torch.equal(empirical_propagation(logits), (expansion >= 0) & (expansion <= 1))


def test_a_single_key_always_propagates() -> None:
    assert empirical_propagation(torch.tensor([[-1e4], [7.0]])).all()
    assert (piecewise_softmax(torch.tensor([[123.0]])) == 1).all()
    assert propagation_finite(torch.tensor(5.0), torch.tensor(3.0), torch.tensor(2.0), 1, 1.0).item() == 1


@pytest.mark.parametrize(("variant", "linear"), [("corrected", -2.0), ("published", 0.0)])
def test_limit_curve_is_the_normal_probability_of_its_moments(variant: str, linear: float) -> None:
    """Oracle: scipy.stats.norm with mean (θ−½)ξη and variance (2θ² + linear·θ + 7/12)η²."""
    theta = torch.linspace(0, 1, 21, dtype=DOUBLE)
    xi = torch.tensor([-20.0, -1.0, 0.0, 3.0], dtype=DOUBLE)[:, None]
    eta = torch.tensor([0.05, 1.0, 30.0], dtype=DOUBLE)
    got = propagation(theta, xi, eta, variant=variant)
    assert got.shape == (4, 3, 21)
    for a in range(4):
        for b in range(3):
            mean = (theta.numpy() - 0.5) * xi[a].item() * eta[b].item()
            scale = np.sqrt(2 * theta.numpy() ** 2 + linear * theta.numpy() + 7 / 12) * eta[b].item()
            normal = scipy.stats.norm(mean, scale)
            np.testing.assert_allclose(got[a, b], normal.cdf(1) - normal.cdf(0), rtol=1e-9, atol=1e-15)


def test_tails_keep_their_relative_accuracy() -> None:
    """At θ = 1, ξ = ±30 the interval lies 20 standard deviations out; oracle: scipy's survival function."""
    theta, eta = torch.ones(1, dtype=DOUBLE), torch.tensor(1e4, dtype=DOUBLE)
    scale = math.sqrt(7 / 12)
    for xi in (30.0, -30.0):
        got = propagation(theta, torch.tensor(xi, dtype=DOUBLE), eta).item()
        z = abs(xi) / 2 / scale
        near = z - 1e-4 / scale if xi > 0 else z
        expected = scipy.stats.norm.sf(near) - scipy.stats.norm.sf(near + 1e-4 / scale)
        assert got == pytest.approx(expected, rel=1e-9)
        assert got > 0


def finite_moments(length: int) -> tuple[Tensor, Tensor]:
    """s_ab and s_aa·s_bb by the T×T matrix K of the definition."""
    index = torch.arange(1, length + 1, dtype=DOUBLE)
    kernel = torch.minimum(index[:, None], index)
    a = torch.eye(length, dtype=DOUBLE) / length - 1 / length**2
    return a @ kernel[:, -1], torch.einsum("is,st,it->i", a, kernel, a) * length


@pytest.mark.parametrize("length", [2, 3, 17, 40])
def test_finite_form_is_that_of_the_explicit_kernel(length: int) -> None:
    trace = torch.tensor([0.7, -3.0], dtype=DOUBLE)
    form, square = torch.tensor([2.0, 5.0], dtype=DOUBLE), torch.tensor([1.5, -4.0], dtype=DOUBLE)
    cross, own = finite_moments(length)
    mean = cross * trace[:, None] / 1.7 + 1 / length
    scale = ((own * form[:, None] + cross**2 * square[:, None]) / 1.7**2).sqrt()
    normal = scipy.stats.norm(mean.numpy(), scale.numpy())
    expected = normal.cdf(1) - normal.cdf(0)
    np.testing.assert_allclose(propagation_finite(trace, form, square, length, 1.7), expected, atol=1e-12)


def test_moments_of_an_asymmetric_head_against_simulated_walks() -> None:
    """Mean and variance of s_i, anisotropic Σ, asymmetric W_QK: within 4.5 standard errors everywhere."""
    width, length, draws, temperature = 8, 40, 30000, 3.0
    generator = torch.Generator().manual_seed(2)
    w_q = torch.randn(width, width, generator=generator, dtype=DOUBLE) + 0.5 * torch.eye(width)
    root = torch.randn(width, width, generator=generator, dtype=DOUBLE) / 3
    moments = qk_moments(w_q, torch.eye(width), root @ root.mT, temperature)
    assert abs(moments.trace_of_square) < 0.7 * moments.form_squared
    values = walk_values(w_q, root, length, draws, temperature, seed=3)

    cross, own = finite_moments(length)
    mean = cross * moments.r + 1 / length
    variance = (own * moments.form_squared + cross**2 * moments.trace_of_square) / temperature**2
    measured = values.var(0)
    fourth = (values - values.mean(0)).pow(4).mean(0)
    assert ((values.mean(0) - mean) / (measured / draws).sqrt()).abs().max() < 4.5
    assert ((measured - variance) / ((fourth - measured**2) / draws).sqrt()).abs().max() < 4.5


def test_both_forms_are_differentiable() -> None:
    """Oracle: finite differences."""
    theta = torch.linspace(0, 1, 7, dtype=DOUBLE)
    xi = torch.tensor([-2.0, 1.5], dtype=DOUBLE, requires_grad=True)
    eta = torch.tensor([0.5, 1.5], dtype=DOUBLE, requires_grad=True)
    assert torch.autograd.gradcheck(lambda a, b: propagation(theta, a, b), (xi, eta))
    assert torch.autograd.gradcheck(lambda a, b: propagation_finite(a, b, b, 6, 1.3), (xi, eta))
    temperature = torch.tensor([0.7, 1.3], dtype=DOUBLE, requires_grad=True)
    assert torch.autograd.gradcheck(lambda a: propagation_finite(xi, eta, 0.5 * eta, 6, a), (temperature,))


def test_certain_positions_pass_a_zero_gradient() -> None:
    zero = torch.zeros((), dtype=DOUBLE, requires_grad=True)
    (gradient,) = torch.autograd.grad(propagation_finite(zero, zero, zero, 6, 1.0).sum(), zero)
    assert gradient == 0


def test_undefined_and_zero_scales_pass_and_so_does_vmap() -> None:
    """Oracle: NaN gives NaN, −0 is 0, and each pair by itself."""
    theta = torch.linspace(0, 1, 5)
    xi, eta = torch.tensor([1.0, torch.nan, 0.3]), torch.tensor([torch.nan, 1.0, 0.5])
    got = propagation(theta, xi, eta)
    assert got[:2].isnan().all()
    assert not got[2].isnan().any()
    zero = torch.zeros(())
    assert torch.equal(propagation(theta, zero, -zero), propagation(theta, zero, zero))
    together = torch.func.vmap(lambda x, e: propagation(theta, x, e))(xi, eta)
    torch.testing.assert_close(together, got, equal_nan=True)
    finite = torch.func.vmap(lambda x, t: propagation_finite(x, x, x, 4, t))
    expected = propagation_finite(eta[1:], eta[1:], eta[1:], 4, eta[1:])
    torch.testing.assert_close(finite(eta[1:], eta[1:]), expected)


THETA = torch.linspace(0, 1, 401, dtype=torch.float64)


def test_shapes_of_curves_that_are_known():
    """Oracle: a constant, and the indicator of an interval."""
    flat = torch.full((401,), 0.3, dtype=torch.float64)
    step = ((THETA > 0.5) & (THETA <= 0.75)).double()
    assert float(curve_width(flat)) == pytest.approx(1)
    assert float(curve_width(step)) == pytest.approx(0.25, abs=0.005)
    unseen = torch.tensor([[1.0, 1.0, 0.0, 0.0, math.nan], [0.2, 0.2, 0.2, 0.2, math.nan]])
    torch.testing.assert_close(curve_width(unseen), torch.tensor([0.5, 1.0]))
    assert curve_width(torch.tensor([[math.nan] * 3, [0.0] * 3])).isnan().all()
