"""A measurement that brings its own sums: an accumulator that a survey feeds, and the columns that it makes of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import ClassVar

from torch import Tensor

from theodolite.accumulate.sums import LayerSums, State
from theodolite.attention.inputs import AttentionInputs
from theodolite.errors import UsageError
from theodolite.measure.column import OPEN_TABLES, Column, declared


class Extra(LayerSums, ABC):
    """Sums over a text that add columns to the tables of a survey, which is given them as `survey(…, extra=[…])`.

    A subclass declares its columns, gives `LayerSums.__init__` its tensors (one a residual layer, or one a block), sums
    in those of `stream`, `attention_input` and `attention` that it needs, and says what comes of it in `columns`. The
    survey works on a copy.

    Attributes:
        name: stands for the measurement in the fingerprint of the run: change it when the numbers change.
        declared: the columns of layers or heads that it gives, none by the name of one which the survey has.
    """

    name: str
    declared: ClassVar[tuple[Column, ...]]

    def stream(self, layer: int, hidden: Tensor) -> None:
        """Add the residual stream (batch, positions, d): layer 0 enters the first block, ℓ leaves block ℓ."""

    def attention_input(self, layer: int, hidden: Tensor) -> None:
        """Add the input of a block's attention module, (batch, positions, d)."""

    def attention(self, layer: int, inputs: AttentionInputs) -> None:
        """Add a block's queries, keys and values."""

    @abstractmethod
    def columns(self, state: State) -> Mapping[str, Sequence[float]]:
        """Return every declared column, from the state of the whole text: N values of layers, L · H of heads."""


def check_extra(extra: Sequence[Extra]) -> None:
    """Raise `UsageError` where one cannot be summed or told apart by name, or has columns that are there."""
    for accumulator in extra:
        if not isinstance(accumulator, Extra):
            kind = type(accumulator).__name__
            raise UsageError(
                f"extra: {kind} is no accumulator: derive its class from Extra, and give an instance"
            )
    names = Counter(accumulator.name for accumulator in extra)
    if twice := [name for name, count in names.items() if count > 1]:
        raise UsageError(f"extra: two accumulators are called {twice[0]!r}: give each a name of its own")
    names_of = {
        table: {name for column in declared(table).values() for name in column.columns}
        for table in OPEN_TABLES
    }
    for name, table, columns in ((e.name, c.table, set(c.columns)) for e in extra for c in e.declared):
        if table not in OPEN_TABLES:
            raise UsageError(f"{name} declares columns of {table!r}: declare them of 'layers' or 'heads'")
        if clash := names_of[table] & columns:
            raise UsageError(f"{name}: the table of {table} has a column {min(clash)!r} already")
        names_of[table] |= columns
