"""Oracles: tables made by hand, and a model with one massive activation that was planted into its weights."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats

from tests import checkpoints
from tests.papers.shared import verdicts_of
from tests.sinks.test_outliers import DIMENSION, TOKEN, plant
from theodolite.corpus.corpus import Corpus
from theodolite.judging import FAILS, HOLDS, UNDECIDED, UNTESTABLE
from theodolite.models import OpenModel, open_model
from theodolite.passes.run import Run
from theodolite.passes.survey import survey
from theodolite.report.outcome import Outcome
from theodolite.report.page import block_of
from theodolite.sinks.outliers import Outliers, find_outliers
from theodolite_papers import Study
from theodolite_papers.catch_tag_release.outliers import (
    is_delimiter,
    judge_consistency,
    judge_massive,
    judge_sinks,
    outliers,
    parts_of,
    sinks_of,
    stays,
)
from theodolite_papers.experiment import of_nothing

NAME, SINKS = "sinks/outliers", ["token_id", "first", "contexts"]


def run_of(model: OpenModel, sinks: pd.DataFrame) -> Run:
    """What the experiment reads of a run, without a survey: its model, its seed and its sinks."""
    provenance = of_nothing()
    provenance["model"]["sha256"] = model.sha256
    return Run(sinks=sinks, arrays={}, provenance=provenance)


@pytest.fixture(scope="module")
def studied(tmp_path_factory) -> tuple[Study, Outcome]:
    folder = tmp_path_factory.mktemp("planted")
    plant("gpt2").save_pretrained(folder)
    checkpoints.byte_tokenizer().save_pretrained(folder)
    model = open_model(folder)
    corpus = Corpus.random_tokens(256, 24, 30)
    corpus.contexts[corpus.contexts == TOKEN] += 1
    corpus.contexts[3:9, 5] = TOKEN
    sinks = pd.DataFrame([(TOKEN, False, 5), (TOKEN, True, 3)], columns=SINKS)
    study = Study(run_of(model, sinks), model, corpus)
    return study, study.outcome(outliers)


@pytest.fixture(scope="module")
def found(studied) -> Outliers:
    study, _ = studied
    return find_outliers(study.model, study.corpus)


def test_verdicts_on_a_planted_activation(studied, found):
    """Token 77 alone, 6 times in 690 tokens, in one dimension from layer 2 on; 5 of 8 sinks are such tokens.

    The model itself has no sink, so that no part of the text gives the share of those put in an error.
    """
    study, outcome = studied
    assert [verdict.answer for verdict in outcome.verdicts[-2:]] == [HOLDS, UNDECIDED]
    assert "0.625 (no standard error)" in outcome.verdicts[-1].evidence
    assert len(outcome.verdicts) == 8
    # A letter carries it, M of the byte tokens, and not a delimiter.
    # 0.9 % of the tokens, and of a part up to 3 %: too near to one in a hundred.
    expected = {"tokens": UNDECIDED, "delimiters": FAILS, "dimensions": HOLDS, "sudden": HOLDS}
    expected |= {"stays": HOLDS}
    of = {verdict.claim: verdict.answer for verdict in outcome.verdicts}
    assert {name: of[outcome.sentence(name)] for name in expected} == expected
    assert not outcome.unjudged
    # Without parts of the text no number has an error.
    assert all(
        "(no standard error)" in verdict.evidence
        for verdict in verdicts_of(judge_massive, (found, outcome.tables["growth"]), of=NAME)
    )
    assert outcome.tables["massive"]["dimension"].unique().tolist() == [DIMENSION]
    assert outcome.runs["outliers"]["corpus"]["sha256"] == study.corpus.sha256


def test_every_figure_is_drawn_and_shows_what_was_planted(studied):
    _, outcome = studied
    figures = {exhibit.key: exhibit.figure for exhibit in outcome.exhibits}
    assert list(figures) == ["dimensions", "growth", "tokens", "heads"]
    for exhibit in outcome.exhibits:
        block_of(exhibit)  # as the page draws it
    line = figures["growth"].data[0]
    assert line.name.startswith(f"dimension {DIMENSION}, ")
    values = outcome.tables["growth"]["value"].to_numpy()
    np.testing.assert_allclose(line.y, np.abs(values), rtol=1e-6)
    bars = figures["tokens"].data[0]
    np.testing.assert_allclose(bars.x, [6 / 30])
    ratios = figures["dimensions"].data[0]
    place = list(ratios.x).index(str(DIMENSION))
    assert np.nanargmax(ratios.customdata[-1]) == place


def test_a_model_without_massive_activations_gives_no_verdict_on_them(opened):
    model = opened("llama2")
    corpus = Corpus.random_tokens(model.tokenizer, 24, 8)
    run = run_of(model, pd.DataFrame([], columns=SINKS))
    outcome = Study(run, model, corpus).outcome(outliers)
    assert {verdict.answer for verdict in outcome.verdicts[1:]} == {UNTESTABLE}
    assert all("largest |x| is" in verdict.evidence for verdict in outcome.verdicts[1:])
    assert "tokens" not in [exhibit.key for exhibit in outcome.exhibits]
    for exhibit in outcome.exhibits:
        block_of(exhibit)


def test_sinks_and_massive_activations_are_compared_by_token_and_position(found):
    """By hand: 3 of 4 massive activations are at tokens that are sinks, 5 of 25 sinks at tokens that are massive, in a
    text in which half of the tokens are sinks at times."""
    massive = pd.DataFrame(
        {
            "token_id": [7, 8, 1],
            "token": ["a", "b", "c"],
            "first": [False, False, True],
            "contexts": 1,
            "places": [2, 1, 1],
        }
    )
    sinks = pd.DataFrame([(7, False, 5), (9, False, 20), (7, False, 4)], columns=SINKS)
    corpus = Corpus("made", torch.tensor([[7, 7, 9, 1, 1, 9]] * 200), torch.zeros(200), [], 0)
    whole = replace(found, massive=massive)
    at_sinks, sinks_at = verdicts_of(judge_sinks, (whole, sinks), [(whole, sinks)] * 8, corpus, of=NAME)
    # Just half, in parts that are alike: 1 − 0.025^{1/200} = 0.018 more or less is not known.
    assert (at_sinks.answer, sinks_at.answer) == (UNDECIDED, FAILS)
    assert at_sinks.parts[0].estimate.error == pytest.approx((1 - 0.025 ** (1 / 200)) / stats.t.ppf(0.975, 7))
    assert "0.500" in at_sinks.evidence
    assert "0.200" in sinks_at.evidence
    # 7, 9 and 9 of six, and 7 at position 0 is not the token after it.
    assert "50\u00a0%" in at_sinks.evidence
    nothing = verdicts_of(judge_sinks, (found, sinks[:0]), [], corpus, of=NAME)
    assert {verdict.evidence for verdict in nothing} == {"no attention sink in this run"}


def test_sinks_of_a_text_are_those_of_its_survey(checkpoint):
    """Oracle: the survey, which finds them beside everything else."""
    model = open_model(checkpoint("gpt2"))
    corpus = Corpus.random_tokens(256, 8, 16)
    pd.testing.assert_frame_equal(sinks_of(model, corpus), survey(model, corpus).sinks)


@pytest.mark.parametrize(
    ("consistency", "massive", "verdict"),
    [([0.5, 0.4, 0.1], False, HOLDS), ([0.1, 0.5, 0.01], False, FAILS), ([0.01] * 3, True, UNTESTABLE)],
)
def test_consistency_is_judged_without_the_dimensions_that_few_tokens_make(
    found, consistency, massive, verdict
):
    dimensions = pd.DataFrame({"consistency": consistency, "large_rms": True, "massive": massive})
    whole = replace(found, dimensions=dimensions)
    (judged,) = verdicts_of(judge_consistency, whole, [whole] * 8, of=NAME)
    assert judged.answer == verdict


def test_the_error_is_that_of_a_mean_over_parts_of_the_text(found):
    """Oracle: by hand: shares of 1, 1, 1 and 0 of even dimensions are ± ½/√4, and four parts take 3.18 of it."""

    def with_consistency(*values: float) -> Outliers:
        table = pd.DataFrame({"consistency": values, "large_rms": True, "massive": False})
        return replace(found, dimensions=table)

    even, uneven = with_consistency(0.5), with_consistency(0.01)
    (verdict,) = verdicts_of(judge_consistency, even, [even, even, even, uneven], of=NAME)
    assert verdict.answer == UNDECIDED
    assert ": 1 ± 0.2 (4 parts)" in verdict.evidence
    corpus = Corpus.random_tokens(256, 24, 30)
    parts = parts_of(corpus)
    assert torch.equal(torch.cat([part.contexts for part in parts]), corpus.contexts)
    assert [len(part.contexts) for part in parts] == [4, 4, 4, 3] * 2
    assert parts_of(Corpus.random_tokens(256, 24, 15)) == []


def test_delimiters():
    assert all(map(is_delimiter, [".", " ,", "\n", "<s>", "<|endoftext|>", "[SEP]", "", "–"]))
    assert not any(map(is_delimiter, ["the", " 2", "é", "<a", "]x["]))


def test_how_long_activations_stay():
    """One is massive in 2 of the 3 layers from where it appears, one never in half of its places."""
    growth = pd.DataFrame(
        {
            "dimension": [1] * 4 + [2] * 4,
            "token_id": 3,
            "first": False,
            "layer": [0, 1, 2, 3] * 2,
            "share": [0.2, 0.6, 1.0, 0.1, 0.1, 0.2, 0.3, 0.4],
            "appears": [1.0] * 4 + [np.nan] * 4,
        }
    )
    np.testing.assert_allclose(stays(growth), [2 / 3])
