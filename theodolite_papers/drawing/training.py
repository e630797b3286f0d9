"""Figures over training steps: layer measures, the curve of positions at every step and layer, accuracies."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from theodolite.report import style
from theodolite.report.data import Floats
from theodolite.report.drawing.grammar import Panel, dots, line, panels
from theodolite.system.wording import percent

PANELS_ACROSS = 3
PANEL_GAP, PANEL_DROP = 0.06, 0.16
BEFORE_FIRST = 0.5  # decades between step 0 and the first step after it
CELL = 0.42  # half a curve's cell; the rest is white
CELL_PIXELS = 96


def log_step_axis(steps: Sequence[int]) -> Floats:
    """Where steps stand on a logarithmic axis that has room for step 0."""
    first = min((step for step in steps if step > 0), default=1)
    return np.array([math.log10(step) if step > 0 else math.log10(first) - BEFORE_FIRST for step in steps])


def _step_axis(steps: Sequence[int], log_steps: Floats) -> dict[str, Any]:
    names = [f"{step // 1000}k" if step >= 1000 and step % 1000 == 0 else str(step) for step in steps]
    ends = [float(log_steps.min()) - 0.15, float(log_steps.max()) + 0.15]
    ticks = {"tickmode": "array", "tickvals": log_steps.tolist(), "ticktext": names, "tickangle": 0}
    return ticks | {"range": ends, "zeroline": False}


def measures_by_step(
    steps: Sequence[int], measures: Mapping[str, tuple[Floats, Floats]], limits: Mapping[str, float]
) -> go.Figure:
    """One panel per measure, one line per layer, against training step."""
    log_steps = log_step_axis(steps)
    layers = next(iter(measures.values()))[0].shape[1]
    down = math.ceil(len(measures) / PANELS_ACROSS)
    shown = []
    for index, (title, (values, errors)) in enumerate(measures.items()):
        traces: list[Any] = []
        for layer in range(layers):
            name, colour = f"layer {layer}", style.order_colour(layer / max(1, layers - 1))
            own: dict[str, Any] = {"errors": errors[:, layer], "customdata": list(steps)}
            own["hover"] = f"{name}, step %{{customdata}}: %{{y:.4g}}<extra></extra>"
            traces += line(log_steps, values[:, layer], name, colour, width=1.6, marker=5, **own)
        x = "step" if index // PANELS_ACROSS == down - 1 else ""
        shown.append(Panel(title, traces, x, "", _step_axis(steps, log_steps), {"rangemode": "tozero"}))
    gaps = (PANEL_GAP, PANEL_DROP)
    drawn = panels(shown, PANELS_ACROSS, height=210, gaps=gaps, layout={"showlegend": False})
    for index, title in enumerate(measures):
        if title in limits:
            row, column = divmod(index, PANELS_ACROSS)
            limit = {"dash": "dot", "width": 1.2, "color": style.GREY}
            drawn.add_hline(limits[title], line=limit, row=row + 1, col=column + 1)
    return drawn.add_trace(style.depth_bar(layers))


def curves_by_step(steps: Sequence[int], layers: Sequence[int], curves: Floats) -> go.Figure:
    """The positions on their two leading directions, one cell per step and layer, each cell on its own scale."""
    centred = curves - curves.mean(axis=2, keepdims=True)
    # One scale for both directions: a second one that is nothing but noise must not look like half of the curve.
    reach = np.abs(centred).max(axis=(2, 3), keepdims=True)
    cells = CELL * centred / np.where(reach > 0, reach, 1.0)
    count = curves.shape[2]
    across = np.arange(len(steps))[:, None, None]
    down = np.arange(len(layers))[None, :, None]
    x, y = across + cells[..., 0], down - cells[..., 1]  # the vertical axis runs downwards
    gap = np.full((*x.shape[:2], 1), np.nan)
    across_gaps, down_gaps = (np.concatenate([part, gap], axis=2).ravel() for part in (x, y))
    unnamed: dict[str, Any] = {"showlegend": False}
    curve = line(across_gaps, down_gaps, "", style.GREY, width=0.7, opacity=0.6, hoverinfo="skip", **unnamed)
    position = np.tile(np.arange(1, count + 1, dtype=np.int32), len(steps) * len(layers))
    marker = {"size": 3.2, "colorscale": style.ORDER, "colorbar": style.colour_bar("position")}
    hover = "position %{marker.color}<extra></extra>"
    points = dots(x.ravel(), y.ravel(), None, None, position, hover, marker=marker, **unnamed)
    axis = {"showgrid": False, "zeroline": False, "ticks": "", "tickmode": "array"}
    above = axis | {"range": [-0.55, len(steps) - 0.45], "side": "top", "tickangle": 0}
    above |= {"tickvals": list(range(len(steps))), "ticktext": [f"step {step}" for step in steps]}
    left = axis | {"range": [len(layers) - 0.45, -0.55]}
    left |= {"tickvals": list(range(len(layers))), "ticktext": [f"layer {layer}" for layer in layers]}
    layout = {"xaxis": above, "yaxis": left}
    return style.figure([*curve, points], height=60 + CELL_PIXELS * len(layers), layout=layout)


def accuracies(
    names: Sequence[str], measured: tuple[Floats, Floats], paper: Mapping[str, Floats]
) -> go.Figure:
    """Accuracy by number of digits: this model with standard errors, and rows of the paper."""
    rows: list[tuple[str, Floats, Floats | None, str, str]] = [
        ("this model", *measured, style.MEASURED, "circle")
    ]
    for (name, values), colour in zip(paper.items(), (style.BLUE, style.GREEN), strict=True):
        rows.append((name, values, None, colour, "diamond-open"))
    traces: list[Any] = []
    for name, values, errors, colour, symbol in rows:
        own: dict[str, Any] = {"mode": "markers", "marker": {"size": 10, "color": colour, "symbol": symbol}}
        own["text"] = [percent(float(value)) for value in values]
        hover = f"%{{x}}<br>{name}: %{{text}}<extra></extra>"
        traces += line(list(names), values, name, colour, errors=errors, hover=hover, **own)
    layout = {"yaxis": {"range": [-0.03, 1.05], "tickformat": ".0%"}, "xaxis": {"type": "category"}}
    return style.figure(traces, "", "exact-match accuracy", height=360, layout=layout)
