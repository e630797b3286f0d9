"""Counts and patterns against sorting by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from theodolite.errors import UsageError
from theodolite.prune.patterns import (
    Pattern,
    ThresholdTracker,
    check_sparsity,
    checked_inputs,
    checked_weight,
    largest,
    pattern_of,
    sparsity_of,
)


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
    columns=st.integers(1, 40),
    share=st.floats(0, 1),
    values=st.integers(1, 50),
    seed=st.integers(0, 99),
)
def test_the_largest_of_each_row(threads, rows, columns, share, values, seed):
    """Few different values make ties. One thread: numpy's partition; many: torch's kthvalue."""
    scores = torch.from_numpy(np.random.default_rng(seed).integers(values, size=(rows, columns)) / 7)
    count = round(share * columns)
    expected = largest_by_sorting(scores.numpy(), count)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "get_num_threads", lambda: threads)
        got = largest(scores, count)
        numbers = largest(scores, count, out=torch.full_like(scores, 9.0))
    assert got.dtype == torch.bool
    assert np.array_equal(got.numpy(), expected)
    assert np.array_equal(numbers.numpy(), expected.astype(float))


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


@settings(max_examples=60, deadline=None)
@given(
    of=st.integers(2, 17),
    kept=st.integers(1, 16),
    groups=st.integers(1, 5),
    values=st.integers(1, 50),
    seed=st.integers(0, 99),
)
def test_the_largest_of_each_group(of, kept, groups, values, seed):
    kept = min(kept, of - 1)
    scores = np.random.default_rng(seed).integers(values, size=(3, groups * of)) / 7
    expected = largest_by_sorting(scores.reshape(-1, of), kept)
    got = Pattern(kept, of).largest(torch.from_numpy(scores))
    assert np.array_equal(got.numpy(), expected.reshape(scores.shape))


@pytest.mark.parametrize("given_", ["2:4", (2, 4)])
def test_patterns_as_they_are_given(given_):
    pattern = pattern_of(given_, 8)
    assert (pattern.kept, pattern.of, pattern.density, str(pattern)) == (2, 4, 0.5, "2:4")
    assert pattern_of(None, 7) is None


NO_PATTERNS = [
    "",
    "24",
    "2/4",
    "2:4:8",
    "4:2",
    "0:4",
    "4:4",
    "-1:4",
    "2:x",
    (2,),
    (2, 4, 8),
    (2.0, 4),
    24,
    True,
]


@pytest.mark.parametrize("wrong", NO_PATTERNS)
def test_what_is_no_pattern(wrong):
    with pytest.raises(UsageError, match="give N:M with 0 < N < M"):
        pattern_of(wrong, 16)


def test_groups_must_divide_the_inputs():
    with pytest.raises(UsageError, match="pattern 2:4 needs a multiple of 4 inputs; the matrix has 10"):
        pattern_of("2:4", 10)


@pytest.mark.parametrize("wrong", [0, 1, 0.0, 1.0, -0.1, 1.5, float("nan"), float("inf"), True, "0.5"])
def test_what_is_no_sparsity(wrong):
    with pytest.raises(UsageError, match="give the share to remove, between 0 and 1, both excluded"):
        check_sparsity(wrong)


def test_a_pattern_fixes_the_sparsity():
    assert sparsity_of(0.3, None) == 0.3
    assert sparsity_of(None, Pattern(2, 8)) == sparsity_of(0.75, Pattern(2, 8)) == 0.75
    assert sparsity_of(0.333, Pattern(2, 3)) == pytest.approx(1 / 3, abs=1e-15)
    with pytest.raises(
        UsageError, match=r"pattern 2:8 removes 0\.75 of the entries, not 0\.5: pass sparsity 0\.75"
    ):
        sparsity_of(0.5, Pattern(2, 8))
    with pytest.raises(UsageError, match="no sparsity is given"):
        sparsity_of(None, None)


def test_what_is_no_weight():
    for wrong in (
        np.ones((2, 2)),
        torch.ones(2, 2, dtype=torch.int64),
        torch.ones(2, 2, dtype=torch.complex64),
    ):
        with pytest.raises(UsageError, match="floating-point numbers"):
            checked_weight(wrong)
    for wrong in (torch.ones(3), torch.ones(1, 2, 3), torch.ones(0, 4)):
        with pytest.raises(UsageError, match=r"give a matrix \(outputs, inputs\)"):
            checked_weight(wrong)
    for wrong in (float("nan"), float("-inf")):
        with pytest.raises(UsageError, match="weight holds NaN or infinity"):
            checked_weight(torch.tensor([[1.0, wrong]]))


def test_one_number_for_each_input():
    weight = torch.ones(3, 2)
    for wrong in (torch.ones(3), torch.ones(1, 2), [1.0, 1.0], torch.ones(2, dtype=torch.complex64)):
        with pytest.raises(UsageError, match="norms must be one number for each of 2 inputs"):
            checked_inputs("norms", wrong, weight)
    with pytest.raises(UsageError, match="norms holds NaN or infinity"):
        checked_inputs("norms", torch.tensor([1.0, float("nan")]), weight)
    with pytest.raises(UsageError, match="norms holds negative numbers"):
        checked_inputs("norms", torch.tensor([1.0, -1.0]), weight)
    assert checked_inputs("norms", torch.tensor([0.0, 3.0]), weight).tolist() == [0, 3]
    assert checked_inputs("norms", torch.zeros(2), weight).tolist() == [1, 1]
