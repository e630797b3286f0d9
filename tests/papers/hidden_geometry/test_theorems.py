"""Oracles: `theory` called one k and m at a time, bases whose smoothness is known, and the theorems themselves."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special

from tests.papers.hidden_geometry.planted import drawn, grouped, study_of
from theodolite.judging import FAILS, HOLDS, UNTESTABLE
from theodolite.theory.smoothness import normalised_gram
from theodolite_papers import Study
from theodolite_papers.catalogue import EXPERIMENTS
from theodolite_papers.hidden_geometry import theorems
from theodolite_papers.hidden_geometry.theorems import (
    KernelSetting,
    _directions,
    _tilted,
    attained_over_none,
    factorisation_bound,
    factorisation_log_ratio,
    kernel_factorisation,
    premise_of,
    smoothness_bound,
)

THEOREM_1, THEOREM_2 = EXPERIMENTS["geometry/theorem1"], EXPERIMENTS["geometry/theorem2"]


def _with_basis(run, rows: torch.Tensor):
    """The run with these positions 1 … at every layer."""
    basis = torch.cat([torch.zeros(1, rows.shape[1]), rows]).expand(3, -1, -1).contiguous()
    return replace(run, arrays=run.arrays | {"positional_basis": basis.float()})


def test_the_table_is_the_theorem_one_k_and_m_at_a_time(run):
    """Oracle: `smoothness_bound` (tested on dense matrices) for a single k and m."""
    table = Study(run).outcome(THEOREM_1).tables["bounds"]
    gram = normalised_gram(run.arrays["positional_basis"][2, 1:])
    for k in (1, 10, 47):
        row = table[(table["layer"] == 2) & (table["k"] == k)].iloc[0]
        for order in (1, 2, 3):
            both = smoothness_bound(gram, [k], order)
            assert row[f"bound_{order}"] == pytest.approx(float(both.bound))
            assert row["attained"] == pytest.approx(float(both.attained), abs=1e-14)
        assert row["no_approximation"] == pytest.approx(np.linalg.norm(gram.numpy(), 2) / len(gram))


def test_on_a_smooth_arc_the_bound_is_of_use_and_on_noise_it_is_not(run, monkeypatch):
    """Oracle: positions at angles θ = a cos(π(t − ½)/T), even about both ends, which sum to zero as J₀(a) = 0. With
    derivatives for differences, ‖Δ^(2,2)‖ ≤ (max|θ''| + max|θ'|²)² = (aπ² + a²π²)² < 6540, so that the bound at k = 40
    is below 6 · 6540/320² = 0.39, and ‖G‖/T is at least ½ of two directions. Random positions have differences of
    order T²."""
    monkeypatch.setattr(theorems, "MODERATE", 40)
    angle = float(special.jn_zeros(0, 1)[0]) * torch.cos(torch.pi * (torch.arange(48) + 0.5) / 48)
    smooth = torch.zeros(48, 64)
    smooth[:, 0], smooth[:, 1] = torch.cos(angle), torch.sin(angle)
    assert _answers(study_of(_with_basis(run, smooth))) == [HOLDS, HOLDS, HOLDS, HOLDS]
    rough = drawn(0, 48, 64)
    study = study_of(_with_basis(run, rough))
    assert _answers(study) == [HOLDS, FAILS, UNTESTABLE, FAILS]
    assert study.outcome(THEOREM_1).readings[0].here == "none up to 48"
    assert _answers(Study(_with_basis(run, smooth))) == [HOLDS, *[UNTESTABLE] * 3]


def _answers(study: Study) -> list[str]:
    return [verdict.answer for verdict in study.outcome(THEOREM_1).verdicts]


@pytest.mark.parametrize("wanted", ["smooth", "rough"])
def test_sampling_noise_does_not_decide_the_premise(wanted):
    """Oracle: bound and attained error of the curve that the groups are drawn about, below what their mean has.

    Twelve layers of noise of their own: intervals of Student's t with 7 degrees of freedom, of which hardly one misses.
    """
    angle = torch.pi * (torch.arange(60) + 0.5) / 60
    curve = torch.stack([angle.cos(), (2 * angle).cos()], -1).double()
    basis = torch.nn.functional.pad(curve / curve.norm(dim=-1, keepdim=True), (0, 62))
    if wanted == "rough":
        basis = basis + 0.04 * drawn(3, 60, 64)
    basis = basis - basis.mean(0)
    noisy = grouped(basis.expand(12, -1, -1), 0.1 * drawn(4, 12, 8, 60, 64))
    exact, measured = (normalised_gram(each) for each in (basis, noisy[0].mean(dim=0)))

    def over_none(gram: torch.Tensor, name: str) -> float:
        numbers = smoothness_bound(gram, [10], 1)
        return float(getattr(numbers, name) / torch.linalg.matrix_norm(gram, 2) * 60)

    assert over_none(measured, "bound") > 1.3 * over_none(exact, "bound")
    values, errors = np.array([premise_of(p, 10) for p in noisy]).T
    assert (np.abs(values - over_none(exact, "bound")) <= 2.365 * errors).sum() >= 11
    attained = [attained_over_none(p, 10) for p in noisy]
    deviations = np.array([float(each.value) for each in attained]) - over_none(exact, "attained")
    assert (np.abs(deviations) <= 2.365 * np.array([float(each.error) for each in attained])).sum() >= 10
    assert deviations.mean() < 0.4 * (over_none(measured, "attained") - over_none(exact, "attained"))


def test_the_kernel_factorises_and_with_noise_too(run, monkeypatch):
    """Oracle: Theorem 2 (slope 1, and the proof's bound) and, with noise, the mean of |exp(z) − 1| for z ~ N(0, 12/d),
    in closed form: over incoh = d^−½ it tends to √(2·12/π) = 2.76, and over d^−¾ it grows as d^¼."""
    monkeypatch.setattr(theorems, "DRAWS", 30)
    outcome = Study(run).outcome(THEOREM_2)
    assert [verdict.answer for verdict in outcome.verdicts] == [HOLDS, HOLDS]
    growth = outcome.tables["growth"].set_index(["exponent", "width"])
    last = growth.loc[(0.5, 8192)]
    sigma = math.sqrt(12 / 8192)
    alone = math.exp(sigma**2 / 2) * math.erf(sigma / math.sqrt(2))
    assert alone * math.sqrt(8192) == pytest.approx(math.sqrt(24 / math.pi), rel=0.02)
    assert last["error_over_incoherence"] == pytest.approx(
        alone * math.sqrt(8192), abs=4 * last["error_over_incoherence_se"] + 0.05
    )
    control = growth.loc[0.75]["error_over_incoherence"]
    assert np.polyfit(np.log(control.index), np.log(control), 1)[0] == pytest.approx(0.25, abs=0.03)
    table = outcome.tables["errors"]
    clean_slope = np.polyfit(np.log(table["incoherence"]), np.log(table["error"]), 1)[0]
    assert clean_slope == pytest.approx(1, abs=0.1)
    shown = [reading.here for reading in outcome.readings]
    assert float(shown[0]) == pytest.approx(clean_slope, abs=1e-3)
    assert (table["error_max"] <= table["bound"]).all()
    assert (table["error"].diff()[1:] > 0).all()
    noise = np.abs(np.expm1(np.random.default_rng(0).normal(scale=(12 / 128) ** 0.5, size=100_000))).mean()
    assert abs(table["noisy_error"][0] - noise) < 4 * table["noisy_error_se"][0]
    assert float(shown[5].split(" ±")[0]) == pytest.approx(run.layers["incoherence_mean"].mean(), rel=1e-2)


def test_an_error_that_outgrows_the_incoherence_is_no_upper_bound(run, monkeypatch):
    """Oracle: incoherences of d^−¾, below 1/√d, over which noise of size 1/√d grows as d^¼."""
    monkeypatch.setattr(theorems, "DRAWS", 20)
    monkeypatch.setattr(theorems, "EXPONENTS", (0.25, 0.75))
    assert [verdict.answer for verdict in Study(run).outcome(THEOREM_2).verdicts] == [HOLDS, FAILS]


def test_logarithm_of_the_ratio_is_that_of_the_kernels() -> None:
    """Oracle: exp(xᵀWy) of every factor with numpy, one pair at a time."""
    weights = 0.3 * drawn(1, 2, 2, 5, 5)
    query, key = (drawn(seed, 2, 7, 5) for seed in (2, 3))
    got = factorisation_log_ratio(weights, query, key).exp()
    w, q, k = weights.numpy(), query.numpy(), key.numpy()
    for pair in range(7):
        joint = np.exp((q[0, pair] + q[1, pair]) @ w.sum((0, 1)) @ (k[0, pair] + k[1, pair]))
        factors = [np.exp(q[a, pair] @ w[a, b] @ k[b, pair]) for a in range(2) for b in range(2)]
        assert got[pair].item() == pytest.approx(joint / np.prod(factors), rel=1e-10)


def test_bound_is_attained() -> None:
    """One vector in each basis, every a_k = 1: s = 3 equal terms in each W_αβ give the bound exactly."""
    rho = 0.2
    first, second = _tilted(*(_directions(1, 4, torch.Generator().manual_seed(seed)) for seed in (0, 1)), rho)
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


def waves(size: int) -> np.ndarray:
    """Columns cos(π j (t + ½)/T), j = 0 … T−1, written from the definition."""
    t = np.arange(size)[:, None] + 0.5
    return np.cos(np.pi * np.arange(size) * t / size)


def dense_bound(gram: np.ndarray, k: int, m: int) -> tuple[float, float]:
    """Theorem 1 with the whole reflected 2T×2T matrix, np.roll, and least squares on the waves."""
    size = len(gram)
    reflected = np.block([[gram, gram[:, ::-1]], [gram[::-1], gram[::-1, ::-1]]])
    for _ in range(m):
        shifted = [np.roll(reflected, shift, (0, 1)) for shift in ((1, 0), (0, 1), (1, 1))]
        reflected = size**2 * (reflected - shifted[0] - shifted[1] + shifted[2])
    basis = waves(size)[:, :k]
    projection = basis @ np.linalg.pinv(basis)
    error = np.linalg.norm(gram - projection @ gram @ projection, 2) / size
    return 6 / (8 * k) ** m * np.abs(reflected).max(), error


@pytest.mark.parametrize(("size", "m"), [(1, 1), (3, 5), (8, 2), (9, 3), (2, 11)])
def test_bound_and_error_are_those_of_the_dense_matrix(size: int, m: int) -> None:
    """Oracle: `dense_bound`, also where the difference reaches around the whole reflected matrix."""
    p = drawn(0, 2, size, 4)
    gram = p @ p.mT
    ks = sorted({1, (size + 1) // 2, size})
    expected = np.array([[dense_bound(g, k, m) for k in ks] for g in gram.numpy()])
    got = smoothness_bound(gram, ks, m)
    assert got.bound.shape == got.attained.shape == (2, len(ks))
    np.testing.assert_allclose(got.bound, expected[..., 0], rtol=1e-9)
    np.testing.assert_allclose(got.attained, expected[..., 1], atol=1e-12)


SIZES = st.tuples(st.integers(3, 24), st.floats(0, 1), st.integers(0, 10**6), st.floats(0, 5))


def smooth(size: int, seed: int, decay: float) -> np.ndarray:
    """Positional vectors of random waves, the j-th of magnitude (j + 1)^−decay."""
    rng = np.random.default_rng(seed)
    scale = np.arange(1, size + 1)[:, None] ** -decay
    return waves(size) @ (rng.standard_normal((size, rng.integers(1, 5))) * scale)


@settings(max_examples=30, deadline=None)
@given(SIZES, st.integers(1, 7))
def test_bound_holds_for_centred_gram_matrices(case: tuple[int, float, int, float], m: int) -> None:
    """Oracle: Theorem 1's own claim, for m ≤ 7, and the sharper ‖H‖_max/(d_1 d_k)^m for every m."""
    size, share, seed, decay = case
    k = 1 + int(share * (size - 2))
    p = smooth(size, seed, decay)
    p -= p.mean(0)
    got = smoothness_bound(torch.tensor(p @ p.T), [k], m)
    rounding = 1e-12 * float(np.square(p).sum())
    assert got.attained <= got.bound + rounding
    d_1, d_k = (2 * size * math.sin(math.pi * j / 2 / size) for j in (1, k))
    largest = got.bound * (8 * k) ** m / 6
    assert got.attained <= largest / (d_1 * d_k) ** m * (1 + 1e-9) + rounding


@settings(max_examples=30, deadline=None)
@given(SIZES, st.integers(1, 6), st.booleans())
def test_bound_for_rows_of_norm_one(case: tuple[int, float, int, float], m: int, centred: bool) -> None:
    """Oracle: the inequality that the docstring states for them; the printed bound where it implies it."""
    size, share, seed, decay = case
    k = 1 + int(share * (size - 2))
    p = smooth(size, seed, decay)
    got = smoothness_bound(normalised_gram(torch.tensor(p - p.mean(0) if centred else p)), [k], m)
    d_1, d_k = (2 * size * math.sin(math.pi * j / 2 / size) for j in (1, k))
    largest = got.bound * (8 * k) ** m / 6
    assert got.attained <= largest * ((d_1 * d_k) ** -m + d_k**-m / 2) * (1 + 1e-9) + 1e-12
    if m == 1 or (m == 2 and k <= 0.7 * size):
        assert got.attained <= got.bound + 1e-12
