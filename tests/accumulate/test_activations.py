"""Oracle: numpy on all values at once."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from theodolite.accumulate import outliers as activations
from theodolite.accumulate.outliers import KEY, Activations, carrier_columns
from theodolite.errors import UsageError
from theodolite.theory.outliers import Thresholds

LAYERS, CONTEXTS, LENGTH, PARTS, WIDTH = 2, 6, 7, 3, 5
THRESHOLDS = Thresholds(outlier=2.0, massive=8.0, massive_ratio=10.0)
BOUNDS = torch.full((LAYERS, PARTS, WIDTH), 12.0, dtype=torch.float64)
BOUNDS[1, 2, 3] = 3.0


def values(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Heavy tails, so that both rules find something, not always the same; two contexts are alike but for a sign."""
    generator = np.random.default_rng(0)
    hidden = generator.standard_t(1.2, size=(LAYERS, CONTEXTS, LENGTH, PARTS, WIDTH))
    hidden[:, 4] = -hidden[:, 2]
    return torch.from_numpy(hidden).to(dtype)


IDS = torch.from_numpy(np.random.default_rng(1).integers(0, 3, size=(CONTEXTS, LENGTH)))
IDS[4] = IDS[2]


def filled(hidden: torch.Tensor, batches: list[range]) -> Activations:
    sums = Activations(BOUNDS, THRESHOLDS)
    for batch in batches:
        for layer in range(LAYERS):
            sums.update(layer, hidden[layer, list(batch)], IDS[list(batch)], batch.start)
    return sums


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_sums_are_those_of_all_values(dtype):
    hidden = values(dtype)
    state = filled(hidden, [range(6)]).state()
    x = hidden.double().numpy()
    later, size = x[:, :, 1:], np.abs(x)
    np.testing.assert_allclose(state["square"], (later**2).sum((1, 2)), rtol=1e-5)
    np.testing.assert_allclose(state["log"], np.log(np.abs(later)).sum((1, 2)), rtol=1e-5, atol=1e-4)
    np.testing.assert_array_equal(state["maximum"], np.abs(later).max((1, 2)))
    np.testing.assert_array_equal(state["maximum_first"], size[:, :, 0].max(1))
    np.testing.assert_array_equal(state["outlier"], (np.abs(later) >= 2).sum((1, 2)))
    published, adaptive = rules(size)
    for name, massive in (("published", published), ("adaptive", adaptive)):
        np.testing.assert_array_equal(state[name], massive[:, :, 1:].sum((1, 2)))
        np.testing.assert_array_equal(state[f"{name}_first"], massive[:, :, 0].sum(1))
        assert massive[:, :, 1:].sum() > 0
    tokens = (published | adaptive).any((3, 4))
    np.testing.assert_array_equal(state["massive_tokens"], tokens[:, :, 1:].sum((1, 2)))
    np.testing.assert_array_equal(state["massive_tokens_first"], tokens[:, :, 0].sum(1))


def rules(size: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Both rules written out; |x| (layers, contexts, positions, parts, width)."""
    medians = np.median(size.transpose(0, 1, 3, 2, 4).reshape(LAYERS, CONTEXTS, PARTS, -1), axis=-1)
    return (size > 8) & (size > 10 * medians[:, :, None, :, None]), size > BOUNDS.numpy()[:, None, None]


def test_carriers_are_who_holds_massive_values():
    """Oracle: one loop over every value."""
    hidden = values()
    x = hidden.double().numpy()
    published, adaptive = rules(np.abs(x))
    seen: dict[tuple[int, ...], list[tuple[int, int, float, bool, bool]]] = {}
    for layer, context, position, part, dimension in np.argwhere(published | adaptive):
        key = (layer, part, dimension, int(IDS[context, position]), int(position == 0))
        place = (layer, context, position, part, dimension)
        seen.setdefault(key, []).append((context, position, x[place], published[place], adaptive[place]))
    columns = carrier_columns(filled(hidden, [range(0, 4), range(4, 6)]).state())
    assert len(columns["layer"]) == len(seen) > 20
    for row in zip(*(values.tolist() for values in columns.values()), strict=True):
        own = dict(zip(columns, row, strict=True))
        places = seen[tuple(own[name] for name in KEY)]
        contexts, positions, numbers, by_published, by_adaptive = zip(*places, strict=True)
        assert own["contexts"] == len(set(contexts))
        assert (own["places"], own["published"], own["adaptive"]) == (
            len(places),
            sum(by_published),
            sum(by_adaptive),
        )
        assert own["value_sum"] == pytest.approx(sum(numbers))
        assert own["extreme"] == max(numbers, key=lambda value: (abs(value), value))
        assert own["position_sum"] == sum(positions)


@given(cuts=st.sets(st.integers(1, CONTEXTS - 1)), there=st.lists(st.booleans(), min_size=6, max_size=6))
@settings(max_examples=12, deadline=None)
def test_parts_merge_to_the_whole_however_they_are_cut(cuts, there):
    """Property: batches, parts in either order, saving and restoring change nothing."""
    hidden = values()
    borders = [0, *sorted(cuts), CONTEXTS]
    batches = [range(a, b) for a, b in pairwise(borders)]
    one = filled(hidden, [batch for batch, other in zip(batches, there, strict=False) if not other])
    other = filled(hidden, [batch for batch, other in zip(batches, there, strict=False) if other])
    restored = Activations(BOUNDS, THRESHOLDS)
    restored.restore(one.state())
    restored.merge(other.state())
    other.merge(one.state())
    whole = filled(hidden, [range(CONTEXTS)]).state()
    for state in (restored.state(), other.state()):
        assert state.keys() == whole.keys()
        for name, value in whole.items():
            torch.testing.assert_close(state[name], value, rtol=1e-12, atol=1e-9)


def test_nothing_massive_is_an_empty_table():
    sums = Activations(BOUNDS, Thresholds())
    sums.update(0, torch.zeros(1, LENGTH, PARTS, WIDTH), IDS[:1], 0)
    assert {len(values) for values in carrier_columns(sums.state()).values()} == {0}


def test_thresholds_that_make_everything_massive_are_refused(monkeypatch):
    monkeypatch.setattr(activations, "MOST_ROWS", 20)
    with pytest.raises(UsageError, match="more than 20 kinds of massive activations by layer 0"):
        filled(values(), [range(6)])
