"""Magnitude, Wanda and SparseGPT against the papers' formulas in numpy; counts and patterns against sorting by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from theodolite.errors import UsageError
from theodolite.prune import methods
from theodolite.prune.methods import (
    Pattern,
    ThresholdTracker,
    factor_hessian,
    largest,
    magnitude,
    sparsegpt,
    wanda,
)
from theodolite.prune.sparse_low_rank import oats


def weights(outputs: int, inputs: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(outputs, inputs))


def hessian_of(inputs: int, kind: str, seed: int = 0) -> np.ndarray:
    """Mean of x xᵀ over tokens whose inputs are correlated, of different size, partly dead, or few."""
    generator = np.random.default_rng(seed)
    x = generator.normal(size=(3 * inputs, inputs))
    if kind == "correlated":
        x = x @ (np.eye(inputs) + generator.normal(size=(inputs, inputs)) / np.sqrt(inputs))
    elif kind == "outliers":
        x = x * np.exp(1.5 * generator.normal(size=inputs))
    elif kind == "dead":
        x[:, ::5] = 0
    elif kind == "singular":
        x = generator.normal(size=(3 * inputs, 3)) @ generator.normal(size=(3, inputs))
    return x.T @ x / len(x)


KINDS = ["correlated", "outliers", "dead", "singular"]


def removed_in_groups(scores: np.ndarray, kept: int, of: int) -> np.ndarray:
    removed = np.zeros(scores.shape, dtype=bool)
    for row in range(len(scores)):
        for first in range(0, scores.shape[1], of):
            order = np.argsort(scores[row, first : first + of], kind="stable")
            removed[row, first + order[: of - kept]] = True
    return removed


def slow_sparsegpt(weight, hessian, sparsity, pattern=None, block=128, damping=0.1):
    """The optimal brain surgeon input by input: the Hessian of the inputs that are left is inverted anew each time.

    Removing w_j costs w_j² / H⁻¹_jj and moves the others by −w_j H⁻¹_j / H⁻¹_jj, with H⁻¹ that of inputs j, j + 1 …
    """
    left, hessian = weight.copy(), hessian.copy()
    outputs, inputs = weight.shape
    dead = np.diag(hessian) == 0
    hessian[dead, dead] = 1
    left[:, dead] = 0
    hessian += damping * np.diag(hessian).mean() * np.eye(inputs)
    inverses = [np.linalg.inv(hessian[j:, j:]) for j in range(inputs)]
    price = np.array([inverse[0, 0] for inverse in inverses])
    removed = np.zeros(weight.shape, dtype=bool)
    for j in range(inputs):
        if pattern is None and j % block == 0:
            part = slice(j, min(j + block, inputs))
            score = left[:, part] ** 2 / price[part]
            gone = np.zeros(score.size, dtype=bool)
            gone[np.argsort(score.T, axis=None, kind="stable")[: int(sparsity * score.size)]] = True
            removed[:, part] = gone.reshape(score.T.shape).T
        elif pattern is not None and j % pattern[1] == 0:
            part = slice(j, j + pattern[1])
            removed[:, part] = removed_in_groups(left[:, part] ** 2 / price[part], *pattern)
        for row in range(outputs):
            if removed[row, j]:
                left[row, j:] -= left[row, j] / price[j] * inverses[j][0]
                left[row, j] = 0
    return left


@pytest.mark.parametrize("sparsity", [0.3, 0.5, 0.9])
def test_magnitude_removes_the_smallest_of_the_matrix_and_wanda_those_of_each_output(sparsity):
    weight, x = weights(13, 21), np.random.default_rng(1).normal(size=(50, 21)) * np.arange(1, 22)
    expected = weight.flatten()
    expected[np.argsort(np.abs(weight), axis=None)[: int(sparsity * weight.size)]] = 0
    got = magnitude(torch.from_numpy(weight), sparsity)
    assert np.array_equal(got.numpy(), expected.reshape(weight.shape))
    expected = weight.copy()
    for row in expected:
        score = [abs(row[j]) * np.linalg.norm(x[:, j]) for j in range(21)]
        row[np.argsort(score)[: int(sparsity * 21)]] = 0
    norm = torch.from_numpy(np.linalg.norm(x, axis=0))
    assert np.array_equal(wanda(torch.from_numpy(weight), norm, sparsity).numpy(), expected)


@pytest.mark.parametrize("factor", [1e50, 1e-50, 1e300, 1e-300, 2.0**-1060, 3.0])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_a_common_factor_of_norms_changes_nothing(factor, kind):
    """Oracle: numpy in float64, where the scores of float32 would all be infinite or 0."""
    weight = torch.from_numpy(weights(13, 21)).to(kind)
    norms = np.arange(21.0)  # the first input was always 0
    pruned = wanda(weight, torch.from_numpy(norms * factor), 0.5)
    for row, own in zip(pruned.double().numpy(), weight.double().numpy(), strict=True):
        removed = np.argsort(np.abs(own) * norms, kind="stable")[:10]
        assert set(np.flatnonzero(row == 0)) == set(removed)
        assert 0 in removed


def test_scores_are_those_of_the_released_code_to_the_bit():
    """Oracle: |W| · ‖x‖ in float32. Many scores are nearly equal, so another rounding would choose others."""
    generator = torch.Generator().manual_seed(0)
    norms = torch.rand(512, generator=generator) * 37 + 0.1
    weight = 1 / norms * (1 + 1e-7 * torch.randn(64, 512, generator=generator))
    scores = weight.abs() * norms
    kept = scores.argsort(dim=1, stable=True)[:, 256:]
    expected = torch.zeros_like(weight).scatter(1, kept, weight.gather(1, kept))
    assert torch.equal(wanda(weight, norms, 0.5), expected)


@pytest.mark.parametrize("pattern", [(2, 4), (4, 8), (2, 8), (1, 3)])
def test_patterns_keep_the_best_of_each_group(pattern):
    weight, norm = weights(6, 48), np.exp(weights(1, 48, 1)[0])
    text = f"{pattern[0]}:{pattern[1]}"
    expected = np.where(removed_in_groups(np.abs(weight), *pattern), 0, weight)
    assert np.array_equal(magnitude(torch.from_numpy(weight), pattern=text).numpy(), expected)
    expected = np.where(removed_in_groups(np.abs(weight) * norm, *pattern), 0, weight)
    got = wanda(torch.from_numpy(weight), torch.from_numpy(norm), 1 - pattern[0] / pattern[1], text)
    assert np.array_equal(got.numpy(), expected)


@pytest.mark.parametrize(
    ("kind", "block"),
    [("correlated", 128), ("correlated", 5), ("outliers", 16), ("dead", 1), ("singular", 128)],
)
def test_sparsegpt_is_the_optimal_brain_surgeon(kind, block, monkeypatch):
    monkeypatch.setattr(methods, "INPUTS_AT_ONCE", block)
    weight, hessian = weights(9, 24), hessian_of(24, kind)
    expected = slow_sparsegpt(weight, hessian, 0.6, block=block)
    given_, moments = torch.from_numpy(weight), torch.from_numpy(hessian)
    got = sparsegpt(given_, moments, 0.6).numpy()
    np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-11)
    assert np.array_equal(got == 0, expected == 0)
    if kind == "correlated":
        single = sparsegpt(given_.float(), moments.float(), 0.6)
        np.testing.assert_allclose(single.numpy(), expected, rtol=1e-3, atol=1e-4)


PATTERNS = {"correlated": [(2, 4)], "outliers": [(4, 8)], "dead": [(2, 8), (20, 24)], "singular": [(1, 3)]}


@pytest.mark.parametrize(("kind", "pattern"), [(kind, of) for kind in PATTERNS for of in PATTERNS[kind]])
def test_sparsegpt_with_a_pattern(kind, pattern, monkeypatch):
    """Groups are chosen as adjusted for those before them, so blocks change nothing."""
    weight, hessian = weights(7, 48), hessian_of(48, kind, 2)
    expected = slow_sparsegpt(weight, hessian, 0, pattern)
    for block in (1, 20, 128):
        monkeypatch.setattr(methods, "INPUTS_AT_ONCE", block)
        text = f"{pattern[0]}:{pattern[1]}"
        got = sparsegpt(torch.from_numpy(weight), torch.from_numpy(hessian), None, text)
        np.testing.assert_allclose(got.numpy(), expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("damping", [0.01, 0.1, 1.0])
def test_damping_is_a_share_of_the_mean_diagonal(damping):
    weight, hessian = weights(5, 12), hessian_of(12, "outliers")
    expected = slow_sparsegpt(weight, hessian, 0.5, damping=damping)
    for factor in (1, 1e-6, 1e6):
        given_ = torch.from_numpy(factor * hessian)
        got = sparsegpt(torch.from_numpy(weight), given_, 0.5, damping=damping)
        np.testing.assert_allclose(got.numpy(), expected, rtol=1e-8, atol=1e-10)


@settings(max_examples=40, deadline=None)
@given(
    outputs=st.integers(1, 12),
    groups=st.integers(1, 9),
    sparsity=st.floats(0.01, 0.99),
    kind=st.sampled_from(KINDS),
    seed=st.integers(0, 99),
)
def test_counts_are_exact(outputs, groups, sparsity, kind, seed):
    """Of continuous numbers no entry is 0 but those that were removed, and the dead ones of SparseGPT."""
    weight, hessian = weights(outputs, 4 * groups, seed), hessian_of(4 * groups, kind, seed)
    given_, norm = torch.from_numpy(weight), torch.from_numpy(hessian).diagonal().sqrt()
    assert (magnitude(given_, sparsity) == 0).sum() == int(sparsity * weight.size)
    assert ((wanda(given_, norm, sparsity) == 0).sum(1) == int(sparsity * 4 * groups)).all()
    removed = int((sparsegpt(given_, torch.from_numpy(hessian), sparsity) == 0).sum())
    dead = outputs * int((norm == 0).sum())
    assert removed == max(dead, int(sparsity * weight.size))
    for pruned in (
        magnitude(given_, pattern="2:4"),
        wanda(given_, norm, pattern="2:4"),
        sparsegpt(given_, torch.from_numpy(hessian), pattern="2:4"),
    ):
        per_group = (pruned.view(-1, 4) != 0).sum(1)
        assert (per_group <= 2).all()
        assert kind == "dead" or (per_group == 2).all()


@pytest.mark.parametrize("at_once", [2, 512])
def test_damping_is_raised_until_the_hessian_can_be_factored(at_once, monkeypatch):
    """A known spectrum: with mean diagonal 1 and an eigenvalue −0.35, damping 0.1 fails and 1 does."""
    monkeypatch.setattr(methods, "_FACTORED_AT_ONCE", at_once)
    inputs = 6
    basis = np.linalg.qr(weights(inputs, inputs))[0]
    values = np.full(inputs, (inputs + 0.35) / (inputs - 1))
    values[0] = -0.35
    hessian = torch.from_numpy((basis * values) @ basis.T)
    before = hessian.clone()
    factor = factor_hessian(hessian)
    assert factor.damping == 1
    assert torch.equal(hessian, before)
    torch.testing.assert_close(
        factor.upper @ factor.upper.mT, hessian + torch.eye(inputs, dtype=torch.float64), rtol=0, atol=1e-12
    )
    assert torch.equal(factor.upper, factor.upper.triu())
    weight = torch.from_numpy(weights(3, inputs))
    expected = slow_sparsegpt(weight.numpy(), hessian.numpy(), 0.5, damping=1)
    np.testing.assert_allclose(sparsegpt(weight, hessian, 0.5).numpy(), expected, rtol=1e-9)


@pytest.mark.parametrize("inputs", [1, 511, 512, 513, 1100])
def test_factor_by_blocks(inputs, monkeypatch):
    """Oracle: NumPy's Cholesky of the flipped matrix. Strips are cut, too."""
    monkeypatch.setattr(methods, "_STRIP", 700)
    rows = weights(1200, inputs) * np.linspace(0.01, 10, inputs)
    hessian = rows.T @ rows / 1200
    given = torch.from_numpy(hessian.copy())
    factor = factor_hessian(given, 0.01, overwrite=True)
    damped = hessian + 0.01 * np.diag(hessian).mean() * np.eye(inputs)
    expected = np.linalg.cholesky(damped[::-1, ::-1])[::-1, ::-1]
    np.testing.assert_allclose(factor.upper.numpy(), expected, rtol=1e-9, atol=1e-12 * expected.max())
    assert factor.upper.data_ptr() == given.data_ptr()


