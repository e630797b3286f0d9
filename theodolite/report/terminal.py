"""Show a run in the terminal: short tables of layers and notable heads, an outcome, and JSON."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

import pandas as pd
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from theodolite.judging import Verdict
from theodolite.measure.column import Column, declared
from theodolite.measure.head_roles import COMMON_ROLES
from theodolite.passes.run import TABLES, Run
from theodolite.report.data import AT_FLOOR, at_floor, evenly, records
from theodolite.report.findings import checks, massive_line, unusual
from theodolite.report.outcome import MARKS, Heading, Outcome
from theodolite.system.wording import harmless, number, rounded_with_error

STRONGEST, MOST_LAYERS = 3, 13
MARK_COLOURS = {"✓": "green", "◐": "yellow", "✗": "red", "–": "dim"}


def show_run(run: Run, console: Console) -> None:
    """Print the short tables of a run."""
    if len(run.layers):
        console.print(_layers(run))
        if left_out := massive_line(run):
            console.print(harmless(left_out), markup=False, highlight=False)
        console.print(_strongest_heads(run.heads))
    else:
        console.print(_spectra(run))
    for place, (sentence, _) in enumerate(unusual(run, checks(run)), 1):
        console.print(f"{place}. {harmless(sentence)}", markup=False, highlight=False)


def show_outcome(
    heading: Heading, outcome: Outcome, console: Console, shown_verdicts: Collection[Verdict] = ()
) -> None:
    """Print the paper's numbers next to the measured ones, and the verdicts that are not in `shown_verdicts`."""
    console.print(f"\n[bold]{escape(heading.name)}[/bold]  {escape(heading.title)}", highlight=False)
    if outcome.readings:
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        printed = any(row.paper for row in outcome.readings)
        parts = ("quantity", "paper", "here") if printed else ("quantity", "here")
        for part in parts:
            table.add_column("" if part == "quantity" else part, overflow="fold")
        for row in outcome.readings:
            table.add_row(*(escape(harmless(getattr(row, part))) for part in parts))
        console.print(table)
    for verdict in outcome.verdicts:
        if verdict in shown_verdicts:
            continue
        mark = MARKS[verdict.answer]
        line = f"[{MARK_COLOURS[mark]}]{mark}[/] {escape(harmless(verdict.claim))}: {verdict.answer}"
        line += f" ({verdict.experiment})" if verdict.experiment else ""
        console.print(line, highlight=False)
        console.print(f"  {harmless(verdict.evidence)}", style="dim", markup=False, highlight=False)


def tables_as_json(run: Run) -> dict[str, Any]:
    """Convert provenance and tables to plain JSON values; NaN becomes null."""
    tables = {name: records(getattr(run, name)) for name in TABLES if len(getattr(run, name))}
    return {"provenance": run.provenance, **tables}


def _short(columns: Mapping[str, Column], rows: pd.DataFrame) -> tuple[dict[str, str], str]:
    """Return the short headings of the columns that the terminal shows, and a caption that says what they stand for."""
    shown = [column for column in columns.values() if column.short and column.name in rows]
    longer = (f"{column.short}: {column.title}" for column in shown if column.short != column.title)
    return {column.name: column.short for column in shown}, "; ".join(longer)


def _layers(run: Run) -> Table:
    """Tabulate the layers, or `MOST_LAYERS` of them, with standard errors (±) below the values."""
    chosen = evenly(len(run.layers), MOST_LAYERS)
    layers = run.layers.iloc[chosen]
    headings, caption = _short(declared("layers", run.provenance), layers)
    known = layers.filter([f"{name}_se" for name in headings]).notna().to_numpy().any()
    hidden = {name: at_floor(run, name)[chosen] for name in headings}
    caption += "; ± one standard error over contexts (coarse for ranks and counts)" if known else ""
    caption += f"; noise: {AT_FLOOR}" if any(noise.any() for noise in hidden.values()) else ""
    caption += f"; {len(layers)} of {len(run.layers)} layers" if len(layers) < len(run.layers) else ""
    padding = 0 if known else (0, 1, 0, 0)
    table = Table(title="Residual stream, by layer", caption=caption, box=box.SIMPLE_HEAD, padding=padding)
    unknown, columns = [math.nan] * len(layers), []
    for name, heading in headings.items():
        table.add_column(heading, justify="right")
        numbers = zip(layers[name], layers.get(f"{name}_se", unknown), hidden[name], strict=True)
        columns.append(["noise" if noise else _with_error(*pair) for *pair, noise in numbers])
    for cells in zip(*columns, strict=True):
        table.add_row(*cells)
    return table


def _with_error(value: float, error: float) -> str:
    shown, spread = rounded_with_error(value, error)
    return f"{shown}\n[dim]±{spread.removeprefix('0')}[/dim]" if spread else _number(value)


def _strongest_heads(heads: pd.DataFrame) -> Table:
    table = Table(title="Strongest heads", box=box.SIMPLE_HEAD)
    table.add_column("measure")
    for rank in range(STRONGEST):
        table.add_column(str(rank + 1))
    for role in COMMON_ROLES:
        best = heads[heads[role.column] > 0].nlargest(STRONGEST, role.column)
        cells = [f"L{row.layer}H{row.head} {_number(getattr(row, role.column))}" for row in best.itertuples()]
        table.add_row(role.name, *(cells or ["none"]))
    return table


def _spectra(run: Run) -> Table:
    headings, caption = _short(declared("heads", run.provenance), run.heads)
    table = Table(title="Query-key spectra, by head", caption=caption, box=box.SIMPLE_HEAD)
    for heading in ("head", *headings.values()):
        table.add_column(heading, justify="left" if heading in ("head", "regime") else "right")
    for row in run.heads.itertuples():
        table.add_row(f"L{row.layer}H{row.head}", *(_number(getattr(row, name)) for name in headings))
    return table


def _number(value: float | str) -> str:
    return escape(value) if isinstance(value, str) else number(value)
