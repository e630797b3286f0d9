"""Oracles: heads whose order is laid down, so that shares and rank correlations are known."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from theodolite.errors import UsageError
from theodolite.judging import FAILS, HOLDS, UNDECIDED, UNTESTABLE
from theodolite_papers import Study
from theodolite_papers.catalogue import EXPERIMENTS
from theodolite_papers.hidden_geometry.weights import _over_heads

FIGURE_25 = EXPERIMENTS["geometry/figure25"]


def _with(run, **columns):
    return replace(run, heads=run.heads.assign(**columns))


def test_shares_and_correlations_of_heads_laid_down(run):
    """Oracle: 16 of 20 heads above 0.8, falling with depth, and attention that rises with the share."""
    count = len(run.heads)
    share = np.linspace(1.0, 0.75, count)
    above = int((share > 0.8).sum())
    local = _with(run, argmax_property=share, previous_token=share**3, entropy=-share)
    outcome = Study(local).outcome(FIGURE_25)
    assert [verdict.answer for verdict in outcome.verdicts] == [HOLDS, HOLDS, HOLDS]
    assert f"share of {count} heads above 0.8: {above / count:.2f} ±" in outcome.verdicts[0].evidence
    answers = outcome.tables["correlations"].set_index("with")["rank_correlation"]
    assert answers["previous_token"] == pytest.approx(1)
    assert answers["entropy"] == pytest.approx(-1)
    assert answers["layer"] < -0.9
    reverse = _with(run, argmax_property=share[::-1] * 0.79, previous_token=share)
    answers = [verdict.answer for verdict in Study(reverse).outcome(FIGURE_25).verdicts]
    assert answers == [FAILS, UNTESTABLE, FAILS]
    reverse = _with(run, argmax_property=share[::-1], previous_token=share)
    answers = [verdict.answer for verdict in Study(reverse).outcome(FIGURE_25).verdicts]
    assert answers == [HOLDS, FAILS, FAILS]


def test_few_heads_more_than_the_limit_decide_nothing(run):
    """Oracle: 10 of 20 heads, 0.07 above 0.43, where the share of 20 heads drawn at 0.43 has an sd of 0.11."""
    share = np.where(np.arange(len(run.heads)) < 10, 0.9, 0.1)
    assert Study(_with(run, argmax_property=share)).outcome(FIGURE_25).verdicts[0].answer == UNDECIDED


def test_a_correlation_within_its_error_decides_nothing(run):
    """Oracle: shares that alternate have a rank correlation near 0 with anything monotone."""
    share = np.tile([0.9, 0.1], len(run.heads) // 2)
    run = _with(run, argmax_property=share, previous_token=np.linspace(0, 1, len(share)))
    assert Study(run).outcome(FIGURE_25).verdicts[2].answer == UNDECIDED


def test_a_run_without_the_column_says_so(run):
    bare = replace(run, heads=run.heads.drop(columns="argmax_property", errors="ignore"))
    with pytest.raises(UsageError, match="'argmax_property', which this run lacks"):
        Study(bare).outcome(FIGURE_25)


def test_over_heads_is_that_of_the_ranks():
    """Oracle: Pearson's correlation of the ranks, by numpy; heads without a value are left out."""
    generator = np.random.default_rng(0)
    x, y = generator.normal(size=30), generator.normal(size=30)
    x[3] = np.nan
    ranks = [np.argsort(np.argsort(np.delete(values, 3))) for values in (x, y)]
    correlation, count = _over_heads(x, y)
    assert correlation == pytest.approx(np.corrcoef(*ranks)[0, 1])
    assert count == 29
    assert np.isnan(_over_heads(x[:6], y[:6])[0])
    assert np.isnan(_over_heads(np.ones(30), y)[0])
