"""Pages of traced sinks and of a disturbed head; oracle: the planted model, of which everything is known."""

from __future__ import annotations

import pandas as pd
import pytest
import torch

from tests import planted
from theodolite.corpus import Corpus
from theodolite.errors import UsageError
from theodolite.experiments.causal import CAUSAL
from theodolite.experiments.page import render
from theodolite.experiments.study import Focus, Study
from theodolite.experiments.tracing import TRACE, traced_outcome
from theodolite.models import open_model
from theodolite.surveyor import spectra
from theodolite.tracer import trace_sinks

IDS = planted.contexts(6)
CORPUS = Corpus("planted", IDS, torch.full((len(IDS),), -1), [], 0)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return open_model(planted.write("gpt2", tmp_path_factory.mktemp("planted") / "model"))


@pytest.fixture(scope="module")
def run(model):
    return spectra(model)


def verdicts(outcome):
    return {verdict.claim.partition("(")[0].strip(): verdict.verdict for verdict in outcome.verdicts}


def test_a_planted_mechanism_is_judged(model, run, tmp_path):
    study = Study(run, model, CORPUS, folder=tmp_path)
    outcome = study.outcome(TRACE)
    found = verdicts(outcome)
    assert found["Attention sinks emerge in later tokens too, and depend on the sequence"] == "holds"
    assert found["Tokens cluster by the sink that they attend to in the output of the head"] == "holds"
    assert len(outcome.tables["sinks"]) == len(planted.SINKS)
    assert (tmp_path / "trace" / "traces.parquet").is_file()
    page = render(TRACE, outcome, run)
    assert "Where each tag lives on" in page
    assert all(exhibit.draw(run).data for exhibit in outcome.exhibits)


def test_a_disturbed_head_is_judged(model, run):
    outcome = Study(run, model, CORPUS, focus=Focus(layer=0, head=1)).outcome(CAUSAL[0])
    changes = outcome.tables["changes"].set_index(["disturbance", "measure"])["change"]
    assert changes["tag removed", "η² in layer 1"] < -0.3
    assert changes["tag removed", "η² in layer 4"] > -0.05  # layer 2 takes this tag out again by itself
    assert outcome.comparisons[0].here == "L0H1, in 6 contexts"
    assert all(exhibit.draw(run).data for exhibit in outcome.exhibits)
    assert isinstance(outcome.tables["changes"], pd.DataFrame)


def test_a_text_without_sinks_is_not_judged(model):
    outcome = traced_outcome(trace_sinks(model, torch.arange(40).view(2, 20)))
    assert set(verdicts(outcome).values()) == {"not testable here"}


def test_refusals(model, run):
    with pytest.raises(UsageError, match="give it beside the run"):
        Study(run, model).outcome(TRACE)
    with pytest.raises(UsageError, match="writes no tag in this text"):
        Study(run, model, CORPUS, focus=Focus(layer=3, head=0)).outcome(CAUSAL[0])
