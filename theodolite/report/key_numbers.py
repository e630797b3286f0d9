"""The key numbers of a run, one each: what a series of checkpoints draws, and what stands beside an untrained model."""

from __future__ import annotations

import math

import numpy as np

from theodolite.measure.catalogue import declared
from theodolite.measure.head_roles import UNIFORM_ATTENTION
from theodolite.passes.run import Run
from theodolite.report.content import Cell, Table
from theodolite.report.data import column, entropy_share, layer_mean
from theodolite.system.run_folders import UNTRAINED, is_run
from theodolite.system.wording import number, with_error

OVER_LAYERS = ("rank", "relative_norm", "low_frequency_10", "incoherence_mean", "similarity_within")
OVER_HEADS = ("entropy", "entropy_share", "propagation", "sink_first", "sink_later")
STRONGEST = ("previous_token", "induction", "same_token")


def measures() -> dict[str, str]:
    """The key numbers by name, and what each says: a column's mean over heads or layers, or its largest value."""
    heads, layers = declared("heads"), declared("layers")
    titles = {name: column.title for name, column in (heads | layers).items()}
    titles |= {UNIFORM_ATTENTION.column: "entropy over its maximum", "entropy": "attention entropy in nats"}
    return (
        {name: f"{titles[name]}, mean over heads" for name in OVER_HEADS}
        | {name: f"{titles[name]}, mean over layers" for name in OVER_LAYERS}
        | {f"{name}_max": f"{titles[name]} score, strongest head" for name in STRONGEST}
    )


def summary_row(run: Run) -> dict[str, float]:
    """The key numbers of a run: every one of `measures`, NaN where it has none; `…_se` for those over layers."""
    row: dict[str, float] = {}
    for name in OVER_HEADS:
        values = entropy_share(run) if name == UNIFORM_ATTENTION.column else column(run.heads, name)
        row[name] = math.nan if values is None else float(np.nanmean(values))
    for name in OVER_LAYERS:
        row[name], row[f"{name}_se"] = layer_mean(run, name) or (math.nan, math.nan)
    for name in STRONGEST:
        values = column(run.heads, name)
        row[f"{name}_max"] = math.nan if values is None else float(np.nanmax(values))
    return row


def untrained_run(run: Run) -> Run | None:
    """The survey of the untrained baseline in the run's own folder; None where there is none."""
    folder = None if run.folder is None else run.folder / UNTRAINED
    return Run.load(folder) if folder is not None and is_run(folder) else None


def beside_untrained(run: Run, untrained: Run) -> Table:
    """The key numbers of a run beside those of the same architecture with random weights, on the same text."""
    here, there = summary_row(run), summary_row(untrained)
    rows = [
        [
            Cell(title),
            *(
                Cell(with_error(row[name], row.get(f"{name}_se", math.nan)), row[name])
                for row in (here, there)
            ),
            Cell(number(here[name] - there[name]), here[name] - there[name]),
        ]
        for name, title in measures().items()
        if math.isfinite(here[name]) and math.isfinite(there[name])
    ]
    headings = [("", ""), ("this model", ""), ("untrained", ""), ("difference", "what training made")]
    return Table(headings, rows)
