"""Texts of a model's tokens: one after the other they are the text, with its spaces between words.

A tokenizer drops the space in front of the first token that it is asked for: a token is read behind an anchor.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from theodolite.corpus.corpus import Corpus
from theodolite.corpus.special_tokens import known_texts
from theodolite.models.opened import OpenModel


def token_text(model: OpenModel) -> Callable[[int], str]:
    """Return the text of a token id, with a space in front where it begins a word.

    Special tokens, and those that are part of a character, are shown as the vocabulary has them.
    """
    tokenizer: Any = model.tokenizer
    if tokenizer is None:
        return str
    _, anchor = next(known_texts(tokenizer), ("", []))

    def decode(ids: list[int]) -> str:
        return str(tokenizer.decode(ids, clean_up_tokenization_spaces=False))

    before = decode(anchor)

    @functools.cache
    def text(token: int) -> str:
        whole = decode([*anchor, token])
        shown = whole[len(before) :] if whole.startswith(before) else decode([token])
        unreadable = "\ufffd" in shown or not shown or token in tokenizer.all_special_ids
        return str(tokenizer.convert_ids_to_tokens(token)) if unreadable else shown

    return text


def text_of_tokens(model: OpenModel, corpus: Corpus) -> Callable[[int], str]:
    """Return the text of a token id of a corpus; of images, and of pictures in a text, the name of their part."""
    if corpus.grid is not None:
        return corpus.grid.token_text
    text, pictured = token_text(model), corpus.pictured
    if pictured is None:
        return text
    return lambda token: text(token) if token < pictured.first else f"image {1 + token - pictured.first}"


def token_texts(model: OpenModel, ids: Tensor) -> list[str]:
    """Return the texts of consecutive tokens (T)."""
    return list(map(token_text(model), ids.tolist()))
