"""Oracles: moments of Gaussian walks, the chi-square of a single step, Haar's first moments, and numpy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats

from theodolite.theory.propagation import propagation_finite
from theodolite_papers.localization.propagation_theory import Simulation, WalkSetting, simulate_walks

SMALL = WalkSetting(width=12, length=6, walks=400, draws=6, means=(0.0, 0.5), scales=(0.2, 1.0))


@pytest.mark.parametrize("covariance", ["isotropic", "anisotropic"])
def test_one_token_propagates_always_and_has_no_entropy(covariance):
    """Oracle: T = 1: s_1 = ω − ω + 1 = 1, and the softmax of one logit is 1."""
    sim = simulate_walks(WalkSetting(width=5, length=1, walks=20, draws=2), covariance, 0)
    assert (sim.propagates == 1).all()
    assert (sim.entropy == 0).all()


def test_two_tokens_follow_a_chi_square():
    """Oracle: d = 1, T = 2, λ = 1, W_QK = m: ω = m x_2 (x_1, x_2), s_2 = ½ + ¼ m x_2 (x_2 − x_1) = ½ + ¼ m ε(ε + x_1),
    ε, x_1 independent: by quadrature over x_1 of the normal probability of −2 ≤ m ε (ε + x_1) ≤ 2."""
    mean = 1.5
    setting = WalkSetting(width=1, length=2, walks=20_000, draws=2, means=(mean,), scales=(1e-9,))
    sim = simulate_walks(setting, "isotropic", 0)
    x = np.linspace(-8, 8, 40_001)
    low = np.sqrt(np.maximum(x**2 / 4 - 2 / mean, 0))  # ε² + εx ≥ −2/m outside of −x/2 ± low
    high = np.sqrt(x**2 / 4 + 2 / mean)
    inside = stats.norm.cdf(-x / 2 + high) - stats.norm.cdf(-x / 2 - high)
    inside -= stats.norm.cdf(-x / 2 + low) - stats.norm.cdf(-x / 2 - low)
    expected = float(np.sum(inside * stats.norm.pdf(x)) * (x[1] - x[0]))
    error = math.sqrt(expected * (1 - expected) / 40_000)
    assert sim.propagation[0].tolist() == pytest.approx([expected, expected], abs=4 * error)


def test_the_simulation_has_the_exact_moments_of_theory():
    """Oracle: `propagation_finite` (its own tests: Monte Carlo and Isserlis) of the very spectra; with η small and
    many dimensions the Gaussian is close, so that only the standard error and little more remains."""
    setting = WalkSetting(width=64, length=12, walks=2000, draws=3, means=(0.2,), scales=(0.1,))
    sim = simulate_walks(setting, "isotropic", 1)
    trace, square = sim.eigenvalues.sum(-1), sim.eigenvalues.square().sum(-1)
    expected = propagation_finite(trace, square, square, 12, setting.temperature).mean(1)
    assert float((sim.propagation - expected).abs().max()) < 0.02


def test_spectra_have_their_mean_and_scale_and_the_anisotropic_trace():
    """Oracle: w ~ N(mean, scale²); E tr(W_QK Σ) = mean · tr Σ, and E tr Σ = E‖R‖²_F/d = d · 2.5²/3."""
    setting = WalkSetting(width=40, length=2, walks=2, draws=60, means=(0.5,), scales=(2.0,))
    eigenvalues = simulate_walks(setting, "isotropic", 0).eigenvalues
    assert float(eigenvalues.mean()) == pytest.approx(0.5, abs=4 * 2 / math.sqrt(eigenvalues.numel()))
    assert float(eigenvalues.std()) == pytest.approx(2.0, rel=0.05)
    flat = WalkSetting(width=40, length=2, walks=2, draws=2, means=(1.0,), scales=(1e-12,))
    trace = simulate_walks(flat, "anisotropic", 0).eigenvalues.sum(-1)
    # Var(u²) of Unif(−a, a) is 4a⁴/45; tr Σ is the mean over rows of their sums of squares.
    error = math.sqrt(4 * 2.5**4 / 45)
    assert trace[0].tolist() == pytest.approx([40 * 2.5**2 / 3] * 2, abs=4 * error)


def test_errors_over_walks_and_draws_are_those_of_means():
    """Oracle: numpy's standard error of a mean of draws; binomial variance of each draw, by hand."""
    shares = torch.tensor([[[0.5, 1.0], [0.7, 1.0], [0.3, 1.0]]], dtype=torch.float64)
    spread = torch.tensor([[4.0, 1.0, 1.0]], dtype=torch.float64)
    entropy = torch.tensor([[1.0, 2.0, 4.0]], dtype=torch.float64)
    sim = Simulation(shares, entropy, spread, torch.zeros(1, 3, 2), walks=101)
    walks, draws = sim.propagation_errors()
    by_hand = math.sqrt((0.25 + 0.21 + 0.21) / 100) / 3
    assert walks[0].tolist() == pytest.approx([by_hand, 0])
    assert draws[0].tolist() == pytest.approx([np.std([0.5, 0.7, 0.3], ddof=1) / math.sqrt(3), 0])
    walks, draws = sim.entropy_errors()
    assert float(walks) == pytest.approx(math.sqrt(6 / 101) / 3)
    assert float(draws) == pytest.approx(np.std([1, 2, 4], ddof=1) / math.sqrt(3))
