"""Exact ρ against simulated walks, closed forms, the sums it avoids, and its own Gaussian approximation."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.integrate
import scipy.special
import scipy.stats
import torch
from torch import Tensor

from tests.theory.test_propagation import finite_moments, walk_values
from theodolite.theory import probability_between, propagation_exact, propagation_exact_head

DOUBLE = torch.float64


def simulated(matrix: Tensor, root: Tensor, length: int, draws: int, temperature: float, seed: int) -> Tensor:
    """Frequency of s_i in [0, 1] for the last query of walks with steps of covariance root·rootᵀ, (T,)."""
    value = walk_values(matrix, root, length, draws, temperature, seed)
    return ((value >= 0) & (value <= 1)).double().mean(0)


def deviations(measured: Tensor, exact: Tensor, draws: int) -> Tensor:
    """(measured − exact) in standard errors; certain positions must agree exactly."""
    error = (exact * (1 - exact) / draws).sqrt()
    return (measured - exact) / error.clamp_min(1e-7)


SPECTRA = {
    "one": [1.5],
    "one, negative, among zeros": [0.0, -0.4, 0.0],
    "two of opposite sign": [1.0, -0.3],
    "zero mean": [0.9, -0.5, 0.3, -0.7, 0.2, -0.2],
    "positive": [0.3, 0.2, 0.4, 0.3, 0.1, 0.3, 0.25, 0.35],
    "negative": [-1.0, -2.0, -0.5, -1.5],
    "one above small ones": [1.0, 0.02, 0.01, -0.01, 0.015, 0.03],
    "large": [40.0, -25.0, 60.0],
    "small": [0.01, 0.02, -0.005],
}


@pytest.mark.parametrize(("name", "length"), [*((name, 7) for name in SPECTRA), ("one", 1), ("large", 2)])
def test_short_contexts_against_simulated_walks(name: str, length: int) -> None:
    """Within 3 standard errors at every position; the form's weights come from the tokens, not from us."""
    values = torch.tensor(SPECTRA[name], dtype=DOUBLE)
    draws = 15_000
    measured = simulated(
        torch.diag(values), torch.eye(len(values), dtype=DOUBLE), length, draws, 0.8, seed=100 + length
    )
    exact = propagation_exact(values, length, 0.8)
    assert exact.shape == (length,)
    assert deviations(measured, exact, draws).abs().max() < 3


def direct(values: Tensor, length: int, positions: list[int]) -> Tensor:
    """ρ_i from all 2d weights, with s_ab and s_aa s_bb by the explicit kernel."""
    cross, own = (moment[torch.tensor(positions) - 1] for moment in finite_moments(length))
    halves = torch.stack([cross + own.sqrt(), cross - own.sqrt()], dim=-1) / 2
    weights = (halves[..., None] * values).flatten(1)
    low = torch.full((len(positions),), -1 / length, dtype=DOUBLE)
    return probability_between(weights, torch.ones(weights.shape[1], dtype=DOUBLE), low, low + 1)


def spectra_of_many() -> dict[str, Tensor]:
    noise = torch.randn(60, generator=torch.Generator().manual_seed(4), dtype=DOUBLE)
    one = torch.ones(1, dtype=DOUBLE)
    return {
        "semicircle-like": noise.clamp(-2, 2),
        "equal": torch.full((60,), 0.01, dtype=DOUBLE),
        "heavy tails": noise.pow(5),
        "power law": torch.arange(1, 61, dtype=DOUBLE) ** -1.0,
        "one and a displaced crowd": torch.cat([one, 1e-3 * (noise + 1)]),
    }


@pytest.mark.parametrize("name", list(spectra_of_many()))
def test_bins_and_interpolation_cost_no_accuracy(name: str) -> None:
    """d = 60, T = 140: Chebyshev nodes in i and bins of eigenvalues against every term at single positions."""
    values, positions = spectra_of_many()[name], [1, 71, 140]
    got = propagation_exact(values, 140, 1.0)[torch.tensor(positions) - 1]
    torch.testing.assert_close(got, direct(values, 140, positions), rtol=0, atol=1e-9)


