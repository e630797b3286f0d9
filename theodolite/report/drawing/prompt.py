"""Figures of one prompt: a head's attention, vectors by dimension, tokens by colour and on a plane."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from theodolite.estimates import Floats
from theodolite.report import style
from theodolite.report.data import evenly
from theodolite.report.drawing.grammar import dots, heat, map_height, rows_down
from theodolite.system.wording import for_plotly, shown_token

LABELLED = 64  # tokens that can all be written at an axis; of more, only some are
DIMENSIONS = 64
FAINTEST = 1e-5  # attention below it is drawn as this much on a logarithmic scale
STRIP = 34  # pixels: one row of coloured tokens
MARK = "▼"


def token_names(tokens: Sequence[str], first: int = 0) -> list[str]:
    """Name each token for hovering: its position, counted from `first`, and its text."""
    return [for_plotly(f"{place} {shown_token(token)}") for place, token in enumerate(tokens, first)]


def token_axis(
    tokens: Sequence[str], sinks: Sequence[int] = (), *, labels: int = LABELLED, letters: int | None = None
) -> dict[str, Any]:
    """Make an axis of tokens: about `labels` of them are written, none over another, and the sinks with a mark."""
    spacing = -(-len(tokens) // labels)  # tokens from one label to the next
    marked: list[int] = []
    for sink in sorted(sinks):
        if not marked or sink - marked[-1] >= spacing:
            marked.append(sink)
    others = [i for i in range(0, len(tokens), spacing) if all(abs(i - sink) >= spacing for sink in marked)]
    ticks = sorted({*others, *marked})

    def label(place: int) -> str:
        text = shown_token(tokens[place])
        text = text if letters is None or len(text) <= letters else text[: letters - 1] + "…"
        return for_plotly(f"{MARK} {text}" if place in sinks else text)

    look = {"type": "category", "ticks": "", "tickfont": {"size": 8}, "tickangle": -90}
    return look | {"tickvals": ticks, "ticktext": [label(tick) for tick in ticks]}


def _down(axis: dict[str, Any]) -> dict[str, Any]:
    return axis | {"autorange": "reversed", "tickangle": 0}


def attention(
    weights: Floats,
    tokens: Sequence[str],
    sinks: Sequence[int],
    *,
    highest: float = 1.0,
    log: bool = False,
    **labels: int,
) -> go.Figure:
    """Draw a head's attention (T, T), queries down and keys across, its `sinks` marked at both axes.

    Args:
        weights: NaN, or 0 at a later key, where the query does not see the key. highest: where colours end.
        log: colours by log₁₀ of the weight, from `FAINTEST` on. labels: as for `token_axis`.
    """
    values = np.where(np.tri(len(tokens), dtype=bool) | (weights > 0), weights, np.nan)
    low, value = 0.0, "%{z:.3g}"
    if log:
        values, low = np.log10(np.maximum(values, FAINTEST)), math.log10(FAINTEST)
        highest, value = max(math.log10(highest), low + 1), "10^%{z:.2f}"
    names = token_names(tokens)
    hover = f"query %{{y}}<br>key %{{x}}<br>attention {value}<extra></extra>"
    bar = style.colour_bar("attention", tickprefix="10^" if log else "")
    axis = token_axis(tokens, sinks, **labels)
    layout = {"xaxis": axis, "yaxis": _down(axis), "margin": {"l": 90, "b": 90}}
    trace = heat(values, low, highest, hover, bar=bar, x=names, y=names)
    return style.figure([trace], "key", "query", height=760, layout=layout)


def by_dimension(
    vectors: Floats, tokens: Sequence[str], sinks: Sequence[int], scale_of: Floats | None = None
) -> go.Figure:
    """Draw vectors (tokens, d), a row per token, in the dimensions largest there or in `scale_of` (rows, d)."""
    largest = np.abs(vectors if scale_of is None else scale_of).max(axis=0)
    dimensions = np.sort(np.argsort(-largest, kind="stable")[:DIMENSIONS])
    limit = float(largest.max()) or 1.0
    hover = "%{y}<br>dimension %{customdata}: %{z:.3g}<extra></extra>"
    x, y = list(range(len(dimensions))), token_names(tokens)
    named = [[str(dimension) for dimension in dimensions]] * len(tokens)
    shown = vectors[:, dimensions]
    trace = heat(shown, -limit, limit, hover, scale=style.SIGNED, bar="value", x=x, y=y, customdata=named)
    ticks = evenly(len(dimensions), 16)
    across = {"tickvals": ticks, "ticktext": [str(dimensions[tick]) for tick in ticks]}
    layout = {"xaxis": across, "yaxis": _down(token_axis(tokens, sinks)), "margin": {"l": 90}}
    return style.figure([trace], "dimension of the residual stream", "token", height=760, layout=layout)


def coloured(
    colours: np.ndarray, names: Sequence[str], tokens: Sequence[str], sinks: Sequence[int]
) -> go.Figure:
    """Draw one row of tokens per residual layer or head output, coloured (rows, tokens, 3) from 0 to 255."""
    texts = [token_names(tokens)] * len(names)
    image = {"type": "image", "z": colours, "text": texts, "hovertemplate": "%{text}<extra></extra>"}
    rows = {"tickvals": list(range(len(names))), "ticktext": list(map(for_plotly, names))}
    bare = {"showgrid": False, "zeroline": False}
    layout = {
        "xaxis": token_axis(tokens, sinks) | bare | {"type": "linear"},
        "yaxis": rows | bare | {"scaleanchor": False},
        "margin": {"l": 150, "b": 100},
    }
    return style.figure([image], height=160 + STRIP * len(names), layout=layout)


def clusters(scores: Floats, groups: Sequence[str], tokens: Sequence[str], names: Sequence[str]) -> go.Figure:
    """Draw tokens on two principal components, (tokens, 2), coloured by their group: the sink that caught them."""
    hover_texts, group_of = np.array(token_names(tokens)), np.array(groups)
    traces = []
    for name, colour in zip(names, itertools.cycle(style.CATEGORIES), strict=False):
        chosen, label = group_of == name, for_plotly(name)
        x, y = scores[chosen, :2].T
        hover = f"%{{text}}<extra>{label}</extra>"
        traces.append(dots(x, y, hover_texts[chosen], label, colour, hover, marker={"opacity": 0.8}))
    return style.figure(traces, "first component", "second component", height=380)


def received(values: Floats, tokens: Sequence[str], sinks: Sequence[int]) -> go.Figure:
    """Draw the mean attention that each token receives from the strongest head of each block, (blocks, tokens)."""
    trace = heat(
        values, 0, 1, "block %{y}, %{x}<br>%{z:.3f}<extra></extra>", bar="attention", x=token_names(tokens)
    )
    layout = {"xaxis": token_axis(tokens, sinks), "yaxis": rows_down(len(values)), "margin": {"b": 100}}
    return style.figure([trace], "", "block", height=map_height(len(values)), layout=layout)
