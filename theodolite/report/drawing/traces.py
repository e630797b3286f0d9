"""Figures of traced sinks: persistence of tags through the layers, strength of tags. They take plain tables."""

from __future__ import annotations

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from theodolite.measure.tags import NAMED
from theodolite.report import style
from theodolite.report.data import Floats
from theodolite.report.drawing.grammar import heat, line
from theodolite.system.wording import for_plotly, head_name, number, percent, shown_token

SHOWN_SINKS = 40
ROW = 22  # pixels
KIND_COLOURS = {
    "first": style.BLUE,
    "later": style.VERMILLION,
    "learned": style.GREEN,
    "stretch": style.ORANGE,
}
KIND_NAMES = {
    "first": "first token",
    "later": "later token",
    "learned": "learned column",
    "stretch": "local sink",
}


def sink_name(row: pd.Series) -> str:
    """`L4H1 “↵”`: a head and its sink."""
    token = f"“{shown_token(row['token'])}”" if row["kind"] in NAMED else KIND_NAMES[row["kind"]]
    return f"{head_name(row['layer'], row['head'])} {token}"


def release_map(traces: pd.DataFrame, release: Floats) -> go.Figure:
    """η² of the strongest sinks: in the head's own output, then in every residual layer from the entering one on.

    The column of the head's output has its own colour scale.

    Args:
        traces: the table, strongest first. release: its rows by residual layer.
    """
    strongest = traces.head(SHOWN_SINKS)
    names = [
        for_plotly(f"{number + 1}. {sink_name(row)}") for number, (_, row) in enumerate(strongest.iterrows())
    ]
    layers = [str(layer) for layer in range(release.shape[1])]
    heats = [
        heat(
            values,
            0,
            float(np.nanmax(values)) if np.isfinite(values).any() else 1.0,
            f"%{{y}}<br>{quantity}, %{{x}}: η² %{{z:.3f}}<extra></extra>",
            x=columns,
            y=names,
            xgap=gap,
            showscale=True,
            colorbar=style.colour_bar(f"η² {quantity}", x=bar_x),
        )
        # η² in the head's output is ten times that in the stream: on one colour scale the latter would vanish.
        for values, columns, quantity, bar_x, gap in (
            (strongest["tag"].to_numpy(float)[:, None], ["head"], "in the head's output", 1.0, 4),
            (release[: len(strongest)], layers, "in the residual stream", 1.1, 0),
        )
    ]
    layout = {
        "yaxis": {"autorange": "reversed", "automargin": True, "showgrid": False},
        "xaxis": {"type": "category", "showgrid": False},
        "margin": {"l": 150},
    }
    height = 130 + ROW * len(names)
    return style.figure(heats, "head output, then residual layers", height=height, layout=layout)


def strength(traces: pd.DataFrame) -> go.Figure:
    """One dot per sink: the share of all queries that it catches, and η² of the head's output."""
    dots = []
    for kind, name in KIND_NAMES.items():
        rows = traces[traces["kind"] == kind]
        if not len(rows):
            continue
        hover_texts = [
            f"{for_plotly(sink_name(row))}<br>a sink in {percent(row['share'])} of contexts, value vector aligned "
            f"with the tag at {number(row['alignment'])}"
            for _, row in rows.iterrows()
        ]
        dots.append(
            go.Scatter(
                x=rows["caught"].to_numpy(np.float32),
                y=rows["tag"].to_numpy(np.float32),
                name=name,
                mode="markers",
                marker={"size": 8, "color": KIND_COLOURS[kind], "opacity": 0.8},
                text=hover_texts,
                hovertemplate="%{text}<br>catches %{x:.1%} of all queries, η² %{y:.3f}<extra></extra>",
            )
        )
    layout = {"xaxis": {"tickformat": "~%", "rangemode": "tozero"}, "yaxis": {"range": [-0.02, 1.02]}}
    return style.figure(
        dots, "share of all queries caught", "η² of the head's output", height=360, layout=layout
    )


def release_scatter(heads: pd.DataFrame) -> go.Figure:
    """One dot per head: η² of its grouping in the layer that enters its block, and the largest of the later layers.

    Bars are the standard error of the difference of the two.
    """
    hover_texts = [
        f"{head_name(r['layer'], r['head'])}, strongest at layer {r['released_layer']}"
        for _, r in heads.iterrows()
    ]
    dots = go.Scatter(
        x=heads["before"].to_numpy(np.float32),
        y=heads["released"].to_numpy(np.float32),
        error_y=style.error_bars(heads["gain_se"]),
        mode="markers",
        marker={
            "size": 8,
            "color": heads["layer"],
            "colorscale": style.ORDER,
            "showscale": True,
            "colorbar": style.whole_bar(
                "layer of the head", int(heads["layer"].max() - heads["layer"].min())
            ),
        },
        text=hover_texts,
        showlegend=False,
        hovertemplate="%{text}<br>before the head %{x:.3f}, after the head %{y:.3f}<extra></extra>",
    )
    top = float(np.nanmax([heads["before"].max(), heads["released"].max(), 0.05])) * 1.05
    diagonal = line(
        *([0, top], [0, top], "unchanged", style.GREY),
        dash="dot",
        width=1,
        showlegend=False,
        hoverinfo="skip",
    )
    layout = {"xaxis": {"range": [0, top]}, "yaxis": {"range": [0, top]}}
    return style.figure(
        [*diagonal, dots], "η² before the head", "largest η² after the head", height=360, layout=layout
    )
