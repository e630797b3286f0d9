"""The figure of one prompt: a head's attention; and axes of tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from theodolite.estimates import Floats
from theodolite.report import style
from theodolite.report.drawing.grammar import heat
from theodolite.system.wording import for_plotly, shown_token

LABELLED = 64  # tokens that can all be written at an axis; of more, only some are
FAINTEST = 1e-5  # attention below it is drawn as this much on a logarithmic scale
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
    down = axis | {"autorange": "reversed", "tickangle": 0}
    layout = {"xaxis": axis, "yaxis": down, "margin": {"l": 90, "b": 90}}
    trace = heat(values, low, highest, hover, bar=bar, x=names, y=names)
    return style.figure([trace], "key", "query", height=760, layout=layout)
