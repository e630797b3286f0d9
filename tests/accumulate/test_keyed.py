"""Sums of rows that come into being when first seen, against a dictionary of numpy arrays."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from theodolite.accumulate.keyed import KeyedSums

Batch = list[tuple[tuple[int, int], int]]
KEYS = st.tuples(st.integers(-2, 3), st.integers(0, 3))
BATCHES = st.lists(st.lists(st.tuples(KEYS, st.integers(-9, 9)), max_size=8), max_size=5)


def _new() -> KeyedSums:
    return KeyedSums(2, {"count": (), "vector": (3,)})


def _fed(sums: KeyedSums, batches: list[Batch]) -> KeyedSums:
    for batch in batches:
        rows = sums.rows(torch.tensor([key for key, _ in batch], dtype=torch.int64).reshape(-1, 2))
        values = torch.tensor([value for _, value in batch], dtype=torch.float32)
        sums.add("count", rows, torch.ones(len(rows)))
        sums.add("vector", rows, values.unsqueeze(1) * torch.tensor([1.0, 2.0, 3.0]))
    return sums


def _same(a: KeyedSums, b: KeyedSums) -> bool:
    first, second = a.state(), b.state()
    return set(first) == set(second) and all(torch.equal(first[name], second[name]) for name in first)


@settings(deadline=None, max_examples=50)
@given(BATCHES)
def test_rows_are_those_of_a_dictionary_in_the_order_of_their_keys(batches):
    expected: dict[tuple[int, int], list[int]] = {}
    for key, value in (pair for batch in batches for pair in batch):
        expected.setdefault(key, []).append(value)
    state = _fed(_new(), batches).state()
    assert [tuple(key) for key in state["keys"].tolist()] == sorted(expected)
    assert state["keys"].shape == (len(expected), 2)
    assert state["vector"].dtype == torch.float64
    for row, key in enumerate(sorted(expected)):
        assert state["count"][row] == len(expected[key])
        np.testing.assert_array_equal(state["vector"][row], sum(expected[key]) * np.array([1, 2, 3]))


@settings(deadline=None, max_examples=50)
@given(BATCHES, BATCHES, BATCHES)
def test_merging_and_going_on_are_the_same_as_one_pass(a, b, c):
    whole = _fed(_new(), a + b + c)
    restored = _new()
    restored.restore(_fed(_new(), a).state())
    assert _same(_fed(restored, b + c), whole)
    left, right = _fed(_new(), a), _fed(_new(), b)
    left.merge(right)
    left.merge(_fed(_new(), c))
    assert _same(left, whole)
    other = _fed(_new(), c)
    other.merge(_fed(_new(), a))
    other.merge(right)
    assert _same(other, whole)  # in any order: whole numbers add up exactly


def test_a_state_does_not_change_any_more():
    sums = _fed(_new(), [[((0, 0), 1)]])
    state = sums.state()
    restored = _new()
    restored.restore(state)
    _fed(sums, [[((0, 0), 5)]])
    _fed(restored, [[((0, 0), 5)]])
    assert state["vector"][0].tolist() == [1, 2, 3]
