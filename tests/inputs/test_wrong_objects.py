"""Functions that are given something else than they take say in one line what they take."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.report.synthetic import make_survey
from theodolite import Corpus, Exclusions, compare, find_outliers, survey, trace_sinks
from theodolite.errors import UsageError

NO_CORPUS = rf"a Corpus, such as Corpus.{Corpus.from_path.__name__}\(…\), not str"


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return Corpus.random_tokens(300, 16, 4)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            lambda model, corpus, run: survey("tiny", corpus),
            r"a model from open_model, not str: give open_model\(it\)",
        ),
        (lambda model, corpus, run: trace_sinks("tiny", corpus), "open_model, not str"),
        (lambda model, corpus, run: find_outliers(model, "notes.txt"), NO_CORPUS),
        (lambda model, corpus, run: survey(model, "notes.txt"), NO_CORPUS),
        (lambda model, corpus, run: compare(model, model), "runs are compared, .* this is OpenModel"),
        (lambda model, corpus, run: Exclusions.of(model), "not of OpenModel"),
        (lambda model, corpus, run: Corpus.python_docs(None, 16), "text needs a tokenizer"),
    ],
)
def test_the_line_says_what_is_taken(call, said: str, opened, corpus) -> None:
    with pytest.raises(UsageError, match=said) as refused:
        call(opened("gpt2"), corpus, make_survey())
    assert "\n" not in str(refused.value)


def test_one_label_tells_nothing_apart(opened, corpus) -> None:
    """As where a text is one file, whose name is the label of all contexts."""
    alone = survey(
        opened("gpt2"), Corpus("one", corpus.contexts, corpus.contexts[:, 0] * 0, ["notes.txt"], 0)
    )
    bare = survey(opened("gpt2"), replace(corpus, labels=corpus.contexts[:, 0] * 0 - 1))
    assert alone.layers["similarity_within"].isna().all()
    assert alone.layers.drop(columns="layer").equals(bare.layers.drop(columns="layer"))
