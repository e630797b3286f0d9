"""Verdicts on a trace; oracles: Student's t and Bonferroni by hand, a text without a sink."""

from __future__ import annotations

import math

import pandas as pd
import torch

from tests import planted
from tests.papers.shared import outcome_of, verdicts_of
from theodolite.models import open_model
from theodolite.report.sink_trace import show_trace
from theodolite.sinks.trace import trace_sinks
from theodolite_papers.catch_tag_release.trace_claims import (
    judge_clusters,
    judge_later,
    judge_release,
    judge_trace,
)


def judged_by(judge, *evidence):
    (verdict,) = verdicts_of(judge, *evidence, of="sinks/trace")
    return verdict


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


def test_a_text_without_sinks_is_not_judged(tmp_path):
    model = open_model(planted.write("gpt2", tmp_path / "model"))
    outcome = outcome_of("sinks/trace")
    run = trace_sinks(model.only([0]), torch.arange(40).view(2, 20))
    show_trace(outcome, run)
    assert [(reading.quantity, reading.here) for reading in outcome.readings] == [
        ("heads that have a sink", f"0 of {model.heads}")
    ]
    judge_trace(outcome, run)
    assert {verdict.answer for verdict in outcome.verdicts} == {"not testable here"}
