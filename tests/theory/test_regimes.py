"""Regimes against what Bao et al. 2024 say of each (ξ, η): Lemma 2, the text below Fig. 2, and Fig. 3."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from theodolite.theory import REGIMES, propagation, regime, regime_margins, regime_of_curve
from theodolite.theory.regimes import UNDEFINED


@pytest.mark.parametrize(
    ("xi", "eta", "name"),
    [
        (5.0, 0.001, "late-site"),  # below Fig. 2: small η and large positive ξ
        (-5.0, 0.001, "early-site"),
        (5.0, 0.5, "middle-site"),  # below Fig. 2: η ≥ 0.5 and |ξ| ≥ 5
        (-5.0, 0.5, "middle-site"),
        (128.0, 0.01, "late-site"),  # Fig. 3: ξη = 1.28
        (512.0, 0.01, "middle-site"),  # Fig. 3: ξη = 5.12
        (1e6, 1.9e-6, "late-site"),  # Lemma 2.1 at its limit, on both sides of r = 2
        (1e6, 2.1e-6, "middle-site"),
        (-1e6, 1.9e-6, "early-site"),
        (-1e6, 2.1e-6, "middle-site"),
        (0.0, 0.1, "uniform"),  # Lemma 2.3
        (1.0, 1e-3, "uniform"),
        (3.0, 1e3, "vanishing"),  # Lemma 2.4
        (0.0, 1e3, "vanishing"),
    ],
)
def test_the_papers_own_examples(xi: float, eta: float, name: str) -> None:
    assert regime(xi, eta) == name


def test_small_xi_is_never_localized_and_larger_xi_never_uniform() -> None:
    """The paper's "regardless of η for small |ξ| ≤ 1", over six decades of η."""
    eta = np.logspace(-4, 2, 200)
    small = regime(np.linspace(-1, 1, 21)[:, None], eta)
    assert set(small.ravel()) == {"uniform", "vanishing"}
    large = regime(np.array([1.5, -1.5, 5.0, 50.0])[:, None], eta)
    assert "uniform" not in large


def test_sign_of_xi_swaps_early_and_late() -> None:
    generator = np.random.default_rng(0)
    xi, eta = generator.normal(0, 10, 500), 10 ** generator.uniform(-3, 1.5, 500)
    swap = {"early-site": "late-site", "late-site": "early-site"}
    names = regime(xi, eta)
    assert [swap.get(name, name) for name in names] == regime(-xi, eta).tolist()
    assert set(names) == set(REGIMES)


def test_margins_are_distances_on_the_corrected_curve() -> None:
    """Oracle: the curve itself. Flatter, the first is uniform; with more signal the last does not vanish."""
    xi, eta = np.array([5.0, 3.0]), np.array([0.001, 1e3])
    margins = regime_margins(xi, eta)
    assert margins.name.tolist() == ["late-site", "vanishing"]
    curve = propagation(torch.linspace(0, 1, 129), torch.tensor(xi), torch.tensor(eta)).numpy()
    spread = 1 - curve[0].min() / curve[0].max()
    np.testing.assert_allclose(margins.margin, [spread - 0.71, 0.1 - curve[1].max()])


def test_margins_of_silent_and_undefined_heads() -> None:
    margins = regime_margins(torch.tensor([[math.nan], [math.nan]]), torch.tensor([[0.0], [1.0]]))
    assert margins.name.tolist() == [["uniform"], [UNDEFINED]]
    assert margins.margin[0, 0] == pytest.approx(0.71)
    assert math.isnan(margins.margin[1, 0])
    single = regime_margins(0.0, 0.1)
    assert single.name == "uniform"
    assert single.margin.shape == ()


def test_regimes_are_read_off_curves_as_theory_reads_them():
    """Oracle: `regime` of ξ and η (its own tests: Lemma 2), against the name of the corrected curve at 512 positions;
    and curves drawn by hand. A window's unseen keys do not count."""
    pairs = np.array([(0.0, 0.5), (8.0, 0.01), (-8.0, 0.01), (10.0, 2.0), (0.0, 50.0), (7.0, 0.2)])
    theta = torch.linspace(0, 1, 512, dtype=torch.float64)
    curves = propagation(theta, torch.tensor(pairs[:, 0]), torch.tensor(pairs[:, 1])).numpy()
    assert regime_of_curve(curves).tolist() == regime(pairs[:, 0], pairs[:, 1]).tolist()
    assert set(regime_of_curve(curves)) == {"uniform", "early-site", "late-site", "middle-site", "vanishing"}
    late = np.where(np.arange(64) < 32, np.nan, np.where(np.arange(64) < 48, 0.0, 1.0))
    assert regime_of_curve(np.stack([late, np.full(64, np.nan)])).tolist() == ["late-site", "undefined"]
    noisy = np.clip(0.5 + 0.45 * np.random.default_rng(0).choice([-1, 1], size=(1, 512)), 0, 1)
    assert regime_of_curve(noisy).tolist() == ["uniform"]
