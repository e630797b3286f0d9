"""What the columns of a run's tables must hold for what reads them: a table with a right checksum may be of anybody.

What they mean is on docs/run-folder.md. Nothing here reads or writes a file.
"""

from __future__ import annotations

from typing import Any

import pandas as pd
from pandas.api.types import is_bool_dtype, is_integer_dtype, is_numeric_dtype, is_string_dtype

from theodolite.measure.attribution import ATTRIBUTED
from theodolite.measure.head_matrices import ADDITIVE
from theodolite.theory.decomposition import PARTS

REQUIRED = {
    "layers": ("layer",),
    "heads": ("layer", "head"),
    "sinks": ("layer", "head", "token_id", "token", "first", "share"),
    "outliers": ("layer", "dimension", "share", "massive", "massive_first"),
    "examples": ("context", "position", "token"),
    "constituents": ("layer", "head", "query", "key", "share", "standard_error"),
    "attribution": ("layer", "head", "pattern", "score", "group", "share", "only", "without", "uniform"),
    "traces": ("layer", "head", "kind", "token_id", "token", "share"),
}
"""The columns of each table that has rows; it may have more."""

TEXTS = {"spectrum_of", "regime", "regime_data", "token", "query", "key", "pattern", "group", "kind"}
"""Columns of texts, in whichever table."""

LISTS = {"outlier_dimensions"}
"""Of traces, texts that list them; of layers, how many there are."""

FLAGS = {"first"}
"""Columns of truth values; all that are of no other kind are of numbers."""

NAMES = {
    "query": (*PARTS, ADDITIVE),
    "key": (*PARTS, ""),
    "group": ATTRIBUTED,
}
"""Columns of texts which only these can be."""

PLACES = {"layer": ("layers", 0), "head": ("heads", -1)}
"""Column → the size of the model that it counts to, and how far beyond: residual layers are one more than blocks."""


def fault_of(name: str, table: pd.DataFrame, model: dict[str, Any]) -> str | None:
    """What is wrong with the table `name` of a run of this `model`, in words; None: nothing."""
    if not len(table):
        return None
    missing = [column for column in REQUIRED[name] if column not in table]
    if missing:
        return f"it has no column {missing[0]}"
    for column in table:
        values = table[column]
        if column in PLACES:
            of, last = PLACES[column]
            if not is_integer_dtype(values) or (
                of in model and not values.between(0, model[of] + last).all()
            ):
                return f"the model has no such {column} as in its column {column}"
        elif not _is_of_its_kind(str(column), values):
            return f"its column {column} holds {values.dtype}"
        elif column in NAMES and not values.isin(NAMES[str(column)]).all():
            return f"its column {column} has other names than theodolite's"
    return None


def _is_of_its_kind(column: str, values: pd.Series) -> bool:
    is_text = is_string_dtype(values) or values.isna().all()
    if column in TEXTS:
        return bool(is_text)
    if column in LISTS:
        return bool(is_text or is_numeric_dtype(values))
    return bool(is_bool_dtype(values) if column in FLAGS else is_numeric_dtype(values))
