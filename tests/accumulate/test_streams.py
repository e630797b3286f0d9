"""Means, second moments and outliers of hidden states, against numpy on all of them at once."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from theodolite.accumulate import sums
from theodolite.accumulate.means import Means, Sample, means_of_first, means_of_halves
from theodolite.accumulate.outliers import OutlierCounts
from theodolite.accumulate.second_moments import (
    Centred,
    MomentSketches,
    SecondMoments,
    covariance,
    low_rank,
)
from theodolite.accumulate.sums import KeyedSums, LayerSums, cache_sized_groups
from theodolite.corpus.groups import GROUPS, Groups

CONTEXTS, LENGTH, WIDTH = 7, 9, 5


def sample(contexts: int = CONTEXTS) -> Sample:
    slot = torch.full((contexts,), -1)
    slot[[1, 4]] = torch.tensor([0, 1])
    return Sample(slot, torch.tensor([0, 3, 6]), torch.tensor([1, 8, 4]))


def hidden() -> torch.Tensor:
    h = torch.randn(2, CONTEXTS, LENGTH, WIDTH, generator=torch.Generator().manual_seed(5))
    h[..., 2] += 3000.0  # an outlier dimension beside small ones
    return h


def filled(h: torch.Tensor, sizes: list[int]) -> Means:
    means = Means(2, LENGTH, WIDTH, sample())
    start = 0
    for size in sizes:
        for layer in range(2):
            means.update(layer, h[layer, start : start + size], start)
        start += size
    return means


def test_kept_tokens_are_the_tokens_themselves():
    h = hidden()
    state = filled(h, [4, 3]).state()
    for k, (context, position) in enumerate([(0, 1), (3, 8), (6, 4)]):
        assert torch.equal(state["token"][:, k], h[:, context, position].double())


def test_means_of_some_groups_are_those_of_their_contexts():
    """Oracle: numpy, of seven contexts that are groups of their own; one lacks a position, which the next one has."""
    h = hidden()
    left_out = torch.zeros(CONTEXTS, LENGTH, dtype=torch.bool)
    left_out[2, 5] = left_out[[2, 4], 6] = True
    means = Means(2, LENGTH, WIDTH, sample())
    for layer in range(2):
        means.update(layer, h[layer], 0, left_out)
    state, x = means.state(), h[1].double().numpy()
    mean, pos = means_of_first(state, 1, torch.tensor([2, 4]), trailing=1)
    rows = x[2].copy()
    rows[5] = x[4, 5]
    text = [1, 2, 3, 4, 5, 7]
    np.testing.assert_allclose(mean, rows[text].mean(0))
    np.testing.assert_allclose(pos[text], rows[text] - rows[text].mean(0), atol=1e-9)
    assert not pos[6].any()
    both, positions = means_of_halves(state, 1)
    for half, contexts in enumerate(([0, 2, 4, 6], [1, 3, 5])):
        there = ~left_out[contexts].numpy()
        own = x[contexts][:, 1:][there[:, 1:]].mean(0)
        np.testing.assert_allclose(both[half], own)
        expected = [x[contexts, t][there[:, t]].mean(0) - own for t in range(LENGTH)]
        np.testing.assert_allclose(positions[half], expected, rtol=1e-6, atol=1e-4)
    of_one = filled(h[:, :1], [1]).state() | {"contexts": torch.eye(8)[:1].expand(2, -1)}
    alone = means_of_halves(of_one, 1)[0]
    assert torch.equal(alone[0], alone[1])


@given(sizes=st.lists(st.integers(1, 30), min_size=1, max_size=5), offset=st.floats(-1e4, 1e4))
@settings(max_examples=30, deadline=None)
def test_covariance_whatever_the_batches_and_the_offset(sizes, offset):
    """Oracle: numpy's covariance of all rows in float64. A raw float32 XᵀX would be off by 1e-7 · offset²."""
    generator = torch.Generator().manual_seed(sum(sizes))
    rows = torch.randn(sum(sizes), 4, generator=generator) * torch.tensor([1e-2, 1.0, 10.0, 1.0]) + offset
    one, other = SecondMoments(1, 4), SecondMoments(1, 4)
    for number, batch in enumerate(rows.split(sizes)):
        (one if number % 2 else other).update(0, batch)
    one.merge(other.state())
    expected = np.atleast_2d(np.cov(rows.double().numpy().T, bias=True))
    scale = np.sqrt(np.outer(expected.diagonal(), expected.diagonal())) + 1e-12 * offset**2
    assert (np.abs(covariance(one.state(), 0).numpy() - expected) <= 2e-6 * scale + 1e-12).all()


