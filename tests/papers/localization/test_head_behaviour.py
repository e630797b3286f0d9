"""Oracles: scipy and scikit-learn, curves whose regime is drawn by hand, and d×d covariances formed in full."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn.metrics import cohen_kappa_score

from theodolite.corpus.corpus import Corpus
from theodolite.judging import UNTESTABLE
from theodolite.papers import Study
from theodolite.papers.catalogue import EXPERIMENTS
from theodolite.papers.localization.head_predictions import (
    agreement,
    curve_error,
    from_increments,
    from_survey,
    others_mean,
    rank_correlation_of_heads,
    regime_of_curve,
    width_of,
)
from theodolite.papers.localization.text_as_walk import text_walk
from theodolite.passes.survey import survey
from theodolite.report.page import block_of
from theodolite.theory.propagation import propagation, propagation_finite
from theodolite.theory.regimes import regime

DRAWN = np.random.default_rng(0)


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


def test_regimes_are_read_off_curves_as_theory_reads_them():
    """Oracle: `regime` of ξ and η (its own tests: Lemma 2), against the name of the corrected curve at 512 positions;
    and curves drawn by hand. A window's unseen keys do not count."""
    pairs = np.array([(0.0, 0.5), (8.0, 0.01), (-8.0, 0.01), (10.0, 2.0), (0.0, 50.0), (7.0, 0.2)])
    theta = torch.linspace(0, 1, 512, dtype=torch.float64)
    curves = propagation(theta, torch.tensor(pairs[:, 0]), torch.tensor(pairs[:, 1])).numpy()
    assert regime_of_curve(curves).tolist() == regime(pairs[:, 0], pairs[:, 1]).tolist()
    assert set(regime_of_curve(curves)) == {"uniform", "early-site", "late-site", "middle-site", "vanishing"}
    late = np.where(np.arange(64) < 32, np.nan, np.where(np.arange(64) < 48, 0.0, 1.0))
    assert regime_of_curve(np.stack([late, np.full(64, np.nan)])).tolist() == ["late-site", "undefined"]
    noisy = np.clip(0.5 + 0.45 * DRAWN.choice([-1, 1], size=(1, 512)), 0, 1)
    assert regime_of_curve(noisy).tolist() == ["uniform"]


def test_errors_of_curves_and_the_baseline_of_all_other_heads():
    """Oracle: by hand, with a key that no query sees."""
    measured = np.array([[0.0, 1.0, np.nan], [0.5, 0.5, 0.5], [1.0, 0.0, 1.0]])
    predicted = np.array([[0.5, 1.0, 0.3], [0.5, 0.5, 0.5], [0.0, 0.0, 1.0]])
    assert curve_error(predicted, measured, 0).value == pytest.approx((0.25 + 0 + 1 / 3) / 3)
    others = others_mean(measured)
    np.testing.assert_allclose(others[0], [0.75, 0.25, 0.75])
    np.testing.assert_allclose(others[1], [0.5, 0.5, 1.0])
    np.testing.assert_allclose(width_of(np.array([[1.0, 1.0, 0.0, 0.0], [0.2] * 4])), [0.5, 1.0])


@pytest.mark.parametrize("family", ["gpt2", "llama3"])
def test_increments_predict_from_the_full_covariance(opened, family):
    """Oracle: W_QK Σ̂ and Σ̂^½ W_QK Σ̂^½ formed as d×d matrices, with grouped heads too."""
    model = opened(family)
    corpus = Corpus.random_tokens(model.tokenizer, 24, 16)
    study = Study(survey(model, corpus), model, corpus)
    prediction = from_increments(study)
    walk = text_walk(study)
    assert text_walk(study) is walk  # read once
    weights = model.head_weights(1)
    sigma = walk.inputs.covariance(walk.input_state, 1)
    values, vectors = torch.linalg.eigh(sigma)
    root = (vectors * values.clamp_min(0).sqrt()) @ vectors.T
    full = weights.w_q[0].double() @ weights.w_k[0].double().T
    form = root @ full @ root
    expected = propagation_finite(
        (full @ sigma).trace(),
        form.square().sum(),
        (full @ sigma @ full @ sigma).trace(),
        24,
        1 / weights.scaling,
    )
    np.testing.assert_allclose(prediction.curve[model.heads], expected, atol=1e-6)
    symmetric = ((form + form.T) / 2).square().sum().sqrt() * weights.scaling
    assert prediction.eta[model.heads] == pytest.approx(float(symmetric), rel=1e-5)


def test_the_page_compares_three_predictions_with_every_head(opened):
    model = opened("gpt2")
    corpus = Corpus.random_tokens(model.tokenizer, 24, 16)
    run = survey(model, corpus)
    outcome = Study(run, model, corpus).outcome(EXPERIMENTS["localization/behaviour"])
    heads = outcome.tables["heads"]
    assert len(heads) == len(run.heads)
    np.testing.assert_allclose(heads["propagation"], run.heads["propagation"], rtol=1e-6)
    text = from_survey(run, "text")
    np.testing.assert_allclose(heads["propagation_text"], text.curve.mean(axis=1))
    assert len(outcome.verdicts) == 11
    assert all("criterion: " in verdict.evidence for verdict in outcome.verdicts)
    if len(run.heads) < 8:
        assert outcome.verdicts[0].answer == UNTESTABLE
    for exhibit in outcome.exhibits:
        figure = exhibit.figure
        if exhibit.choice:
            options = exhibit.choice.options
            assert len(exhibit.choice.variants()[options[-1].key]) == len(figure.data)


@pytest.mark.parametrize("family", ["qwen3", "mistral", "bert", "bloom"])
def test_other_families_give_every_verdict(opened, family):
    """Oracle: Qwen 3 norms queries and keys after projecting, so that no prediction may be made or judged there; in
    the others no window, bias or direction may break a number."""
    model = opened(family)
    corpus = Corpus.random_tokens(model.tokenizer, 24, 8)
    run = survey(model, corpus)
    study = Study(run, model, corpus)
    outcome = study.outcome(EXPERIMENTS["localization/behaviour"])
    assert len(outcome.verdicts) == 11
    assert outcome.tables["heads"]["propagation"].notna().all()
    if family == "qwen3":
        prediction = from_increments(study)
        assert np.isnan(prediction.curve).all()
        assert set(prediction.regime) == {"undefined"}
        assert {verdict.answer for verdict in outcome.verdicts[:3]} == {UNTESTABLE}
        assert outcome.tables["heads"]["error_increments"].isna().all()
    else:
        assert outcome.tables["heads"]["error_increments"].notna().all()
    for exhibit in outcome.exhibits:
        block_of(exhibit)  # as the page draws it
