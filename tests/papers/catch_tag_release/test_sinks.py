"""Pages of traced sinks and of an ablated head; oracle: the planted model, of which everything is known."""

from __future__ import annotations

import pandas as pd
import pytest
import torch

from tests import planted
from tests.papers.shared import outcome_of
from theodolite.corpus.corpus import Corpus
from theodolite.errors import UsageError
from theodolite.judging import Verdict
from theodolite.models import open_model
from theodolite.models.texts import Focus
from theodolite.passes.survey import spectra
from theodolite.report.outcome import render
from theodolite_papers.catch_tag_release.tag_ablation import (
    LOSS_CAUGHT,
    LOSS_DIFFERENCE,
    LOSS_OTHERS,
    ablated,
    against_others,
)
from theodolite_papers.catch_tag_release.trace_claims import traced
from theodolite_papers.experiment import Study

IDS = planted.contexts(16)
CORPUS = Corpus("planted", IDS, torch.full((len(IDS),), -1), [], 0)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return open_model(planted.write("gpt2", tmp_path_factory.mktemp("planted") / "model"))


@pytest.fixture(scope="module")
def run(model):
    return spectra(model)


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
    assert outcome.readings[0].here == "L0H1, in 8 contexts"  # the other eight are for choosing
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

    def judged(caught: float, *between: float) -> Verdict:
        outcome = outcome_of("sinks/ablation")
        return against_others(outcome, ablation_rows(caught, 0.018, between))

    assert judged(0.043, 0.025, 0.0, 0.001).answer == "holds"
    harder = judged(0.043, 0.025, 0.0, 0.044)
    assert harder.answer == "fails"
    assert "0.025 ± 0.003" in harder.evidence
    assert judged(0.043, 0.025, 0.0, 0.022).answer == "not decided"
    assert judged(0.018, 0.0, -0.02, -0.03).answer == "not decided"


def test_refusals(model, run):
    with pytest.raises(UsageError, match="pass it together with the run"):
        Study(run, model).outcome(traced)
    with pytest.raises(UsageError, match="writes no tag in this text"):
        Study(run, model, CORPUS, focus=Focus(layer=3, head=0)).outcome(ablated)
