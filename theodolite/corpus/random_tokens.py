"""Random token ids, of a number of tokens or of a tokenizer, once or twice over."""

from __future__ import annotations

import numpy as np
from jaxtyping import Int
from torch import Tensor

from theodolite.corpus.special_tokens import SpecialTokens, Tokenizer, frame_of
from theodolite.errors import UsageError


def repeated_random_tokens(
    vocabulary: int | Tokenizer, length: int, contexts: int, seed: int, *, below: int | None = None
) -> tuple[Int[Tensor, "contexts length"], int, int]:
    """Random tokens twice over, for induction: (ids, start, half), drawn as in `Corpus.random_tokens`.

    ids[:, start : start + half] stands again right behind itself; what the tokenizer puts around is around both.
    """
    drawable, frame = drawable_ids(vocabulary, length, below)
    half = (length - len(frame.before) - len(frame.after)) // 2
    drawn = np.random.default_rng(seed).choice(drawable, size=(contexts, half))
    return frame.around(np.tile(drawn, (1, 2))), len(frame.before), half


def drawable_ids(
    vocabulary: int | Tokenizer, length: int, below: int | None
) -> tuple[np.ndarray, SpecialTokens]:
    """The ids to draw random tokens from, and what goes around them."""
    if isinstance(vocabulary, int):
        if vocabulary < 1:
            raise UsageError(f"A vocabulary of {vocabulary} has no tokens to draw; it must be at least 1.")
        return np.arange(vocabulary), SpecialTokens([], [], [])
    # The named ones, and those that are only marked so (Llama 3 reserves hundreds).
    marked = (id for id, token in vocabulary.added_tokens_decoder.items() if token.special)
    named, every = set(vocabulary.all_special_ids), set(vocabulary.get_vocab().values())
    ordinary = every - named - set(marked) or every - named or every  # some mark all of their tokens
    ids = np.array(sorted(ordinary), dtype=np.int64)
    return ids if below is None else ids[ids < below], frame_of(vocabulary, length)
