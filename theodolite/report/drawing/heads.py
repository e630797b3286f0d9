"""All heads at once: maps over layer × head, and every head on the plane of its spectrum.

Layer ℓ is block ℓ counted from 0.
"""

from __future__ import annotations

import textwrap
from typing import Any

import numpy as np
import plotly.graph_objects as go

from theodolite.errors import UsageError
from theodolite.measure.column import Column
from theodolite.measure.head_roles import COMMON_ROLES
from theodolite.passes.run import Run
from theodolite.report import style
from theodolite.report.data import (
    Floats,
    array,
    blocks,
    column,
    columns_of,
    entropy_limits,
    head_grid,
    head_labels,
    heads_per_block,
    offered,
)
from theodolite.report.drawing.grammar import Sketch, Sketched, dots, head_cells, reference
from theodolite.system.wording import for_plotly, number

ROBUST = 98.0  # the percentile of |value| at which signed and amount colours saturate
REGIMES = ("early", "middle", "late", "uniform", "vanishing")
REGIME_COLOURS = (
    *(style.order_colour(place) for place in (0.0, 0.5, 1.0)),
    style.REFERENCE,
    style.VERMILLION,
)
HOVER_WIDTH = 58  # characters in a line of a hover text
NOTE_COLUMNS = (
    "entropy",
    "propagation",
    *(role.column for role in COMMON_ROLES),
    "trace",
    "xi_symmetric",
    "eta_symmetric",
    "regime",
)


def regime_kind(name: object) -> int:
    """Index into REGIMES of a regime's name (`late` and `late-site` are one), −1 for none of them."""
    first = str(name).replace("-", " ").split(" ")[0].lower()
    return REGIMES.index(first) if first in REGIMES else -1


def head_measures(run: Run) -> list[Column]:
    """The columns that pickers offer and that this run has for at least one head, in their order."""
    measures = []
    for name, described in offered(run).items():
        if name not in run.heads:
            continue
        if described.kind == "name":
            has = any(regime_kind(value) >= 0 for value in run.heads[name])
        else:
            values = column(run.heads, name)
            has = values is not None and not (described.rare and not np.nan_to_num(values).any())
        if has:
            measures.append(described)
    return measures


def head_notes(run: Run) -> list[list[str]]:
    """For every head of the (L, H) grid its other main numbers, as the lines of a hover text."""
    notes = [["" for _ in range(heads_per_block(run))] for _ in range(blocks(run))]
    names = [name for name in NOTE_COLUMNS if name in run.heads.columns]
    described = columns_of(run, "heads")
    for row in run.heads[["layer", "head", *names]].itertuples(index=False):
        parts = []
        for name, value in zip(names, row[2:], strict=True):
            shown = for_plotly(value) if described[name].kind == "name" else number(value)
            parts.append(f"{described[name].title} {shown}")
        lines = [" · ".join(parts[start : start + 3]) for start in range(0, len(parts), 3)]
        notes[int(row[0])][int(row[1])] = "<br>".join(lines)
    return notes


def _regime_grid(run: Run, name: str) -> Floats:
    grid = np.full((blocks(run), heads_per_block(run)), np.nan)
    for layer, head, value in zip(run.heads["layer"], run.heads["head"], run.heads[name], strict=True):
        kind = regime_kind(value)
        grid[int(layer), int(head)] = kind if kind >= 0 else np.nan
    return grid


def _of_regimes(run: Run, measure: Column) -> dict[str, Any]:
    """The entries of a map of regimes: a colour each, by name."""
    count, grid = len(REGIMES), _regime_grid(run, measure.name)
    return {
        "z": grid,
        "low": -0.5,
        "high": count - 0.5,
        "scale": [[edge / count, colour] for i, colour in enumerate(REGIME_COLOURS) for edge in (i, i + 1)],
        "bar": style.colour_bar("", tickvals=list(range(count)), ticktext=list(REGIMES), ticks=""),
        "text": [["undefined" if np.isnan(kind) else REGIMES[int(kind)] for kind in row] for row in grid],
    }


