"""A column of a run, declared once, beside the function that computes it.

    @gives(Column("heads", "entropy", "Mean Shannon entropy of the head's attention rows.", unit="nats"))
    def attention_columns(attention: State) -> dict[str, list[float]]: ...

A function of this package that is so marked is found by `catalogue.py` and run by `passes/tabulate.py` as soon as there
is something by the name of each of its parameters. The check of loaded tables, hover texts, headings, pickers, health
checks, the glossary and the page of the run folder are made from the declarations: no other place lists columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, TypeVar

import pandas as pd
from torch import Tensor

from theodolite.judging import SIDES, Criterion

Function = TypeVar("Function", bound=Callable[..., Any])

Kind = Literal["number", "name", "text", "flag", "index", ""]

OPEN_TABLES = ("layers", "heads")
"""The tables whose columns several functions make, and which may have columns of an `Extra`."""

MODEL_INDICES = {"layer": ("layers", 0), "head": ("heads", -1)}
"""Column → the size of the model that it counts to, and how far beyond: residual layers are one more than blocks."""

ATTENTION, BEHAVIOUR, SINKS = "Attention on the text", "Attention patterns", "Sinks"
CONSTITUENTS, POSITIONAL = "Constituents of its logits", "Position in the head"
SPECTRUM, SPECTRUM_DATA = "Spectrum of W_QK", "Spectrum of W_QK Σ̂"
BASIS, CONTEXTS, STREAM = "Positional basis", "Context vectors", "Hidden states"
GROUPS = (
    *(BASIS, CONTEXTS, STREAM, ATTENTION, BEHAVIOUR, SINKS),
    *(CONSTITUENTS, POSITIONAL, SPECTRUM, SPECTRUM_DATA),
)
"""The groups of the pickers, in their order; any other group follows."""

SHARE, BALANCE = (0.0, 1.0), (-1.0, 1.0)
AMOUNT, SIGNED = (0.0, math.inf), (-math.inf, math.inf)  # ranges that many columns have

WITHOUT = ".without"
"""Ending of an array (8, rows): what a column is without each of 8 groups of contexts, as TABLE.COLUMN.without."""

LEFT_OUT = "each of 8 groups of neighbouring contexts left out in turn (jackknife)"


@dataclass(frozen=True)
class Column:
    """One column of one table.

    Attributes:
        table: of the run that it is in, such as "layers" or "heads".
        name: of the column.
        meaning: a sentence or two for who hovers over a heading or a cell.
        formula: the exact definition and its conventions, which the page of the run folder adds to the meaning.
        source: publication and section.
        title: its heading, in words; unless given, its name with blanks.
        unit: of its numbers; empty where they have none.
        names: which names there are, of a column of names; empty: any.
        kind: "number"; "name", one of a few; "text"; "flag", true or false; "index", the index of a layer or head.
            Unless given, it follows from `name` and `names`.
        range: of a layer's or head's numbers, which colours span; infinite: as far as the numbers go.
        decades: whether colours go by powers of ten.
        group: of the picker of head maps and of the card of a head; `offered`: whether they have it.
        error: how its standard error is made, which is the column NAME_se; empty: it has none.
        floor: the column of the same table that says what noise or chance alone gives; empty: none is known.
        healthy: what its numbers meet in a healthy model.
        rare: few models have it, and it is not offered where it is 0 in every row.
        short: its heading in the terminal's table of layers or of spectra; empty: it is not in there.
    """

    table: str
    name: str
    meaning: str
    formula: str = ""
    source: str = ""
    title: str = ""
    unit: str = ""
    names: tuple[str, ...] = ()
    kind: Kind = ""
    range: tuple[float, float] = AMOUNT
    decades: bool = False
    group: str = ""
    offered: bool = True
    error: str = ""
    floor: str = ""
    healthy: Criterion | None = None
    rare: bool = False
    short: str = ""

    def __post_init__(self) -> None:
        kind = self.kind or ("index" if self.name in MODEL_INDICES else "name" if self.names else "number")
        object.__setattr__(self, "kind", kind)
        object.__setattr__(self, "title", self.title or self.name.replace("_", " "))

    @property
    def needed(self) -> bool:
        """True if a table with rows must have it: of layers and heads only the columns that say which they are."""
        return self.kind == "index" or self.table not in OPEN_TABLES

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the columns in the table: its own, and that of its standard error."""
        return (self.name, f"{self.name}_se") if self.error else (self.name,)

    def to_json(self) -> dict[str, Any]:
        """Convert to plain JSON values; an infinite end of the range is None."""
        return asdict(self) | {"range": [end if math.isfinite(end) else None for end in self.range]}

    @classmethod
    def from_json(cls, entry: Any) -> Column | None:
        """Read what `to_json` gave; None of anything else, which an edited file may have."""
        try:
            low, high = entry["range"]
            ends = (-math.inf if low is None else float(low), math.inf if high is None else float(high))
            healthy = entry["healthy"] and Criterion(**entry["healthy"])
            column = cls(**entry | {"range": ends, "names": tuple(entry["names"]), "healthy": healthy})
        except (TypeError, ValueError, KeyError, AttributeError):
            return None
        texts = [getattr(column, field.name) for field in fields(cls) if field.type == "str"]
        known = healthy is None or (healthy.side in SIDES and isinstance(healthy.limit, float | int))
        return column if known and all(isinstance(text, str) for text in texts) else None


def head_places(table: str) -> tuple[Column, Column]:
    """Declare the columns of a table that say which head a row is of."""
    return (
        Column(table, "layer", "Block, counted from 0."),
        Column(table, "head", "Head of the block, counted from 0."),
    )


def table_of(columns: Mapping[str, Tensor | list[str]]) -> pd.DataFrame:
    """Make a table of tensors and texts. An empty list of texts alone would not say that it is of texts."""
    return pd.DataFrame(
        {
            name: pd.Series(values, dtype="str") if isinstance(values, list) else values.numpy()
            for name, values in columns.items()
        }
    )


@dataclass(frozen=True)
class Array:
    """An array of a run: its `name`, `shape` in the sizes of the model and the text, and `meaning`."""

    name: str
    shape: str
    meaning: str


def array_without(table: str, name: str) -> Array:
    """Declare the array of what a column is without each group of contexts."""
    return Array(
        f"{table}.{name}{WITHOUT}", f"(8, rows of {table})", f"`{name}` without each of 8 groups of contexts."
    )


@dataclass(frozen=True)
class Measurement:
    """A function that makes columns, arrays or a table, and the declarations of what it makes."""

    function: Callable[..., Any]
    columns: tuple[Column, ...]
    arrays: tuple[Array, ...]


MEASUREMENTS: list[Measurement] = []
"""All that are declared in the modules imported so far; `catalogue.measurements` has those of the whole package."""


def gives(*declared: Column | Array) -> Callable[[Function], Function]:
    """Declare what a function returns: these columns and arrays by name, or a table of these columns."""
    columns = tuple(one for one in declared if isinstance(one, Column))
    arrays = tuple(one for one in declared if isinstance(one, Array))

    def declare(function: Function) -> Function:
        MEASUREMENTS.append(Measurement(function, columns, arrays))
        return function

    return declare
