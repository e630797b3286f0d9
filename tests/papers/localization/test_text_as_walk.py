"""Oracle: what the page is said to hold, of a tiny model."""

from __future__ import annotations

import pytest

from theodolite.errors import UsageError
from theodolite.measure.walks import MEASURES
from theodolite_papers import Study
from theodolite_papers.catalogue import EXPERIMENTS


def test_the_page_has_a_text_a_control_and_a_verdict_on_each(surveyed_gpt2):
    run, model, _ = surveyed_gpt2
    study = Study(*surveyed_gpt2)
    outcome = study.outcome(EXPERIMENTS["localization/walk"])
    table = outcome.tables["layers"]
    assert set(table["tokens"]) == {"text", "random tokens", "simulated walk"}
    assert set(MEASURES) < set(table.columns)
    assert len(table) == 3 * model.layers + model.layers + 1
    assert len(outcome.verdicts) == 6
    assert all("criterion: " in verdict.evidence for verdict in outcome.verdicts)
    for exhibit in outcome.exhibits:
        figure = exhibit.figure
        assert len(exhibit.choice.variants()[exhibit.choice.options[-1].key]) == len(figure.data)
    with pytest.raises(UsageError, match="reads the text of the run again"):
        Study(run, model).outcome(EXPERIMENTS["localization/walk"])
