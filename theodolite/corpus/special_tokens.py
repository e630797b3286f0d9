"""Find the special tokens that a tokenizer puts around every sequence, and the ordinary ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from theodolite.errors import UsageError


class Tokenizer(Protocol):
    """A tokenizer with the interface of `transformers`, slow or fast."""

    all_special_ids: Any
    added_tokens_decoder: Any
    eos_token_id: Any
    sep_token_id: Any

    def __call__(self, text: str, *, add_special_tokens: bool, verbose: bool) -> Any:
        """Return a mapping with the token ids of `text` under `input_ids`."""

    def get_vocab(self) -> dict[str, int]:
        """Return every token and its id."""


@dataclass(frozen=True)
class SpecialTokens:
    """Token ids that a tokenizer puts before and after a sequence, and those between packed documents."""

    before: list[int]
    after: list[int]
    between: list[int]

    def around(self, bodies: np.ndarray) -> Int[Tensor, "contexts length"]:
        """Put the special tokens around bodies of contexts (contexts, body)."""
        ends = (np.tile(np.array(x, dtype=np.int64), (len(bodies), 1)) for x in (self.before, self.after))
        before, after = ends
        return torch.from_numpy(np.concatenate([before, bodies, after], axis=1))


def frame_of(tokenizer: Tokenizer, length: int) -> SpecialTokens:
    """Find what `tokenizer` puts around a sequence, from what it does to a letter."""
    if not callable(tokenizer):
        raise UsageError("text needs a tokenizer: the model has none beside its weights, or none was given")
    bare = list(tokenizer("a", add_special_tokens=False, verbose=False)["input_ids"])
    full = list(tokenizer("a", add_special_tokens=True, verbose=False)["input_ids"])
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            before, after = full[:start], full[start + len(bare) :]
            break
    else:
        raise UsageError(
            f"{type(tokenizer).__name__} changes a text's tokens when it adds special ones; use another."
        )
    if len(before) + len(after) >= length:
        raise UsageError(
            f"A context of {length} tokens is filled by the tokenizer's {len(before) + len(after)} "
            "special ones; use a larger --length."
        )
    ends = (tokenizer.eos_token_id, tokenizer.sep_token_id)
    return SpecialTokens(before, after, [token for token in ends if token is not None][:1])


PIECE, MOST_GROWTH = 64, 32
"""Characters normalised at a time to see how many become of them; Unicode's own forms make 18 of one at most."""


def refuse_growth(tokenizer: Any, text: str) -> None:
    """Raise `UsageError` where a tokenizer's normaliser would grow a text until it fills the memory."""
    normalizer = getattr(getattr(tokenizer, "backend_tokenizer", None), "normalizer", None)
    if normalizer is None:
        return
    for begin in range(0, len(text), PIECE):
        if len(normalizer.normalize_str(text[begin : begin + PIECE])) > MOST_GROWTH * PIECE:
            raise UsageError(
                f"the tokenizer's normaliser makes more than {MOST_GROWTH} characters of one: use another "
                "tokenizer.json"
            )


def trailing_special_tokens(
    tokenizer: Any, ids: Int[Tensor, "contexts length"], lengths: Int[Tensor, " contexts"] | None = None
) -> int:
    """Count the tokens at the end of every context that the tokenizer puts behind a sequence ([SEP], </s>).

    They mark the end of a text and are told apart as position 0 is. 0 where the tokenizer puts none there (most
    decoders), where some context ends in text, and without a tokenizer (None). `lengths`, None: all are as long as
    `ids`.
    """
    if tokenizer is None:
        return 0
    try:
        after = frame_of(tokenizer, ids.shape[1]).after
    except UsageError:
        return 0
    end = torch.full((len(ids),), ids.shape[1], device="cpu") if lengths is None else lengths
    places = end[:, None] - torch.arange(len(after), 0, -1, device="cpu")
    ends = ids.cpu().gather(1, places.clamp_min(0))
    return len(after) if after and bool((ends == torch.tensor(after, device="cpu")).all()) else 0


def repeated_random_tokens(
    vocabulary: int | Tokenizer, length: int, contexts: int, seed: int, *, below: int | None = None
) -> tuple[Int[Tensor, "contexts length"], int, int]:
    """Draw random tokens and repeat them, for induction: (ids, start, half), drawn as in `Corpus.random_tokens`.

    ids[:, start : start + half] stands again right behind itself; what the tokenizer puts around is around both.
    """
    drawable, frame = drawable_ids(vocabulary, length, below)
    half = (length - len(frame.before) - len(frame.after)) // 2
    drawn = np.random.default_rng(seed).choice(drawable, size=(contexts, half))
    return frame.around(np.tile(drawn, (1, 2))), len(frame.before), half


def drawable_ids(
    vocabulary: int | Tokenizer, length: int, below: int | None
) -> tuple[np.ndarray, SpecialTokens]:
    """Give the ids to draw random tokens from, and what goes around them."""
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
