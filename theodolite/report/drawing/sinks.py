"""Where sinks stand and which feature dimensions are outliers.

Both figures thin what does not fit a screen by keeping the largest values, never by averaging them away.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import plotly.graph_objects as go

from theodolite.report import style
from theodolite.report.data import Floats, evenly, need
from theodolite.report.drawing.grammar import heat, rows_down

if TYPE_CHECKING:
    from theodolite.passes.run import Run

POSITION_BINS = 128
LEAST_SCALE = 0.1  # of contexts: where no position is a sink in more, colours end there
DIMENSIONS = 40


def _largest_in_bins(values: Floats, bins: int) -> tuple[Floats, list[str]]:
    """The largest of each of at most `bins` neighbouring groups of columns, and the groups' names.

    Column 0 is always a group of its own: the first position is not like the others.
    """
    length = values.shape[1]
    starts = [0, *[1 + step for step in evenly(length - 1, bins - 1)]] if length > 1 else [0]
    ends = [*starts[1:], length]
    reduced = np.stack([values[:, a:b].max(axis=1) for a, b in zip(starts, ends, strict=True)], axis=1)
    return reduced, [str(a) if b == a + 1 else f"{a}–{b - 1}" for a, b in zip(starts, ends, strict=True)]


def sinks_by_position(run: Run) -> go.Figure:
    """Share of contexts in which each position is a sink of the layer's strongest head."""
    shares = need(run, "sink_by_position")
    strongest = np.nan_to_num(shares).max(axis=1)
    reduced, names = _largest_in_bins(strongest, POSITION_BINS)
    cells = heat(
        reduced,
        0,
        max(float(reduced.max(initial=0.0)), LEAST_SCALE),
        "layer %{y}, position %{customdata}<br>%{z:.1%} of contexts<extra></extra>",
        bar=style.colour_bar("share of contexts", tickformat=".0%"),
        customdata=[names] * len(reduced),
    )
    ticks = evenly(len(names), 9)
    named = {"tickmode": "array", "tickvals": ticks, "ticktext": [names[tick] for tick in ticks]}
    return style.figure(
        [cells],
        "position of the sink",
        "layer",
        height=min(640, max(220, 110 + 22 * len(reduced))),
        layout={"xaxis": {"showgrid": False} | named, "yaxis": rows_down(len(reduced))},
    )


def outlier_shares(run: Run) -> go.Figure:
    """Share of tokens with |x| ≥ 6 in the dimensions where it is highest, over layers."""
    shares = np.nan_to_num(need(run, "outlier_share"))
    highest = shares.max(axis=0)
    dimensions = np.sort(np.argsort(-highest, kind="stable")[:DIMENSIONS])
    dimensions = dimensions[highest[dimensions] > 0] if (highest > 0).any() else dimensions[:1]
    cells = heat(
        shares[:, dimensions],
        0,
        1,
        "layer %{y}, dimension %{x}<br>%{z:.1%} of tokens<extra></extra>",
        bar="share of tokens",
        cells=True,
        x=[str(dimension) for dimension in dimensions],
    )
    named = {"type": "category", "showgrid": False, "tickangle": -90, "tickfont": {"size": 10}}
    return style.figure(
        [cells],
        "feature dimension",
        "layer",
        height=min(640, max(240, 120 + 22 * len(shares))),
        layout={"xaxis": named, "yaxis": rows_down(len(shares))},
    )
