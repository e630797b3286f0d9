"""What is declared is what a run has; and a module that is added to the package is found."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from theodolite.judging import Criterion
from theodolite.measure.column import EXTRA_COLUMNS, WITHOUT, Column, arrays, declared
from theodolite.measure.tags import TRACED_HEADS
from theodolite.passes.run import TABLES, Run


def test_every_column_and_array_of_a_run_is_declared(surveyed, traced):
    """Oracle: the tables and arrays themselves. What only some texts and models have is declared, too."""
    surveyed, traced = Run.load(surveyed), Run.load(traced)
    tables = {name: getattr(surveyed, name) for name in TABLES if name != "traces"}
    tables |= {"traces": traced.traces, TRACED_HEADS: traced.heads}
    for name, table in tables.items():
        of_table = declared(name).values()
        columns = {name for column in of_table for name in column.columns}
        assert set(table) <= columns, name
        assert {column.name for column in of_table if column.needed} <= set(table)
        for column in of_table:
            assert column.title, column
            assert column.meaning.endswith("."), column
            assert not column.floor or column.floor in columns
    without = {
        f"{table}.{name}{WITHOUT}"
        for table in ("layers", "heads")
        for name, column in declared(table).items()
        if column.error
    }
    assert {*surveyed.arrays, *traced.arrays} <= set(arrays()) | without
    assert {"layers.norm.without", "layers.rank.without"} <= set(surveyed.arrays)
    for name in set(surveyed.arrays) & without:
        table, column, _ = name.split(".")
        assert surveyed.arrays[name].shape[1] == len(getattr(surveyed, table)), name
        error = (
            surveyed.arrays[name].double().std(dim=0, correction=0) * (len(surveyed.arrays[name]) - 1) ** 0.5
        )
        np.testing.assert_allclose(error, getattr(surveyed, table)[f"{column}_se"], rtol=1e-3, atol=1e-4)


def test_a_module_that_is_added_is_found(tmp_path):
    """And no name is given twice, though imported by several modules."""
    (tmp_path / "added.py").write_text(
        "from theodolite.measure.column import Column, gives\n"
        "@gives(Column('heads', 'added', 'A test.'))\n"
        "def added(attention): return {'added': []}\n"
    )
    code = (
        f"from theodolite import measure; measure.__path__.append({str(tmp_path)!r})\n"
        "from theodolite.measure.column import declared\n"
        "print(declared('heads')['added'].title)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "added\n"


@pytest.mark.parametrize(
    "entry", [{}, {"table": 3, "range": [1], "healthy": {"x": 1}}, {"range": ["a", None]}, 7, None]
)
def test_a_declaration_that_was_edited_counts_for_nothing(entry):
    whole = Column(
        "heads",
        "x",
        "It.",
        title="X",
        range=(0.0, 2.0),
        error="halves",
        healthy=Criterion("at most", 1.0, "ours"),
    )
    provenance = {EXTRA_COLUMNS: [entry, whole.to_json()]}
    assert declared("heads", provenance)["x"] == whole
    assert len(declared("heads", provenance)) == len(declared("heads")) + 1
