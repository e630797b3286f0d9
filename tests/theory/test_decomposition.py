"""The two-way decomposition and variance explained: algebra as properties, values against numpy and scipy."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import f_oneway
from torch import Tensor

from theodolite.theory import decompose
from theodolite.theory.grouping import chance_explained, variance_explained


@st.composite
def hidden_states(draw: st.DrawFn) -> Tensor:
    shape = [draw(st.integers(1, 6)) for _ in range(3)]
    scale = 10.0 ** draw(st.integers(-3, 4))
    seed = draw(st.integers(0, 2**31))
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


PROPERTY = settings(max_examples=20, deadline=None, derandomize=True)


@PROPERTY
@given(hidden_states())
def test_parts_sum_to_the_whole(h: Tensor) -> None:
    parts = decompose(h)
    tolerance = {"rtol": 0, "atol": 1e-12 * h.abs().max().item()}
    whole = parts.mean + parts.pos + parts.ctx[:, None] + parts.resid
    torch.testing.assert_close(whole, h, **tolerance)
    torch.testing.assert_close(parts.mean + parts.pos + parts.cvec, h, **tolerance)


def test_values_are_numpys_and_survive_float32_input() -> None:
    """1e4 beside 1e-2, as residual streams hold: sums in float32 would lose the small part."""
    generator = np.random.default_rng(0)
    h = (1e4 + 1e-2 * generator.normal(size=(7, 5, 3))).astype(np.float32)
    exact = h.astype(np.float64)
    parts = decompose(torch.from_numpy(h))
    np.testing.assert_allclose(parts.mean, exact.mean((0, 1)), rtol=1e-14)
    np.testing.assert_allclose(parts.pos, exact.mean(0) - exact.mean((0, 1)), atol=1e-10)
    np.testing.assert_allclose(parts.ctx, exact.mean(1) - exact.mean((0, 1)), atol=1e-10)


def test_of_one_dimension_it_is_the_f_statistic():
    """F = (η²/(G−1)) / ((1−η²)/(n−G))."""
    values = np.random.default_rng(0).normal(size=30) + np.repeat([0.0, 1.0, 3.0], 10)
    group = torch.arange(3).repeat_interleave(10)
    eta = variance_explained(torch.from_numpy(values)[:, None], group)
    assert (eta / 2) / ((1 - eta) / 27) == pytest.approx(
        f_oneway(*values.reshape(3, 10)).statistic, rel=1e-12
    )


def test_by_chance_is_the_mean_over_all_permutations():
    x = torch.randn(6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    group = torch.tensor([0, 0, 0, 1, 2, 2])
    found = [variance_explained(x, group[list(order)]) for order in itertools.permutations(range(6))]
    assert np.mean(found) == pytest.approx(chance_explained(group), rel=1e-12)


def test_nothing_to_explain():
    assert math.isnan(variance_explained(torch.randn(4, 2), torch.zeros(4, dtype=torch.int64)))
    assert math.isnan(variance_explained(torch.ones(4, 2), torch.tensor([0, 0, 1, 1])))
    assert math.isnan(chance_explained(torch.tensor([0])))
    assert variance_explained(torch.tensor([[0.0], [0.0], [1.0]]), torch.tensor([0, 0, 1])) == pytest.approx(
        1
    )