def _of_amounts(run: Run, measure: Column) -> dict[str, Any]:
    """The entries of a map of numbers: what is coloured, where its colours end, and their scale."""
    grid = head_grid(run, measure.name)
    if grid is None:
        raise UsageError(f"this run has no head measure {measure.name!r}")
    title, finite = measure.unit, np.abs(grid[np.isfinite(grid)])
    low, high = measure.range
    scale = style.SIGNED if low < 0 else style.MAGNITUDE
    if measure.decades:
        with np.errstate(divide="ignore", invalid="ignore"):
            grid = np.where(grid > 0, np.log10(grid), np.nan)
        logs = grid[np.isfinite(grid)]
        low, high = (float(logs.min()), float(logs.max())) if len(logs) else (0.0, 1.0)
        title = "log₁₀"
    elif measure.unit == "nats" and array(run, "visible_keys") is not None:
        high = float(entropy_limits(run).mean(axis=1).max())
    elif np.isinf(high):
        high = float(np.percentile(finite, ROBUST))
    if np.isinf(low):
        high = high or 1.0
        low = -high
    return {"z": grid, "low": low, "high": high if high > low else low + 1.0, "scale": scale, "bar": title}


@Sketched
def head_map(run: Run, measure: str) -> Sketch:
    """One head measure over layer × head; hovering tells what it means and the head's other numbers."""
    described = columns_of(run, "heads")[measure]
    is_name = described.kind == "name"
    value = "%{text}" if is_name else "10^%{z:.3f}" if described.decades else "%{z:.4g}"
    unit = f" {for_plotly(described.unit)}" if described.unit else ""
    meaning = "<br>".join(map(for_plotly, textwrap.wrap(described.meaning, HOVER_WIDTH)))
    hover = (
        f"<b>L%{{y}}H%{{x}}</b><br>{for_plotly(described.title)}: {value}{unit}<br>"
        f"<i>{meaning}</i><br><br>%{{customdata}}<extra></extra>"
    )
    entries = (_of_regimes if is_name else _of_amounts)(run, described)
    return head_cells.sketch(**entries, hover=hover, customdata=head_notes(run))


def regime_plane(run: Run, suffix: str = "") -> go.Figure:
    """Every head on the (ξ, η) plane of the symmetric part, coloured by regime, with the lines |ξη| = 2.

    `suffix` "" for W_QK or "_data" for W_QK Σ̂. Bao et al. 2024, Fig. 2 and Lemma 2.
    """
    xi, eta = column(run.heads, f"xi_symmetric{suffix}"), column(run.heads, f"eta_symmetric{suffix}")
    if xi is None or eta is None:
        raise UsageError("this run has no ξ and η of any head")
    kinds = np.array([regime_kind(value) for value in run.heads.get(f"regime{suffix}", [-1] * len(xi))])
    names = np.array(head_labels(run))
    traces: list[Any] = []
    for kind in range(-1, len(REGIMES)):
        in_regime = (kinds == kind) & np.isfinite(xi) & (eta > 0)
        if in_regime.any():
            known = (REGIMES[kind], REGIME_COLOURS[kind]) if kind >= 0 else ("no regime", style.SKY)
            hover = "%{text}<br>ξ %{x:.4g}, η %{y:.4g}<extra></extra>"
            traces.append(dots(xi[in_regime], eta[in_regime], names[in_regime], *known, hover))
    largest = float(np.nanmax(np.abs(xi))) or 1.0
    for sign in (-1, 1):
        boundary = np.geomspace(largest / 60, largest, 60) * sign
        traces += reference(boundary, 2 / np.abs(boundary), "|ξη| = 2", showlegend=sign > 0)
    low, high = np.log10(eta[eta > 0]).min(), np.log10(eta[eta > 0]).max()
    up = {"type": "log", "dtick": "D2" if high - low < 2 else 1, "tickformat": "~g"}
    layout = {
        "yaxis": up | {"range": [low - 0.3, high + 0.3]},
        "xaxis": {"range": [-1.08 * largest, 1.08 * largest]},
    }
    return style.figure(traces, "ξ (sign and concentration)", "η (scale)", height=380, layout=layout)