def test_batches_zeros_and_nan() -> None:
    values = torch.tensor([[[1.0, -0.5], [0.0, 0.0]], [[math.nan, 1.0], [0.3, 0.0]]], dtype=DOUBLE)
    temperature = torch.tensor([1.0, 2.0], dtype=DOUBLE)
    got = propagation_exact(values, 9, temperature)
    assert got.shape == (2, 2, 9)
    assert (got[0, 1] == 1).all()
    assert got[1, 0].isnan().all()
    torch.testing.assert_close(got[1, 1], propagation_exact(torch.tensor([0.3]), 9, 2.0), rtol=0, atol=1e-8)
    assert propagation_exact(torch.zeros(2, 0, 3), 5, 1.0).shape == (2, 0, 5)
    assert (propagation_exact(torch.zeros(2, 0), 5, 1.0) == 1).all()


def random_head(width: int, head_width: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    w_q, w_k = torch.randn(2, width, head_width, generator=generator, dtype=DOUBLE)
    return w_q + 0.3, w_k + 0.3


@pytest.mark.parametrize(("width", "head_width", "length"), [(6, 4, 12), (5, 1, 7), (3, 3, 40)])
def test_asymmetric_heads_against_simulated_walks(width: int, head_width: int, length: int) -> None:
    """Anisotropic Σ, within 3 standard errors everywhere; the symmetrised head is further off than that."""
    w_q, w_k = random_head(width, head_width, seed=width)
    root = torch.randn(width, width, generator=torch.Generator().manual_seed(1), dtype=DOUBLE) / 2
    draws = 50_000
    measured = simulated(w_q @ w_k.mT, root, length, draws, 2.0, seed=5)
    exact = propagation_exact_head(w_q, w_k, length, 2.0, covariance=root @ root.mT)
    assert deviations(measured, exact, draws).abs().max() < 3
    form = root.mT @ w_q @ w_k.mT @ root
    symmetrised = propagation_exact(torch.linalg.eigvalsh((form + form.mT) / 2), length, 2.0)
    assert deviations(measured, symmetrised, draws).abs().max() > 6


def test_characteristic_function_is_the_determinant_of_the_docstring() -> None:
    """(0, −W; W, 0)-like W of rank 2, whose symmetric part is zero: φ(t) = 1/(1 + t² g² (1 − c²) w²), a Laplace
    variable of scale w·√(g² − s_ab²); oracle: scipy."""
    w_q = torch.eye(2, dtype=DOUBLE)
    w_k = 0.4 * torch.tensor([[0.0, 1.0], [-1.0, 0.0]], dtype=DOUBLE)
    length = 9
    got = propagation_exact_head(w_q, w_k, length, 1.0)
    cross, own = finite_moments(length)
    scale = 0.4 * (own - cross**2).sqrt().numpy()
    law = scipy.stats.laplace(scale=scale)
    expected = law.cdf(1 - 1 / length) - law.cdf(-1 / length)
    np.testing.assert_allclose(got, expected, atol=1e-11)


@pytest.mark.parametrize("length", [1, 2, 30])
def test_symmetric_heads_agree_with_their_eigenvalues(length: int) -> None:
    """W_k = B and W_q = B diag(w), which has a singular joint Gram matrix; then with Σ and d_h = d."""
    generator = torch.Generator().manual_seed(0)
    basis = torch.linalg.qr(torch.randn(20, 5, generator=generator, dtype=DOUBLE)).Q
    values = torch.tensor([1.0, -0.5, 0.3, 0.3, 0.0], dtype=DOUBLE)
    got = propagation_exact_head(basis * values, basis, length, 1.5)
    torch.testing.assert_close(got, propagation_exact(values, length, 1.5), rtol=0, atol=1e-8)

    half = torch.randn(6, 6, generator=generator, dtype=DOUBLE)
    root = torch.randn(6, 6, generator=generator, dtype=DOUBLE) / 3
    got = propagation_exact_head(
        half + half.mT, torch.eye(6, dtype=DOUBLE), length, 1.5, covariance=root @ root.mT
    )
    eigenvalues = torch.linalg.eigvalsh(root.mT @ (half + half.mT) @ root)
    torch.testing.assert_close(got, propagation_exact(eigenvalues, length, 1.5), rtol=0, atol=1e-8)


def test_chosen_positions_and_the_default_temperature() -> None:
    w_q, w_k = random_head(16, 4, seed=0)
    whole = propagation_exact_head(w_q, w_k, 150)
    some = propagation_exact_head(w_q, w_k, 150, 2.0, positions=[150, 1, 77])
    torch.testing.assert_close(some, whole[[149, 0, 76]], rtol=0, atol=1e-9)
    assert propagation_exact_head(w_q * math.nan, w_k, 3).isnan().all()
    assert (propagation_exact_head(w_q * 0, w_k, 3) == 1).all()
