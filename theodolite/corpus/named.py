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
from theodolite.corpus.sampling import LEAST_LENGTH, Choice
from theodolite.corpus.spec import DOCS, KEYWORDS, PRESETS, PYTHON_TEXTS, RANDOM, check_spec, dataset_of
from theodolite.corpus.special_tokens import Tokenizer, frame_of
from theodolite.errors import UsageError
from theodolite.system.progress import ShowTokens

BETWEEN = "\n\n"
"""What joins the rows of a text that is one sequence, as the literature reads WikiText-2."""

CHARACTERS, AT_THE_CUT = 6, 64
"""Characters that are first read for each token wanted; tokens beside a cut, which may be others in the whole text."""


def make_corpus(
    spec: str | Path | None,
    tokenizer: Tokenizer | TransformedImages,
    length: int | None,
    contexts: int | None = None,
    seed: int = 0,
    columns: documents.Columns = documents.TEXT_COLUMN,
    per_label: int | None = None,
    *,
    pack: bool = True,
    show_tokens: ShowTokens = lambda tokens: None,
) -> Corpus:
    """Make the corpus that `spec` names: a path, or one of these.

    `docs` (or None), `held-out` (of docs, what the embedded model was not trained on), `code`, `random`,
    `hf:NAME[:CONFIG[:SPLIT]]`, `wikitext-2` (the test part of the hub's).

    A file named like a keyword is reached as `./docs`. Random tokens and datasets give
    `STREAMED_CONTEXTS` when `contexts` is None. `columns` are those of a table, `per_label`, `pack` and
    `show_tokens` as in `Corpus`. With a `TransformedImages` they are images, without a length: a path, or `hf:NAME…`.
    """
    name = DOCS if spec is None else str(spec)
    if isinstance(tokenizer, TransformedImages):
        if spec is None:
            raise UsageError("the model reads images: give a folder of them, or hf:NAME (--corpus)")
        if name in KEYWORDS:
            raise UsageError(
                f"the model reads images, and {name} is text: give a folder of images, or hf:NAME"
            )
    else:
        assert length is not None
        check_spec(spec, columns, per_label)
        if name in PYTHON_TEXTS:
            choice = Choice(contexts, seed, per_label)
            return Corpus.from_documents(name, PYTHON_TEXTS[name](), tokenizer, length, choice, pack)
        if name == RANDOM:
            some = STREAMED_CONTEXTS if contexts is None else contexts
            return Corpus.random_tokens(tokenizer, length, some, seed)
    return Corpus.from_path(
        PRESETS.get(name, name),
        tokenizer,
        length,
        contexts,
        seed,
        columns.text,
        columns.label_by,
        per_label,
        encoding=columns.encoding,
        pack=pack,
        show_tokens=show_tokens,
    )


def make_stream(
    spec: str | Path | None,
    tokenizer: Tokenizer,
    columns: documents.Columns = documents.TEXT_COLUMN,
    tokens: int | None = None,
    *,
    special_tokens: bool = True,
) -> Corpus:
    """Read a text as one context of all its tokens (1, tokens), as for the perplexities of WikiText-2.

    Rows of a table, and the lines of a text in WikiText's format as its data set has them, are joined by empty lines;
    the whole is tokenized at once.

    Args:
        spec: as of `make_corpus`, but for random tokens, which are drawn; `wikitext-2` is the test
            part of the raw WikiText-2 of the hub.
        tokenizer: the model's own.
        columns: the text column of tables.
        tokens: at most so many, from the beginning; no more is read than they need.
        special_tokens: begin as the tokenizer begins a text (with its beginning-of-sequence token, if it has one).

    Raises:
        UsageError: there is no such text, or it is none of rows, files or documents.
    """
    check_spec(spec, columns)
    if tokens is not None and tokens < LEAST_LENGTH:
        raise UsageError(f"{tokens} tokens of a text: give {LEAST_LENGTH} or more")
    name = DOCS if spec is None else str(spec)
    columns = replace(columns, tokenizer=tokenizer, notes=documents.Notes())
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


def _pieces(name: str, columns: documents.Columns) -> Iterator[str]:
    """Yield a text piece by piece, with what joins its rows."""
    for number, row in enumerate(_rows(name, columns)):
        yield BETWEEN if number else ""
        yield from row


def _rows(name: str, columns: documents.Columns) -> Iterator[Iterable[str]]:
    if name == RANDOM:
        raise UsageError(f"{name} is drawn, and no text of its own: leave out --stride, or give a text")
    if name in PYTHON_TEXTS:
        yield from ([document.text] for document in PYTHON_TEXTS[name]())
    elif (dataset := dataset_of(PRESETS.get(name, name))) is not None:
        yield from ([document.text] for document in documents.streamed_rows(*dataset, columns))
    else:
        for file in documents.files_at(name, columns):
            with documents.reading(file, Path(name), columns):
                yield from _rows_of_file(file, columns)


def _rows_of_file(file: Path, columns: documents.Columns) -> Iterable[Iterable[str]]:
    """Give a table's rows, WikiText's lines with their ends ("" for one without text), any other text in its parts."""
    if (kind := documents.kind_of(file)) not in documents.TEXTS:
        return ([document.text] for document in documents.READERS[kind](file, columns))
    parts, titled = documents.text_parts(file, columns)
    if not titled:
        return [parts]
    lines = (line for part in parts for line in part.removesuffix("\n").split("\n"))
    return ([f"{line}\n" if line.strip() else ""] for line in lines)
