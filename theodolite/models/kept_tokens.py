"""Which tokens a cache keeps that has room for a few: sinks up to a number, and the most recent tokens.

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
        places: how many of them may be sinks: one at the beginning of a context stays, of later ones the latest.
        first: tokens at the beginning that stay whether they are sinks or not; of `places`.

    Raises:
        UsageError: numbers that leave no token for the window.
    """

    size: int
    places: int
    first: int = 0

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
    stays = positions < room.first
    if room.places:
        stays = stays | (sinks & (positions == 0))
    stays = stays & (positions >= 0)
    later = sinks & ~stays & (positions >= 0)
    last = torch.arange(sinks.shape[1] - new, sinks.shape[1], device=sinks.device)
    index = torch.arange(sinks.shape[1], device=sinks.device)
    count_stays, count_later = (flags.cumsum(dim=1, dtype=torch.int32) for flags in (stays, later))
    # Up to the token that was read last, (rows, new, 1): of those that stay, and room for the others.
    all_stay, all_later = (count[:, last].unsqueeze(2) for count in (count_stays, count_later))
    places = room.places - all_stay
    window = room.size - all_stay - torch.minimum(all_later, places)
    # After each candidate and up to that token: the sinks that are kept, and then all others.
    later_after = torch.minimum(all_later - count_later.unsqueeze(1), places)
    others_after = last.unsqueeze(1) - index - (all_stay - count_stays.unsqueeze(1)) - later_after
    kept_later = later.unsqueeze(1) & (later_after < places)
    visible = index <= last.unsqueeze(1)
    return visible & (stays.unsqueeze(1) | kept_later | (others_after < window))
