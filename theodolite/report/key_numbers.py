"""The key numbers of a run, one each: what a series of checkpoints draws, and what stands beside an untrained model."""

from __future__ import annotations

import math

import numpy as np

from theodolite.measure.head_roles import INDUCTION, PREVIOUS_TOKEN, SAME_TOKEN
from theodolite.passes.run import Run
from theodolite.report.content import Cell, Table
from theodolite.report.data import column, entropy_share, layer_mean
from theodolite.system.run_folders import UNTRAINED, is_run
from theodolite.system.wording import number, with_error

OVER_LAYERS = {
    "rank": "positional rank, mean over layers",
    "relative_norm": "norm of the positional basis, mean over layers",
    "low_frequency_10": "positional smoothness, mean over layers",
    "incoherence_mean": "incoherence, mean over layers",
    "similarity_within": "within-label cosine, mean over layers",
}
OVER_HEADS = {
    "entropy": "attention entropy in nats, mean over heads",
    "entropy_share": "entropy over its maximum, mean over heads",
    "propagation": "signal propagation ρ, mean over heads",
    "sink_first": "first-token sink, share of contexts",
    "sink_later": "later sink, share of contexts",
}
STRONGEST = {
    "previous_token_max": (PREVIOUS_TOKEN.column, "previous-token score, strongest head"),
    "induction_max": (INDUCTION.column, "induction score, strongest head"),
    "same_token_max": (SAME_TOKEN.column, "same-token score, strongest head"),
}
MEASURES = OVER_HEADS | OVER_LAYERS | {name: title for name, (_, title) in STRONGEST.items()}
"""Column of the table → what it says."""


def summary_row(run: Run) -> dict[str, float]:
    """The key numbers of a run: every column of `MEASURES`, NaN where it has none; `…_se` for those over layers."""
    row: dict[str, float] = {}
    for name in OVER_HEADS:
        values = entropy_share(run) if name == "entropy_share" else column(run.heads, name)
        row[name] = math.nan if values is None else float(np.nanmean(values))
    for name in OVER_LAYERS:
        row[name], row[f"{name}_se"] = layer_mean(run, name) or (math.nan, math.nan)
    for name, (score, _) in STRONGEST.items():
        values = column(run.heads, score)
        row[name] = math.nan if values is None else float(np.nanmax(values))
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
        for name, title in MEASURES.items()
        if math.isfinite(here[name]) and math.isfinite(there[name])
    ]
    headings = [("", ""), ("this model", ""), ("untrained", ""), ("difference", "what training made")]
    return Table(headings, rows)
