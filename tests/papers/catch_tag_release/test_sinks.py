"""Pages of traced sinks and of an ablated head; oracle: the planted model, of which everything is known."""

from __future__ import annotations

import math
from dataclasses import replace

import pandas as pd
import pytest
import torch

from tests import planted
from tests.papers.shared import verdicts_of
from theodolite.corpus.corpus import Corpus
from theodolite.errors import UsageError
from theodolite.models import open_model
from theodolite.models.prompts import Focus
from theodolite.passes.survey import spectra
from theodolite.report.outcome import Outcome, render
from theodolite.report.sink_trace import judge_clusters, judge_later, judge_release, show_trace
from theodolite.sinks.ablation import LOSS_CAUGHT, LOSS_DIFFERENCE, LOSS_OTHERS
from theodolite.sinks.trace import trace_sinks
from theodolite_papers.catch_tag_release.tag_ablation import ablated, against_others, traced
from theodolite_papers.experiment import Study

IDS = planted.contexts(6)
CORPUS = Corpus("planted", IDS, torch.full((len(IDS),), -1), [], 0)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return open_model(planted.write("gpt2", tmp_path_factory.mktemp("planted") / "model"))


@pytest.fixture(scope="module")
def run(model):
    return spectra(model)


def judged_by(judge, *evidence):
    (verdict,) = verdicts_of(judge, *evidence)
    return verdict


def verdicts(outcome):
    return {verdict.claim.partition("(")[0].strip(): verdict.answer for verdict in outcome.verdicts}


def test_a_planted_mechanism_is_judged(model, run, tmp_path):
    study = Study(run, model, CORPUS, folder=tmp_path)
    outcome = study.outcome(traced)
    answers = verdicts(outcome)
    assert answers["Attention sinks emerge in later tokens too, and depend on the sequence"] == "holds"
    assert answers["Tokens cluster by the sink that they attend to in the output of the head"] == "holds"
    assert len(outcome.tables["sinks"]) == len(planted.SINKS)
    assert (tmp_path / "trace" / "traces.parquet").is_file()
    page = render(traced, outcome, run.provenance)
    assert "Where each tag persists" in page
    assert all(exhibit.figure.data for exhibit in outcome.exhibits)


def test_an_ablated_head_is_judged(model, run):
    outcome = Study(run, model, CORPUS, focus=Focus(layer=0, head=1)).outcome(ablated)
    changes = outcome.tables["changes"].set_index(["ablation", "measure"])["change"]
    assert changes["tag ablated", "η² in layer 1"] < -0.3
    assert changes["tag ablated", "η² in layer 4"] > -0.05  # layer 2 takes this tag out again by itself
    assert outcome.readings[0].here == "L0H1, in 3 contexts"  # the other three are for choosing
    assert all(exhibit.figure.data for exhibit in outcome.exhibits)
    assert isinstance(outcome.tables["changes"], pd.DataFrame)


def ablation_rows(caught: float, others: float, between: tuple[float, float, float]) -> pd.DataFrame:
    """What an ablation of the tag does; `between`: caught tokens less others under it, and under two controls."""
    changes = {LOSS_CAUGHT: caught, LOSS_OTHERS: others, LOSS_DIFFERENCE: between[0]}
    rows = []
    for measure, change in changes.items():
        controls = between[1:] if measure == LOSS_DIFFERENCE else (0.0, 0.0)
        beyond = {"beyond_most": change - max(controls), "beyond_least": change - min(controls)}
        rows.append(
            {"ablation": "tag ablated", "measure": measure, "untouched": 1.8, "contexts": 59}
            | {"change": change, "change_se": 0.003, "control": sum(controls) / 2, "control_se": 0.003}
            | {name: value for name, value in beyond.items()}
            | {f"{name}_se": 0.003 for name in beyond}
        )
    return pd.DataFrame(rows)


