"""Make corpora by name, as on the command line: contexts of a text, a text as one sequence, or what is drawn."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from theodolite.corpus import documents
from theodolite.corpus.corpus import STREAMED_CONTEXTS, Corpus
from theodolite.corpus.cutting import no_text, tokenized
from theodolite.corpus.images import TransformedImages
from theodolite.corpus.sampling import ALL, LEAST_LENGTH, Choice
from theodolite.corpus.spec import DOCS, KEYWORDS, PRESETS, PYTHON_TEXTS, RANDOM, check_spec
from theodolite.corpus.special_tokens import Tokenizer, frame_of
from theodolite.errors import UsageError

CHARACTERS = 6  # that are first read for each token wanted
AT_THE_CUT = 64  # tokens beside a cut, which may be others in the whole text


def make_corpus(
    spec: str | Path | None,
    tokenizer: Tokenizer | TransformedImages,
    length: int | None,
    choice: Choice = ALL,
    columns: documents.Columns | None = None,
) -> Corpus:
    """Make the corpus that `spec` names: a path (of images without a length), hf:NAME[:CONFIG[:SPLIT]], or a keyword.

    Keywords are `docs` (or None), `held-out` (of docs, what the embedded model was not trained on), `code`, `random`,
    `wikitext-2` (the test part of the hub's); a file named like one is `./docs`.
    """
    columns = replace(columns or documents.Columns(), tokenizer=tokenizer, notes=documents.Notes())
    choice = replace(choice, rows=columns.rows)
    name = DOCS if spec is None else str(spec)
    if not isinstance(tokenizer, TransformedImages):
        check_spec(spec, columns, choice.per_label)
        if name in PYTHON_TEXTS:
            return Corpus.from_documents(name, PYTHON_TEXTS[name](), tokenizer, length, choice)
        if name == RANDOM:
            assert length is not None
            some = STREAMED_CONTEXTS if choice.contexts is None else choice.contexts
            return Corpus.random_tokens(tokenizer, length, some, choice.seed)
    elif name in KEYWORDS or documents.dataset_of(name):
        raise UsageError(f"the model reads images, and {name} is text: give a folder of images")
    return Corpus.from_columns(PRESETS.get(name, name), tokenizer, length, columns, choice)


def make_stream(
    spec: str | Path | None,
    tokenizer: Tokenizer,
    columns: documents.Columns | None = None,
    tokens: int | None = None,
    *,
    special_tokens: bool = True,
) -> Corpus:
    """Read a text as one context of all its tokens (1, tokens), as for the perplexities of WikiText-2.

    Rows of a table, and the lines of a text in WikiText's format, are joined by empty lines, as the literature does. Of
    a text that is longer, no more is read than so many `tokens` need. With `special_tokens` it begins as the tokenizer
    begins a text. `UsageError` where there is no such text, or fewer than 4 tokens.
    """
    columns = replace(columns or documents.Columns(), tokenizer=tokenizer, notes=documents.Notes())
    check_spec(spec, columns)
    name = DOCS if spec is None else str(spec)
    if name == RANDOM:
        raise UsageError(f"{name} is drawn, and no text of its own: leave out --stride, or give a text")
    pieces = _pieces(name, columns)
    text = "".join(pieces) if tokens is None else _beginning(pieces, tokenizer, tokens)
    before = no_text(frame_of(tokenizer).before if special_tokens else [])
    whole = torch.from_numpy(np.concatenate([before, tokenized(tokenizer, text)], axis=1))
    ids, sizes = whole[:, :tokens]
    if len(ids) < LEAST_LENGTH:
        raise UsageError(f"{name} has {len(ids)} tokens: give a text with {LEAST_LENGTH} or more")
    cut = {"tokens_read": tokens} if len(ids) < whole.shape[1] else {}
    return replace(
        Corpus.from_ids(ids),
        name=documents.printable(name),
        selection=columns.described() | cut,
        text_bytes=sizes[None],
    )


def _pieces(name: str, columns: documents.Columns) -> Iterator[str]:
    for number, row in enumerate(_rows(name, columns)):
        yield "\n\n" if number else ""
        yield from row


def _beginning(pieces: Iterator[str], tokenizer: Tokenizer, tokens: int) -> str:
    """Join so many pieces of a text that they give more than so many tokens, or all."""
    parts: list[str] = []
    length, size = 0, CHARACTERS * tokens
    for piece in pieces:
        parts.append(piece)
        length += len(piece)
        while length >= size:
            beginning = "".join(parts)[:size].encode("utf-8", "replace").decode()
            ids = tokenizer(beginning, add_special_tokens=False, verbose=False)["input_ids"]
            if len(ids) > tokens + AT_THE_CUT:
                return beginning
            size *= 2
    return "".join(parts)


def _rows(name: str, columns: documents.Columns) -> Iterator[Iterable[str]]:
    """Yield a table's rows, WikiText's lines with their ends ("" for one without text), any other text in its parts."""
    if name in PYTHON_TEXTS:
        yield from ([document.text] for document in PYTHON_TEXTS[name]())
        return
    if (dataset := documents.dataset_of(PRESETS.get(name, name))) is not None:
        yield from ([document.text] for document in documents.streamed_rows(*dataset, columns))
        return
    for file in documents.files_at(name, columns):
        kind = documents.kind_of(file)
        with documents.reading(file, Path(name), columns):
            if kind not in documents.TEXTS:
                yield from ([document.text] for document in documents.READERS[kind](file, columns))
                continue
            parts, titled = documents.text_parts(file, columns)
            if not titled:
                yield parts
                continue
            lines = (line for part in parts for line in part.removesuffix("\n").split("\n"))
            yield from ([f"{line}\n" if line.strip() else ""] for line in lines)
