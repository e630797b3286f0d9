"""A text as one sequence of tokens, as the literature reads WikiText-2 for its perplexities.

Rows of a table, and the lines of a text in WikiText's format as its data set has them, are joined by empty lines; the
whole is tokenized at once, with what the tokenizer puts around a sequence. Nothing is cut, packed or chosen.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import torch

from theodolite.corpus.corpus import Corpus
from theodolite.corpus.documents import (
    HELD_OUT_TOPICS,
    READERS,
    TABLES,
    TEXT_COLUMN,
    Columns,
    EmptyFileError,
    files_at,
    printable,
    python_topics,
    stdlib_sources,
)
from theodolite.corpus.hub_dataset import streamed_rows
from theodolite.corpus.sampling import LEAST_LENGTH
from theodolite.corpus.spec import CODE, DOCS, HELD_OUT, check_spec, dataset_of, is_text, preset
from theodolite.corpus.special_tokens import Tokenizer
from theodolite.errors import UsageError

BETWEEN = "\n\n"


def make_stream(spec: str | Path | None, tokenizer: Tokenizer, columns: Columns = TEXT_COLUMN) -> Corpus:
    """The text that `spec` names as one context of all its tokens (1, tokens).

    Args:
        spec: as of `make_corpus`, but for what is drawn (random tokens, additions, prompts); `wikitext-2` is the test
            part of the raw WikiText-2 of the hub.
        tokenizer: the model's own.
        columns: the text column of tables.

    Raises:
        UsageError: there is no such text, or it is none of rows, files or documents.
    """
    check_spec(spec, columns)
    name = DOCS if spec is None else str(spec)
    text = (
        BETWEEN.join(_rows(name, replace(columns, tokenizer=tokenizer))).encode("utf-8", "replace").decode()
    )
    # verbose=False: it is longer than the model, which reads it in windows.
    ids = list(tokenizer(text, add_special_tokens=True, verbose=False)["input_ids"])
    if len(ids) < LEAST_LENGTH:
        raise UsageError(f"{name} has {len(ids)} tokens: give a text with {LEAST_LENGTH} or more")
    return Corpus(printable(name), torch.tensor([ids]), torch.tensor([-1]), [], 0)


def _rows(name: str, columns: Columns) -> Iterable[str]:
    if not is_text(name):
        raise UsageError(f"{name} is drawn, and no text of its own: leave out --stride, or give a text")
    if name == CODE:
        return (document.text for document in stdlib_sources())
    if name in (DOCS, HELD_OUT):
        held_out = name == HELD_OUT
        return (t.text for t in python_topics() if not held_out or t.label in HELD_OUT_TOPICS)
    dataset = dataset_of(preset(name))
    if dataset is None:
        return _rows_of_files(Path(name), columns)
    of, config, split = dataset
    return (row.text for row in streamed_rows(of, config or None, split or "train", columns))


def _rows_of_files(path: Path, columns: Columns) -> Iterator[str]:
    """Of a table its rows; of WikiText its lines with their ends, "" for one without text; any other text whole."""
    for file in files_at(path, columns):
        try:
            documents = list(READERS[file.suffix.lower()](file, columns))
        except EmptyFileError:
            if not path.is_dir():
                raise
            continue
        if file.suffix.lower() in TABLES or len(documents) == 1:
            yield from (document.text for document in documents)
        else:
            lines = file.read_text(encoding="utf-8-sig").removesuffix("\n").split("\n")
            yield from (f"{line}\n" if line.strip() else "" for line in lines)
