"""Figures of pruning: what was lost in each matrix; sweeps over sparsity, rank ratio, the allocation of rank.

They take plain tables.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from theodolite.estimates import Estimate
from theodolite.report import style
from theodolite.report.drawing.grammar import HEADROOM, Panel, heat, line, panels
from theodolite.system.wording import for_plotly

ROW = 26  # pixels


def error_map(table: pd.DataFrame, column: str) -> go.Figure:
    """A relative error of every matrix, blocks by names; the experts of a block as their mean.

    Args:
        table: one row per matrix. column: `error` or `error_scaled`.
    """
    names = list(dict.fromkeys(table["matrix"]))
    values = table.pivot_table(column, "layer", "matrix", aggfunc="mean", dropna=False, sort=False)[names]
    trace = heat(
        values.to_numpy(),
        0,
        float(np.nanmax([*table[column], 1e-3])),
        "block %{y}, %{x}: %{z:.3f}<extra></extra>",
        bar="relative error",
        x=[for_plotly(name) for name in names],
        y=[str(layer) for layer in values.index],
    )
    layout = {
        "yaxis": {"type": "category", "autorange": "reversed", "showgrid": False},
        "xaxis": {"type": "category", "showgrid": False, "automargin": True},
    }
    height = 130 + ROW * len(values)
    return style.figure([trace], "", "block", height=height, layout=layout)


SIDES = {
    "loss_more": ("loss above the dense model's, nats per token", "front_loss"),
    "sinks_kept": ("share of sinks kept", "front_sinks"),
}
"""Measure → its title, and the column that tells which rows are on its Pareto front."""


def fronts(table: pd.DataFrame) -> go.Figure:
    """Loss and sinks kept against bytes: one dot per row, coloured by rank ratio, with the Pareto front.

    Args:
        table: `bytes`, `rank_ratio`, `sparsity`, both measures with their `_se`, `front_loss` and `front_sinks`.
    """
    ratios = sorted(table["rank_ratio"].unique())

    def traces(name: str) -> list[Any]:
        front = table[table[SIDES[name][1]]].sort_values("bytes")
        drawn = line(
            front["bytes"], front[name], "front", style.GREY, width=1, hoverinfo="skip", showlegend=False
        )
        for index, ratio in enumerate(ratios):
            rows = table[table["rank_ratio"] == ratio]
            label, colour = f"rank ratio {ratio:g}", style.order_colour(index / max(1, len(ratios) - 1))
            drawn += line(
                rows["bytes"],
                rows[name],
                label,
                colour,
                errors=rows[f"{name}_se"].to_numpy(),
                mode="markers",
                marker=10,
                text=[f"{sparsity:.0%} removed" for sparsity in rows["sparsity"]],
                hovertemplate=f"%{{text}}: %{{y:.3g}} at %{{x:.1%}} of the bytes<extra>{label}</extra>",
            )
        return drawn

    return _figure(traces, "bytes relative to the dense model", {"tickformat": ".0%"})


def plans(table: pd.DataFrame) -> go.Figure:
    """Both measures by plan: one dot per calibration text, with lines joining those of one text."""
    names = [for_plotly(name) for name in table["plan"].drop_duplicates()]

    def traces(name: str) -> list[Any]:
        drawn: list[Any] = []
        for number, (calibration, rows) in enumerate(table.groupby("part")):
            colour = style.CATEGORIES[number % len(style.CATEGORIES)]
            hover = "%{x}: %{y:.4g}<extra></extra>"
            drawn += line(
                names, rows[name], f"calibration {calibration}", colour, width=1, marker=9, hover=hover
            )
        return drawn

    return _figure(traces, "", {})


def shares_left(left: Mapping[str, Estimate], limits: Sequence[float]) -> go.Figure:
    """One dot per ablation with its 95 % interval, and a dotted line at each of `limits`."""
    names = ["<br>".join(map(for_plotly, textwrap.wrap(name, 44))) for name in left]
    dots = go.Scatter(
        x=np.array([share.value for share in left.values()], dtype=np.float32),
        y=names,
        mode="markers",
        marker={"size": 11, "color": style.BLUE},
        error_x=style.error_bars([share.margin for share in left.values()]),
        hovertemplate="%{y}: %{x:.3f}<extra></extra>",
    )
    drawn = style.figure(
        [dots],
        "share left",
        height=150 + 60 * len(names),
        layout={"xaxis": {"range": [-0.03, 1.03]}, "yaxis": {"autorange": "reversed", "automargin": True}},
    )
    for limit in limits:
        drawn.add_vline(x=limit, line={"dash": "dot", "width": 1, "color": style.REFERENCE})
    return drawn


def _figure(traces: Callable[[str], list[Any]], x: str, axis: dict[str, Any]) -> go.Figure:
    """A panel per measure, all under the legend of the first."""
    shown = [Panel("", traces(name), x, title, xaxis=axis) for name, (title, _) in SIDES.items()]
    for trace in shown[1].traces:
        trace.showlegend = False
    return panels(shown, 2, height=430 - HEADROOM, gaps=(0.12, 0))
