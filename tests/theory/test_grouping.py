"""Variance explained; oracles: one-way analysis of variance from scipy, and all permutations."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from scipy.stats import f_oneway

from theodolite.theory.grouping import chance_explained, variance_explained


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
