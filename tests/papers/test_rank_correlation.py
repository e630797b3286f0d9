"""Rank correlations of heads."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import spearmanr

from theodolite_papers.rank_correlation import error_under_independence, rank_correlation


def test_batches_with_ties_are_scipys():
    generator = np.random.default_rng(0)
    x = np.round(generator.normal(size=(3, 2, 40)), 1)
    y = x + generator.normal(size=x.shape)
    expected = [
        [spearmanr(*pair).statistic for pair in zip(*rows, strict=True)] for rows in zip(x, y, strict=True)
    ]
    np.testing.assert_allclose(rank_correlation(x, y), expected, atol=1e-12)
    assert float(rank_correlation(x[0, 0], y[0, 0])) == pytest.approx(expected[0][0])


def test_what_does_not_vary_has_no_rank_correlation():
    assert np.isnan(rank_correlation(np.ones(5), np.arange(5.0)))


def test_the_error_is_the_spread_over_permutations():
    generator = np.random.default_rng(0)
    shuffled = generator.permuted(np.tile(np.arange(12.0), (20_000, 1)), axis=1)
    spread = rank_correlation(shuffled, np.tile(np.arange(12.0), (20_000, 1))).std()
    assert spread == pytest.approx(error_under_independence(12), rel=0.02)
