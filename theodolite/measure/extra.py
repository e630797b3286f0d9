"""A measurement that brings its own sums: an accumulator that a survey feeds, and the columns that it makes of them.

A caller's is given as `survey(…, extra=[…])`. One that is defined in a module of this package is part of every survey.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from theodolite.accumulate.sums import LayerSums, State
from theodolite.attention.inputs import MASKED, AttentionInputs
from theodolite.errors import UsageError
from theodolite.measure.column import OPEN_TABLES, Column


class Extra(LayerSums):
    """Sums over a text that add columns to the tables of a survey.

    A subclass declares its columns, gives `LayerSums.__init__` its tensors (one a residual layer, or one a block), sums
    in those of `stream`, `attention_input` and `attention` that it needs, and says what comes of it in `columns`. The
    survey works on a copy, so that the same instance may be given again. Subclasses of this package are made by the
    numbers of blocks and of heads of the widest block.

    Attributes:
        name: stands for the measurement in the fingerprint of the run: change it when the numbers change.
        declared: the columns of layers or heads that it gives, none by the name of one which the survey has.
    """

    name: str
    declared: ClassVar[tuple[Column, ...]] = ()

    def stream(self, layer: int, hidden: Tensor) -> None:
        """Add the residual stream (batch, positions, d): layer 0 enters the first block, ℓ leaves block ℓ."""

    def attention_input(self, layer: int, hidden: Tensor) -> None:
        """Add the input of a block's attention module, (batch, positions, d)."""

    def attention(self, layer: int, inputs: AttentionInputs) -> None:
        """Add a block's queries, keys and values."""

    def columns(self, state: State) -> Mapping[str, Sequence[float]]:
        """Return every declared column, from the state of the whole text: N values of layers, L · H of heads."""
        raise NotImplementedError


QUERIES = 8
"""Evenly spaced queries of a context: all would cost every product of queries and keys once more."""


def sampled_logits(inputs: AttentionInputs) -> Float[Tensor, "batch heads queries keys"]:
    """Return the logits of `QUERIES` evenly spaced queries of each context, the last included; NaN where masked."""
    rows = torch.arange(1, QUERIES + 1, device=inputs.query.device) * inputs.query.shape[2] // QUERIES - 1
    logits = inputs.of_queries(rows.clamp_min(0).unique()).logits().double()
    return logits.masked_fill(logits < MASKED / 2, torch.nan)


class HeadMean(Extra):
    """The mean over a text of a number of each head: a subclass gives its `column`, and `values` of a batch.

    Made by the numbers of blocks and of heads of the widest block. Values that are NaN are left out. Its `name` is that
    of the column, unless it gives one.
    """

    column: ClassVar[Column]

    def __init_subclass__(cls) -> None:
        if not isinstance(getattr(cls, "column", None), Column):
            raise UsageError(f"{cls.__name__} declares no column: give the class `column`, a Column")
        cls.declared = (cls.column,)
        if "name" not in vars(cls):
            cls.name = cls.column.name

    def __init__(self, layers: int, heads: int) -> None:
        super().__init__(layers, {"sum": (heads,), "count": (heads,)})
        self.heads = heads

    def values(self, inputs: AttentionInputs) -> Tensor:
        """Compute the numbers of a block to be averaged, (batch, heads, any number)."""
        raise NotImplementedError

    def attention(self, layer: int, inputs: AttentionInputs) -> None:
        """Sum the block's values, and how many these are."""
        values = self.values(inputs).double()
        batch, heads = inputs.query.shape[:2]
        if values.ndim != 3 or values.shape[:2] != (batch, heads):
            raise UsageError(
                f"{self.name}: `values` gives a tensor of {tuple(values.shape)}, not ({batch}, {heads}, any number): "
                "contexts, heads and numbers"
            )
        for name, terms in (("sum", values.nan_to_num(0.0)), ("count", (~values.isnan()).double())):
            summed = terms.sum(dim=(0, 2))
            self.add(name, layer, functional.pad(summed, (0, self.heads - len(summed))))

    def columns(self, state: State) -> dict[str, list[float]]:
        """Return the mean of every head."""
        return {self.column.name: (state["sum"] / state["count"]).flatten().tolist()}


def check_extra(extra: Sequence[Extra], taken: Callable[[str], set[str]]) -> None:
    """Raise `UsageError` where one cannot be summed, told apart by name, or tabulated; `taken`: a table's columns."""
    for accumulator in extra:
        kind = type(accumulator).__name__
        if not isinstance(accumulator, Extra):
            raise UsageError(
                f"extra: {kind} is no accumulator: derive its class from Extra, and give an instance"
            )
        if type(accumulator).columns is Extra.columns:
            raise UsageError(f"extra: {kind} has no columns: give its class the method `columns`")
        if not getattr(accumulator, "name", ""):
            raise UsageError(f"extra: {kind} has no name: give its class one")
        declared = accumulator.declared
        if not declared or not all(isinstance(column, Column) for column in declared):
            raise UsageError(
                f"extra: {kind} declares no columns: give its class `declared`, a tuple of Column"
            )
    names = Counter(accumulator.name for accumulator in extra)
    if twice := [name for name, count in names.items() if count > 1]:
        raise UsageError(f"extra: two accumulators are called {twice[0]!r}: give each a name of its own")
    names_of = {table: taken(table) for table in OPEN_TABLES}
    for accumulator in extra:
        for column in accumulator.declared:
            if column.table not in OPEN_TABLES:
                raise UsageError(
                    f"{accumulator.name} declares columns of {column.table!r}: declare them of 'layers' or 'heads'"
                )
            if clash := names_of[column.table] & set(column.columns):
                raise UsageError(
                    f"{accumulator.name}: the table of {column.table} has a column {min(clash)!r} already"
                )
            names_of[column.table] |= set(column.columns)


def extra_columns(
    extra: Sequence[Extra], state_of: Callable[[str], State], rows: dict[str, int]
) -> dict[str, dict[str, Sequence[float]]]:
    """Collect the values of all accumulators from the states by their names: table → column → values.

    Raises:
        UsageError: a column is not declared, or does not have a value for each row.
    """
    tables: dict[str, dict[str, Sequence[float]]] = {table: {} for table in OPEN_TABLES}
    for accumulator in extra:
        table_of = {name: column.table for column in accumulator.declared for name in column.columns}
        for name, values in accumulator.columns(state_of(accumulator.name)).items():
            if name not in table_of:
                raise UsageError(f"{accumulator.name} gives {name!r}, which it does not declare")
            table = table_of[name]
            if len(values) != rows[table]:
                raise UsageError(
                    f"{accumulator.name}: {len(values)} values of {name!r} for {rows[table]} {table}"
                )
            tables[table][name] = values
    return tables
