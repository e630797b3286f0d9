"""Oracle: what the page is said to hold, of a tiny model."""

from __future__ import annotations

import pytest

from theodolite.corpus.corpus import Corpus
from theodolite.errors import UsageError
from theodolite.measure.walks import MEASURES
from theodolite.passes.survey import survey
from theodolite_papers import Study
from theodolite_papers.catalogue import EXPERIMENTS


def test_the_page_has_a_text_a_control_and_a_verdict_on_each(opened):
    model = opened("gpt2")
    corpus = Corpus.random_tokens(model.tokenizer, 24, 16)
    run = survey(model, corpus)
    study = Study(run, model, corpus)
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
