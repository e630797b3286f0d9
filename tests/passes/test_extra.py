"""Measurements that bring their own sums, and what is wrong with them."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch

from tests.passes.test_survey import gpt2_weights, kept_whole
from theodolite import measure
from theodolite.errors import UsageError
from theodolite.judging import Criterion
from theodolite.measure import column as declarations
from theodolite.measure.column import MEASUREMENTS, Column, declared
from theodolite.measure.extra import Extra
from theodolite.models import OpenModel, open_model
from theodolite.passes.run import Run
from theodolite.passes.survey import TEXT_TITLE, spectra, survey
from theodolite.report import figures, findings
from theodolite.report.data import offered
from theodolite.report.page import render
from theodolite.system.wording import number


class FourthMoment(Extra):
    """Of the residual stream by layer, and the mean squared query by head."""

    name = "moments"
    declared = (
        Column("layers", "fourth", "Mean fourth power of the residual stream."),
        Column(
            "heads",
            "query_squared",
            "Sum of the squares of all queries.",
            title="size of the <queries>",
            group="Of my own",
            healthy=Criterion("at most", 1e5, "a limit of this test"),
        ),
    )

    def __init__(self, model: OpenModel) -> None:
        super().__init__(model.layers + 1, {"fourth": (), "count": (), "query": (model.heads,)})

    def stream(self, layer: int, hidden: torch.Tensor) -> None:
        self.add("fourth", layer, hidden.double().pow(4).sum())
        self.add("count", layer, torch.tensor(float(hidden.numel())))

    def attention(self, layer: int, inputs) -> None:
        self.add("query", layer, inputs.query.double().square().sum(dim=(0, 2, 3)))

    def columns(self, state):
        return {
            "fourth": (state["fourth"] / state["count"]).tolist(),
            "query_squared": state["query"][:-1].flatten().tolist(),
        }


def test_an_accumulator_of_ones_own_adds_columns(tmp_path, checkpoint, opened, corpus):
    """Oracle: dense hidden states, and queries from weights by parameter name. Stopped in between, twice used."""
    model = opened("gpt2")
    extra = [FourthMoment(model)]
    with pytest.raises(UsageError, match="two accumulators are called 'moments'"):
        survey(model, corpus, batch=2, extra=[*extra, FourthMoment(model)])

    def stop(what, done, total):
        if done >= 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        survey(model, corpus, tmp_path / "run", batch=2, extra=extra, show_progress=stop)
    run = survey(model, corpus, tmp_path / "run", batch=2, extra=extra)
    reference = open_model(checkpoint("gpt2"))
    dense_states = kept_whole(reference, corpus)
    for layer, hidden in enumerate(dense_states.hidden):
        assert run.layers.fourth[layer] == pytest.approx((hidden**4).mean(), rel=1e-5)
    state = reference.hf.state_dict()
    for row in run.heads.itertuples():
        w_q, _, _ = gpt2_weights(state, row.layer, row.head)
        bias = state[f"transformer.h.{row.layer}.attn.c_attn.bias"].double().numpy()
        query = dense_states.inputs[row.layer] @ w_q + bias[8 * row.head : 8 * row.head + 8]
        assert row.query_squared == pytest.approx((query**2).sum(), rel=1e-4)
    assert run.provenance["fingerprint"]["extra"] == ["moments"]
    plain = survey(model, corpus, batch=2)
    assert plain.layers.equals(run.layers.drop(columns="fourth"))
    assert survey(model, corpus, batch=2, extra=extra).layers.equals(run.layers)


def test_declarations_travel_with_the_run(tmp_path, opened, corpus):
    """Oracle: what is declared above, in the loaded run and on its page, where it cannot be mistaken for markup."""
    model = opened("gpt2")
    survey(model, corpus, tmp_path / "run", extra=[FourthMoment(model)])
    run = Run.load(tmp_path / "run")
    described = declared("heads", run.provenance) | declared("layers", run.provenance)
    assert [described[column.name] for column in FourthMoment.declared] == [*FourthMoment.declared]
    assert list(offered(run))[-1] == "query_squared"
    hover = figures.head_map(run, "query_squared").data[0].hovertemplate
    assert "size of the &lt;queries&gt;: %{z:.4g}" in hover
    assert "Sum of the squares of all queries." in hover
    page = render(run)
    assert "size of the &lt;queries&gt;" in page
    assert "<queries>" not in page
    assert ">Mean fourth power of the residual stream.</p>" in page  # in the caption
    assert "Columns of your own" in page
    texts = [check.text for check in findings.checks(run)]
    assert f"size of the <queries> is at most {number(1e5)} in all heads." in texts
    large = replace(run, heads=run.heads.assign(query_squared=[1e10] + [1.0] * 11))
    texts = [check.text for check in findings.checks(large)]
    assert f"size of the <queries> is not at most {number(1e5)} in L0H0: a limit of this test." in texts


def test_columns_that_do_not_fit_are_refused_right_after_the_text(opened, corpus, tmp_path):
    """And the text is not read again once they do."""
    model, shown = opened("gpt2"), []
    show = {"show_progress": lambda what, done, total: shown.append(what)}
    for columns, message in (
        ({"query_squared": [1.0]}, "1 values of 'query_squared' for 12 heads"),
        ({"mine": [1.0]}, "gives 'mine', which it does not declare"),
    ):
        shown.clear()
        wrong = type("Wrong", (FourthMoment,), {"columns": lambda self, state, given=columns: given})
        with pytest.raises(UsageError, match=message):
            survey(model, corpus, tmp_path / "run", extra=[wrong(model)], **show)
        assert set(shown) <= {TEXT_TITLE}
    shown.clear()
    survey(model, corpus, tmp_path / "run", extra=[FourthMoment(model)], **show)
    assert TEXT_TITLE not in shown


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (Column("layers", "rank", ""), "the table of layers has a column 'rank' already"),
        (Column("layers", "rank_se", ""), "the table of layers has a column 'rank_se' already"),
        (Column("heads", "induction", ""), "the table of heads has a column 'induction' already"),
        (Column("layers", "fourth", ""), "the table of layers has a column 'fourth' already"),
        (Column("sinks", "mine", ""), "declares columns of 'sinks': declare them of 'layers' or 'heads'"),
    ],
)
def test_declarations_that_do_not_fit_are_refused_before_the_first_pass(column, message, opened, corpus):
    wrong = type("Wrong", (FourthMoment,), {"name": "wrong", "declared": (column,)})
    model = opened("gpt2")
    with pytest.raises(UsageError, match=message):
        survey(model, corpus, extra=[FourthMoment(model), wrong(model)], show_progress=_no_pass)


def _no_pass(*_):
    pytest.fail("a pass was made")


def test_what_is_no_accumulator_is_refused_before_the_first_pass(opened, corpus):
    with pytest.raises(UsageError, match="is no accumulator: derive its class from Extra"):
        survey(opened("gpt2"), corpus, extra=[FourthMoment], show_progress=_no_pass)


PLANTED = """
from theodolite.measure.column import Column, gives
@gives(Column("heads", "planted", "A number of a test."))
def planted(attention):
    layers, heads = attention["entropy"].shape[:2]
    return {"planted": [3.0] * layers * heads}
