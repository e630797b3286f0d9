"""All declarations of this package, found by importing its modules: a module that is added is found, too."""

from __future__ import annotations

import functools
import hashlib
import importlib
import json
import pkgutil
from typing import Any

import pandas as pd
from pandas.api.types import is_bool_dtype, is_integer_dtype, is_numeric_dtype, is_string_dtype

from theodolite import measure
from theodolite.measure.column import GROUPS, MEASUREMENTS, MODEL_INDICES, Array, Column, Measurement

EXTRA_COLUMNS = "extra_columns"  # under which a run's provenance has the declarations of a caller's columns


@functools.cache
def measurements() -> tuple[Measurement, ...]:
    """Return the marked functions of all modules."""
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
