"""Figures of outlier dimensions and massive activations: maps, growth through the layers, who carries them, counts.

They take plain arrays. What does not fit a screen is thinned by keeping the largest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from theodolite.report import style
from theodolite.report.data import Floats, evenly
from theodolite.report.drawing.grammar import heat, line, reference, rows_down
from theodolite.system.wording import for_plotly

LINES = 12
TOKENS = 20
SMALLEST = 1e-6  # of the largest value: below it the logarithmic axis of the growth ends
NAMED: dict[str, Any] = {"type": "category", "showgrid": False}  # an axis of dimensions or tokens
TURNED = {"tickangle": -90, "tickfont": {"size": 10}}  # its names, where there are many
DASHES = ("solid", "dash", "dot", "dashdot")


def ratio_map(ratios: Floats, columns: Sequence[object], titles: tuple[str, str, str]) -> go.Figure:
    """Ratios to a median, rows by columns, coloured by their logarithm from 1 up.

    Args:
        ratios: (rows, columns); below 1 and NaN count as 1.
        columns: their names. titles: of the columns, of the rows, of the ratio.
    """
    shown = np.maximum(np.nan_to_num(ratios, nan=1.0), 1.0)
    top = max(float(shown.max()), 10.0)
    ticks = [amount for power in range(8) for amount in (10**power, 3 * 10**power) if amount <= top * 1.001]
    named = {"tickvals": np.log10(ticks).tolist(), "ticktext": [str(tick) for tick in ticks]}
    cells = heat(
        np.log10(shown),
        0,
        float(np.log10(top)),
        f"{titles[1]} %{{y}}, {titles[0]} %{{x}}<br>%{{customdata:.3g}} {titles[2]}<extra></extra>",
        bar=style.colour_bar(titles[2], **named),
        cells=True,
        customdata=ratios.astype(np.float32),
        x=[str(name) for name in columns],
    )
    layout = {"xaxis": NAMED | (TURNED if len(columns) > LINES else {}), "yaxis": rows_down(len(shown))}
    height = min(640, max(260, 140 + 22 * len(shown)))
    return style.figure([cells], titles[0], titles[1], height=height, layout=layout)


def growth(
    lines: Mapping[tuple[str, str], Floats], references: Mapping[str, Floats], threshold: float
) -> go.Figure:
    """|value| by layer on a logarithmic axis: one line per massive activation, against the usual magnitudes.

    Args:
        lines: (dimension, token) → |value| at every layer, the most important first; at most `LINES` are drawn. A
            colour is a dimension.
        references: name → magnitude at every layer that they are compared with.
        threshold: the published one, as a dotted line.
    """
    drawn = dict(list(lines.items())[:LINES])
    dimensions = list(dict.fromkeys(dimension for dimension, _ in drawn))
    drawn_of_dimension: dict[str, int] = dict.fromkeys(dimensions, 0)
    traces: list[Any] = []
    for (dimension, token), values in drawn.items():
        colour = style.CATEGORIES[dimensions.index(dimension) % (len(style.CATEGORIES) - 1)]
        dash = DASHES[drawn_of_dimension[dimension] % len(DASHES)]
        traces += _by_layer(f"{dimension}, {token}", np.where(values > 0, values, np.nan), colour, dash)
        drawn_of_dimension[dimension] += 1
    for (name, values), dash in zip(references.items(), DASHES[1:], strict=False):
        traces += _by_layer(name, np.where(values > 0, values, np.nan), style.GREY, dash)
    all_values = np.concatenate([*drawn.values(), *references.values(), [threshold]])
    top = float(np.nanmax(all_values))
    low = max(float(np.nanmin(all_values[all_values > 0])), SMALLEST * top)
    length = max(len(values) for values in references.values())
    traces += reference([0, length - 1], threshold, f"published threshold, {threshold:g}")
    layout = {
        "xaxis": {"zeroline": False} | style.every_tick(length),
        "yaxis": {"type": "log", "dtick": 1, "range": [np.log10(low / 2), np.log10(2 * top)]},
    }
    return style.figure(traces, "layer", "|value|", height=420, layout=layout)


def _by_layer(name: str, values: Floats, colour: str, dash: str) -> list[Any]:
    hover = f"{for_plotly(name)}<br>layer %{{x}}: %{{y:.4g}}<extra></extra>"
    return line(np.arange(len(values)), values, name, colour, dash=dash, width=2, marker=5, hover=hover)


def carriers(names: Sequence[str], contexts: Floats, notes: Sequence[str]) -> go.Figure:
    """Share of contexts in which a token carries a massive activation, one bar a token, at most `TOKENS` of them.

    Args:
        names: of the tokens, the most frequent first. contexts: shares. notes: what hovering tells more.
    """
    names, notes = list(names[:TOKENS]), list(notes[:TOKENS])
    bars = go.Bar(
        x=contexts[:TOKENS].astype(np.float32),
        # Numbered, since two tokens may look alike.
        y=list(range(len(names))),
        orientation="h",
        marker={"color": style.BLUE},
        customdata=[[for_plotly(name), for_plotly(note)] for name, note in zip(names, notes, strict=True)],
        hovertemplate="%{customdata[0]}: %{x:.1%} of contexts<br>%{customdata[1]}<extra></extra>",
    )
    layout = {
        "yaxis": {
            "autorange": "reversed",
            "tickmode": "array",
            "tickvals": list(range(len(names))),
            "ticktext": [for_plotly(name) for name in names],
            "showgrid": False,
        },
        "xaxis": {"tickformat": ".0%", "rangemode": "tozero"},
    }
    return style.figure([bars], "share of contexts", "", height=110 + 24 * max(3, len(names)), layout=layout)


def counts(columns: Mapping[str, tuple[Floats, str, str]], y: str) -> go.Figure:
    """Numbers by layer: name → (values, colour, dash)."""
    traces = [
        trace
        for name, (values, colour, dash) in columns.items()
        for trace in _by_layer(name, values, colour, dash)
    ]
    length = len(next(iter(columns.values()))[0])
    layers = {"tickmode": "array", "tickvals": evenly(length, 16), "zeroline": False}
    return style.figure(
        traces, "layer", y, height=360, layout={"xaxis": layers, "yaxis": {"rangemode": "tozero"}}
    )
