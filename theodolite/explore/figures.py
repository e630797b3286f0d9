"""Figures that only the explorer has: a head's attention with its switches, and the head map with one head framed.

They take plain numbers and return Plotly figures in the report's style.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from theodolite.explore.view import HeadView
from theodolite.passes.run import Run
from theodolite.report import style
from theodolite.report.drawing.heads import head_map
from theodolite.system.wording import for_plotly, shown_token

FAINTEST = 1e-5
"""Attention below it is drawn as this much on the logarithmic scale: five decades can be told apart."""

LABELLED = 24  # tokens written at an axis at most: in a column of half a laptop's screen they do not touch
NAMED = 10  # characters of each
MARK = "▼"
AXIS_MARGIN = 0.06  # of an axis, beyond its outermost points


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
    names = [for_plotly(f"{place} {shown_token(token)}") for place, token in enumerate(view.tokens)]
    low, high = (
        (math.log10(FAINTEST), max(math.log10(most), math.log10(FAINTEST) + 1)) if log else (0.0, most)
    )
    value = "10^%{z:.2f}" if log else "%{z:.3g}"
    z = np.log10(np.maximum(weights, FAINTEST)) if log else weights
    heat = go.Heatmap(
        z=z.astype(np.float32),
        x=names,
        y=names,
        colorscale=style.MAGNITUDE,
        zmin=low,
        zmax=high,
        colorbar=style.colour_bar("attention", tickprefix="10^" if log else ""),
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


def _axis(tokens: Sequence[str], sinks: Sequence[int]) -> dict[str, Any]:
    spacing = -(-len(tokens) // LABELLED)  # tokens from one label to the next
    marked: list[int] = []
    for sink in sorted(sinks):  # of those side by side, as in a stretch, the first has the label
        if not marked or sink - marked[-1] >= spacing:
            marked.append(sink)
    unmarked = [i for i in range(0, len(tokens), spacing) if all(abs(i - sink) >= spacing for sink in marked)]
    ticks = sorted({*unmarked, *marked})
    return {
        "type": "category",
        "showgrid": False,
        "zeroline": False,
        "ticks": "",
        "tickmode": "array",
        "tickvals": ticks,
        "ticktext": [for_plotly(_tick_text(tokens[tick], tick in sinks)) for tick in ticks],
        "tickfont": {"size": 9},
        "constrain": "domain",
        "automargin": False,  # the map stays where it is when a switch is turned
    }


def _tick_text(token: str, sink: bool) -> str:
    text = shown_token(token)
    shown = text if len(text) <= NAMED else text[: NAMED - 1] + "…"
    return f"{MARK} {shown}" if sink else shown


def framed_map(run: Run, measure: str, layer: int, head: int) -> go.Figure:
    """The layer × head map of a measure, with a frame around one head."""
    drawn = head_map(run, measure)
    frame = {"type": "rect", "x0": head - 0.5, "x1": head + 0.5, "y0": layer - 0.5, "y1": layer + 0.5}
    for colour, width in ((style.NEUTRAL, 7), (style.INK, 3)):  # paper around ink is seen on any colour
        drawn.add_shape(frame | {"line": {"color": colour, "width": width}, "layer": "above"})
    return drawn


def share_scales(drawn: list[go.Figure]) -> list[go.Figure]:
    """Give figures of several models, alike but for their numbers, the same ends of colours and of axes."""
    for figure in drawn:
        # On a dark page, too: colours are those of light paper.
        figure.update_layout(paper_bgcolor=style.NEUTRAL)
    if len(drawn) < 2:
        return drawn
    for name in ("coloraxis", "coloraxis2"):
        _share([figure.layout[name] for figure in drawn if name in figure.layout], "c")
    _share([trace for figure in drawn for trace in figure.select_traces({"type": "heatmap"})], "z")
    for axis in ("x", "y"):
        if all(figure.layout[f"{axis}axis"].range is None for figure in drawn):
            _share_axis(drawn, axis)
    return drawn


def _share(scales: Sequence[Any], letter: str) -> None:
    """Colour scales from the least to the most of all, with the ticks of the one that goes farthest."""
    low, high = f"{letter}min", f"{letter}max"
    scales = [scale for scale in scales if scale[high] is not None]
    if not scales:
        return
    lowest, widest = min(scale[low] for scale in scales), max(scales, key=lambda scale: scale[high])
    for scale in scales:
        scale.update({low: lowest, high: widest[high], "colorbar": widest.colorbar})


def _share_axis(drawn: Sequence[go.Figure], axis: str) -> None:
    """An axis of numbers from the least to the most of all points."""
    values = [np.asarray(trace[axis]) for figure in drawn for trace in figure.data if trace.type == "scatter"]
    finite = np.concatenate([points[np.isfinite(points)] for points in values] or [[]])
    if not finite.size:
        return
    low, high = float(finite.min()), float(finite.max())
    margin = AXIS_MARGIN * (high - low or 1.0)
    for figure in drawn:
        figure.layout[f"{axis}axis"].range = [low - margin, high + margin]
