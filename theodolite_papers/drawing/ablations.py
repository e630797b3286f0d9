"""Figures of ablations: what is left of a sink, and changes beside those of a control."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from theodolite.estimates import Estimate
from theodolite.report import style
from theodolite.system.wording import for_plotly


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


def changes(table: pd.DataFrame, measures: list[str]) -> go.Figure:
    """Bars with standard errors: one group per ablation and measure, ablation and control side by side."""
    shown = table[table["measure"].isin(measures)]
    names = [for_plotly(f"{row.ablation}: {row.measure}") for row in shown.itertuples()]
    bars = [
        go.Bar(
            y=names,
            x=shown[column].to_numpy(np.float32),
            error_x=style.error_bars(shown[f"{column}_se"]),
            orientation="h",
            name=name,
            marker={"color": colour},
            hovertemplate="%{y}<br>" + name + ": %{x:.4g}<extra></extra>",
        )
        for column, name, colour in (
            ("control", "control", style.GREY),
            ("change", "ablation", style.VERMILLION),
        )
    ]
    layout = {
        "yaxis": {"autorange": "reversed", "automargin": True},
        "barmode": "group",
        "margin": {"l": 300},
    }
    return style.figure(bars, "change", height=150 + 46 * len(names), layout=layout)
