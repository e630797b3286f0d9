"""Sinks by position, and traced.

They take a run or plain tables. What does not fit a screen is thinned by keeping the largest values.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from theodolite.measure.tags import NAMED
from theodolite.passes.run import Run
from theodolite.report import style
from theodolite.report.data import Floats, evenly, need
from theodolite.report.drawing.grammar import dots, heat, reference, rows_down
from theodolite.system.wording import for_plotly, head_name, number, percent, shown_token

POSITION_BINS = 128
LEAST_SCALE = 0.1  # of contexts: where no position is a sink in more, colours end there


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


SHOWN_SINKS = 40
ROW = 22  # pixels
KIND_NAMES = {
    "first": "first token",
    "later": "later token",
    "learned": "learned column",
    "stretch": "local sink",
}
KIND_COLOURS = dict(zip(KIND_NAMES, (style.BLUE, style.VERMILLION, style.GREEN, style.ORANGE), strict=True))


def sink_name(row: pd.Series) -> str:
    """`L4H1 “↵”`: a head and its sink."""
    token = f"“{shown_token(row['token'])}”" if row["kind"] in NAMED else KIND_NAMES[row["kind"]]
    return f"{head_name(row['layer'], row['head'])} {token}"


def release_map(traces: pd.DataFrame, release: Floats) -> go.Figure:
    """η² of the strongest sinks: in the head's own output, in colours of its own, then by residual layer."""
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
    drawn = []
    for kind, name in KIND_NAMES.items():
        rows = traces[traces["kind"] == kind]
        if not len(rows):
            continue
        texts = [
            f"{for_plotly(sink_name(row))}<br>a sink in {percent(row['share'])} of contexts, value vector aligned "
            f"with the tag at {number(row['alignment'])}"
            for _, row in rows.iterrows()
        ]
        hover = "%{text}<br>catches %{x:.1%} of all queries, η² %{y:.3f}<extra></extra>"
        look = (texts, name, KIND_COLOURS[kind], hover)
        drawn.append(dots(rows["caught"], rows["tag"], *look, marker={"opacity": 0.8}))
    layout = {"xaxis": {"tickformat": "~%", "rangemode": "tozero"}, "yaxis": {"range": [-0.02, 1.02]}}
    titles = ("share of all queries caught", "η² of the head's output")
    return style.figure(drawn, *titles, height=360, layout=layout)


def release_scatter(heads: pd.DataFrame) -> go.Figure:
    """One dot per head: η² of its grouping in the layer that enters its block, and the largest of the later layers.

    Bars are the standard error of the difference of the two.
    """
    hover_texts = [
        f"{head_name(r['layer'], r['head'])}, strongest at layer {r['released_layer']}"
        for _, r in heads.iterrows()
    ]
    bar = style.whole_bar("layer of the head", int(heads["layer"].max() - heads["layer"].min()))
    of_heads = dots(
        heads["before"],
        heads["released"],
        hover_texts,
        None,
        heads["layer"],
        "%{text}<br>before the head %{x:.3f}, after the head %{y:.3f}<extra></extra>",
        error_y=style.error_bars(heads["gain_se"]),
        marker={"colorscale": style.ORDER, "showscale": True, "colorbar": bar},
        showlegend=False,
    )
    top = float(np.nanmax([heads["before"].max(), heads["released"].max(), 0.05])) * 1.05
    diagonal = reference([0, top], [0, top], "unchanged", showlegend=False)
    layout = {"xaxis": {"range": [0, top]}, "yaxis": {"range": [0, top]}}
    titles = ("η² before the head", "largest η² after the head")
    return style.figure([*diagonal, of_heads], *titles, height=360, layout=layout)
