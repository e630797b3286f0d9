"""Oracles: Python's integers, and the positions of `+` and `=` in the text itself."""

from __future__ import annotations

import pytest

from theodolite.corpus.addition_task import CHARACTERS
from theodolite.corpus.named import make_corpus
from theodolite.errors import UsageError
from theodolite_papers.training.task_models import character_tokenizer


def test_additions_are_whole_at_full_length_and_cut_below() -> None:
    """Oracle: the text read back; the same seed gives the same contexts."""
    tokenizer = character_tokenizer(CHARACTERS, 33)
    corpus = make_corpus("addition", tokenizer, 33, 20, 3)
    assert corpus.contexts.shape == (20, 33)
    assert corpus.sha256 == make_corpus("addition", tokenizer, 33, 20, 3).sha256
    assert corpus.sha256 != make_corpus("addition", tokenizer, 33, 20, 4).sha256
    for row in corpus.contexts:
        prompt, answer = tokenizer.decode(row).split("=")
        first, second = prompt.split("+")
        assert int(first) + int(second) == int(answer.strip()[::-1])
        assert (len(first), len(second), len(answer)) == (10, 10, 11)
    texts = [tokenizer.decode(row) for row in make_corpus("addition", tokenizer, 24, 50).contexts]
    assert {len(text) for text in texts} == {24}
    assert len({text.index("+") for text in texts}) > 3


def test_additions_need_a_token_a_character_and_room() -> None:
    """Oracle: the words."""
    with pytest.raises(UsageError, match="use a --length from 4 to 33"):
        make_corpus("addition", character_tokenizer(CHARACTERS, 33), 34)
    with pytest.raises(UsageError, match="one token per character"):
        make_corpus("addition", character_tokenizer("0123456789", 33), 33)
