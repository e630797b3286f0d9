"""Which tokens a cache keeps that has room for a few: old sinks up to a number, and the most recent tokens.

Pure functions of flags and positions; no model. After each token that is read, the cache keeps of what it had and of
that token: so the result is the same however a text is cut into chunks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from theodolite.errors import UsageError


@dataclass(frozen=True)
class Room:
    """What a cache has room for.

    Attributes:
        size: tokens at most, the one that is being read among them.
        places: how many of them may be sinks whose place in the window is over.
        first: tokens at the beginning of a context that are always kept, as if they were sinks; of `places`.
        latest: of more sinks than places, keep the latest rather than the earliest.

    Raises:
        UsageError: numbers that leave no token for the window.
    """

    size: int
    places: int
    first: int = 0
    latest: bool = False

    def __post_init__(self) -> None:
        if self.size < 1 or not 0 <= self.first <= self.places < self.size:
            raise UsageError(
                f"a cache of {self.size} tokens with {self.places} places for sinks, {self.first} of them for the "
                "first tokens: give a size of 1 or more, fewer places than that, and no more first tokens than places"
            )


def kept(
    room: Room,
    sinks: Bool[Tensor, "rows candidates"],
    positions: Int[Tensor, "rows candidates"],
    new: int,
) -> Bool[Tensor, "rows new candidates"]:
    """Which candidates the cache keeps after each of the new tokens; these are what that token attends to.

    Args:
        room: what it has room for.
        sinks: whether a token is a sink; what the cache held, then the new ones, in the order of the text.
        positions: of each in its context; below 0 before its beginning.
        new: how many of the candidates are new.
    """
    first = (positions >= 0) & (positions < room.first)
    later = sinks & ~first & (positions >= 0)
    firsts, laters = _up_to(first), _up_to(later)
    last = torch.arange(sinks.shape[1] - new, sinks.shape[1], device=sinks.device)
    index = torch.arange(sinks.shape[1], device=sinks.device)
    visible = index <= last.unsqueeze(1)
    places = room.places - room.first
    # Counts of what comes after a candidate, up to the token that was read last.
    after = last.unsqueeze(1) - index
    firsts_after = firsts[:, last].unsqueeze(2) - firsts.unsqueeze(1)
    if room.latest:
        laters_after = (laters[:, last].unsqueeze(2) - laters.unsqueeze(1)).clamp(max=places)
        chosen = later.unsqueeze(1) & (laters_after < places)
        chosen_of_all = laters[:, last].clamp(max=places)
    else:
        taken = laters.clamp(max=places)
        laters_after = taken[:, last].unsqueeze(2) - taken.unsqueeze(1)
        chosen = (later & (laters <= places)).unsqueeze(1)
        chosen_of_all = taken[:, last]
    chosen = chosen | first.unsqueeze(1)
    window = room.size - chosen_of_all - firsts[:, last]
    recent = after - firsts_after - laters_after < window.unsqueeze(2)
    return visible & (chosen | recent)


def _up_to(flags: Bool[Tensor, "rows candidates"]) -> Int[Tensor, "rows candidates"]:
    """How many are set up to each, itself included."""
    return flags.cumsum(dim=1, dtype=torch.int32)
