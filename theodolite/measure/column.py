"""A column of a run, declared once, beside the function that computes it.

    @gives(Column("heads", "entropy", "Mean Shannon entropy of the head's attention rows.", unit="nats"))
    def attention_columns(attention: State) -> dict[str, list[float]]: ...

A function of this package that is so marked is found, in a module that is added, too, and run by `passes/tabulate.py`
as soon as there is something by the name of each of its parameters. The check of loaded tables, hover texts, headings,
pickers, health checks, the glossary and the page of the run folder are made from the declarations: no other place lists
columns.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import json
import math
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, TypeVar

import pandas as pd
from pandas.api.types import is_bool_dtype, is_integer_dtype, is_numeric_dtype, is_string_dtype
from torch import Tensor

from theodolite import measure
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

EXTRA_COLUMNS = "extra_columns"  # under which a run's provenance has the declarations of a caller's columns

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
"""All that are declared in the modules imported so far; `measurements` has those of the whole package."""


def gives(*declared: Column | Array) -> Callable[[Function], Function]:
    """Declare what a function returns: these columns and arrays by name, or a table of these columns."""
    columns = tuple(one for one in declared if isinstance(one, Column))
    arrays = tuple(one for one in declared if isinstance(one, Array))

    def declare(function: Function) -> Function:
        MEASUREMENTS.append(Measurement(function, columns, arrays))
        return function

    return declare


@functools.cache
def measurements() -> tuple[Measurement, ...]:
    """Return the marked functions of all modules of this package, which it imports."""
    for module in pkgutil.iter_modules(measure.__path__):
        importlib.import_module(f"{measure.__name__}.{module.name}")
    # By module: else they would be in the order of imports.
    return tuple(sorted(MEASUREMENTS, key=lambda each: each.function.__module__))


@functools.cache
def arrays() -> dict[str, Array]:
    """Return every array of a run by name."""
    return {array.name: array for maker in measurements() for array in maker.arrays}


@functools.cache
def _declared() -> dict[str, dict[str, Column]]:
    tables: dict[str, dict[str, Column]] = {}
    for maker in measurements():
        for column in maker.columns:
            tables.setdefault(column.table, {})[column.name] = column
    return tables


@functools.cache
def checksum() -> str:
    """Return a checksum of the names of all columns and arrays: where it differs, other things are measured."""
    names = [f"{table}.{name}" for table, columns in _declared().items() for name in columns]
    return hashlib.sha256(json.dumps(sorted([*names, *arrays()])).encode()).hexdigest()[:16]


def declared(table: str, provenance: dict[str, Any] | None = None) -> dict[str, Column]:
    """Return the columns of a table by name, in the order of groups and declarations.

    `table`: such as "layers", or "heads of a trace". Those of a caller, in the `provenance` of a run, are the last
    ones.
    """
    entries = (provenance or {}).get(EXTRA_COLUMNS)
    callers = map(Column.from_json, entries if isinstance(entries, list) else [])
    columns = [*_declared().get(table, {}).values(), *(one for one in callers if one and one.table == table)]
    order = {group: place for place, group in enumerate(GROUPS)}

    def place(column: Column) -> int:
        return -1 if column.kind == "index" else order.get(column.group, len(order))

    return {column.name: column for column in sorted(columns, key=place)}


def fault_of(table: str, rows: pd.DataFrame, model: dict[str, Any]) -> str | None:
    """Say what makes a table of a run of this `model` unreadable; None: nothing.

    A table with a right checksum may be of anybody. A column that is not declared must hold numbers.
    """
    if not len(rows):
        return None
    columns = declared(table)
    if missing := [name for name, column in columns.items() if column.needed and name not in rows]:
        return f"it has no column {missing[0]}"
    for name, values in rows.items():
        column = columns.get(str(name))
        if name in MODEL_INDICES:
            of, last = MODEL_INDICES[str(name)]
            known = is_integer_dtype(values)
            if not known or (of in model and not values.between(0, model[of] + last).all()):
                return f"the model has no such {name} as in its column {name}"
        elif not _is_of_its_kind(values, "number" if column is None else column.kind):
            return f"its column {name} holds {values.dtype}"
        elif column is not None and column.names and not values.isin(column.names).all():
            return f"its column {name} has other names than theodolite's"
    return None


def _is_of_its_kind(values: pd.Series, kind: str) -> bool:
    if kind in ("name", "text"):
        return bool(is_string_dtype(values) or values.isna().all())
    return bool(is_bool_dtype(values) if kind == "flag" else is_numeric_dtype(values))
