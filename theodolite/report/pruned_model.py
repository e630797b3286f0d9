"""The page of one pruned model: what was asked, what was lost in each matrix, how many bytes are left."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from theodolite.passes.run import Run
from theodolite.prune import Pruned
from theodolite.report.drawing import pruning as drawing
from theodolite.report.exhibit import Exhibit, exhibit
from theodolite.report.outcome import Comparison, Heading, Outcome
from theodolite.report.outcome_page import folder_of, write_index, write_outcome
from theodolite.system.wording import counted, listed, number, percent

LOOK_FOR = "matrices that stand out: there, fewer zeros or (OATS) another share of rank would keep more."


PRUNING = Heading(
    "sinks/prune",
    "A pruned model: what was lost in each matrix",
    "Pruning that keeps no low-rank part of the weights loses sinks and outliers, and with them few-shot accuracy "
    "(section 3)",
)


def pruned_outcome(pruned: Pruned) -> Outcome:
    """Key numbers, the errors by block and matrix, and the table."""
    table, told = pruned.table, pruned.provenance["pruning"]
    entries = (table["outputs"] * table["inputs"]).to_numpy(float)
    kept = 1 - float((table["sparsity"] * entries).sum() / entries.sum())
    comparisons = [
        Comparison("method", "", _method(told)),
        Comparison("matrices", "", f"{len(table)} in {counted(table['layer'].nunique(), 'block')}"),
        Comparison("removed of their entries", "", percent(1 - kept)),
        Comparison("relative error of outputs, scaled norm", "", _spread(table["error_scaled"])),
    ]
    if table["error"].notna().any():
        comparisons.append(Comparison("relative error of outputs", "", _spread(table["error"])))
    if "bytes" in told:
        size = f"{number(told['bytes'] / 1e6)} MB ({told['format']}), dense {number(told['dense_bytes'] / 1e6)} MB"
        comparisons.append(Comparison("weights on disk", "", size))
    notes = [
        ("left dense", listed(list(told["left_dense"]), 3)),
        ("fallbacks", listed(list(table.loc[table["fallback"] != "", "fallback"].unique()))),
    ]
    comparisons += [Comparison(name, "", said) for name, said in notes if said]
    return Outcome(comparisons, [], {"matrices": table}, _exhibits(table))


def write_page(pruned: Pruned, place: Path) -> Path:
    """Write the page below `place`, and return its path.

    Raises:
        WorkError: the folder cannot be written.
    """
    empty = pd.DataFrame()
    run = Run(empty, empty, empty, empty, empty, {}, pruned.provenance)
    page = write_outcome(PRUNING, pruned_outcome(pruned), run, place)
    write_index(place)
    return page


def page_at(place: Path) -> Path:
    """Where the page below `place` is."""
    return folder_of(PRUNING.name, place) / "index.html"


def _exhibits(table: pd.DataFrame) -> list[Exhibit]:
    scaled = exhibit(
        "error-scaled",
        "What was lost in each matrix, in the scaled norm",
        drawing.error_map(table, "error_scaled"),
        "‖(W − Ŵ) D‖ / ‖W D‖, D the root mean square of each input of the matrix on the calibration text, as the "
        "pruned blocks before it gave them. The norm in which Wanda and OATS prune; inputs count as if they were "
        "uncorrelated.",
        LOOK_FOR,
        "Sun et al. 2024, eq. 1; Zhang & Papyan 2025, section 2",
        wide=True,
    )
    if not table["error"].notna().any():
        return [scaled]
    exact = exhibit(
        "error",
        "What was lost in the outputs of each matrix",
        drawing.error_map(table, "error"),
        "‖(W − Ŵ) X‖ / ‖W X‖ over all inputs X of the calibration text, from their whole second moments. What "
        "SparseGPT keeps small.",
        LOOK_FOR,
        "Frantar & Alistarh 2023, eq. 1",
        wide=True,
    )
    return [exact, scaled]


def _method(told: dict) -> str:
    pattern = f", pattern {told['pattern']}" if told["pattern"] else ""
    return told["method"] + pattern


def _spread(errors: pd.Series) -> str:
    return f"mean {number(errors.mean())}, from {number(errors.min())} to {number(errors.max())}"