def test_outliers_and_massive_activations_where_they_were_planted():
    h = torch.full((2, 6, 8), 0.05)
    h[0, 3, 2] = h[0, 4, 2] = 150.0  # massive: above 100 and above 1000 × 0.05, twice in one context
    h[1, 0, 4] = -400.0  # massive, at the first position
    h[1, 2, 5] = 99.0  # an outlier, not massive
    h[0, 1, 5] = -6.0  # an outlier, just
    outliers = OutlierCounts(1, 8, contexts=2)
    outliers.update(0, h, 0)
    by_group = {name: value[0] for name, value in outliers.state().items()}
    assert by_group["massive_contexts"][0, 2] == by_group["massive_first"][4, 4] == 1  # contexts 0 and 1 of 2
    state = {name: value.sum(0) if value.ndim == 2 else value for name, value in by_group.items()}
    assert state["massive"].tolist() == [0, 0, 2, 0, 0, 0, 0, 0]
    assert state["massive_contexts"].tolist() == [0, 0, 1, 0, 0, 0, 0, 0]
    assert state["massive_first"].tolist() == [0, 0, 0, 0, 1, 0, 0, 0]
    assert state["outlier"].tolist() == [0, 0, 2, 0, 0, 2, 0, 0]
    assert state["maximum"][[2, 5]].tolist() == [150.0, 99.0]
    assert state["maximum_first"][4] == 400.0


def test_large_sums_are_those_of_small_ones(monkeypatch):
    """Oracle: torch's own sums and maxima. Rows of nothing are passed over, but not where −∞ is the beginning."""
    value = torch.zeros(2, 3, 4)
    value[1, 2] = torch.arange(4)
    monkeypatch.setattr(sums, "LARGE", 1)
    total = LayerSums(2, {"sum": (3, 4), "most": (3, 4), "count": ()}, maxima=("most",))
    for tensor in total._tensors["most"]:
        tensor.fill_(-torch.inf)
    other = {"sum": value, "most": value, "count": torch.ones(2)}
    total.merge(other)
    total.merge(other)
    state = {name: tensor.clone() for name, tensor in total.state().items()}
    torch.testing.assert_close(
        state, {"sum": 2 * value.double(), "most": value.double(), "count": torch.full((2,), 2.0).double()}
    )
    again = LayerSums(2, {"sum": (3, 4), "most": (3, 4), "count": ()}, maxima=("most",))
    again.add("sum", 0, torch.ones(3, 4))  # what was there goes
    again.restore(state)
    torch.testing.assert_close(again.state(), state)


@given(contexts=st.integers(1, 100), data=st.data())
@settings(max_examples=50, deadline=None)
def test_groups_are_ranges_of_equal_size_however_they_are_batched(contexts, data):
    """Oracle: numpy's equal division of [0, C) into eighths, index by index."""
    first = data.draw(st.integers(0, contexts - 1))
    batch = data.draw(st.integers(1, contexts - first))
    groups = Groups(contexts)
    expected = np.floor(np.arange(contexts) * GROUPS / contexts)
    assert groups.of(torch.arange(contexts)).tolist() == expected.tolist()
    assert np.ptp(np.bincount(expected.astype(int), minlength=GROUPS)) <= 1
    for parts in (groups.parts(first, batch), cache_sized_groups(groups, first, batch, torch.device("cpu"))):
        seen = [(first + i, group) for group, part in parts for i in range(part.start, part.stop)]
        assert seen == [(i, expected[i]) for i in range(first, first + batch)]


def _spiked(contexts: int, width: int = 48) -> torch.Tensor:
    """Hidden states with a decaying spectrum, a large common offset, and groups that differ."""
    generator = torch.Generator().manual_seed(2)
    scale = 3.0 / torch.arange(1, width + 1) ** 0.7
    h = torch.randn(contexts, 30, width, generator=generator) * scale
    h[..., :3] += torch.randn(contexts, 1, 3, generator=generator) * 2
    return h + 500.0


