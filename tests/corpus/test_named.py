"""A text as one sequence. Oracle: rows joined and tokenized as scripts do that print WikiText-2's perplexity."""

from __future__ import annotations

import itertools
import json

import pytest

from theodolite.corpus import documents, named
from theodolite.corpus.documents import Columns, Document, dataset_of
from theodolite.corpus.named import make_stream
from theodolite.corpus.spec import HELD_OUT_TOPICS, PRESETS
from theodolite.errors import UsageError

LINES = ["", " = First = ", "", " Some words of it .", " More .", "", " = Second = ", "", " Other words ."]
LINES += [""]
ROWS = [f"{line}\n" if line else "" for line in LINES]
"""As the data set of the hub has them: a line keeps its end, and one without text has none."""


def ids_of(model, text):
    return [model.tokenizer(text)["input_ids"]]


def test_lines_of_wikitext_are_joined_as_its_data_set_would_be(opened, tmp_path):
    model = opened("llama3")
    wanted = ids_of(model, "\n\n".join(ROWS))
    (tmp_path / "text.txt").write_text("\n".join(LINES) + "\n")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"body": row}) + "\n" for row in ROWS))
    stream = make_stream(tmp_path / "text.txt", model.tokenizer)
    assert stream.contexts.tolist() == wanted
    assert stream.name == str(tmp_path / "text.txt")
    assert make_stream(tmp_path / "rows.jsonl", model.tokenizer, Columns("body")).contexts.tolist() == wanted


def test_the_preset_is_the_hubs_test_part(opened, monkeypatch):
    asked = []

    def rows(name, config, split, columns):
        asked.append((name, config, split))
        return map(Document, ROWS)

    monkeypatch.setattr(documents, "streamed_rows", rows)
    model = opened("llama3")
    stream = make_stream("wikitext-2", model.tokenizer)
    assert asked == [("Salesforce/wikitext", "wikitext-2-raw-v1", "test")]
    assert stream.contexts.tolist() == ids_of(model, "\n\n".join(ROWS))
    assert stream.name == "wikitext-2"
    assert all(dataset_of(spec) for spec in PRESETS.values())


@pytest.mark.parametrize("characters", [1, 6])
def test_a_stream_is_read_no_further_than_its_tokens(opened, monkeypatch, characters):
    """Oracle: the beginning of a longer stream, without an end to it."""
    read = []

    def rows(*_):
        for number in itertools.count():
            read.append(number)
            yield Document(f"The row of {number} and {number * number} words.")

    monkeypatch.setattr(documents, "streamed_rows", rows)
    monkeypatch.setattr(named, "CHARACTERS", characters)
    tokenizer = opened("llama3").tokenizer
    text = "\n\n".join(document.text for document in itertools.islice(rows(), 100))
    read.clear()
    stream = make_stream("hf:user/set", tokenizer, tokens=200)
    assert stream.contexts.tolist() == [tokenizer(text)["input_ids"][:200]]
    assert stream.selection == {"tokens_read": 200}
    assert len(read) < 100


def test_other_texts_are_whole(opened, tmp_path):
    from pydoc_data.topics import topics

    model = opened("llama3")
    (tmp_path / "a.txt").write_text("One text.\n\nOf two paragraphs.\n")
    (tmp_path / "b.md").write_text("# Another\n")
    (tmp_path / "c.txt").write_text(" \n")
    both = "One text.\n\nOf two paragraphs.\n\n\n# Another\n"
    assert make_stream(tmp_path, model.tokenizer).contexts.tolist() == ids_of(model, both)
    held_out = "\n\n".join(topics[name] for name in sorted(topics) if name in HELD_OUT_TOPICS)
    assert make_stream("held-out", model.tokenizer).contexts.tolist() == ids_of(model, held_out)


def test_what_is_no_text_is_refused(opened, tmp_path):
    tokenizer = opened("llama3").tokenizer
    with pytest.raises(UsageError, match="drawn, and no text"):
        make_stream("random", tokenizer)
    (tmp_path / "short.txt").write_text("ab")
    with pytest.raises(UsageError, match="give a text with 4 or more"):
        make_stream(tmp_path / "short.txt", tokenizer)
    with pytest.raises(UsageError, match="no file or folder"):
        make_stream(tmp_path / "none.txt", tokenizer)
    (tmp_path / "empty.txt").write_text("\n")
    with pytest.raises(UsageError, match="is empty"):
        make_stream(tmp_path / "empty.txt", tokenizer)
