"""The kernel of Theorem 2: constructions checked with numpy, errors against bounds and closed forms."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from theodolite_papers.hidden_geometry.kernel_factorisation import (
    KernelSetting,
    _directions,
    _tilted,
    factorisation_bound,
    factorisation_log_ratio,
    kernel_factorisation,
)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


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
    first, second = _tilted(*(_directions(1, 4, generator(seed)) for seed in (0, 1)), rho)
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
