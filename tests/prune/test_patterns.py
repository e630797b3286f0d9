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


def test_patterns_as_they_are_given():
    for given_ in ("2:4", (2, 4)):
        pattern = pattern_of(given_, 8)
        assert (pattern.kept, pattern.of, pattern.density, str(pattern)) == (2, 4, 0.5, "2:4")
    assert pattern_of(None, 7) is None
    for wrong in NO_PATTERNS:
        with pytest.raises(UsageError, match="give N:M with 0 < N < M"):
            pattern_of(wrong, 16)
    with pytest.raises(UsageError, match="pattern 2:4 needs a multiple of 4 inputs; the matrix has 10"):
        pattern_of("2:4", 10)


NO_PATTERNS = ("", *["24", "2/4", "2:4:8", "4:2", "0:4", "4:4", "-1:4", "2:x"], (2,), (2, 4, 8), (2.0, 4), 24)
NO_PATTERNS += (True,)


def test_a_pattern_fixes_the_sparsity():
    for wrong in (0, 1, 0.0, 1.0, -0.1, 1.5, float("nan"), float("inf"), True, "0.5"):
        with pytest.raises(UsageError, match="give the share to remove, between 0 and 1, both excluded"):
            check_sparsity(wrong)
    assert sparsity_of(0.3, None) == 0.3
    assert sparsity_of(None, Pattern(2, 8)) == sparsity_of(0.75, Pattern(2, 8)) == 0.75
    assert sparsity_of(0.333, Pattern(2, 3)) == pytest.approx(1 / 3, abs=1e-15)
    with pytest.raises(
        UsageError, match=r"pattern 2:8 removes 0\.75 of the entries, not 0\.5: pass sparsity 0\.75"
    ):
        sparsity_of(0.5, Pattern(2, 8))
    with pytest.raises(UsageError, match="no sparsity is given"):
        sparsity_of(None, None)


def test_what_is_no_weight_and_not_one_number_for_each_input():
    for wrong, words in (
        (np.ones((2, 2)), "floating-point numbers"),
        (torch.ones(2, 2, dtype=torch.int64), "floating-point numbers"),
        (torch.ones(2, 2, dtype=torch.complex64), "floating-point numbers"),
        (torch.ones(3), r"give a matrix \(outputs, inputs\)"),
        (torch.ones(1, 2, 3), r"give a matrix \(outputs, inputs\)"),
        (torch.ones(0, 4), r"give a matrix \(outputs, inputs\)"),
        (torch.tensor([[1.0, torch.nan]]), "weight holds NaN or infinity"),
        (torch.tensor([[1.0, -torch.inf]]), "weight holds NaN or infinity"),
    ):
        with pytest.raises(UsageError, match=words):
            checked_weight(wrong)
    weight, for_each = torch.ones(3, 2), "norms must be one number for each of 2 inputs"
    for wrong, words in (
        (torch.ones(3), for_each),
        (torch.ones(1, 2), for_each),
        ([1.0, 1.0], for_each),
        (torch.ones(2, dtype=torch.complex64), for_each),
        (torch.tensor([1.0, torch.nan]), "norms holds NaN or infinity"),
        (torch.tensor([1.0, -1.0]), "norms holds negative numbers"),
    ):
        with pytest.raises(UsageError, match=words):
            checked_inputs("norms", wrong, weight)
    assert checked_inputs("norms", torch.tensor([0.0, 3.0]), weight).tolist() == [0, 3]
    assert checked_inputs("norms", torch.zeros(2), weight).tolist() == [1, 1]
