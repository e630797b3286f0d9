"""Figures of prunings swept over sparsity and rank ratio, and over where the rank goes. They take plain tables."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from theodolite.report import style
from theodolite.system.wording import for_plotly

PANELS = ([0.0, 0.44], [0.56, 1.0])
SIDES = (("loss_more", "loss beyond the dense model's, nats"), ("sinks_kept", "share of sinks kept"))


def fronts(table: pd.DataFrame) -> go.Figure:
    """Loss and sinks kept against bytes: one dot per row, coloured by rank ratio, and the line of those unbeaten.

    Args:
        table: `bytes`, `rank_ratio`, `sparsity`, both measures with their `_se`, `front_loss` and `front_sinks`.
    """
    traces: list[Any] = []
    ratios = sorted(table["rank_ratio"].unique())
    colours = {
        ratio: style.order_colour(place / max(1, len(ratios) - 1)) for place, ratio in enumerate(ratios)
    }
    for place, ((name, _), flag) in enumerate(zip(SIDES, ("front_loss", "front_sinks"), strict=True)):
        axes = _axes(place)
        line = table[table[flag]].sort_values("bytes")
        traces.append(
            go.Scatter(
                x=line["bytes"],
                y=line[name],
                mode="lines",
                line={"color": style.GREY, "width": 1},
                hoverinfo="skip",
                showlegend=False,
                **axes,
            )
        )
        for ratio in ratios:
            own = table[table["rank_ratio"] == ratio]
            traces.append(
                go.Scatter(
                    x=own["bytes"],
                    y=own[name],
                    error_y={"array": own[f"{name}_se"].fillna(0), "thickness": 1, "width": 3},
                    mode="markers",
                    marker={"size": 10, "color": colours[ratio]},
                    name=f"rank ratio {ratio:g}",
                    showlegend=place == 0,
                    text=[f"{sparsity:.0%} removed" for sparsity in own["sparsity"]],
                    hovertemplate="%{text}: %{y:.3g} at %{x:.1%} of the bytes<extra>rank ratio "
                    + f"{ratio:g}</extra>",
                    **axes,
                )
            )
    return _figure(traces, {"title": {"text": "bytes over dense ones"}, "tickformat": ".0%"})


def plans(table: pd.DataFrame) -> go.Figure:
    """Both measures by plan: one dot per calibration, those of one calibration joined."""
    names = [for_plotly(name) for name in table["plan"].drop_duplicates()]
    traces = []
    for place, (name, _) in enumerate(SIDES):
        for number, (part, own) in enumerate(table.groupby("part")):
            traces.append(
                go.Scatter(
                    x=names,
                    y=own[name].to_numpy(np.float64),
                    mode="lines+markers",
                    marker={"size": 9},
                    line={"width": 1, "color": style.CATEGORIES[number % len(style.CATEGORIES)]},
                    name=f"calibration {part}",
                    showlegend=place == 0,
                    hovertemplate="%{x}: %{y:.4g}<extra></extra>",
                    **_axes(place),
                )
            )
    return _figure(traces, {})


def _axes(place: int) -> dict[str, str]:
    own = str(place + 1) if place else ""
    return {"xaxis": f"x{own}", "yaxis": f"y{own}"}


def _figure(traces: list[Any], across: dict[str, Any]) -> go.Figure:
    layout: dict[str, Any] = {}
    for place, (_, title) in enumerate(SIDES):
        own = str(place + 1) if place else ""
        layout[f"xaxis{own}"] = {"domain": PANELS[place], "anchor": f"y{own}"} | across
        layout[f"yaxis{own}"] = {"anchor": f"x{own}", "title": {"text": title}}
    return style.figure(traces, height=430, layout=layout)
