"""Oracles: the survey's own columns, and a family whose queries and keys have no W_QK."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn.metrics import cohen_kappa_score

from tests.papers.shared import answers, assert_whole, outcome_of, verdicts_of
from theodolite.corpus.corpus import Corpus
from theodolite.judging import FAILS, HOLDS, UNDECIDED, UNTESTABLE
from theodolite.passes.survey import survey
from theodolite.report.page import block_of
from theodolite.theory import propagation_finite
from theodolite_papers import Study
from theodolite_papers.catalogue import EXPERIMENTS
from theodolite_papers.localization.head_behaviour import (
    curve_errors,
    from_increments,
    from_survey,
    judge_curves,
    judge_entropy,
    mean_over_heads,
    others_median,
)
from theodolite_papers.localization.text_as_walk import read_walk, text_walk
from theodolite_papers.rank_correlation import agreement, rank_correlation_of_heads


def test_predicted_curves_are_judged_by_the_median_curve_of_the_other_heads():
    """Oracle: curves made up: an offset smaller than heads differ; one larger, though within a tenth; and the median of
    all other heads itself, which is no nearer than itself."""
    generator = torch.Generator().manual_seed(0)
    measured = 0.5 + 0.1 * (torch.rand(24, 32, generator=generator, dtype=torch.float64) - 0.5)
    curves = {"weights": measured + 0.005, "text": measured + 0.08, "increments": others_median(measured)}
    curves["others"] = others_median(measured)
    outcome = outcome_of("localization/behaviour")
    of_heads = {name: curve_errors(curve, measured) for name, curve in curves.items()}
    errors = judge_curves(outcome, of_heads, np.arange(24) // 4)
    assert [verdict.answer for verdict in outcome.verdicts] == [HOLDS, FAILS, UNDECIDED]
    assert errors["text"].value == pytest.approx(0.08)
    assert errors["others"].value == errors["increments"].value == pytest.approx(0.025, rel=0.2)
    assert "close would be 0.1" in outcome.verdicts[1].evidence


def test_the_page_compares_three_predictions_with_every_head(surveyed_gpt2):
    run, _, _ = surveyed_gpt2
    outcome = Study(*surveyed_gpt2).outcome(EXPERIMENTS["localization/behaviour"])
    heads = outcome.tables["heads"]
    assert len(heads) == len(run.heads)
    np.testing.assert_allclose(heads["propagation"], run.heads["propagation"], rtol=1e-6)
    text = from_survey(run, "text")
    np.testing.assert_allclose(heads["propagation_text"], text.curve.mean(1))
    assert len(outcome.verdicts) == 11
    assert_whole(outcome)


def test_without_an_affine_projection_nothing_is_predicted(opened):
    """Oracle: Qwen 3 norms queries and keys after projecting, so that no prediction may be made or judged there."""
    model = opened("qwen3")
    corpus = Corpus.random_tokens(model.tokenizer, 24, 8)
    study = Study(survey(model, corpus), model, corpus)
    outcome = study.outcome(EXPERIMENTS["localization/behaviour"])
    assert len(outcome.verdicts) == 11
    assert outcome.tables["heads"]["propagation"].notna().all()
    assert text_walk(study) is text_walk(study)  # read once
    prediction = from_increments(model, text_walk(study), 24)
    assert prediction.curve.isnan().all()
    assert set(prediction.regime) == {"undefined"}
    assert {verdict.answer for verdict in outcome.verdicts[:3]} == {UNTESTABLE}
    assert outcome.tables["heads"]["error_increments"].isna().all()
    for exhibit in outcome.exhibits:
        block_of(exhibit)  # as the page draws it


@pytest.mark.parametrize("family", ["gpt2", "llama3"])
def test_increments_predict_from_the_full_covariance(opened, family):
    """Oracle: W_QK Σ̂ and Σ̂^½ W_QK Σ̂^½ formed as d×d matrices, with grouped heads too."""
    model = opened(family)
    walk = read_walk(model, Corpus.random_tokens(model.tokenizer, 24, 16), 0)
    prediction, weights = from_increments(model, walk, 24), model.head_weights(1)
    sigma = walk.inputs.covariance(1)
    values, vectors = torch.linalg.eigh(sigma)
    root = (vectors * values.clamp_min(0).sqrt()) @ vectors.T
    full = weights.w_q[0].double() @ weights.w_k[0].double().T
    form, product = root @ full @ root, full @ sigma
    traces = product.trace(), form.square().sum(), (product @ product).trace()
    expected = propagation_finite(*traces, 24, 1 / weights.scaling)
    torch.testing.assert_close(prediction.curve[model.heads], expected, rtol=0, atol=1e-6)
    symmetric = ((form + form.T) / 2).square().sum().sqrt() * weights.scaling
    assert float(prediction.eta[model.heads]) == pytest.approx(float(symmetric), rel=1e-5)


def test_entropy_is_judged_at_a_fixed_trace():
    """Oracle: heads drawn so that entropy falls with η at a fixed |tr W|, and rises with it over all heads, since both
    rise with |tr W|; and the other way round."""
    drawn = np.random.default_rng(0)
    trace = drawn.uniform(1, 10, 200)
    eta = trace + drawn.normal(0, 0.5, 200)
    for sign, answer in ((-1, HOLDS), (1, FAILS)):
        entropy = 3 * trace * -sign + sign * eta
        given = eta, eta, entropy, trace, np.arange(200) // 8
        assert answers(verdicts_of(judge_entropy, *given, of="localization/behaviour")) == [answer] * 2
        assert np.sign(stats.spearmanr(eta, entropy).statistic) == -sign


DRAWN = np.random.default_rng(0)
EACH = np.arange(400)
"""Every head in a layer of its own."""


def test_partial_rank_correlation_holds_a_third_number_fixed():
    """Oracle: the correlation of what regressions of the ranks on the third's leave; two that share only the third."""
    third = DRAWN.normal(size=400)
    x, y = third + 0.3 * DRAWN.normal(size=400), third + 0.3 * DRAWN.normal(size=400)
    ranks = [stats.rankdata(values) for values in (x, y, third)]
    left = [r - np.polyval(np.polyfit(ranks[2], r, 1), ranks[2]) for r in ranks[:2]]
    estimate = rank_correlation_of_heads(x, y, EACH, third)
    assert estimate.value == pytest.approx(stats.pearsonr(*left).statistic)
    assert rank_correlation_of_heads(x, y, EACH).value > 0.8
    assert abs(estimate.value) < 3 * estimate.error
    assert np.isnan(rank_correlation_of_heads(x, y, EACH, x).value)


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
    errors = curve_errors(predicted, measured)
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
