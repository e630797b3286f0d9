"""Find the special tokens that a tokenizer puts around every sequence, and the ordinary ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from theodolite.errors import UsageError

Tokenizer = Any  # what behaves as a tokenizer of `transformers`, slow or fast


@dataclass(frozen=True)
class SpecialTokens:
    """Token ids that a tokenizer puts before and after a sequence, and those between packed documents."""

    before: list[int]
    after: list[int]
    between: list[int]

    def around(self, bodies: np.ndarray) -> Int[Tensor, "contexts length"]:
        """Put the special tokens around bodies of contexts (contexts, body)."""
        sides = (np.array(ids, dtype=np.int64) for ids in (self.before, self.after))
        before, after = (np.tile(side, (len(bodies), 1)) for side in sides)
        return torch.from_numpy(np.concatenate([before, bodies, after], axis=1))


TEXTS = 4  # unlike texts from which it is told what goes around them
TRIED = 1000  # texts tried for them


def known_texts(tokenizer: Tokenizer) -> Iterator[tuple[str, list[int]]]:
    """Yield short texts that a tokenizer makes unlike tokens of, and these: letters and digits, then its own tokens."""
    if not callable(tokenizer):
        raise UsageError("text needs a tokenizer: the model has none beside its weights, or none was given")

    def vocabulary_tokens() -> Iterator[str]:
        vocabulary, special = tokenizer.get_vocab(), set(tokenizer.all_special_ids)
        for token, number in sorted(vocabulary.items(), key=lambda item: item[1]):
            if number not in special:
                yield token

    yielded = set()
    for text in islice(chain("aZ70", vocabulary_tokens()), TRIED):
        try:
            ids = list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
        except Exception:  # whatever a tokenizer raises of characters that it does not have
            continue
        if ids and tuple(ids) not in yielded:
            yielded.add(tuple(ids))
            yield text, ids


def frame_of(tokenizer: Tokenizer, length: int | None = None) -> SpecialTokens:
    """Find what `tokenizer` puts around several texts of its own vocabulary; in a context of `length` it must fit."""
    frames: list[set[tuple[tuple[int, ...], tuple[int, ...]]]] = []
    for text, bare in islice(known_texts(tokenizer), TEXTS):
        full = list(tokenizer(text, add_special_tokens=True, verbose=False)["input_ids"])
        places = ((at, at + len(bare)) for at in range(len(full) - len(bare) + 1))
        frames.append({(tuple(full[:at]), tuple(full[to:])) for at, to in places if full[at:to] == bare})
    if not frames:
        raise UsageError(f"{type(tokenizer).__name__} makes no token of any text; use another.")
    common = set.intersection(*frames)
    if not common:
        raise UsageError("the tokenizer changes a text's tokens when it adds special ones; use another.")
    before, after = map(list, min(common))
    if length is not None and len(before) + len(after) >= length:
        raise UsageError(
            f"{length} tokens are filled by the tokenizer's special ones; use a larger --length."
        )
    ends = (tokenizer.eos_token_id, tokenizer.sep_token_id)
    return SpecialTokens(before, after, [token for token in ends if token is not None][:1])


PIECE = 64  # characters normalised at a time
MOST_GROWTH = 32  # characters that one becomes at most; Unicode's own forms make 18


def refuse_growth(tokenizer: Any, text: str) -> None:
    """Raise `UsageError` where a tokenizer's normaliser would grow a text until it fills the memory."""
    normalizer = getattr(getattr(tokenizer, "backend_tokenizer", None), "normalizer", None)
    if normalizer is None:
        return
    for begin in range(0, len(text), PIECE):
        if len(normalizer.normalize_str(text[begin : begin + PIECE])) > MOST_GROWTH * PIECE:
            raise UsageError(f"the tokenizer's normaliser makes more than {MOST_GROWTH} characters of one")


def special_ends(
    tokenizer: Any, ids: Int[Tensor, "contexts length"], lengths: Int[Tensor, " contexts"] | None = None
) -> tuple[int, int]:
    """Count what the tokenizer puts around a sequence at the beginning and the end ([SEP], </s>) of every context."""
    if tokenizer is None:
        return 0, 0
    try:
        frame = frame_of(tokenizer, ids.shape[1])
    except UsageError:
        return 0, 0
    before, after = len(frame.before), len(frame.after)
    ends = [ids.shape[1]] * len(ids) if lengths is None else lengths.tolist()
    begins_alike = all(row == frame.before for row in ids[:, :before].tolist())
    ends_alike = all(
        row[max(end - after, 0) : end].tolist() == frame.after for row, end in zip(ids, ends, strict=True)
    )
    return before if begins_alike else 0, after if ends_alike else 0


def repeated_random_tokens(
    vocabulary: int | Tokenizer, length: int, contexts: int, seed: int, *, below: int | None = None
) -> tuple[Int[Tensor, "contexts length"], int, int]:
    """Draw random tokens and repeat them: (ids, start, half), ids[:, start : start + half] right behind itself."""
    drawable, frame = drawable_ids(vocabulary, length, below)
    half = (length - len(frame.before) - len(frame.after)) // 2
    drawn = np.random.default_rng(seed).choice(drawable, size=(contexts, half))
    return frame.around(np.tile(drawn, (1, 2))), len(frame.before), half


def drawable_ids(
    vocabulary: int | Tokenizer, length: int, below: int | None
) -> tuple[np.ndarray, SpecialTokens]:
    """Give the ids to draw random tokens from, and what goes around them."""
    if isinstance(vocabulary, int):
        return np.arange(vocabulary), SpecialTokens([], [], [])
    # The named ones, and those that are only marked so (Llama 3 reserves hundreds).
    marked = (id for id, token in vocabulary.added_tokens_decoder.items() if token.special)
    named, every = set(vocabulary.all_special_ids), set(vocabulary.get_vocab().values())
    ordinary = every - named - set(marked) or every - named or every  # some mark all of their tokens
    ids = np.array(sorted(ordinary), dtype=np.int64)
    return ids if below is None else ids[ids < below], frame_of(vocabulary, length)
