"""The page of one pruned model: settings, error of each matrix, bytes on disk."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from theodolite.prune import Pruned
from theodolite.report.drawing import pruning as drawing
from theodolite.report.exhibit import Exhibit
from theodolite.report.outcome import Heading, Outcome, Reading
from theodolite.report.outcome_page import folder_of, write_index, write_outcome
from theodolite.system.wording import counted, listed, number, percent

OUTLYING_MATRICES = (
    "matrices that stand out: a lower sparsity or (OATS) another rank ratio would retain more."
)


PRUNING = Heading(
    "sinks/prune",
    "A pruned model: the error of each matrix",
    "Pruning that keeps no low-rank part of the weights loses sinks and outliers, and with them few-shot accuracy "
    "(section 3)",
)


def pruned_outcome(pruned: Pruned) -> Outcome:
    """Key numbers, the errors by block and matrix, and the table."""
    table, pruning = pruned.table, pruned.provenance["pruning"]
    entries = table["outputs"] * table["inputs"]
    removed = float((table["sparsity"] * entries).sum() / entries.sum())
    of = "outputs, scaled norm" if _read_text(table) else "weights"
    readings = [
        Reading("method", _method(pruning)),
        Reading("matrices", f"{len(table)} in {counted(table['layer'].nunique(), 'block')}"),
        *_half(pruning),
        Reading("share of entries removed, of pruned matrices", percent(removed)),
        Reading(f"relative error of {of}", _spread(table["error_scaled"])),
    ]
    if table["error"].notna().any():
        readings.append(Reading("relative error of outputs", _spread(table["error"])))
    if "bytes" in pruning:
        written, dense = (number(pruning[name] / 1e6) for name in ("bytes", "dense_bytes"))
        size = f"{written} MB ({pruning['format']}), dense {dense} MB"
        readings.append(Reading("weights that are loaded", size))
    short = short_of_tokens(pruned)
    notes = [
        ("matrices with fewer tokens than inputs", f"{len(short)}: {listed(short, 3)}" if short else ""),
        ("left dense", listed(list(pruning["left_dense"]), 3)),
        ("fallbacks", listed(list(table.loc[table["fallback"] != "", "fallback"].unique()))),
    ]
    readings += [Reading(name, text) for name, text in notes if text]
    return Outcome(readings, [], {"matrices": table}, _exhibits(table))


def short_of_tokens(pruned: Pruned) -> list[str]:
    """Matrices whose full moments are of fewer tokens than inputs, so that damping decides in part: name and tokens."""
    table = pruned.table
    if "damping" not in pruned.provenance["pruning"]:  # no method that reads full moments
        return []
    return [
        f"{row.layer}.{row.matrix}{'' if row.expert < 0 else f'.{row.expert}'} ({counted(row.tokens, 'token')})"
        for row in table[table["tokens"] < table["inputs"]].itertuples()
    ]


def _half(pruning: dict) -> list[Reading]:
    """Of an encoder-decoder: which half was pruned."""
    if "half" not in pruning:
        return []
    other = {"encoder": "decoder", "decoder": "encoder"}[pruning["half"]]
    text = f"{pruning['half']} alone; the {other} is dense (--attention {other} prunes it instead)"
    return [Reading("pruned half", text)]


def _read_text(table: pd.DataFrame) -> bool:
    """Whether a text was read; where none was, `error_scaled` counts all inputs alike."""
    return bool(table["tokens"].any())


def write_page(pruned: Pruned, folder: Path) -> Path:
    """Write the page below `folder`, and return its path.

    Raises:
        WorkError: the folder cannot be written.
    """
    page = write_outcome(PRUNING, pruned_outcome(pruned), pruned.provenance, folder)
    write_index(folder)
    return page


def page_at(folder: Path) -> Path:
    """Where the page below `folder` is."""
    return folder_of(PRUNING.name, folder) / "index.html"


def _exhibits(table: pd.DataFrame) -> list[Exhibit]:
    of_outputs = (
        "Error of each matrix in the scaled norm",
        "‖(W − Ŵ) D‖ / ‖W D‖, D the root mean square of each input of the matrix on the calibration text, as the "
        "pruned blocks before it give them: the norm in which Wanda and OATS choose, as if inputs were uncorrelated.",
    )
    of_weights = (
        "Error of the weights of each matrix",
        "‖W − Ŵ‖ / ‖W‖. The method weighs no inputs, and no text was read: --errors measures outputs, too.",
    )
    title, shows = of_outputs if _read_text(table) else of_weights
    scaled = Exhibit(
        "error-scaled",
        title,
        drawing.error_map(table, "error_scaled"),
        shows,
        OUTLYING_MATRICES,
        "Sun et al. 2024, eq. 1; Zhang & Papyan 2025, section 2",
        wide=True,
    )
    if not table["error"].notna().any():
        return [scaled]
    exact = Exhibit(
        "error",
        "Error of the outputs of each matrix",
        drawing.error_map(table, "error"),
        "‖(W − Ŵ) X‖ / ‖W X‖ over all inputs X of the calibration text, from their full second moments: what "
        "SparseGPT minimises.",
        OUTLYING_MATRICES,
        "Frantar & Alistarh 2023, eq. 1",
        wide=True,
    )
    return [exact, scaled]


def _method(pruning: dict) -> str:
    also = [f"pattern {pruning['pattern']}"] if pruning["pattern"] else []
    also += ["exact"] if pruning.get("exact") else []
    return ", ".join([pruning["method"], *also])


def _spread(errors: pd.Series) -> str:
    return f"mean {number(errors.mean())}, from {number(errors.min())} to {number(errors.max())}"
