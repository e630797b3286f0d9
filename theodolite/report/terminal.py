"""Show a run in the terminal: short tables of layers and notable heads, an outcome, and JSON."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import pandas as pd
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from theodolite.judging import Verdict
from theodolite.measure.head_roles import COMMON_ROLES
from theodolite.passes.run import Run
from theodolite.report.data import records
from theodolite.report.outcome import MARKS, Heading, Outcome
from theodolite.system.wording import harmless, rounded_with_error

LAYER_COLUMNS = {
    "layer": "layer",
    "rank": "rank",
    "relative_norm": "rel.",
    "low_frequency_10": "smooth",
    "incoherence_mean": "incoh.",
    "similarity_within": "within",
    "similarity_between": "betw.",
    "norm": "norm",
    "rank_collapse": "resid.",
    "massive_activations_first": "mass.",
    "outlier_dimensions": "outl.",
}
SPECTRUM_COLUMNS = {
    "trace": "trace",
    "variance": "variance",
    "xi_symmetric": "ξ sym.",
    "eta_symmetric": "η sym.",
    "r": "r",
}
STRONGEST = 3
MARK_COLOURS = {"✓": "green", "◐": "yellow", "✗": "red", "–": "dim"}
WIDE = 140  # columns of a terminal from which standard errors are printed next to the values, not below


def show_run(run: Run, console: Console) -> None:
    """Print the short tables of a run."""
    if len(run.layers):
        console.print(_layers(run.layers, wide=console.width >= WIDE))
        console.print(_strongest_heads(run.heads))
    else:
        console.print(_spectra(run.heads))


def show_outcome(
    heading: Heading, outcome: Outcome, console: Console, shown_verdicts: Collection[Verdict] = ()
) -> None:
    """Print the paper's numbers next to the measured ones, and the verdicts that are not in `shown_verdicts`."""
    console.print(f"\n[bold]{escape(heading.name)}[/bold]  {escape(heading.title)}", highlight=False)
    if outcome.readings:
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        parts = {"": "quantity", "paper": "paper", "here": "here"}
        if not any(row.paper for row in outcome.readings):
            del parts["paper"]
        for part in parts:
            table.add_column(part, overflow="fold")
        for row in outcome.readings:
            table.add_row(*(escape(harmless(getattr(row, part))) for part in parts.values()))
        console.print(table)
    for verdict in outcome.verdicts:
        if verdict in shown_verdicts:
            continue
        mark = MARKS[verdict.answer]
        line = f"[{MARK_COLOURS[mark]}]{mark}[/] {escape(harmless(verdict.claim))}: {verdict.answer}"
        console.print(line, highlight=False)
        console.print(f"  {harmless(verdict.evidence)}", style="dim", markup=False, highlight=False)


def tables_as_json(run: Run) -> dict[str, Any]:
    """Convert provenance and tables to plain JSON values; NaN becomes null."""
    names = ("layers", "heads", "sinks", "outliers", "constituents", "attribution", "traces")
    tables = {name: records(getattr(run, name)) for name in names if len(getattr(run, name))}
    return {"provenance": run.provenance, **tables}


def _layers(layers: pd.DataFrame, *, wide: bool) -> Table:
    """Tabulate the layers with standard errors (±): next to the values in a wide terminal, below in a narrow one."""
    names = [name for name in LAYER_COLUMNS if name in layers.columns]
    known = any(f"{name}_se" in layers.columns and layers[f"{name}_se"].notna().any() for name in names)
    caption = (
        "rank, relative norm and low-frequency energy (smooth) of the positional basis; incoherence of position and "
        "context; cosine similarity of contexts within and between labels; residual of the tokens (0: rank collapse); "
        "massive activations at position 0; outlier dimensions"
    ) + ("; ± one standard error from resampling contexts (coarse for ranks and counts)" if known else "")
    table = Table(
        title="Residual stream, by layer",
        caption=caption,
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0) if wide or not known else 0,
    )
    for name in names:
        table.add_column(LAYER_COLUMNS[name], justify="right")
    for row in layers.to_dict(orient="records"):
        table.add_row(*(_with_error(row[name], row.get(f"{name}_se", math.nan), wide=wide) for name in names))
    return table


def _with_error(value: float, error: float, *, wide: bool) -> str:
    shown, spread = rounded_with_error(value, error)
    if not spread:
        return _number(value)
    return f"{shown} [dim]±{spread}[/dim]" if wide else f"{shown}\n[dim]±{spread.removeprefix('0')}[/dim]"


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


def _spectra(heads: pd.DataFrame) -> Table:
    table = Table(title="Query-key spectra, by head", box=box.SIMPLE_HEAD)
    for title in ("head", *SPECTRUM_COLUMNS.values(), "regime"):
        table.add_column(title, justify="left" if title in ("head", "regime") else "right")
    for row in heads.itertuples():
        numbers = (_number(getattr(row, column)) for column in SPECTRUM_COLUMNS)
        table.add_row(f"L{row.layer}H{row.head}", *numbers, escape(str(row.regime)))
    return table


def _number(value: float) -> str:
    if math.isnan(value):
        return "–"
    return str(int(value)) if float(value).is_integer() and abs(value) < 1e6 else f"{value:.3g}"
