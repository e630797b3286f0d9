"""The page of one pruned model: settings, error of each matrix, bytes on disk."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from theodolite.prune import Pruned
from theodolite.report import style
from theodolite.report.drawing.grammar import heat, map_height
from theodolite.report.outcome import Heading, Outcome, folder_of, write_index, write_outcome
from theodolite.system.wording import counted, for_plotly, listed, number, percent

PRUNING = Heading(
    "sinks/prune",
    "A pruned model: the error of each matrix",
    "Pruning that keeps no low-rank part of the weights loses sinks and outliers, and with them few-shot accuracy "
    "(section 3)",
)


def pruned_outcome(pruned: Pruned) -> Outcome:
    """Make the outcome: key numbers, the errors by block and matrix, and the table."""
    table, pruning = pruned.table, pruned.provenance["pruning"]
    outcome = Outcome(tables={"matrices": table})
    entries = table["outputs"] * table["inputs"]
    read_text = bool(table["tokens"].any())  # else `error_scaled` counts all inputs alike
    pattern = pruning["pattern"] and f"pattern {pruning['pattern']}"
    parts = (pruning["method"], pattern, pruning.get("exact") and "exact")
    outcome.read("method", ", ".join(filter(None, parts)))
    outcome.read("matrices", f"{len(table)} in {counted(table['layer'].nunique(), 'block')}")
    removed = float((table["sparsity"] * entries).sum() / entries.sum())
    outcome.read("share of entries removed, of pruned matrices", percent(removed))
    of = "outputs, scaled norm" if read_text else "weights"
    errors = table["error_scaled"]
    spread = f"mean {number(errors.mean())}, from {number(errors.min())} to {number(errors.max())}"
    outcome.read(f"relative error of {of}", spread)
    if "bytes" in pruning:
        written, dense = (number(pruning[name] / 1e6) for name in ("bytes", "dense_bytes"))
        outcome.read("weights that are loaded", f"{written} MB ({pruning['format']}), dense {dense} MB")
    # Full moments are of fewer tokens than inputs, so that damping decides in part.
    few = table[table["tokens"] < table["inputs"]] if "damping" in pruning else table[:0]
    short = [
        f"{row.layer}.{row.matrix}{'' if row.expert < 0 else f'.{row.expert}'} ({counted(row.tokens, 'token')})"
        for row in few.itertuples()
    ]
    if short:
        text = f"{len(short)}: {listed(short, 3)}; give more --contexts"
        outcome.read("matrices with fewer tokens than inputs", text)
    if left := pruning["left_dense"]:
        share = sum(left.values()) / (sum(left.values()) + int(entries.sum()))
        outcome.read("left dense", f"{percent(share)} of the blocks' weights: {listed(list(left), 3)}")
    if fallbacks := list(filter(None, table["fallback"].unique())):
        outcome.read("fallbacks", listed(fallbacks))
    outcome.show("prune", "error-scaled" if read_text else "error-weights", error_map(table))
    return outcome


def write_page(pruned: Pruned, folder: Path) -> Path:
    """Write the page below `folder`, and return its path; `WorkError` where it cannot be written."""
    page = write_outcome(PRUNING, pruned_outcome(pruned), pruned.provenance, folder)
    write_index(folder, "Pruning of")
    return page


def page_at(folder: Path) -> Path:
    """Return the path of the page below `folder`."""
    return folder_of(PRUNING.name, folder) / "index.html"


def error_map(table: pd.DataFrame) -> go.Figure:
    """Draw a relative error of every matrix: blocks down, names across; the experts of a block as their mean."""
    names = list(dict.fromkeys(table["matrix"]))
    values = table.pivot_table("error_scaled", "layer", "matrix", aggfunc="mean", dropna=False, sort=False)
    values = values[names]
    highest = float(np.nanmax([*table["error_scaled"], 1e-3]))
    hover = "block %{y}, %{x}: %{z:.3f}<extra></extra>"
    x, y = list(map(for_plotly, names)), list(map(str, values.index))
    trace = heat(values.to_numpy(), 0, highest, hover, bar="relative error", x=x, y=y)
    layout = {"yaxis": {"type": "category", "autorange": "reversed"}, "xaxis": {"type": "category"}}
    return style.figure([trace], "", "block", height=map_height(len(values)), layout=layout)
