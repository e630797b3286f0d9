"""Accumulators of one's own, and what is wrong with them."""

from __future__ import annotations

import pytest
import torch

from tests.passes.test_survey import gpt2_weights, kept_whole
from theodolite.accumulate.extra import Extra
from theodolite.errors import UsageError
from theodolite.models import OpenModel, open_model
from theodolite.passes.added_columns import SURVEY_COLUMNS
from theodolite.passes.survey import TITLES, survey


class FourthMoment(Extra):
    """Of the residual stream by layer, and the mean squared query by head."""

    name = "moments"

    def __init__(self, model: OpenModel) -> None:
        super().__init__(model.layers + 1, {"fourth": (), "count": (), "query": (model.heads,)})

    def stream(self, layer: int, hidden: torch.Tensor) -> None:
        self.add("fourth", layer, hidden.double().pow(4).sum())
        self.add("count", layer, torch.tensor(float(hidden.numel())))

    def attention(self, layer: int, inputs) -> None:
        self.add("query", layer, inputs.query.double().square().sum(dim=(0, 2, 3)))

    def columns(self, state):
        return {
            "layers": {"fourth": (state["fourth"] / state["count"]).tolist()},
            "heads": {"query_squared": state["query"][:-1].flatten().tolist()},
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


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"layers": {"rank": [0.0] * 4}}, "the table of layers has a column 'rank' already"),
        ({"heads": {"induction": [0.0] * 12}}, "the table of heads has a column 'induction' already"),
        ({"heads": {"mine": [1.0]}}, "1 values of 'mine' for 12 heads"),
        ({"sinks": {}}, "gives columns of 'sinks': give them of 'layers' or 'heads'"),
    ],
)
def test_columns_that_do_not_fit_are_refused_right_after_the_text(columns, message, opened, corpus, tmp_path):
    """And the text is not read again once they do."""

    class Wrong(FourthMoment):
        def columns(self, state):
            return columns

    model, shown = opened("gpt2"), []
    show = {"show_progress": lambda what, done, total: shown.append(what)}
    with pytest.raises(UsageError, match=message):
        survey(model, corpus, tmp_path / "run", extra=[Wrong(model)], **show)
    assert set(shown) == {TITLES["corpus"]}
    shown.clear()
    survey(model, corpus, tmp_path / "run", extra=[FourthMoment(model)], **show)
    assert TITLES["corpus"] not in shown


def test_what_is_no_accumulator_with_columns_is_refused_before_the_first_pass(opened, corpus):
    class Bare(Extra):
        name = "bare"

    def read(*_):
        pytest.fail("a pass was made")

    for wrong, message in (
        (Bare(4, {}), "Bare has no columns: give its class the method `columns`"),
        (FourthMoment, "type is no accumulator: derive its class from Extra"),
        (object(), "object is no accumulator: derive its class from Extra"),
    ):
        with pytest.raises(UsageError, match=message):
            survey(opened("gpt2"), corpus, extra=[wrong], show_progress=read)


def test_the_names_that_are_taken_are_those_of_the_tables(opened, corpus):
    run = survey(opened("gpt2"), corpus)
    assert sorted(run.layers) == sorted(SURVEY_COLUMNS["layers"])
    assert sorted(run.heads) == sorted(SURVEY_COLUMNS["heads"])
