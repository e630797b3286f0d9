"""Write the page of a comparison and `comparison.json`, and print the comparison in a terminal.

The page has one table of all parts, the verdicts, and figures before and after. That of a series of checkpoints, or of
any models, has their key numbers in one table, and curves over training.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import plotly.graph_objects as go
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from theodolite.comparison.audit import Audit
from theodolite.comparison.parts import OUTPUTS
from theodolite.comparison.survival import MORE_THAN_HARDLY_ANY, NEARLY_ALL, Survival
from theodolite.judging import Verdict, mix_of
from theodolite.passes.run import Run
from theodolite.report.content import measures, summary_row
from theodolite.report.data import records
from theodolite.report.drawing import compare as drawing
from theodolite.report.exhibit import by_name
from theodolite.report.outcome import MARKS, Heading, Outcome, result, write_index, write_outcome
from theodolite.report.terminal import show_outcome
from theodolite.system.files import disk_errors, write_text
from theodolite.system.wording import harmless, listed, number, percent, visible

SCHEMA_VERSION = 2
FILE = "comparison.json"


def outcome(audits: Sequence[Audit]) -> Outcome:
    """Make the page's content."""
    page = Outcome(lead=_lead(audits))
    for audit in audits:
        page.verdicts += _verdicts(audit, explain=audit is audits[0])
        page.runs |= {audit.other: audit.runs[audit.other]}
    for name in audits[0].tables:
        tables = []
        for audit in audits:
            pair = {"before_in": audit.reference, "after_in": audit.other} if len(audits) > 1 else {}
            if (table := audit.tables.get(name)) is not None:
                tables.append(table.assign(**pair)[[*pair, *table]])
        filled = [table for table in tables if len(table)]
        page.tables[name] = pd.concat(filled or tables[:1], ignore_index=True)
    _draw_parts(page, audits)
    return page


def _lead(audits: Sequence[Audit]) -> pd.DataFrame:
    """Make the table that the page begins with: the overview, with columns of their own for each of several models."""
    tables = []
    for place, audit in enumerate(audits):
        table = audit.overview.set_index("part").drop(columns=["measure", "before"] if place else [])
        after = f"after in {visible(audit.other, 60)}" if len(audits) > 1 else "after"
        tables.append(table.rename(columns={"after": after}).add_suffix(" " * place))
    return pd.concat(tables, axis=1).rename_axis("part").reset_index()


def experiment_of(audits: Sequence[Audit]) -> Heading:
    """Make the page's heading: which models."""
    first, *others = (visible(name, 60) for name in [audits[0].reference, *(audit.other for audit in audits)])
    return Heading("sinks/compare", f"What survives of {first} in {listed(others, 4)}", "")


def _verdicts(audit: Audit, explain: bool) -> list[Verdict]:
    """Judge the whole mechanism and each part, with its sentence and limits; `explain` adds each part's criterion."""
    limits = f"{NEARLY_ALL.side} {NEARLY_ALL.limit:g} is kept, at most {MORE_THAN_HARDLY_ANY.limit:g} lost"

    def judged(part: Survival) -> Verdict:
        criterion = f" Criterion: {part.criterion}." if explain else ""
        left = number(part.family.value) if part.family.is_exact else part.family  # every unit is decided
        evidence = f"{part.sentence}{criterion} Left: {left}; criterion: {limits} (ours)"
        return replace(part.verdict(f"{audit.other}, {part.name}"), evidence=evidence)

    parts = [judged(part) for part in audit.parts if len(part.table)]
    whole = mix_of(f"The mechanism of {audit.reference} survives in {audit.other}", parts)
    return [replace(whole, evidence=audit.summary), *parts, *audit.further]


FIGURES: dict[str, Callable[[pd.DataFrame], go.Figure]] = {
    "sinks": partial(drawing.scatter, shown=drawing.SINK_DOTS),
    "tags": partial(drawing.scatter, shown=drawing.TAG_DOTS),
    OUTPUTS: partial(drawing.scatter, shown=drawing.OUTPUT_DOTS),
    "entropies": partial(drawing.scatter, shown=drawing.ENTROPY_DOTS),
    "outlier dimensions": partial(drawing.scatter, shown=drawing.OUTLIER_DOTS),
    "positional basis": drawing.positions,
    "spectra": partial(drawing.scatter, shown=drawing.SPECTRUM_DOTS),
}
"""How the table of each part is drawn, in the order of the page."""


