"""Regimes against what Bao et al. 2024 say of each (ξ, η): Lemma 2, the text below Fig. 2, and Fig. 3."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from theodolite.theory import REGIMES, regime
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


def test_shapes_and_kinds_of_input() -> None:
    names = regime(torch.zeros(3, 1), np.full(4, 0.1))
    assert names.shape == (3, 4)
    assert (names == "uniform").all()
    assert regime(torch.zeros(2, dtype=torch.bfloat16).float(), 0.1).tolist() == ["uniform"] * 2


def test_undefined_moments_have_no_regime_and_a_silent_head_is_uniform() -> None:
    assert regime([math.nan, math.nan, 1.0], [math.nan, 0.0, math.nan]).tolist() == [
        UNDEFINED,
        "uniform",
        UNDEFINED,
    ]