def test_a_singular_hessian_without_damping_and_one_that_no_damping_makes_definite():
    """Of rank 1, exact in float64: it gets just enough."""
    column = torch.arange(1, 9, dtype=torch.float64)
    factor = factor_hessian(torch.outer(column, column), damping=0)
    assert 0 < factor.damping < 1e-12
    pruned = sparsegpt(torch.from_numpy(weights(4, 8)), factor, 0.5)
    assert torch.isfinite(pruned).all()
    assert factor_hessian(torch.eye(4), damping=0).damping == 0
    dead = factor_hessian(torch.from_numpy(hessian_of(20, "dead"))).dead
    assert dead.nonzero().flatten().tolist() == [0, 5, 10, 15]
    assert (sparsegpt(torch.ones(2, 3), torch.zeros(3, 3), 0.5) == 0).all()
    hessian = torch.full((3, 3), 1e20)
    hessian.diagonal().fill_(1e-3)
    with pytest.raises(UsageError, match="far from positive semidefinite"):
        factor_hessian(hessian)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_the_dtype_stays_and_half_precisions_are_computed_in_float32(dtype):
    weight, hessian = torch.from_numpy(weights(8, 32)).to(dtype), torch.from_numpy(hessian_of(32, "outliers"))
    wide, norm = weight.to(torch.promote_types(dtype, torch.float32)), hessian.diagonal().sqrt()
    for method in (
        lambda matrix: magnitude(matrix, 0.5),
        lambda matrix: wanda(matrix, norm, 0.5),
        lambda matrix: sparsegpt(matrix, hessian, 0.5),
        lambda matrix: sparsegpt(matrix, hessian, None, "2:4"),
    ):
        pruned = method(weight)
        assert pruned.dtype == dtype
        assert pruned.is_contiguous()
        assert torch.equal(pruned, method(wide).to(dtype))


