"""Read contexts of unlike lengths: out of padded and packed rows, sorted, in runs of one length.

No padding ever reaches a model: a forward pass reads contexts of one length, each from its own first position.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from theodolite.corpus.groups import Groups
from theodolite.corpus.sampling import LEAST_LENGTH
from theodolite.errors import UsageError

NO_TOKEN = -1
"""Behind a context that is shorter than the longest: no model has such a token, so that reading it would fail."""


def padded(rows: Sequence[Int[Tensor, " tokens"]]) -> tuple[Tensor, Tensor | None]:
    """Pad rows with `NO_TOKEN` to the longest: (contexts, length), and their lengths; None: all alike."""
    lengths = torch.tensor([len(row) for row in rows], device="cpu")
    contexts = torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True, padding_value=NO_TOKEN)
    return contexts, None if (lengths == contexts.shape[1]).all() else lengths


def read_order(lengths: Int[Tensor, " contexts"]) -> Int[Tensor, " contexts"]:
    """Sort contexts by length, the longest first, within each of the eight groups, which stay groups of neighbours."""
    group = Groups(len(lengths)).of(torch.arange(len(lengths), device="cpu"))
    by_length = torch.argsort(lengths, descending=True, stable=True)
    return by_length[torch.argsort(group[by_length], stable=True)]


def runs(lengths: Int[Tensor, " contexts"], first: int, last: int) -> Iterator[slice]:
    """Cut the contexts `first … last − 1` where their length changes."""
    _, counts = lengths[first:last].unique_consecutive(return_counts=True)
    for count in counts.tolist():
        yield slice(first, first + count)
        first += count


def contexts_of_rows(
    ids: Int[Tensor, "rows positions"], attention_mask: Tensor | None, position_ids: Tensor | None
) -> tuple[list[Int[Tensor, " tokens"]], list[int], int]:
    """Take the contexts out of padded or packed rows: contexts, the row of each, and how many were too short.

    Args:
        attention_mask: 0 where a row is padded, on its left or right; as `ids`. None: nowhere.
        position_ids: 0, 1, 2, … from the beginning of every context of a row on; as `ids`. None: a row is one.

    Raises:
        UsageError: a mask or positions of another shape, with holes, or that count otherwise.
    """
    mask, position_ids = (
        given if given is None else _shaped(name, given, ids)
        for name, given in (("attention_mask", attention_mask), ("position_ids", position_ids))
    )
    mask = torch.ones_like(ids) if mask is None else mask
    contexts, rows = [], []
    short = 0
    for row, own_ids in enumerate(ids):
        places = mask[row].nonzero().flatten()
        positions = places - places[:1] if position_ids is None else position_ids[row, places]
        starts = (positions == 0).nonzero().flatten().tolist()
        lengths = np.diff([*starts, len(places)]).tolist()
        counted = [position for length in lengths for position in range(length)]
        if counted != positions.tolist():
            raise UsageError(
                f"attention_mask of row {row} has a hole: give rows that are padded on the left or right, or "
                "position_ids"
                if position_ids is None
                else f"position_ids of row {row} do not count 0, 1, 2, … from the beginning of each context on; "
                "padding belongs in the attention_mask"
            )
        for context in own_ids[places].split(lengths):
            if len(context) < LEAST_LENGTH:
                short += 1
                continue
            contexts.append(context)
            rows.append(row)
    return contexts, rows, short


def _shaped(name: str, given: Tensor, ids: Tensor) -> Tensor:
    if given.ndim == 1:
        given = given.unsqueeze(0)
    if given.shape != ids.shape:
        raise UsageError(
            f"{name} has shape {tuple(given.shape)} and the token ids {tuple(ids.shape)}: give one of that shape"
        )
    return given.cpu()