def test_a_tag_serves_caught_tokens_only_beyond_the_hardest_control():
    """A control that hits caught tokens harder (0.044 against 0.018, as was measured) speaks against it."""
    assert against_others(ablation_rows(0.043, 0.018, (0.025, 0.0, 0.001))).answer == "holds"
    harder = against_others(ablation_rows(0.043, 0.018, (0.025, 0.0, 0.044)))
    assert harder.answer == "fails"
    assert "0.025 ± 0.003" in harder.evidence
    assert against_others(ablation_rows(0.043, 0.018, (0.025, 0.0, 0.022))).answer == "not decided"
    assert against_others(ablation_rows(0.018, 0.018, (0.0, -0.02, -0.03))).answer == "not decided"


HEADS = pd.DataFrame(
    {
        "layer": [0, 2, 2, 3],
        "head": [0, 0, 1, 0],
        "contexts": [60, 30, 10, 1],
        "tag": [0.3, 0.2, 0.05, 0.9],
        "tag_se": [0.02, 0.01, 0.01, math.nan],
        "tag_shifted": [0.1, 0.1, 0.0, 0.0],
        "gain": [0.022, 0.022, -0.1, 0.5],
        "gain_se": [0.01, 0.01, 0.01, math.nan],
    }
)


def test_heads_count_by_the_contexts_that_they_rest_on():
    """Oracle: by hand, (60 · 0.3 + 30 · 0.2 + 10 · 0.05)/100; the head of one context has no error and is left out."""
    verdict = judged_by(judge_clusters, HEADS)
    assert verdict.answer == "holds"
    assert ": 0.24 ± 0.02 (46 contexts); " in verdict.evidence
    assert "mean over 3 heads" in verdict.evidence
    assert "1 head that rest on one context left out" in verdict.evidence
    assert judged_by(judge_clusters, HEADS[3:]).answer == "not testable here"


def test_the_largest_of_more_layers_must_gain_more():
    """Oracle: Student's t by hand, two of three heads' intervals sharing 5 %: of 60 and of 30 contexts 2.30 and 2.36
    standard errors for one later layer, 2.58 and 2.66 for two, 2.83 and 2.94 for four.
    """
    last = HEADS.assign(layer=3, gain=[0.024, 0.024, -0.1, 0.5])
    # Two of three, of whom there is one later layer.
    assert judged_by(judge_release, last, 4).answer == "holds"
    assert judged_by(judge_release, last.assign(layer=2), 4).answer == "not decided"  # the better one of two
    assert judged_by(judge_release, HEADS.assign(layer=2, gain=0.027), 4).answer == "holds"
    assert judged_by(judge_release, HEADS.assign(layer=0, gain=0.027), 4).answer == "not decided"
    assert (
        "more in 0 of 3 heads with a sink, less in 1 "
        in judged_by(judge_release, HEADS.assign(layer=2), 4).evidence
    )
    assert judged_by(judge_release, HEADS.assign(gain=[0.1, -0.03, -0.03, 0.5]), 4).answer == "fails"
    assert judged_by(judge_release, HEADS.assign(gain_se=math.nan), 4).answer == "not testable here"


def test_the_largest_share_of_many_sinks_must_be_larger():
    """Oracle: Bonferroni by hand: 256 contexts are ± 1/32; of one sink 0.01 + 1.96/32 decides, of a hundred 3.48/32."""
    assert judged_by(judge_later, pd.Series([0.08]), 256).answer == "holds"
    assert judged_by(judge_later, pd.Series([0.08] * 100), 256).answer == "not decided"
    assert judged_by(judge_later, pd.Series([0.13] * 100), 256).answer == "holds"
    assert judged_by(judge_later, pd.Series([], dtype=float), 256).answer == "not decided"


def test_a_trace_of_an_older_version_is_refused(model):
    run = trace_sinks(model, IDS)
    with pytest.raises(UsageError, match="trace again"):
        show_trace(Outcome(), replace(run, traces=run.traces.drop(columns=["gain", "gain_se"])))


def test_a_text_without_sinks_is_not_judged(model):
    outcome = Outcome()
    show_trace(outcome, trace_sinks(model, torch.arange(40).view(2, 20)))
    assert set(verdicts(outcome).values()) == {"not testable here"}


def test_refusals(model, run):
    with pytest.raises(UsageError, match="pass it together with the run"):
        Study(run, model).outcome(traced)
    with pytest.raises(UsageError, match="writes no tag in this text"):
        Study(run, model, CORPUS, focus=Focus(layer=3, head=0)).outcome(ablated)
