"""Figures of pruning: what was lost in each matrix, and what is left of a sink.

They take plain tables.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from theodolite.estimates import Estimate
from theodolite.report import style
from theodolite.report.drawing.grammar import heat
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
