"""Oracles: scipy and scikit-learn, standard errors in closed form, and means by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn.metrics import cohen_kappa_score

from theodolite.measure.agreement import (
    agreement,
    curve_errors,
    mean_over_heads,
    others_median,
    partial_rank_correlation_of_heads,
    rank_correlation_of_heads,
)

DRAWN = np.random.default_rng(0)


def test_partial_rank_correlation_holds_a_third_number_fixed():
    """Oracle: the correlation of what regressions of the ranks on the third's leave; two that share only the third."""
    third = DRAWN.normal(size=400)
    x, y = third + 0.3 * DRAWN.normal(size=400), third + 0.3 * DRAWN.normal(size=400)
    ranks = [stats.rankdata(values) for values in (x, y, third)]
    left = [r - np.polyval(np.polyfit(ranks[2], r, 1), ranks[2]) for r in ranks[:2]]
    estimate = partial_rank_correlation_of_heads(x, y, third, 0)
    assert estimate.value == pytest.approx(stats.pearsonr(*left).statistic)
    assert rank_correlation_of_heads(x, y, 0).value > 0.8
    assert abs(estimate.value) < 3 * estimate.error
    assert np.isnan(partial_rank_correlation_of_heads(x, y, x, 0).value)


def test_rank_correlation_and_its_interval():
    """Oracle: scipy's Spearman, with ties; for a bivariate normal with ρ = 0.6 and n = 200 its standard error is about
    (1 − ρ²)·1.06/√n = 0.048."""
    x = DRAWN.normal(size=200)
    y = 0.6 * x + 0.8 * DRAWN.normal(size=200)
    tied = np.round(x, 1)
    estimate = rank_correlation_of_heads(tied, y, 0)
    assert estimate.value == pytest.approx(stats.spearmanr(tied, y).statistic)
    assert estimate.error == pytest.approx(0.048, rel=0.35)
    assert estimate.low < estimate.value < estimate.high
    assert estimate == rank_correlation_of_heads(tied, y, 0)
    x[:3] = np.nan
    assert rank_correlation_of_heads(x, y, 0).n == 197
    assert np.isnan(rank_correlation_of_heads(x[:9], y[:9], 0).value)
    assert np.isnan(rank_correlation_of_heads(np.ones(20), y[:20], 0).value)


def test_agreement_is_cohens():
    """Oracle: scikit-learn's kappa; complete agreement in one name says nothing."""
    names = np.array(["uniform", "late-site", "middle-site"])
    one, two = names[DRAWN.integers(3, size=60)], names[DRAWN.integers(3, size=60)]
    two[:30] = one[:30]
    estimate, share = agreement(one, two, 0)
    assert estimate.value == pytest.approx(cohen_kappa_score(one, two))
    assert share == (one == two).mean()
    with_unknown = np.append(one, "undefined")
    assert agreement(with_unknown, np.append(two, "uniform"), 0)[0].n == 60
    assert np.isnan(agreement(names[[0] * 9], names[[0] * 9], 0)[0].value)


def test_errors_of_curves():
    """Oracle: by hand, with a key that no query sees."""
    measured = torch.tensor([[0.0, 1.0, math.nan], [0.5, 0.5, 0.5], [1.0, 0.0, 1.0]]).double()
    predicted = torch.tensor([[0.5, 1.0, 0.3], [0.5, 0.5, 0.5], [0.0, 0.0, 1.0]]).double()
    errors = curve_errors(predicted, measured).numpy()
    np.testing.assert_allclose(errors, [0.25, 0, 1 / 3], rtol=1e-6)
    assert mean_over_heads(errors, 0).value == pytest.approx((0.25 + 0 + 1 / 3) / 3)


def test_the_baseline_is_the_median_of_all_other_heads():
    """Oracle: numpy's nanmedian of the rows without each, where values tie, some are unknown, and no other has one."""
    for heads in (1, 2, 7, 8):
        curves = DRAWN.integers(0, 6, size=(heads, 200)) / 4
        curves[DRAWN.random(curves.shape) < 0.3] = np.nan
        others = others_median(torch.from_numpy(curves)).numpy()
        for head in range(heads):
            rest = np.delete(curves, head, axis=0)
            known = np.isfinite(rest).any(axis=0)
            np.testing.assert_allclose(others[head, known], np.nanmedian(rest[:, known], axis=0))
            assert np.isnan(others[head, ~known]).all()


def test_the_error_of_a_mean_over_heads_is_that_of_the_mean():
    """Oracle: s/√n, of which a bootstrap has √((n − 1)/n), to the noise of 2,000 draws; unknown heads left out."""
    values = np.append(DRAWN.normal(size=100), np.nan)
    estimate = mean_over_heads(values, 0)
    assert (estimate.n, estimate.value) == (100, pytest.approx(values[:100].mean()))
    assert estimate.error == pytest.approx(values[:100].std() / 10, rel=0.08)
    assert math.isnan(mean_over_heads(values[:7], 0).error)
