"""The key numbers of a series of checkpoints, or of any models: one table, and curves over training."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import pandas as pd

from theodolite.passes.run import Run
from theodolite.report.content import measures, summary_row
from theodolite.report.drawing.compare import over_training
from theodolite.report.outcome import Heading, Outcome, write_index, write_outcome
from theodolite.system.files import disk_errors, write_text
from theodolite.system.wording import listed, number, visible

HEADING = Heading("series", "Surveys of a series of models", "")
PAGE, CSV = "report", "series.csv"

_STEP = re.compile(r"(?:checkpoint|ckpt|ck|step|iter|epoch|global_step)[-_]?(\d+)", re.IGNORECASE)


def step_of(name: str) -> int | None:
    """Read the training step from a checkpoint's name: `checkpoint-1000`, `step1000`, `ck_1000`, or its last number."""
    numbers = _STEP.findall(name) or re.findall(r"\d+", name)
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
    outcome = Outcome(tables={"models": table})
    if bool(table["step"].notna().all()) and table["step"].is_unique:
        outcome.show("series", "curves", over_training(table, shown))
    for name, title in shown.items():
        values = [number(value) for value in table[name]]
        outcome.read(f"{title}, first and last model", f"{values[0]} → {values[-1]}")
    last = runs[str(table["name"].iloc[-1])].provenance
    names = [visible(name, 40) for name in table["name"]]
    model = {**last["model"], "id": f"{len(names)} models: {listed(names, 4)}"}
    page = write_outcome(HEADING, outcome, {**last, "model": model}, out / PAGE)
    write_index(out / PAGE, "Survey of")
    with disk_errors(out):
        write_text(out / CSV, table.to_csv(index=False))
    return table, page
