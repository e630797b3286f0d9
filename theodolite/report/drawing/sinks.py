"""Sinks by position, and traced.

They take a run or plain tables. What does not fit a screen is thinned by keeping the largest values.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from theodolite.estimates import Floats
from theodolite.measure.tags import NAMED
from theodolite.passes.run import Run
from theodolite.report import style
from theodolite.report.data import evenly, need
from theodolite.report.drawing.grammar import dots, heat, map_height, noise_floor, reference, rows_down
from theodolite.report.exhibit import exhibit
from theodolite.system.wording import for_plotly, head_name, number, percent, shown_token

POSITION_BINS = 128
LEAST_SCALE = 0.1  # of contexts: where no position is a sink in more, colours end there
SHOWN_SINKS = 40
KIND_NAMES = {
    "first": "first token",
    "later": "later token",
    "learned": "learned column",
    "local": "local sink",
}
KIND_COLOURS = dict(zip(KIND_NAMES, (style.BLUE, style.VERMILLION, style.GREEN, style.ORANGE), strict=True))


@exhibit()
def sinks_by_position(run: Run) -> go.Figure:
    """Draw the share of contexts in which each position is a sink of the strongest head of each block.

    Of neighbouring positions that share a cell the largest is shown; the first position has a cell of its own.
    """
    strongest = np.nan_to_num(need(run, "sink_by_position")).max(axis=1)
    length = strongest.shape[1]
    starts = [0, *[1 + step for step in evenly(length - 1, POSITION_BINS - 1)]] if length > 1 else [0]
    largest = np.maximum.reduceat(strongest, starts, axis=1)
    lasts = [start - 1 for start in [*starts[1:], length]]
    names = [str(a) if a == b else f"{a}–{b}" for a, b in zip(starts, lasts, strict=True)]
    cells = heat(
        largest,
        0,
        max(float(largest.max(initial=0.0)), LEAST_SCALE),
        "block %{y}, position %{customdata}<br>%{z:.1%} of contexts<extra></extra>",
        bar=style.colour_bar("share of contexts", tickformat=".0%"),
        customdata=[names] * len(largest),
    )
    ticks = evenly(len(names), 9)
    named = {"tickmode": "array", "tickvals": ticks, "ticktext": [names[tick] for tick in ticks]}
    layout = {"xaxis": named, "yaxis": rows_down(len(largest))}
    height = map_height(len(largest))
    return style.figure([cells], "position of the sink", "block", height=height, layout=layout)


def sink_name(row: pd.Series) -> str:
    """Name a head and its sink: `L4H1 “↵”`."""
    token = f"“{shown_token(row['token'])}”" if row["kind"] in NAMED else KIND_NAMES[row["kind"]]
    return f"{head_name(row['layer'], row['head'])} {token}"


def release_map(traces: pd.DataFrame, release: Floats) -> go.Figure:
    """Draw η² of the strongest sinks: in the head's own output, in colours of its own, then by residual layer."""
    strongest = traces.head(SHOWN_SINKS)
    named = (sink_name(row) for _, row in strongest.iterrows())
    names = [for_plotly(f"{place}. {name}") for place, name in enumerate(named, 1)]

    def cells(values: Floats, columns: list[str], quantity: str, **look: Any) -> dict[str, Any]:
        highest = float(np.nanmax(values)) if np.isfinite(values).any() else 1.0
        hover = f"%{{y}}<br>{quantity}, %{{x}}: η² %{{z:.3f}}<extra></extra>"
        bar = style.colour_bar(f"η² {quantity}", x=look.pop("bar_x"))
        return heat(values, 0, highest, hover, bar=bar, x=columns, y=names, **look)

    # η² in the head's output is ten times that in the stream: on one colour scale the latter would vanish.
    tags = strongest["tag"].to_numpy(float)[:, None]
    layers = [str(layer) for layer in range(release.shape[1])]
    heats = [
        cells(tags, ["head"], "in the head's output", bar_x=1.0, xgap=4),
        cells(release[: len(strongest)], layers, "in the residual stream", bar_x=1.1),
    ]
    layout = {
        "yaxis": {"autorange": "reversed"},
        "xaxis": {"type": "category"},
        "margin": {"l": 150},
    }
    height = map_height(len(names), most=None)
    return style.figure(heats, "head output, then residual layers", height=height, layout=layout)


def strength(traces: pd.DataFrame) -> go.Figure:
    """Draw one dot per sink: the share of all queries that it catches, and η² of the head's output."""
    drawn = noise_floor([0, float(traces["caught"].max())], float(traces["tag_chance"].max()))
    by_kind = traces.groupby(pd.Categorical(traces["kind"], list(KIND_NAMES)), observed=True)
    for kind, rows in by_kind:
        texts = [
            f"{for_plotly(sink_name(row))}<br>a sink in {percent(row['share'])} of contexts, value vector aligned "
            f"with the tag at {number(row['alignment'])}"
            for _, row in rows.iterrows()
        ]
        hover = "%{text}<br>catches %{x:.1%} of all queries, η² %{y:.3f}<extra></extra>"
        look = (texts, KIND_NAMES[kind], KIND_COLOURS[kind], hover)
        drawn.append(dots(rows["caught"], rows["tag"], *look, marker={"opacity": 0.8}))
    layout = {"xaxis": {"tickformat": "~%", "rangemode": "tozero"}, "yaxis": {"range": [-0.02, 1.02]}}
    titles = ("share of all queries caught", "η² of the head's output")
    return style.figure(drawn, *titles, height=360, layout=layout)


def release_scatter(heads: pd.DataFrame) -> go.Figure:
    """Draw one dot per head: η² of its grouping in the layer that enters its block, and the largest of later layers.

    Bars are the standard error of the difference of the two.
    """
    texts = [
        f"{head_name(r['layer'], r['head'])}, strongest at layer {r['released_layer']}"
        for _, r in heads.iterrows()
    ]
    hover = "%{text}<br>before the head %{x:.3f}, after the head %{y:.3f}<extra></extra>"
    bar = style.whole_bar("block of the head", int(heads["layer"].max() - heads["layer"].min()))
    of_heads = dots(
        heads["before"],
        heads["released"],
        texts,
        None,
        heads["layer"],
        hover,
        error_y=style.error_bars(heads["gain_se"]),
        marker={"colorscale": style.ORDER, "showscale": True, "colorbar": bar},
        showlegend=False,
    )
    top = float(np.nanmax([heads["before"].max(), heads["released"].max(), 0.05])) * 1.05
    diagonal = reference([0, top], [0, top], "unchanged", showlegend=False)
    layout = {"xaxis": {"range": [0, top]}, "yaxis": {"range": [0, top]}}
    titles = ("η² before the head", "largest η² after the head")
    return style.figure([*diagonal, of_heads], *titles, height=360, layout=layout)
