"""Exact ρ against simulated walks, closed forms, the sums it avoids, and its own Gaussian approximation."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.theory.test_propagation import finite_moments, walk_values
from theodolite.theory import probability_between, propagation_exact

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
