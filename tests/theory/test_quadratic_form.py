"""Inversion of characteristic functions against closed forms, mpmath, and itself at many more nodes."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.integrate
import scipy.special
import scipy.stats
import torch
from torch import Tensor

from theodolite.theory import probability_between

DOUBLE = torch.float64


def probability(weights: list[float], low: float, high: float, counts: list[float] | None = None) -> float:
    ends = torch.tensor([[low], [high]], dtype=DOUBLE)
    degrees = torch.tensor(counts or [1.0] * len(weights), dtype=DOUBLE)
    return probability_between(torch.tensor([weights], dtype=DOUBLE), degrees, ends[0], ends[1]).item()


@pytest.mark.parametrize(("freedom", "scale"), [(1, 1e-6), (2, -3.0), (3, 1e6), (5, 1.0), (300, 1.0)])
def test_equal_weights_are_a_chi_square(freedom: int, scale: float) -> None:
    """Oracle: scipy's χ², also near zero where one degree of freedom has an infinite density."""
    law = scipy.stats.chi2(freedom)
    for low, high in (
        (1e-4, 0.3),
        (0.0, 2.0),
        (-1.0, freedom),
        (freedom - 1, freedom + 5),
        (freedom, math.inf),
    ):
        ends = sorted((scale * low, scale * high))
        expected = law.cdf(high) - law.cdf(low)
        assert probability([scale] * freedom, *ends) == pytest.approx(expected, abs=1e-11)


@pytest.mark.parametrize(("low", "high"), [(-1, 1), (-1e-3, 0.3), (-1e-9, 1e-6), (2, 5), (0.0, 1.0)])
def test_one_pair_of_weights_is_a_product_of_normals(low: float, high: float) -> None:
    """XY = (χ² − χ²′)/2 has density K₀(|z|)/π (|φ| ~ 1/t); oracle: quad over scipy's Bessel function."""
    sides = [(max(low, 0.0), high)] + ([(0.0, -low)] if low < 0 else [])
    mass = sum(scipy.integrate.quad(scipy.special.k0, *side, epsabs=1e-14, limit=400)[0] for side in sides)
    assert probability([0.5, -0.5], low, high) == pytest.approx(mass / math.pi, abs=1e-12)


@pytest.mark.parametrize(("low", "high"), [(-1, 1), (-1e-9, 1e-9), (-2, 30), (3, 4)])
def test_two_pairs_of_weights_are_a_laplace_variable(low: float, high: float) -> None:
    law = scipy.stats.laplace(scale=2)
    expected = law.cdf(high) - law.cdf(low)
    assert probability([1, -1], low, high, [2, 2]) == pytest.approx(expected, abs=1e-13)


def midpoint(weights: np.ndarray, counts: np.ndarray, low: float, high: float) -> float:
    """Davies' sum in numpy until |φ| < 1e-13, with a step for windows of ±200 largest weights."""
    step = 2 * math.pi / (400 * np.abs(weights).max() + 4 * abs((weights * counts).sum()))
    total, first = 0.0, 0
    while True:
        index = np.arange(first, first + 20000) + 0.5
        double = 2 * step * index[:, None] * weights
        modulus = np.exp(-np.log1p(double**2) @ counts / 4)
        phase = np.arctan(double) @ counts / 2 - step * index * (low + high) / 2
        total += (np.sin(step * index * (high - low) / 2) / index * modulus * np.cos(phase)).sum()
        first += 20000
        if modulus[-1] < 1e-13:
            return 2 / math.pi * total


@pytest.mark.parametrize("seed", range(4))
def test_one_weight_above_a_crowd_of_small_ones(seed: int) -> None:
    """The crowd's mean displaces the slow oscillation of the large weight; oracle: the plain sum, many nodes."""
    generator = np.random.default_rng(seed)
    share = generator.uniform(0.1, 0.9)
    size = 10 ** -generator.uniform(1.5, 2.8)
    base = np.array([1.0, generator.choice([-1, 1]) * size, -0.3 * size])
    weights = np.concatenate([base * share, -base * (1 - share)])
    counts = np.tile([generator.integers(1, 4), generator.integers(20, 1500), generator.integers(1, 4)], 2)
    spread, mean = math.sqrt(2 * (counts * weights**2).sum()), (counts * weights).sum()
    crowd = (counts * weights)[[1, 4]].sum()
    for low in (mean - spread, mean, crowd - 0.01, crowd + 0.02):
        expected = midpoint(weights, counts, low, low + 0.5 * spread)
        got = probability(weights.tolist(), low, low + 0.5 * spread, counts.tolist())
        assert got == pytest.approx(expected, abs=1e-11)


def test_contours_agree_where_both_apply(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bent contour, which shares no quadrature with the straight one, on forms that the latter resolves."""
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(40, 24, generator=generator, dtype=DOUBLE)
    low = torch.randn(40, generator=generator, dtype=DOUBLE) * 5
    straight = probability_between(weights, torch.ones(24, dtype=DOUBLE), low, low + 2)
    monkeypatch.setattr("theodolite.theory.quadratic_form._STRAIGHT_NODES", 0)
    bent = probability_between(weights, torch.ones(24, dtype=DOUBLE), low, low + 2)
    torch.testing.assert_close(bent, straight, rtol=0, atol=1e-11)
    assert not torch.equal(bent, straight)


def test_rare_intervals_keep_relative_accuracy() -> None:
    """An interval of length 1 in a spread of 1e8: its length times the density at its middle (scipy)."""
    law = scipy.stats.chi2(6)
    expected = law.pdf(4.0) * 1e-8
    assert probability([1e8] * 6, 4e8 - 0.5, 4e8 + 0.5) == pytest.approx(expected, rel=1e-9)


def test_degenerate_forms() -> None:
    weights = torch.tensor(
        [[0.0, 0.0], [0.0, 0.0], [math.nan, 1.0], [math.inf, 1.0], [1.0, 1.0]], dtype=DOUBLE
    )
    low = torch.tensor([-1.0, 0.1, 0.0, 0.0, 0.5], dtype=DOUBLE)
    got = probability_between(weights, torch.ones(2, dtype=DOUBLE), low, low + 1)
    assert got[:2].tolist() == [1.0, 0.0]
    assert got[2:4].isnan().all()
    assert got[4].item() == pytest.approx(math.exp(-0.25) - math.exp(-0.75))
    nowhere = torch.zeros(0, dtype=DOUBLE)
    empty: Tensor = probability_between(
        torch.zeros(0, 3, dtype=DOUBLE), torch.ones(3, dtype=DOUBLE), nowhere, nowhere
    )
    assert empty.shape == (0,)
