"""Oracles: series written down by hand, the binomial distribution, and a tiny model trained here for a few steps."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from tests.calls import call
from tests.papers.shared import answers, outcome_of, quiet, verdicts_of
from theodolite.errors import UsageError
from theodolite.judging import FAILS, HOLDS, UNDECIDED, UNTESTABLE
from theodolite.models import open_model
from theodolite.passes.survey import survey
from theodolite_papers import EXPERIMENTS, Study, experiment
from theodolite_papers.hidden_geometry import addition
from theodolite_papers.hidden_geometry import positions_while_learned as training
from theodolite_papers.hidden_geometry.addition import binomial_error, is_adder, judge_accuracy, trained_on
from theodolite_papers.hidden_geometry.positions_while_learned import (
    appears,
    judge_layer,
    met_at,
    needed_for,
    series_of,
    some_contexts,
)
from theodolite_papers.training.tasks import Additions, TaskModelConfig, train_task_model

SERIES, ADDITION = EXPERIMENTS["geometry/training"], EXPERIMENTS["geometry/addition"]
SPIRAL = {"low_frequency_10": 0.95, "roughness": 0.01, "turns": 1.2, "relative_norm": 0.5}
CLOUD = SPIRAL | {"low_frequency_10": 0.1, "roughness": 0.9}


@pytest.fixture(scope="module")
def adder(tmp_path_factory):
    """A model trained on addition for 10 steps, with checkpoints at steps 0 and 10."""
    folder = tmp_path_factory.mktemp("training") / "adder"
    config = TaskModelConfig(2, 2, 16, 4, 10, 1e-3, "linear", bfloat16=False, series=True)
    train_task_model(folder, Additions(), config, threads=1, console=quiet())
    return open_model(folder)


@pytest.fixture(scope="module")
def few(adder):
    """Five additions; below eight contexts a survey has no standard errors to compute, and is quick."""
    return trained_on(adder).corpus(33, 5)


def _of(run, model):
    """The run, as if it were of this model."""
    described = run.provenance["model"] | {"sha256": model.sha256}
    return replace(run, provenance=run.provenance | {"model": described})


def _answers(fill, *evidence, of="geometry/training") -> list[str]:
    return answers(verdicts_of(fill, *evidence, of=of))


def _spiral(table: pd.DataFrame, *, expected: bool = True):
    return appears(outcome_of("geometry/training"), "spiral", table, 1, expected=expected)


def _table(*rows: dict[str, float]) -> pd.DataFrame:
    """Rows of layer 1 at steps 0, 10, 100, …."""
    steps = [0, *(10 ** (place + 1) for place in range(len(rows) - 1))]
    table = pd.DataFrame(rows).assign(step=steps, layer=1)
    for name in SPIRAL:
        table[f"{name}_se"] = 0.0
    return table


@pytest.mark.parametrize(
    ("rows", "expected", "said"),
    [
        ([CLOUD, CLOUD, SPIRAL, SPIRAL], HOLDS, "first at step 100, and stays to step 1000"),
        ([CLOUD, SPIRAL, CLOUD, SPIRAL], HOLDS, "first at step 10, but not at step 100"),
        ([CLOUD, SPIRAL, CLOUD], FAILS, "first at step 10, but not at step 100"),
        ([CLOUD, CLOUD, CLOUD], FAILS, "at no step"),
        ([CLOUD, SPIRAL], HOLDS, "at step 10, the last one, only"),
        ([SPIRAL, SPIRAL], FAILS, "first at step 0, and stays to step 10"),
        ([CLOUD, SPIRAL | {"roughness": math.nan}], UNDECIDED, "at the noise floor"),
        ([CLOUD, CLOUD | {"roughness": math.nan}], FAILS, "at the noise floor"),
    ],
)
def test_when_a_spiral_appears(rows, expected, said):
    """Oracle: series written down, in which it is there or not."""
    verdict = _spiral(_table(*rows))
    assert verdict.answer == expected
    assert said in verdict.evidence
    opposite = _spiral(_table(*rows), expected=False)
    assert opposite.answer == {HOLDS: FAILS, FAILS: HOLDS}.get(expected, UNDECIDED)


@pytest.mark.parametrize(
    ("step", "error", "expected"),
    [(100, 0.11, UNDECIDED), (100, 0.1, HOLDS), (0, 0.11, HOLDS), (10, 0.11, HOLDS)],
)
def test_the_last_step_is_judged_with_its_standard_error(step, error, expected):
    """Oracle: 0.95 lies 0.248 above Table 2's 0.702, between 2.365 × 0.11 and × 0.10 (t, 7); a cloud far below."""
    table = _table(CLOUD, SPIRAL, SPIRAL)
    table.loc[table["step"] == step, "low_frequency_10_se"] = error
    verdict = _spiral(table)
    assert verdict.answer == expected
    assert ("at step 100 not decided" in verdict.evidence) == (expected == UNDECIDED)
    opposite = _spiral(table, expected=False)
    assert opposite.answer == (UNDECIDED if expected == UNDECIDED else FAILS)


