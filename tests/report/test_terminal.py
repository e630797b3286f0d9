"""Oracle: the run's own numbers, rounded by hand, in what rich prints."""

from __future__ import annotations

import io

from rich.console import Console

from tests.report.synthetic import make_run, weights_only
from theodolite.passes.run import Run
from theodolite.report.terminal import show_run, tables_as_json


def printed(run: Run, width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width, no_color=True)
    show_run(run, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def row(lines: list[str], layer: int) -> int:
    return next(at for at, line in enumerate(lines) if line.split()[:1] == [str(layer)])


def test_a_wide_terminal_has_errors_beside_their_values(run: Run) -> None:
    lines = printed(run, 160)
    assert "0.97 ±0.05" in lines[row(lines, 0)]
    assert row(lines, 1) == row(lines, 0) + 1
    assert not any("±" in line for line in printed(make_run(), 160))
    assert any("Query-key spectra" in line for line in printed(weights_only(run), 100))


def test_80_columns_have_errors_below_their_values_and_nothing_is_cut(run: Run) -> None:
    lines = printed(run, 80)
    assert "…" not in "".join(lines)
    values, errors = lines[row(lines, 0)], lines[row(lines, 0) + 1]
    for value, error in (("0.97", "±.05"), ("14", "±.5")):
        assert values.index(value) + len(value) == errors.index(error) + len(error)


def test_json_has_every_table_that_has_rows(run: Run) -> None:
    tables = tables_as_json(run)
    assert len(tables["constituents"]) == len(run.constituents)
    assert tables["attribution"][0]["group"] == "position"
    assert set(tables_as_json(weights_only(run))) == {"provenance", "heads"}
