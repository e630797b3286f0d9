"""How the tokens of a model read."""

from __future__ import annotations

import functools
from collections.abc import Callable

from torch import Tensor

from theodolite.models.open import OpenModel

MOST_PARTS = 12
"""Tokens that are tried together until they are whole characters."""

_SUBSCRIPT = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")


def token_text(model: OpenModel) -> Callable[[int], str]:
    """The text of a token id; tokens that are part of a character are shown as the vocabulary has them."""
    tokenizer = model.tokenizer

    @functools.cache
    def text(token: int) -> str:
        if tokenizer is None:
            return str(token)
        decoded = str(tokenizer.decode([token], clean_up_tokenization_spaces=False))
        raw = tokenizer.convert_ids_to_tokens(token)
        return str(raw) if "\ufffd" in decoded or not decoded else decoded

    return text


def token_texts(model: OpenModel, ids: Tensor) -> list[str]:
    """The texts of consecutive tokens (T); those that share characters have these, and which part they are: 😀₁ 😀₂."""
    alone = token_text(model)
    texts: list[str] = []
    while len(texts) < len(ids):
        start = len(texts)
        for end in range(start + 2, min(start + MOST_PARTS, len(ids)) + 1):
            if model.tokenizer is None or "\ufffd" not in _decoded(model, ids[start : start + 1]):
                break
            together = _decoded(model, ids[start:end])
            if together and "\ufffd" not in together:
                texts += [
                    (together if part == 1 else together.lstrip()) + str(part).translate(_SUBSCRIPT)
                    for part in range(1, end - start + 1)
                ]
                break
        if len(texts) == start:
            texts.append(alone(int(ids[start])))
    return texts


def _decoded(model: OpenModel, ids: Tensor) -> str:
    assert model.tokenizer is not None
    return str(model.tokenizer.decode(ids.tolist(), clean_up_tokenization_spaces=False))
