"""Corpora by name, as on the command line, including addition problems and few-shot prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from theodolite.corpus.addition_task import DIGITS, additions, corpus_name, digits_of, full_length
from theodolite.corpus.building import numbered
from theodolite.corpus.corpus import STREAMED_CONTEXTS, Corpus
from theodolite.corpus.documents import TEXT_COLUMN, Columns
from theodolite.corpus.few_shot_task import CORPUS_STREAM, RULES, prompt_ids
from theodolite.corpus.images import ImageReader, refuse_length
from theodolite.corpus.spec import (
    CODE,
    DOCS,
    FEW_SHOT,
    HELD_OUT,
    KEYWORDS,
    RANDOM,
    check_spec,
    dataset_of,
    preset,
)
from theodolite.corpus.special_tokens import Tokenizer
from theodolite.errors import UsageError
from theodolite.system.progress import ShowTokens

DRAWN_AT_ONCE = 1000


def make_corpus(
    spec: str | Path | None,
    tokenizer: Tokenizer | ImageReader,
    length: int | None,
    contexts: int | None = None,
    seed: int = 0,
    columns: Columns = TEXT_COLUMN,
    per_label: int | None = None,
    *,
    pack: bool = True,
    show_tokens: ShowTokens = lambda tokens: None,
) -> Corpus:
    """The corpus that `spec` names: a path, or one of these.

    `docs` (or None), `held-out` (of docs, what the embedded model was not trained on), `code`, `random`,
    `addition[:DIGITS]`, `few-shot`, `hf:NAME[:CONFIG[:SPLIT]]`, `wikitext-2` (the test part of the hub's).

    A file named like a keyword is reached as `./docs`. Random tokens, additions, prompts and datasets give
    `STREAMED_CONTEXTS` when `contexts` is None. `columns` are those of a table, `per_label`, `pack` and
    `show_tokens` as in `Corpus`. With an `ImageReader` they are images, without a length: a path, or `hf:NAME…`.
    """
    name = DOCS if spec is None else str(spec)
    some = max(STREAMED_CONTEXTS, per_label or 0) if contexts is None else contexts
    if isinstance(tokenizer, ImageReader):
        refuse_length(length)
        if spec is None:
            raise UsageError("the model reads images: give a folder of them, or hf:NAME (--corpus)")
        if name in KEYWORDS or digits_of(name) is not None:
            raise UsageError(
                f"the model reads images, and {name} is text: give a folder of images, or hf:NAME"
            )
    else:
        assert length is not None
        check_spec(spec, columns, per_label)
        if name == DOCS:
            return Corpus.python_docs(tokenizer, length, contexts, seed, per_label, pack=pack)
        if name == HELD_OUT:
            return Corpus.python_docs(tokenizer, length, contexts, seed, held_out=True, pack=pack)
        if name == CODE:
            return Corpus.stdlib_code(tokenizer, length, contexts, seed, per_label, pack=pack)
        if name == RANDOM:
            return Corpus.random_tokens(tokenizer, length, some, seed)
        if name == FEW_SHOT:
            return few_shot_corpus(tokenizer, length, some, seed)
        if (digits := digits_of(name)) is not None:
            return addition_corpus(tokenizer, length, some, seed, digits)
    labels = (columns.label, columns.rows, per_label)
    more: dict[str, Any] = {"pack": pack, "show_tokens": show_tokens}
    dataset = dataset_of(preset(name))
    if dataset is None:
        return Corpus.from_path(name, tokenizer, length, contexts, seed, columns.text, *labels, **more)
    of, config, split = dataset
    place = (config or None, split or "train", columns.text, seed)
    return Corpus.from_dataset(of, tokenizer, length, some, *place, *labels, **more)


def addition_corpus(
    tokenizer: Tokenizer, length: int, contexts: int, seed: int = 0, digits: tuple[int, int] = DIGITS
) -> Corpus:
    """Addition problems with `digits` digits (`addition_task.additions`), one per context, cut to `length` characters.

    Shorter ones are redrawn. At the full length of 33 all three numbers of 5 to 10 digits have ten, so that `+`
    and `=` stand at the same positions in every context; at 24, say, their places vary.

    Raises:
        UsageError: a length below 4 or above that of the longest example, or a tokenizer that does not give a token
            for each character.
    """
    full = full_length(digits)
    if not 4 <= length <= full:
        raise UsageError(
            f"these addition problems have up to {full} characters; use a --length from 4 to {full}"
        )
    random = np.random.default_rng(seed)
    rows: list[list[int]] = []
    while len(rows) < contexts:
        long = [
            example.text
            for example in additions(DRAWN_AT_ONCE, random, digits)
            if len(example.text) >= length
        ]
        rows += [
            list(tokenizer(t[:length], add_special_tokens=False, verbose=False)["input_ids"]) for t in long
        ]
        if {len(row) for row in rows} - {length}:
            raise UsageError(
                "addition problems need a tokenizer with one token per character, as `theodolite train` makes"
            )
    ids = torch.from_numpy(np.array(rows[:contexts], dtype=np.int64))
    return Corpus(corpus_name(digits), ids, *numbered([None] * contexts), seed)


def few_shot_corpus(tokenizer: Tokenizer, length: int, contexts: int, seed: int = 0) -> Corpus:
    """Few-shot prompts (`few_shot_task.RULES`), one per context, cut to `length` tokens; no test prompts among them.

    Raises:
        UsageError: a length below 4 or above that of a prompt, or a tokenizer without a token for each character.
    """
    prompts = RULES.draw(contexts, np.random.default_rng([seed, CORPUS_STREAM]))
    ids, _, _ = prompt_ids(prompts, RULES, tokenizer)
    if not 4 <= length <= ids.shape[1]:
        raise UsageError(f"these prompts have {ids.shape[1]} tokens; use a --length from 4 to {ids.shape[1]}")
    return Corpus(FEW_SHOT, ids[:, :length].clone(), *numbered([None] * contexts), seed)
