"""Oracles: `theory` called one k and m at a time, bases whose smoothness is known, and the theorems themselves."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from theodolite.judging import FAILS, HOLDS
from theodolite.papers import Study
from theodolite.papers.catalogue import EXPERIMENTS
from theodolite.papers.hidden_geometry import theorems
from theodolite.papers.hidden_geometry.kernel_factorisation import FactorisationError
from theodolite.papers.hidden_geometry.theorems import cutoffs_of
from theodolite.theory.smoothness import normalised_gram, smoothness_bound

THEOREM_1, THEOREM_2 = EXPERIMENTS["geometry/theorem1"], EXPERIMENTS["geometry/theorem2"]


def _with_basis(run, rows: torch.Tensor):
    """The run with these positions 1 … at every layer."""
    basis = torch.cat([torch.zeros(1, rows.shape[1]), rows]).expand(3, -1, -1).contiguous()
    return replace(run, arrays=run.arrays | {"positional_basis": basis.float()})


def test_the_slope_with_noise_is_taken_above_the_noise():
    """Oracle: errors written down: flat up to 1/√d = 0.088, then 3ρ; the flat part must not count."""
    rho = torch.tensor(theorems.INCOHERENCES, dtype=torch.float64)
    ones = torch.ones_like(rho)
    noisy = FactorisationError(rho, 3 * rho.clamp(min=128**-0.5), ones, ones, ones)
    assert theorems.slope_above_noise(noisy) == pytest.approx(1)
    assert noisy.slope < 0.9


@pytest.mark.parametrize("positions", [4, 12, 60, 511])
def test_cutoffs_reach_from_one_to_the_most_and_include_ten(positions):
    cutoffs = cutoffs_of(positions)
    assert cutoffs[0] == 1
    assert cutoffs[-1] == min(positions, 64)
    assert cutoffs == sorted(set(cutoffs))
    assert min(10, positions) in cutoffs


def test_the_table_is_the_theorem_one_k_and_m_at_a_time(run):
    """Oracle: `smoothness_bound` (tested on dense matrices) for a single k and m."""
    table = Study(run).outcome(THEOREM_1).tables["bounds"]
    gram = normalised_gram(run.arrays["positional_basis"][2, 1:])
    for k in (1, 10, 47):
        row = table[(table["layer"] == 2) & (table["k"] == k)].iloc[0]
        for order in (1, 2, 3):
            both = smoothness_bound(gram, k, order)
            assert row[f"bound_{order}"] == pytest.approx(float(both.bound))
            assert row["attained"] == pytest.approx(float(both.attained), abs=1e-14)
        assert row["no_approximation"] == pytest.approx(np.linalg.norm(gram.numpy(), 2) / len(gram))


def test_on_a_smooth_arc_the_bound_is_of_use_and_on_noise_it_is_not(run):
    """Oracle: positions at angles θ = ½ cos(π(t − ½)/T), even about both ends, where derivatives bound differences:
    ‖Δ^(2,2)‖ ≤ (max|θ''| + max|θ'|²)² = (¾π²)² < 55, the bound at k = 10 is below 6 · 55/80² = 0.052, and ‖G‖/T
    is at least the least cosine, cos 1 = 0.54. Random positions have differences of order T²."""
    angle = torch.cos(torch.pi * (torch.arange(48) + 0.5) / 48) / 2
    smooth = torch.zeros(48, 64)
    smooth[:, 0], smooth[:, 1] = torch.cos(angle), torch.sin(angle)
    answers = [v.answer for v in Study(_with_basis(run, smooth)).outcome(THEOREM_1).verdicts]
    assert answers == [HOLDS, HOLDS, HOLDS]
    rough = torch.randn(48, 64, generator=torch.Generator().manual_seed(0))
    outcome = Study(_with_basis(run, rough)).outcome(THEOREM_1)
    assert [v.answer for v in outcome.verdicts] == [HOLDS, FAILS, FAILS]
    assert outcome.readings[0].here == "none up to 48"


def test_the_kernel_factorises_and_noise_hides_it(run, monkeypatch):
    """Oracle: Theorem 2 (slope 1, and the proof's bound) and, with noise, the mean of |exp(z) − 1| for
    z ~ N(0, 12/d), d = 128, whatever the incoherence: drawn here. An error that is flat has slope 0, not 1."""
    monkeypatch.setattr(theorems, "DRAWS", 30)
    outcome = Study(run).outcome(THEOREM_2)
    assert not outcome.verdicts  # of drawn bases, it says nothing about the run
    table = outcome.tables["errors"]
    loud = table[table["incoherence"] >= 128**-0.5]
    assert len(loud) == 3
    clean_slope = np.polyfit(np.log(table["incoherence"]), np.log(table["error"]), 1)[0]
    noisy_slope = np.polyfit(np.log(loud["incoherence"]), np.log(loud["noisy_error"]), 1)[0]
    assert clean_slope == pytest.approx(1, abs=0.1)
    assert abs(noisy_slope - 1) > 0.9  # at width 128 the noise of size 1/√d dominates at every incoherence
    shown = [reading.here for reading in outcome.readings]
    assert float(shown[0]) == pytest.approx(clean_slope, abs=1e-3)
    assert float(shown[1].replace("−", "-")) == pytest.approx(noisy_slope, abs=1e-3)
    assert (table["error_max"] <= table["bound"]).all()
    assert (table["error"].diff()[1:] > 0).all()
    noise = np.abs(np.expm1(np.random.default_rng(0).normal(scale=(12 / 128) ** 0.5, size=100_000))).mean()
    assert abs(table["noisy_error"][0] - noise) < 4 * table["noisy_error_se"][0]
    assert float(shown[2]) == pytest.approx(run.layers["incoherence_mean"].mean(), rel=1e-2)
