"""Means, second moments and outliers of hidden states, against numpy on all of them at once."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from theodolite.accumulate.means import Means, Sample, decomposed_means
from theodolite.accumulate.outliers import Outliers
from theodolite.accumulate.second_moments import SecondMoments, covariance

CONTEXTS, LENGTH, WIDTH = 7, 9, 5


def sample(contexts: int = CONTEXTS) -> Sample:
    slot = torch.full((contexts,), -1)
    slot[[1, 4]] = torch.tensor([0, 1])
    return Sample(slot, torch.tensor([0, 3, 6]), torch.tensor([1, 8, 4]))


def hidden(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    h = torch.randn(2, CONTEXTS, LENGTH, WIDTH, generator=generator)
    h[..., 2] += 3000.0  # an outlier dimension beside small ones
    return h.to(dtype)


def filled(h: torch.Tensor, sizes: list[int]) -> Means:
    means = Means(2, LENGTH, WIDTH, sample())
    start = 0
    for size in sizes:
        for layer in range(2):
            means.update(layer, h[layer, start : start + size], start)
        start += size
    return means


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_decomposition_from_sums_is_that_of_all_hidden_states(dtype):
    h = hidden(dtype)
    mean, pos, ctx = decomposed_means(filled(h, [3, 2, 2]).state())
    x = h.double().numpy()[:, :, 1:]
    np.testing.assert_allclose(mean, x.mean((1, 2)), rtol=1e-12)
    np.testing.assert_allclose(pos[:, 1:], x.mean(1) - x.mean((1, 2))[:, None], atol=1e-9)
    np.testing.assert_allclose(pos[:, 0], h.double().numpy()[:, :, 0].mean(1) - x.mean((1, 2)), atol=1e-9)
    np.testing.assert_allclose(ctx, x[:, [1, 4]].mean(2) - x.mean((1, 2))[:, None], atol=1e-9)


def test_kept_tokens_are_the_tokens_themselves():
    h = hidden()
    state = filled(h, [4, 3]).state()
    for k, (context, position) in enumerate([(0, 1), (3, 8), (6, 4)]):
        assert torch.equal(state["token"][:, k], h[:, context, position].double())


def test_batches_do_not_matter_and_parts_merge():
    h = hidden()
    whole = filled(h, [7]).state()
    first, second = Means(2, LENGTH, WIDTH, sample()), Means(2, LENGTH, WIDTH, sample())
    for layer in range(2):
        first.update(layer, h[layer, :3], 0)
        second.update(layer, h[layer, 3:], 3)
    second.merge(first)
    restored = Means(2, LENGTH, WIDTH, sample())
    restored.restore(second.state())
    for name, value in whole.items():
        torch.testing.assert_close(second.state()[name], value, rtol=1e-12, atol=1e-9)
        assert torch.equal(restored.state()[name], second.state()[name])


@given(sizes=st.lists(st.integers(1, 30), min_size=1, max_size=5), offset=st.floats(-1e4, 1e4))
@settings(max_examples=30, deadline=None)
def test_covariance_whatever_the_batches_and_the_offset(sizes, offset):
    """Oracle: numpy's covariance of all rows in float64. A raw float32 XᵀX would be off by 1e-7 · offset²."""
    generator = torch.Generator().manual_seed(sum(sizes))
    rows = torch.randn(sum(sizes), 4, generator=generator) * torch.tensor([1e-2, 1.0, 10.0, 1.0]) + offset
    one, other = SecondMoments(1, 4), SecondMoments(1, 4)
    for number, batch in enumerate(rows.split(sizes)):
        (one if number % 2 else other).update(0, batch)
    one.merge(other)
    expected = np.atleast_2d(np.cov(rows.double().numpy().T, bias=True))
    scale = np.sqrt(np.outer(expected.diagonal(), expected.diagonal())) + 1e-12 * offset**2
    assert (np.abs(covariance(one.state(), 0).numpy() - expected) <= 2e-6 * scale + 1e-12).all()


def test_empty_parts_merge_to_nothing():
    moments = SecondMoments(1, 3)
    moments.merge(SecondMoments(1, 3))
    assert moments.state()["count"].item() == 0


def test_outliers_and_massive_activations_where_they_were_planted():
    h = torch.full((2, 6, 8), 0.05)
    h[0, 3, 2] = 150.0  # massive: above 100 and above 1000 × 0.05
    h[1, 0, 4] = -400.0  # massive, at the first position
    h[1, 2, 5] = 99.0  # an outlier, not massive
    h[0, 1, 5] = -6.0  # an outlier, just
    outliers = Outliers(1, 8)
    outliers.update(0, h)
    state = {name: value[0] for name, value in outliers.state().items()}
    assert state["massive"].tolist() == [0, 0, 1, 0, 0, 0, 0, 0]
    assert state["massive_first"].tolist() == [0, 0, 0, 0, 1, 0, 0, 0]
    assert state["outlier"].tolist() == [0, 0, 1, 0, 0, 2, 0, 0]
    assert state["maximum"][[2, 5]].tolist() == [150.0, 99.0]
    assert state["maximum_first"][4] == 400.0


def test_large_values_everywhere_are_not_massive():
    """150 is above 100 but not above 1000 × the median."""
    outliers = Outliers(1, 4)
    outliers.update(0, torch.full((1, 3, 4), 150.0))
    assert outliers.state()["massive"].sum() == 0
    assert outliers.state()["outlier"].sum() == 8
