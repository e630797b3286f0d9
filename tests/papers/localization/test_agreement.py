"""Oracles: scipy and scikit-learn, standard errors in closed form, and means by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn.metrics import cohen_kappa_score

from theodolite_papers.localization.head_behaviour import (
    agreement,
    curve_errors,
    mean_over_heads,
    others_median,
    partial_rank_correlation_of_heads,
    rank_correlation_of_heads,
)

DRAWN = np.random.default_rng(0)
EACH = np.arange(400)
"""Every head in a layer of its own."""


def test_partial_rank_correlation_holds_a_third_number_fixed():
    """Oracle: the correlation of what regressions of the ranks on the third's leave; two that share only the third."""
    third = DRAWN.normal(size=400)
    x, y = third + 0.3 * DRAWN.normal(size=400), third + 0.3 * DRAWN.normal(size=400)
    ranks = [stats.rankdata(values) for values in (x, y, third)]
    left = [r - np.polyval(np.polyfit(ranks[2], r, 1), ranks[2]) for r in ranks[:2]]
    estimate = partial_rank_correlation_of_heads(x, y, third, EACH)
    assert estimate.value == pytest.approx(stats.pearsonr(*left).statistic)
    assert rank_correlation_of_heads(x, y, EACH).value > 0.8
    assert abs(estimate.value) < 3 * estimate.error
    assert np.isnan(partial_rank_correlation_of_heads(x, y, x, EACH).value)


def test_agreement_is_cohens():
    """Oracle: scikit-learn's kappa; complete agreement in one name says nothing."""
    names = np.array(["uniform", "late-site", "middle-site"])
    one, two = names[DRAWN.integers(3, size=60)], names[DRAWN.integers(3, size=60)]
    two[:30] = one[:30]
    estimate, share = agreement(one, two, EACH[:60])
    assert estimate.value == pytest.approx(cohen_kappa_score(one, two))
    assert share == (one == two).mean()
    with_unknown = np.append(one, "undefined")
    assert agreement(with_unknown, np.append(two, "uniform"), EACH[:61])[0].n == 60
    assert np.isnan(agreement(names[[0] * 9], names[[0] * 9], EACH[:9])[0].value)


def test_errors_of_curves():
    """Oracle: by hand, with a key that no query sees."""
    measured = torch.tensor([[0.0, 1.0, math.nan], [0.5, 0.5, 0.5], [1.0, 0.0, 1.0]]).double()
    predicted = torch.tensor([[0.5, 1.0, 0.3], [0.5, 0.5, 0.5], [0.0, 0.0, 1.0]]).double()
    errors = curve_errors(predicted, measured).numpy()
    np.testing.assert_allclose(errors, [0.25, 0, 1 / 3], rtol=1e-6)
    assert mean_over_heads(errors, EACH[:3]).value == pytest.approx((0.25 + 0 + 1 / 3) / 3)


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


def test_the_error_of_a_mean_over_heads_is_that_of_the_mean_over_layers():
    """Oracle: s/√n, of layers where their heads are alike; unknown heads left out; one layer has none."""
    values = np.append(DRAWN.normal(size=100), np.nan)
    estimate = mean_over_heads(values, EACH[:101])
    assert (estimate.n, estimate.value) == (100, pytest.approx(values[:100].mean()))
    assert estimate.error == pytest.approx(values[:100].std(ddof=1) / 10)
    alike = mean_over_heads(np.repeat(values[:6], 4), np.repeat(EACH[:6], 4))
    assert (alike.n, alike.of) == (6, "layers")
    assert alike.error == pytest.approx(values[:6].std(ddof=1) / math.sqrt(6))
    assert math.isnan(mean_over_heads(values[:7], EACH[:7]).error)
    assert math.isnan(mean_over_heads(values[:9], np.zeros(9, int)).margin)