@pytest.mark.parametrize("name", list(SPIRAL))
def test_every_criterion_is_needed(name):
    """Oracle: a spiral with one measure at the far end of its range is none; a curve need not turn."""
    worst = {"low_frequency_10": 0.0, "roughness": 1.0, "turns": 0.0}
    worst |= {"relative_norm": 0.0}
    table = _table(SPIRAL, SPIRAL | {name: worst[name]})
    outcome = outcome_of("geometry/training")
    assert met_at(table, needed_for(outcome, "spiral")) == [True, False]
    assert met_at(table, needed_for(outcome, "learned")) == [True, name == "turns"]


def test_claims_go_by_the_text_and_few_positions_decide_nothing(run, monkeypatch):
    """Oracle: what the paper says of language and of additions."""
    table = _table(CLOUD, SPIRAL)
    assert _answers(judge_layer, table, 1, run) == [HOLDS, HOLDS]
    corpus = run.provenance["corpus"] | {"name": "addition"}
    additions = replace(run, provenance=run.provenance | {"corpus": corpus})
    assert _answers(judge_layer, table, 1, additions) == [UNTESTABLE]  # no text of additions, and no model
    additions = replace(additions, examples=pd.DataFrame({"token": list("12345+678=\n")}))
    assert _answers(judge_layer, table, 1, additions) == [UNTESTABLE]  # no model
    monkeypatch.setattr(addition, "why_not_an_adder", lambda model, run: None)
    assert _answers(judge_layer, table, 1, additions) == [FAILS]
    rough = _table(CLOUD, CLOUD)
    assert _answers(judge_layer, rough, 1, additions) == [HOLDS]
    monkeypatch.setattr(addition, "why_not_an_adder", lambda model, run: "this model adds nothing")
    assert _answers(judge_layer, rough, 1, additions) == [UNTESTABLE]
    short = run.arrays | {"positional_basis": run.arrays["positional_basis"][:, :20]}
    assert _answers(judge_layer, table, 1, replace(run, arrays=short)) == [UNTESTABLE]


def test_a_series_is_surveyed_step_by_step_and_kept(run, adder, few, tmp_path, monkeypatch):
    """Oracle: the survey of the last checkpoint, made here on the same contexts."""
    monkeypatch.setattr(training, "SURVEYED_CONTEXTS", 4)
    calls = []

    def counted(model, text, place, **options):
        calls.append((len(text.contexts), place))
        return survey(model, text, place, **options)

    monkeypatch.setattr(experiment, "survey", counted)
    outcome = Study(_of(run, adder), adder, few, folder=tmp_path).outcome(SERIES)
    assert [contexts for contexts, _ in calls] == [4] * 2
    assert all((place / "run.json").is_file() for _, place in calls)
    table = outcome.tables["steps"]
    assert sorted(set(table["step"])) == [0, 10]
    assert len(table) == 6
    last = survey(open_model(series_of(adder)[10]), some_contexts(few))
    series = table[table["step"] == 10].sort_values("layer")
    for name in ("rank", "relative_norm", "low_frequency_10", "incoherence_mean"):
        np.testing.assert_array_equal(series[name], last.layers[name])
    assert series["roughness"].isna().all()  # fewer contexts than groups
    assert set(outcome.runs) == {"step 0", "step 10"}
    claims = [verdict.claim for verdict in outcome.verdicts]
    assert claims == ["A model trained on addition learns no smooth positional curve (section 4.3): layer 1"]