def _draw_parts(page: Outcome, audits: Sequence[Audit]) -> None:
    """Draw the parts that some comparison has, with a picker where there are several comparisons."""
    for name, draw in FIGURES.items():
        tables = {audit.other: part.table for audit in audits for part in audit.parts if part.name == name}
        if not any(map(len, tables.values())):
            continue
        figures = [draw(table) for table in tables.values()]
        picker = by_name("model", list(tables), figures.__getitem__)
        page.show("compare", name.replace(" ", "-"), picker if len(figures) > 1 else figures[0])


def write(audits: Sequence[Audit], content: Outcome, out: Path) -> tuple[Path, dict[str, Any]]:
    """Write `out`/comparison.json and the page with its tables as parquet; return the page's path, and the JSON."""
    heading, provenance = experiment_of(audits), audits[0].runs[audits[0].reference]
    page = write_outcome(heading, content, provenance, out)
    of_part = ("name", "answer", "criterion", "sentence")
    comparisons = [
        {name: getattr(audit, name) for name in ("reference", "other", "answer", "summary")}
        | {"loss": None if audit.loss is None else records(audit.tables["loss"])[0]}
        | {"parts": [{name: getattr(part, name) for name in of_part} for part in audit.parts]}
        for audit in audits
    ]
    told = {"schema_version": SCHEMA_VERSION, "comparisons": comparisons}
    of_page = result(heading, content, provenance)
    told |= {name: of_page[name] for name in ("verdicts", "tables", "provenance", "other_runs")}
    with disk_errors(out):
        write_text(out / FILE, json.dumps(told, indent=2, ensure_ascii=False, allow_nan=False) + "\n")
    write_index(out, "Comparison with")
    return page, told


def show(audits: Sequence[Audit], content: Outcome, console: Console) -> None:
    """Print all parts of each pair in one table, then the verdicts with their evidence."""
    for audit in audits:
        pair = escape(harmless(f"{audit.reference} → {audit.other}"))
        console.print(f"\n{MARKS[audit.answer]} [bold]{pair}[/bold]", highlight=False)
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for heading in audit.overview:
            is_words = heading in ("part", "measure", "verdict")
            table.add_column(heading, justify="left" if is_words else "right", no_wrap=not is_words)
        for row in audit.overview.to_dict("records"):
            row |= {side: number(row[side]) for side in ("before", "after")}
            table.add_row(*(row | {"left": percent(row["left"]) if row["survived"] else ""}).values())
        console.print(table)
    show_outcome(experiment_of(audits), content, console)


def step_of(name: str) -> int | None:
    """Read the training step from a checkpoint's name: `checkpoint-1000`, `step1000`, `ck_1000`, or its last number."""
    steps = r"(?:checkpoint|ckpt|ck|step|iter|epoch|global_step)[-_]?(\d+)"
    numbers = re.findall(steps, name, re.IGNORECASE) or re.findall(r"\d+", name)
    return int(numbers[-1]) if numbers else None


def write_series(runs: Mapping[str, Run], out: Path) -> tuple[pd.DataFrame, Path]:
    """Write `out`/series.csv and a page with curves below `out`/report; returns the table and the page's path.

    A row a run, by step: `name`, `step` (missing where a name has none), and `summary_row`. Curves need a step in each
    name, and no two alike; without, the page has the table alone.
    """
    rows = [{"name": name, "step": step_of(name), **summary_row(run)} for name, run in runs.items()]
    table = pd.DataFrame(rows).astype({"step": "Int64"})
    table = table.sort_values(["step", "name"], kind="stable", na_position="last", ignore_index=True)
    shown = {name: title for name, title in measures().items() if table[name].notna().any()}
    content = Outcome(tables={"models": table})
    if bool(table["step"].notna().all()) and table["step"].is_unique:
        content.show("series", "curves", drawing.over_training(table, shown))
    for name, title in shown.items():
        values = [number(value) for value in table[name]]
        content.read(f"{title}, first and last model", f"{values[0]} → {values[-1]}")
    last = runs[str(table["name"].iloc[-1])].provenance
    names = [visible(name, 40) for name in table["name"]]
    model = {**last["model"], "id": f"{len(names)} models: {listed(names, 4)}"}
    heading = Heading("series", "Surveys of a series of models", "")
    page = write_outcome(heading, content, {**last, "model": model}, out / "report")
    write_index(out / "report", "Survey of")
    with disk_errors(out):
        write_text(out / "series.csv", table.to_csv(index=False))
    return table, page
