"""Oracles: heads whose order is laid down, so that shares and rank correlations are known."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from theodolite.errors import UsageError
from theodolite.judging import FAILS, HOLDS, UNDECIDED, UNTESTABLE, Criterion, judge
from theodolite_papers import Study
from theodolite_papers.catalogue import EXPERIMENTS
from theodolite_papers.hidden_geometry.criteria import above_chance
from theodolite_papers.hidden_geometry.layer_columns import share_of_heads
from theodolite_papers.hidden_geometry.prompt_logits import UNCHANGED
from theodolite_papers.hidden_geometry.weights import EARLIER, MAJORITY, MANY_HEADS, _by_layers, _over_heads

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


@pytest.mark.parametrize(
    "limit",
    [MAJORITY.limit, MANY_HEADS.limit, UNCHANGED.limit, *(above_chance(of).limit for of in (4, 5, 6))],
)
def test_a_share_at_its_limit_is_decided_by_chance_in_one_case_of_twenty_or_fewer(limit):
    """Oracle: the binomial distribution, at every number of heads, with the criterion's own probability."""
    criterion, decided = Criterion("at least", limit, "a test"), set()
    for heads in range(4, 145):
        counts = np.arange(heads + 1)
        answers = np.array(
            [
                judge("", "", share_of_heads([True] * n + [False] * (heads - n), criterion), criterion).answer
                for n in counts
            ]
        )
        assert stats.binom.pmf(counts, heads, limit)[answers != UNDECIDED].sum() <= 0.05
        decided |= {answers[0], answers[-1]}
    assert decided == {HOLDS, FAILS, UNDECIDED}


def test_a_correlation_within_its_error_decides_nothing(run):
    """Oracle: shares that alternate have a rank correlation near 0 with anything monotone."""
    share = np.tile([0.9, 0.1], len(run.heads) // 2)
    run = _with(run, argmax_property=share, previous_token=np.linspace(0, 1, len(share)))
    assert Study(run).outcome(FIGURE_25).verdicts[2].answer == UNDECIDED


def test_heads_that_are_alike_within_a_layer_fall_with_depth_by_chance_alone(run):
    """Oracle: 1000 draws without a trend, half of whose variance is between layers; 2.5 % may hold, with an sd of 5."""
    generator = np.random.default_rng(0)
    layer = np.repeat(np.arange(6), 4)
    each = replace(run, heads=pd.DataFrame({"layer": layer}))
    holds = 0
    for _ in range(1000):
        share = generator.normal(size=6)[layer] + generator.normal(size=len(layer))
        estimate = _by_layers(each, _over_heads(share, layer.astype(np.float64))[0])
        holds += judge("", "", estimate, EARLIER).answer == HOLDS
    assert holds <= 35


def test_the_normed_share_is_shown_where_the_run_has_it(run):
    share = np.linspace(0, 1, len(run.heads))
    figure = Study(_with(run, argmax_property=share)).outcome(FIGURE_25)
    two = Study(_with(run, argmax_property=share, argmax_property_normed=share)).outcome(FIGURE_25)
    assert len(two.exhibits) == len(figure.exhibits) + 1
    assert set(two.tables["correlations"]["share"]) == {"argmax_property", "argmax_property_normed"}


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
