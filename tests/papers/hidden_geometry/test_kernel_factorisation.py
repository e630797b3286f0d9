"""The kernel of Theorem 2: constructions checked with numpy, errors against bounds and closed forms."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from theodolite.errors import UsageError
from theodolite_papers.hidden_geometry.kernel_factorisation import (
    KernelSetting,
    factorisation_bound,
    factorisation_log_ratio,
    incoherent_bases,
    kernel_factorisation,
    sparse_weight,
)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("incoherence", [0.0, 0.05, 1.0])
@pytest.mark.parametrize("vectors", [(1, 1), (3, 40), (40, 3)])
def test_bases_have_the_incoherence_asked_for(incoherence: float, vectors: tuple[int, int]) -> None:
    """Oracle: numpy's norms and largest |⟨c, t⟩|."""
    first, second = incoherent_bases(vectors, 9, incoherence, generator())
    assert (first.shape, second.shape) == ((vectors[0], 9), (vectors[1], 9))
    for basis in (first, second):
        np.testing.assert_allclose(np.linalg.norm(basis, axis=1), 1, rtol=1e-12)
    assert np.abs(first.numpy() @ second.numpy().T).max() == pytest.approx(incoherence, abs=1e-15)


def test_weight_is_sparse_in_its_bases() -> None:
    """Oracle: of orthonormal bases, coefficients UᵀWV hold at most s entries, each a sum of numbers in [−1, 1]."""
    left, right = (torch.linalg.qr(torch.randn(12, 12, generator=generator(s)).double()).Q for s in (1, 2))
    weight = sparse_weight(left, right, 5, generator())
    coefficients = left @ weight @ right.mT
    assert 1 <= (coefficients.abs() > 1e-12).sum() <= 5
    assert coefficients.abs().sum() <= 5
    torch.testing.assert_close(left.mT @ coefficients @ right, weight)
    many = sparse_weight(torch.ones(1, 1).double(), torch.ones(1, 1).double(), 40000, generator())
    assert abs(many.item()) < 4 * math.sqrt(40000 / 3)  # uniform in [−1, 1]: variance 1/3 each


def test_logarithm_of_the_ratio_is_that_of_the_kernels() -> None:
    """Oracle: exp(xᵀWy) of every factor with numpy, one pair at a time."""
    weights = 0.3 * torch.randn(2, 2, 5, 5, generator=generator(1)).double()
    query, key = (torch.randn(2, 7, 5, generator=generator(s)).double() for s in (2, 3))
    got = factorisation_log_ratio(weights, query, key).exp()
    w, q, k = weights.numpy(), query.numpy(), key.numpy()
    for pair in range(7):
        joint = np.exp((q[0, pair] + q[1, pair]) @ w.sum((0, 1)) @ (k[0, pair] + k[1, pair]))
        factors = [np.exp(q[a, pair] @ w[a, b] @ k[b, pair]) for a in range(2) for b in range(2)]
        assert got[pair].item() == pytest.approx(joint / np.prod(factors), rel=1e-10)


def test_bound_is_attained() -> None:
    """One vector in each basis, every a_k = 1: s = 3 equal terms in each W_αβ give the bound exactly."""
    rho = 0.2
    first, second = incoherent_bases((1, 1), 8, rho, generator())
    bases = (first, second)
    weights = torch.stack([torch.stack([3 * u.mT @ v for v in bases]) for u in bases])
    tokens = torch.stack(bases)
    error = torch.expm1(factorisation_log_ratio(weights, tokens, tokens))
    bound = factorisation_bound(torch.tensor(rho), 3)
    assert error.item() == pytest.approx(bound.item()) == pytest.approx(math.expm1(3 * (1.6 + 0.16)))


@settings(max_examples=15, deadline=None)
@given(st.floats(0, 1), st.integers(1, 6), st.integers(1, 9), st.integers(1, 9), st.integers(0, 10**6))
def test_no_error_exceeds_the_bound(incoherence: float, s: int, first: int, second: int, seed: int) -> None:
    """Oracle: Theorem 2 with the constant of `factorisation_bound`."""
    setting = KernelSetting(width=10, vectors=(first, second), sparsity=s)
    got = kernel_factorisation([incoherence], setting, draws=2, seed=seed)
    assert got.maximum <= got.bound * (1 + 1e-12) + 1e-12
    assert got.mean <= got.maximum


def test_error_grows_linearly_in_the_incoherence() -> None:
    """Oracle: Theorem 2, slope 1; and the slope by scipy.stats.linregress."""
    levels = [0.001, 0.003, 0.01, 0.03]
    setting = KernelSetting(width=32, vectors=(24, 24))
    got = kernel_factorisation(levels, setting, draws=60)
    assert got.slope == pytest.approx(1, abs=0.02)
    line = scipy.stats.linregress(np.log(levels), got.mean.log().numpy())
    assert got.slope == pytest.approx(line.slope)
    assert (got.standard_error < 0.2 * got.mean).all()


def test_orthogonal_bases_factorise_exactly() -> None:
    got = kernel_factorisation([0.0], KernelSetting(), draws=3)
    assert got.maximum.item() < 1e-13
    assert math.isnan(got.slope)


def test_noise_alone_has_the_error_of_a_lognormal() -> None:
    """E|e^N − 1| = e^{σ²/2}(2Φ(σ) − 1) for N normal of variance σ² = 12/d: orthogonal bases, d = 64."""
    setting = KernelSetting(width=64, vectors=(40, 40), noise=True)
    got = kernel_factorisation([0.0], setting, draws=150)
    sigma = math.sqrt(12 / 64)
    expected = math.exp(sigma**2 / 2) * (2 * scipy.stats.norm.cdf(sigma) - 1)
    assert abs(got.mean.item() - expected) < 4 * got.standard_error.item()
    assert got.standard_error.item() < 0.05 * expected


def test_wrong_calls_are_named() -> None:
    with pytest.raises(UsageError, match=r"incoherence is 1\.5"):
        kernel_factorisation([1.5], KernelSetting())
    with pytest.raises(UsageError, match="no incoherence is given"):
        kernel_factorisation([], KernelSetting())
    with pytest.raises(UsageError, match="draws is 1"):
        kernel_factorisation([0.1], KernelSetting(), draws=1)
    with pytest.raises(UsageError, match="sparsity is 0"):
        kernel_factorisation([0.1], KernelSetting(sparsity=0))
    with pytest.raises(UsageError, match="a vector in each basis"):
        kernel_factorisation([0.1], KernelSetting(vectors=(0, 3)))