def test_a_series_is_found_from_its_folder_and_from_inside(adder, opened):
    inside = open_model(series_of(adder)[10])
    assert series_of(inside) == series_of(adder)
    with pytest.raises(UsageError, match="theodolite train characters --series"):
        series_of(opened("gpt2"))


def test_an_adder_reads_the_additions_it_learned(adder, few, tmp_path):
    options = ("--contexts", 5, "--out", tmp_path, "--json")
    _, stdout, stderr = call("reproduce", "geometry/figure5", series_of(adder)[10], *options)
    assert few.sha256 in stdout, stderr


def test_an_untrained_adder_has_learned_nothing_to_generalise(run, adder, monkeypatch):
    """Oracle: after 10 steps no answer of six digits or more is right by chance."""
    monkeypatch.setattr("theodolite_papers.training.tasks.TESTED", 50)
    outcome = Study(_of(run, adder), adder).outcome(ADDITION)
    assert [verdict.answer for verdict in outcome.verdicts] == [FAILS, UNTESTABLE]
    table = outcome.tables["accuracy"]
    assert list(table["examples"]) == ["5 to 10 digits", "1 digit", "2 digits", "3 digits", "4 digits"]
    assert (table["tested"] == 50).all()
    assert table["accuracy"][0] == 0


def test_other_models_are_no_adders(run, opened):
    model = opened("gpt2")
    assert not is_adder(model)
    with pytest.raises(UsageError, match="was not trained on addition"):
        Study(_of(run, model), model).outcome(ADDITION)


@pytest.mark.parametrize(
    ("accuracies", "expected"),
    [
        ([1.0, 0.326, 0.080, 0.111, 0.099], [HOLDS, HOLDS]),  # the paper's, absolute positions
        ([0.999, 0.9, 0.8, 0.9, 0.9], [HOLDS, FAILS]),
        ([0.99, 0.1, 0.1, 0.1, 0.1], [UNDECIDED, HOLDS]),  # it adds, whether or not in 99 of 100
        ([0.93, 0.1, 0.1, 0.1, 0.1], [FAILS, HOLDS]),
        ([0.91, 0.1, 0.1, 0.1, 0.1], [FAILS, UNTESTABLE]),  # within the interval of 0.9
        ([0.5, 0.1, 0.1, 0.1, 0.1], [FAILS, UNTESTABLE]),
    ],
)
def test_accuracies_are_judged_with_their_errors(accuracies, expected):
    """Oracle: the paper's own numbers hold by its own words."""
    values = np.array(accuracies)
    errors = np.array([binomial_error(value, 1000) for value in accuracies])
    assert _answers(judge_accuracy, values, errors, 1000, "10 digits", of="geometry/addition") == expected


def test_the_error_of_a_share_is_binomial():
    """Oracle: the standard deviation of shares drawn from the binomial distribution."""
    drawn = np.random.default_rng(0).binomial(1000, 0.3, size=20_000) / 1000
    assert binomial_error(0.3, 1000) == pytest.approx(drawn.std(), rel=0.03)
    assert 0 < binomial_error(1.0, 1000) < 0.002


@pytest.mark.parametrize(("share", "known"), [(0.91, False), (0.96, True)])
def test_only_a_model_that_adds_is_judged_as_one(run, adder, monkeypatch, share, known):
    """Oracle: 0.9 of 200 sums, two binomial standard errors (0.04) away."""
    monkeypatch.setattr(Additions, "accuracy", lambda *_: share)
    tokens = pd.DataFrame({"token": list("12345+678=\n")})
    rough = replace(_of(run, adder), examples=tokens, layers=run.layers.assign(low_frequency_10=0.5))
    verdict = Study(rough, adder).outcome(EXPERIMENTS["geometry/figure5"]).verdicts[0]
    assert verdict.answer == (HOLDS if known else UNTESTABLE)
    assert known or f"{share:.2f}" in verdict.evidence
    alone = Study(rough).outcome(EXPERIMENTS["geometry/figure5"]).verdicts[0]
    assert alone.answer == UNTESTABLE
    assert "pass the model" in alone.evidence
