"""Figures of one head on one prompt: attention, output by dimension, tokens coloured by principal components."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from theodolite.report import style
from theodolite.report.data import Floats, evenly
from theodolite.report.drawing.grammar import dots, heat
from theodolite.system.wording import for_plotly, shown_token

LABELLED = 64  # tokens that can all be written at an axis; of more, only some are
DIMENSIONS = 64
STRIP = 34  # pixels: one row of coloured tokens
MARK = "▼"


def _axis(tokens: Sequence[str], sinks: Sequence[int]) -> dict[str, Any]:
    """Tick labels of tokens, `LABELLED` of them and the sinks, which are marked; no label lies over another's."""
    spacing = -(-len(tokens) // LABELLED)  # tokens from one label to the next
    written: list[int] = []
    for sink in sorted(sinks):
        if not written or sink - written[-1] >= spacing:
            written.append(sink)
    unmarked = [i for i in range(0, len(tokens), spacing) if all(abs(i - sink) >= spacing for sink in sinks)]
    ticks = sorted({*unmarked, *sinks})
    names = [
        f"{MARK} {shown_token(tokens[i])}" if i in written else MARK if i in sinks else shown_token(tokens[i])
        for i in ticks
    ]
    return {
        "tickmode": "array",
        "tickvals": ticks,
        "ticktext": [for_plotly(name) for name in names],
        "tickfont": {"size": 8},
        "tickangle": -90,
        "showgrid": False,
        "zeroline": False,
    }


def _numbered(tokens: Sequence[str]) -> list[str]:
    return [for_plotly(f"{position}: {shown_token(token)}") for position, token in enumerate(tokens)]


def attention(weights: Floats, tokens: Sequence[str], sinks: Sequence[int]) -> go.Figure:
    """A head's attention, queries down and keys across; `sinks` are marked at both axes."""
    visible = np.where(np.tri(len(tokens), dtype=bool) | (weights > 0), weights, np.nan)
    names = _numbered(tokens)
    trace = heat(
        visible,
        0,
        1,
        "query %{text}<br>key %{customdata}<br>%{z:.3f}<extra></extra>",
        bar="attention",
        customdata=[names] * len(names),
        text=[[name] * len(names) for name in names],
    )
    layout = {
        "xaxis": _axis(tokens, sinks),
        "yaxis": _axis(tokens, sinks) | {"autorange": "reversed", "tickangle": 0},
        "margin": {"l": 90, "b": 90},
    }
    return style.figure([trace], "key", "query", height=760, layout=layout)


def by_dimension(
    vectors: Floats,
    tokens: Sequence[str],
    sinks: Sequence[int],
    y: str = "token",
    scale_of: Floats | None = None,
) -> go.Figure:
    """Vectors (tokens, d), one row per token: the dimensions that are largest at any token, in their order.

    `scale_of` (rows, d): choose dimensions and colours by these vectors instead, so that figures can be compared.
    """
    largest = np.abs(vectors if scale_of is None else scale_of).max(axis=0)
    dimensions = np.sort(np.argsort(-largest, kind="stable")[:DIMENSIONS])
    values = vectors[:, dimensions]
    limit = float(largest.max()) or 1.0
    trace = heat(
        values,
        -limit,
        limit,
        "%{text}<br>dimension %{customdata}: %{z:.3g}<extra></extra>",
        scale=style.SIGNED,
        bar="value",
        x=list(range(len(dimensions))),
        customdata=[[str(d) for d in dimensions]] * len(values),
        text=[[name] * len(dimensions) for name in _numbered(tokens)],
    )
    ticks = evenly(len(dimensions), 16)
    layout = {
        "xaxis": {
            "tickmode": "array",
            "tickvals": ticks,
            "ticktext": [str(dimensions[tick]) for tick in ticks],
            "showgrid": False,
        },
        "yaxis": _axis(tokens, sinks) | {"autorange": "reversed", "tickangle": 0},
        "margin": {"l": 90},
    }
    return style.figure([trace], "dimension of the residual stream", y, height=760, layout=layout)


def coloured(
    colours: np.ndarray, names: Sequence[str], tokens: Sequence[str], sinks: Sequence[int]
) -> go.Figure:
    """One row of coloured tokens per residual layer or head output.

    Args:
        colours: (rows, tokens, 3), 0 to 255. names: of the rows. sinks: tokens to mark.
    """
    image = go.Image(
        z=colours,
        text=[_numbered(tokens)] * len(names),
        hovertemplate="%{text}<extra></extra>",
    )
    layout = {
        "xaxis": _axis(tokens, sinks),
        "yaxis": {
            "tickmode": "array",
            "tickvals": list(range(len(names))),
            "ticktext": [for_plotly(name) for name in names],
            "showgrid": False,
            "zeroline": False,
            "scaleanchor": False,
        },
        "margin": {"l": 150, "b": 100},
    }
    return style.figure([image], height=160 + STRIP * len(names), layout=layout)


def clusters(scores: Floats, groups: Sequence[str], tokens: Sequence[str], names: Sequence[str]) -> go.Figure:
    """Tokens on two principal components, coloured by the sink that caught them.

    Args:
        scores: (tokens, 2). groups: of each token. names: all groups, in order.
    """
    hover_texts, group_of = np.array(_numbered(tokens)), np.array(groups)
    traces = []
    for name, colour in zip(names, itertools.cycle(style.CATEGORIES), strict=False):
        chosen, label = group_of == name, for_plotly(name)
        x, y = scores[chosen, :2].T
        hover = f"%{{text}}<extra>{label}</extra>"
        traces.append(dots(x, y, hover_texts[chosen], label, colour, hover, marker={"opacity": 0.8}))
    return style.figure(traces, "first component", "second component", height=380)


def received(values: Floats, tokens: Sequence[str], sinks: Sequence[int]) -> go.Figure:
    """Mean attention that each token receives from the layer's strongest head, (blocks, tokens)."""
    hover = "layer %{y}, %{text}<br>%{z:.3f}<extra></extra>"
    trace = heat(values, 0, 1, hover, bar="attention", text=[_numbered(tokens)] * len(values))
    layout = {
        "xaxis": _axis(tokens, sinks),
        "yaxis": {"showgrid": False, "dtick": max(1, len(values) // 12), "autorange": "reversed"},
    }
    height = min(640, max(260, 160 + 22 * len(values)))
    return style.figure([trace], "", "layer", height=height, layout=layout | {"margin": {"b": 100}})