def test_nothing_given_is_changed_and_a_view_is_pruned_as_its_copy_is():
    strided = torch.from_numpy(weights(12, 24)).T
    hessian = torch.from_numpy(hessian_of(12, "dead"))
    before, square = strided.clone(), hessian.clone()
    assert not strided.is_contiguous()
    for call in (
        lambda w: magnitude(w, 0.5),
        lambda w: wanda(w, hessian.diagonal(), 0.5),
        lambda w: sparsegpt(w, hessian, 0.5),
        lambda w: oats(w, hessian.diagonal(), 0.5, iterations=3).dense(),
    ):
        pruned = call(strided)
        assert pruned.data_ptr() != strided.data_ptr()
        assert not (pruned == before).all()
        assert torch.equal(pruned, call(strided.contiguous()))
    assert torch.equal(strided, before)
    assert torch.equal(hessian, square)


NO_PATTERNS = ("", "2:4:8", "4:2", "0:4", "4:4", "2:x", (2, 4))
NO_SHARES = (0, 1.0, -0.1, float("nan"), True, "0.5")
NO_WEIGHTS = {
    r"give a matrix \(outputs, inputs\)": [torch.ones(3), torch.ones(0, 4)],
    "weight holds NaN or infinity": [torch.tensor([[1.0, torch.nan]])],
}
NO_NORMS = {
    "input_norm must be one number for each of 8 inputs": [torch.ones(7)],
    "input_norm holds NaN or infinity": [torch.tensor([1.0, torch.nan] * 4)],
}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda w, h: magnitude(w), "no sparsity is given"),
        (
            lambda w, h: wanda(w, torch.ones(8), 0.6, "2:4"),
            r"2:4 removes 0\.5 of the entries, not 0\.6: pass",
        ),
        (lambda w, h: sparsegpt(w, h[:4], 0.5), r"shape \(4, 8\): give \(inputs, inputs\)"),
        (lambda w, h: sparsegpt(w, h[:4, :4], 0.5), "the Hessian is of 4 inputs, the weight of 8"),
        (lambda w, h: sparsegpt(w, h.where(h < h.max(), torch.inf), 0.5), "hessian holds NaN or infinity"),
        (lambda w, h: sparsegpt(w, h, 0.5, damping=-1), "damping is -1"),
        (
            lambda w, h: sparsegpt(w, h, 0.5, "3:5"),
            "pattern 3:5 needs a multiple of 5 inputs; the matrix has 8",
        ),
        *((lambda w, h, p=p: magnitude(w, None, p), "give N:M with 0 < N < M") for p in NO_PATTERNS),
        *(
            (lambda w, h, s=s: magnitude(w, s), "give the share to remove, between 0 and 1")
            for s in NO_SHARES
        ),
        *((lambda _, h, w=w: magnitude(w, 0.5), m) for m, wrong in NO_WEIGHTS.items() for w in wrong),
        *((lambda w, h, n=n: wanda(w, n, 0.5), m) for m, wrong in NO_NORMS.items() for n in wrong),
    ],
)
def test_bad_calls(call, message):
    with pytest.raises(UsageError, match=message):
        call(torch.from_numpy(weights(3, 8)), torch.from_numpy(hessian_of(8, "correlated")))