"""


@pytest.fixture
def add_measurement(tmp_path, monkeypatch):
    """Return what adds a file to `theodolite.measure`, as a new release of the package or its user may."""
    cached = [one for one in vars(declarations).values() if hasattr(one, "cache_clear")]

    def forget():
        for one in cached:
            one.cache_clear()

    def add():
        (tmp_path / "planted.py").write_text(PLANTED)
        monkeypatch.setattr(measure, "__path__", [*measure.__path__, str(tmp_path)])
        forget()

    yield add
    sys.modules.pop("theodolite.measure.planted", None)
    MEASUREMENTS[:] = [each for each in MEASUREMENTS if not each.function.__module__.endswith(".planted")]
    monkeypatch.undo()
    forget()


def test_a_survey_of_before_a_measurement_was_added_is_another_one(add_measurement, opened, corpus, tmp_path):
    """Oracle: the planted value; without it, what was finished or read before is not taken for the same survey."""
    model, whole, shards, heads = opened("gpt2"), tmp_path / "run", tmp_path / "shards", tmp_path / "heads"
    survey(model, corpus, whole)
    survey(model, corpus, shards, batch=2, shard=(1, 2))
    spectra(model, heads)
    add_measurement()
    for again in (
        lambda: survey(model, corpus, whole),
        lambda: survey(model, corpus, shards, batch=2, shard=(2, 2)),
        lambda: spectra(model, heads),
    ):
        with pytest.raises(UsageError, match=r"\(the columns that theodolite measures\)"):
            again()
    assert (survey(model, corpus).heads["planted"] == 3.0).all()
