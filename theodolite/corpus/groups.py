"""Split a corpus into eight groups of contexts, for standard errors; and places into stretches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

GROUPS = 8
"""Groups of contexts: a power of two, so that Hadamard's matrix of that size gives balanced halves of them."""


@dataclass(frozen=True)
class Groups:
    """The corpus's contexts in `GROUPS` ranges of nearly equal size: neighbours are often of one document."""

    contexts: int

    def of(self, context: Int[Tensor, " some"]) -> Int[Tensor, " some"]:
        """Give the group of each context."""
        return context * GROUPS // self.contexts

    def parts(self, first: int, batch: int) -> Iterator[tuple[int, slice]]:
        """Cut a batch that begins with the context `first` where a group ends: (group, slice of the batch)."""
        start = 0
        while start < batch:
            group = (first + start) * GROUPS // self.contexts
            end = -(-(group + 1) * self.contexts // GROUPS)  # the first context of the next group
            stop = min(batch, end - first)
            yield group, slice(start, stop)
            start = stop


def halves(contexts: int) -> tuple[Int[Tensor, " half"], Int[Tensor, " other"]]:
    """Split contexts into those to choose by and those to judge by, ranges in turn: the best of many looks too good."""
    parts = min(contexts, GROUPS)
    odd = torch.arange(contexts) * parts // max(contexts, 1) % 2 == 1
    return torch.nonzero(~odd).flatten(), torch.nonzero(odd).flatten()


def one_of_each_stretch(count: int, most: int, seed: int = 0) -> Int[Tensor, " chosen"]:
    """Choose at most so many of `count` places, ascending: one, at random, of each of as many stretches."""
    if count <= most:
        return torch.arange(count)
    edges = torch.linspace(0, count, most + 1).long()
    drawn = torch.rand(most, generator=torch.Generator().manual_seed(seed))
    return edges[:-1] + (drawn * edges.diff()).long()