def test_a_pattern_is_its_sparsity_and_norms_that_are_all_zero_count_alike():
    """A share that is nearly the pattern's is the pattern's: 0.333 for 1/3."""
    weight = torch.from_numpy(weights(3, 24))
    assert torch.equal(magnitude(weight, 0.333, "2:3"), magnitude(weight, None, "2:3"))
    assert torch.equal(wanda(weight, torch.zeros(24), 0.5), wanda(weight, torch.ones(24), 0.5))


def largest_by_sorting(scores: np.ndarray, count: int) -> np.ndarray:
    """True at the last `count` of each row in a stable order."""
    kept = np.zeros(scores.shape, dtype=bool)
    order = np.argsort(scores, axis=1, kind="stable")
    np.put_along_axis(kept, order[:, scores.shape[1] - count :], True, axis=1)
    return kept


@pytest.mark.parametrize("threads", [1, 64])
@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 6),
    groups=st.integers(1, 5),
    of=st.integers(2, 17),
    share=st.floats(0, 1),
    values=st.integers(1, 50),
    seed=st.integers(0, 99),
)
def test_the_largest_of_each_row_and_of_each_group(threads, rows, groups, of, share, values, seed):
    """Few different values make ties. One thread: numpy's partition; many: torch's kthvalue."""
    drawn = np.random.default_rng(seed).integers(values, size=(rows, groups * of)) / 7
    scores, count = torch.from_numpy(drawn), round(share * groups * of)
    kept = min(max(round(share * of), 1), of - 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "get_num_threads", lambda: threads)
        got = largest(scores, count)
        numbers = largest(scores, count, out=torch.full_like(scores, 9.0))
        in_groups = Pattern(kept, of).largest(scores)
    assert got.dtype == torch.bool
    expected = largest_by_sorting(drawn, count)
    assert np.array_equal(got.numpy(), expected)
    assert np.array_equal(numbers.numpy(), expected.astype(float))
    expected = largest_by_sorting(drawn.reshape(-1, of), kept)
    assert np.array_equal(in_groups.numpy(), expected.reshape(drawn.shape))


@settings(max_examples=40, deadline=None)
@given(
    columns=st.integers(1, 60),
    share=st.floats(0, 1),
    change=st.sampled_from([0, 1e-3, 0.1, 10]),
    dead=st.floats(0, 1),
    seed=st.integers(0, 99),
)
def test_the_largest_again_as_the_scores_change(columns, share, change, dead, seed):
    """Also where they change a lot, and where many are 0."""
    generator = np.random.default_rng(seed)
    scores, count = np.abs(generator.normal(size=(5, columns))), round(share * columns)
    scores[:, generator.random(columns) < dead] = 0
    search, kept = ThresholdTracker(count), torch.empty(5, columns, dtype=torch.float64)
    for _ in range(5):
        search.mark(torch.from_numpy(scores), kept)
        assert np.array_equal(kept.numpy(), largest_by_sorting(scores, count).astype(float))
        scores = np.abs(scores * (1 + change * generator.normal(size=scores.shape)))
