"""Figures of sweeps of pruning over sparsity, rank ratio, and the allocation of rank. They take plain tables."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from theodolite.report import style
from theodolite.system.wording import for_plotly

PANELS = ([0.0, 0.44], [0.56, 1.0])
SIDES = (("loss_more", "loss above the dense model's, nats per token"), ("sinks_kept", "share of sinks kept"))


def fronts(table: pd.DataFrame) -> go.Figure:
    """Loss and sinks kept against bytes: one dot per row, coloured by rank ratio, with the Pareto front.

    Args:
        table: `bytes`, `rank_ratio`, `sparsity`, both measures with their `_se`, `front_loss` and `front_sinks`.
    """
    traces: list[Any] = []
    ratios = sorted(table["rank_ratio"].unique())
    colours = {
        ratio: style.order_colour(index / max(1, len(ratios) - 1)) for index, ratio in enumerate(ratios)
    }
    for index, ((name, _), flag) in enumerate(zip(SIDES, ("front_loss", "front_sinks"), strict=True)):
        axes = _axes(index)
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
            rows = table[table["rank_ratio"] == ratio]
            traces.append(
                go.Scatter(
                    x=rows["bytes"],
                    y=rows[name],
                    error_y=style.error_bars(rows[f"{name}_se"]),
                    mode="markers",
                    marker={"size": 10, "color": colours[ratio]},
                    name=f"rank ratio {ratio:g}",
                    showlegend=index == 0,
                    text=[f"{sparsity:.0%} removed" for sparsity in rows["sparsity"]],
                    hovertemplate="%{text}: %{y:.3g} at %{x:.1%} of the bytes<extra>rank ratio "
                    + f"{ratio:g}</extra>",
                    **axes,
                )
            )
    return _figure(traces, {"title": {"text": "bytes relative to the dense model"}, "tickformat": ".0%"})


def plans(table: pd.DataFrame) -> go.Figure:
    """Both measures by plan: one dot per calibration text, with lines joining those of one text."""
    names = [for_plotly(name) for name in table["plan"].drop_duplicates()]
    traces = []
    for index, (name, _) in enumerate(SIDES):
        for number, (calibration, rows) in enumerate(table.groupby("part")):
            traces.append(
                go.Scatter(
                    x=names,
                    y=rows[name].to_numpy(np.float64),
                    mode="lines+markers",
                    marker={"size": 9},
                    line={"width": 1, "color": style.CATEGORIES[number % len(style.CATEGORIES)]},
                    name=f"calibration {calibration}",
                    showlegend=index == 0,
                    hovertemplate="%{x}: %{y:.4g}<extra></extra>",
                    **_axes(index),
                )
            )
    return _figure(traces, {})


def _axes(index: int) -> dict[str, str]:
    suffix = style.axis_suffix(index)
    return {"xaxis": f"x{suffix}", "yaxis": f"y{suffix}"}


def _figure(traces: list[Any], x_axis: dict[str, Any]) -> go.Figure:
    layout: dict[str, Any] = {}
    for index, (_, title) in enumerate(SIDES):
        suffix = style.axis_suffix(index)
        layout[f"xaxis{suffix}"] = {"domain": PANELS[index], "anchor": f"y{suffix}"} | x_axis
        layout[f"yaxis{suffix}"] = {"anchor": f"x{suffix}", "title": {"text": title}}
    return style.figure(traces, height=430, layout=layout)