def _sketched(h: torch.Tensor, order: list[tuple[int, int]]) -> MomentSketches:
    sketches = MomentSketches(1, h.shape[-1], 24)
    for start, stop in order:
        sketches.update_centred(0, Centred.of(h[start:stop]), start)
    return sketches


def _moments(h: torch.Tensor, group: int) -> np.ndarray:
    rows = h[group * 3 : group * 3 + 3].double().numpy().reshape(-1, h.shape[-1])
    return np.cov(rows.T, bias=True) * len(rows)


def test_a_sketch_gives_the_largest_eigenvalue_and_narrow_ones_the_whole_moment():
    """Oracle: numpy's eigenvalues of the dense moment; with d ≤ r Nyström's approximation is an identity."""
    h = _spiked(24)
    state = _sketched(h, [(0, 24)]).state()
    factors = low_rank(state["sketch"][0], state["directions"][0])
    for group, factor in enumerate(factors):
        dense = _moments(h, group)
        assert torch.linalg.matrix_norm(factor, 2).item() ** 2 == pytest.approx(
            np.linalg.norm(dense, 2), rel=0.01
        )
    narrow = h[..., :20]
    state = _sketched(narrow, [(0, 24)]).state()
    factor = low_rank(state["sketch"][0, 3], state["directions"][0])
    dense = _moments(narrow, 3)
    np.testing.assert_allclose(factor @ factor.T, dense, atol=2e-5 * np.linalg.norm(dense, 2))


def test_sketches_that_look_along_the_same_directions_merge_without_loss():
    """Oracle: one that saw all."""
    h = torch.randn(8, 30, 48, generator=torch.Generator().manual_seed(3))  # wider than a sketch
    whole, first, second = (MomentSketches(1, 48, 8) for _ in range(3))
    whole.update_centred(0, Centred.of(h[:3]), 0)
    whole.update_centred(0, Centred.of(h[3:]), 3)
    first.update_centred(0, Centred.of(h[:3]), 0)
    second.look_along(first.state()["directions"])
    second.update_centred(0, Centred.of(h[3:]), 3)
    first.merge(second.state())
    for name, tensor in whole.state().items():
        torch.testing.assert_close(first.state()[name], tensor, rtol=1e-12, atol=1e-12, msg=name)


Batch = list[tuple[tuple[int, int], int]]
KEYS = st.tuples(st.integers(-2, 3), st.integers(0, 3))
BATCHES = st.lists(st.lists(st.tuples(KEYS, st.integers(-9, 9)), max_size=8), max_size=5)


def _new() -> KeyedSums:
    return KeyedSums(2, {"count": (), "vector": (3,), "largest": ()}, maxima=("largest",))


def _fed(sums: KeyedSums, batches: list[Batch]) -> KeyedSums:
    for batch in batches:
        rows = sums.rows(torch.tensor([key for key, _ in batch], dtype=torch.int64).reshape(-1, 2))
        values = torch.tensor([value for _, value in batch], dtype=torch.float32)
        vector = values.unsqueeze(1) * torch.tensor([1.0, 2.0, 3.0])
        sums.add(rows, {"count": torch.ones(len(rows)), "vector": vector, "largest": values})
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
        assert state["largest"][row] == max(expected[key])
        np.testing.assert_array_equal(state["vector"][row], sum(expected[key]) * np.array([1, 2, 3]))


@settings(deadline=None, max_examples=50)
@given(BATCHES, BATCHES, BATCHES)
def test_merging_and_going_on_are_the_same_as_one_pass(a, b, c):
    whole = _fed(_new(), a + b + c)
    restored = _new()
    restored.restore(_fed(_new(), a).state())
    assert _same(_fed(restored, b + c), whole)
    left, right = _fed(_new(), a), _fed(_new(), b)
    left.merge(right.state())
    left.merge(_fed(_new(), c).state())
    assert _same(left, whole)
    other = _fed(_new(), c)
    other.merge(_fed(_new(), a).state())
    other.merge(right.state())
    assert _same(other, whole)  # in any order: whole numbers add up exactly


def test_a_state_does_not_change_any_more():
    sums = _fed(_new(), [[((0, 0), 1)]])
    state = sums.state()
    restored = _new()
    restored.restore(state)
    _fed(sums, [[((0, 0), 5)]])
    _fed(restored, [[((0, 0), 5)]])
    assert state["vector"][0].tolist() == [1, 2, 3]
