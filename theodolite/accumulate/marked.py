"""Occurrences of tokens at which something was found, recorded so that exactly these are recognised later."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from jaxtyping import Int
from torch import Tensor

from theodolite.accumulate.sums import KeyedSums, State

ANY = -1  # the part (head or dimension) of what is marked at position 0, where nearly every part is

COLUMNS = ("layer", "part", "context", "position", "token_id", "occurrences", "key")
"""Of `marked_places`: `part` is a head or a dimension, `key` what knows the context again (`context_key`)."""


class Marked(KeyedSums):
    """Occurrences by layer, part, number of the context, position and token: keys alone, and no sums."""

    def __init__(self) -> None:
        super().__init__(5, {})

    def mark(self, layer: int, part: Tensor, context: Tensor, position: Tensor, token: Tensor) -> None:
        """Mark occurrences, one a row of all tensors; of position 0 all parts are one."""
        part = torch.where(position == 0, ANY, part)
        self.rows(torch.stack([torch.full_like(part, layer), part, context, position, token], dim=1))


def context_key(ids: Int[Tensor, " positions"]) -> int:
    """Return a number that only contexts of the same tokens have."""
    digest = hashlib.sha256(ids.cpu().long().contiguous().numpy().tobytes()).digest()
    return int.from_bytes(digest[:7], "little")


def marked_places(state: State, contexts: Iterable[Int[Tensor, " positions"]]) -> Int[Tensor, "places 7"]:
    """Tabulate by `COLUMNS` what was marked in these contexts; occurrences are counted after position 0, 0 there."""
    contexts = list(contexts)
    layer, part, context, position, token = state["keys"].unbind(dim=1)
    counts = torch.bincount(
        torch.cat([ids[1:] for ids in contexts]), minlength=int(max(token, default=0)) + 1
    )
    key = torch.tensor([context_key(ids) for ids in contexts])
    occurrences = torch.where(position == 0, 0, counts[token])
    return torch.stack([layer, part, context, position, token, occurrences, key[context]], dim=1)
