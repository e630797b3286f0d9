"""Figures of the page that the reports do not have: a head's attention with its switches, the map with a choice.

They take plain numbers and return Plotly figures in the report's style.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from theodolite.explore.view import HeadView
from theodolite.report import style
from theodolite.report.data import evenly
from theodolite.report.figures_heads import head_map
from theodolite.report.text import for_plotly, token_text
from theodolite.run import Run

FAINTEST = 1e-5
"""Attention below it is drawn as this much on the logarithmic scale: five decades can be told apart."""

LABELLED = 40  # tokens written at an axis at most
NAMED = 10  # characters of each
MARK = "▼"


def hidden_keys(view: HeadView) -> list[int]:
    """Keys that the switch hides: the head's sinks, or where it has none the first token."""
    return sorted({sink.position for sink in view.sinks if sink.position >= 0}) or [0]


def attention_map(view: HeadView, *, log: bool = False, hide_sinks: bool = False) -> go.Figure:
    """The head's attention, queries down and keys across; colours run to the largest weight that is shown.

    Args:
        view: of the head.
        log: colours by log₁₀ of the weight, from `FAINTEST` on.
        hide_sinks: leave out the columns of `hidden_keys`; what is left is not made to sum to 1.
    """
    weights = view.attention.copy()
    if hide_sinks:
        weights[:, hidden_keys(view)] = np.nan
    shown = weights[np.isfinite(weights)]
    most = float(shown.max()) if shown.size and shown.max() > 0 else 1.0
    sinks = [sink.position for sink in view.sinks if sink.position >= 0]
    names = [for_plotly(f"{place} {token_text(token)}") for place, token in enumerate(view.tokens)]
    low, high, ticks = _decades(most) if log else (0.0, most, {})
    value = "10^%{z:.2f}" if log else "%{z:.3g}"
    z = np.log10(np.maximum(weights, FAINTEST)) if log else weights
    heat = go.Heatmap(
        z=z.astype(np.float32),
        x=names,
        y=names,
        colorscale=style.MAGNITUDE,
        zmin=low,
        zmax=high,
        colorbar=style.colour_bar("attention", **ticks),
        hoverongaps=False,
        hovertemplate=f"query %{{y}}<br>key %{{x}}<br>attention {value}<extra></extra>",
    )
    axis = _axis(view.tokens, sinks)
    layout = {
        "xaxis": axis | {"tickangle": -90, "constraintoward": "left"},
        "yaxis": axis | {"autorange": "reversed", "scaleanchor": "x", "constraintoward": "top"},
        "margin": {"l": 84, "r": 8, "t": 8, "b": 84},
    }
    return style.figure([heat], "key", "query", height=560, layout=layout)


def _decades(most: float) -> tuple[float, float, dict[str, Any]]:
    """The ends of the colours in decades, one decade apart at least, and the colour bar's ticks as plain numbers."""
    low = round(math.log10(FAINTEST))
    high = max(math.log10(most), low + 1.0)
    decades = list(range(low, math.floor(high) + 1))
    names = [f"{10.0**decade:g}" for decade in decades]
    return low, high, {"tickvals": decades, "ticktext": [f"≤ {names[0]}", *names[1:]]}


def _axis(tokens: Sequence[str], sinks: Sequence[int]) -> dict[str, Any]:
    apart = -(-len(tokens) // LABELLED)  # tokens from one label to the next
    free = [i for i in evenly(len(tokens), LABELLED) if all(abs(i - sink) >= apart for sink in sinks)]
    ticks = sorted({*free, *sinks})
    return {
        "type": "category",
        "showgrid": False,
        "zeroline": False,
        "ticks": "",
        "tickmode": "array",
        "tickvals": ticks,
        "ticktext": [for_plotly(_short(tokens[tick], tick in sinks)) for tick in ticks],
        "tickfont": {"size": 9},
        "constrain": "domain",
        "automargin": False,  # the map stays where it is when a switch is turned
    }


def _short(token: str, sink: bool) -> str:
    text = token_text(token)
    cut = text if len(text) <= NAMED else text[: NAMED - 1] + "…"
    return f"{MARK} {cut}" if sink else cut


def chosen_map(run: Run, measure: str, layer: int, head: int) -> go.Figure:
    """The layer × head map of a measure, with a frame around one head."""
    drawn = head_map(run, measure)
    frame = {"type": "rect", "x0": head - 0.5, "x1": head + 0.5, "y0": layer - 0.5, "y1": layer + 0.5}
    drawn.add_shape(frame | {"line": {"color": style.VERMILLION, "width": 3}, "layer": "above"})
    return drawn
