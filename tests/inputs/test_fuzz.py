"""Corpora and tables that nobody thought of. Oracles: the definition of a corpus; the table that was saved."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pandas as pd
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.checkpoints import byte_tokenizer
from theodolite.corpus.corpus import Corpus
from theodolite.errors import UsageError
from theodolite.passes.run import SCHEMA_VERSION, TABLES, Run

TOKENIZER = byte_tokenizer()
few = settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)

TEXTS = st.lists(st.text(st.characters(codec=None), max_size=60), max_size=8)


@few
@given(TEXTS, st.integers(-2, 12), st.none() | st.integers(-1, 6), st.integers(0, 2**32), st.booleans())
def test_corpora(texts: list[str], length: int, contexts: int | None, seed: int, labelled: bool) -> None:
    labels = [str(len(text) % 3) for text in texts] if labelled else None

    def read() -> Corpus:
        return Corpus.from_texts(texts, TOKENIZER, length, contexts, labels, seed)

    try:
        corpus = read()
    except UsageError:
        return
    rows, columns = corpus.contexts.shape
    assert columns == length
    assert rows >= 1
    assert contexts is None or rows <= contexts
    assert corpus.labels.shape == (rows,)
    assert 0 <= int(corpus.contexts.min()) <= int(corpus.contexts.max()) < len(TOKENIZER)
    assert set(corpus.labels.tolist()) <= ({-1} if labels is None else set(range(len(corpus.label_names))))
    again = read()
    assert torch.equal(again.contexts, corpus.contexts)
    assert again.sha256 == corpus.sha256


CELLS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
NUMBERS = st.floats(allow_nan=True, allow_infinity=True)


@few
@given(st.lists(st.tuples(CELLS, NUMBERS), max_size=5), CELLS, NUMBERS)
def test_tables_come_back_as_they_were(rows: list[tuple[str, float]], name: str, value: float) -> None:
    table = pd.DataFrame(rows, columns=["token", "share"]).astype({"token": object, "share": float})
    places = dict.fromkeys(("context", "position", "token_id", "layer", "head"), 0)
    table = table.assign(**places, received=0.0, sink=False)
    tables = dict.fromkeys(TABLES, pd.DataFrame())
    tables |= {"examples": table, "heads": pd.DataFrame({"layer": [0], "head": [0], "entropy": [value]})}
    provenance = {
        "schema_version": SCHEMA_VERSION,
        "model": {"id": name, "layers": 1, "heads": 1},
        "seed": value,
    }
    run = Run(**tables, arrays={"x": torch.tensor([value])}, provenance=provenance)
    with tempfile.TemporaryDirectory() as place:
        loaded = Run.load(run.save(Path(place) / "run").folder)
    got = loaded.examples
    assert got["token"].tolist() == table["token"].tolist()
    assert got["share"].to_numpy().tobytes() == table["share"].to_numpy().tobytes() or bool(
        table["share"].isna().any()
    )
    assert got["share"].isna().tolist() == table["share"].isna().tolist()
    assert loaded.heads["entropy"].isna().tolist() == [value != value]
    assert loaded.provenance["model"]["id"] == name
    assert loaded.arrays["x"].numpy().tobytes() == run.arrays["x"].numpy().tobytes()
