"""Figures of a grid of training runs: measures against training step, one line a setting, and maps of ρ over training.

They take plain arrays and return Plotly figures. Nothing here computes a statistic or reads a grid.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import plotly.graph_objects as go

from theodolite.report import style
from theodolite.report.data import Floats
from theodolite.system.wording import for_plotly

ACROSS = 2
GAP, DROP = 0.11, 0.14  # between panels, of the width and of the height
PANEL_HEIGHT, MAP_HEIGHT = 230, 380
BAND = 0.14  # opacity
MOST_COLUMNS = 400
"""Steps that a map shows at most: more are not to be seen."""


@dataclass(frozen=True)
class Panel:
    """One measure: a title, and for every line the middle and the lowest and highest value over seeds, (S,) each.

    `logarithmic`: the vertical axis. `window`: its range, None for all.
    """

    title: str
    lines: Sequence[tuple[Floats, Floats, Floats]]
    logarithmic: bool = False
    window: tuple[float, float] | None = None


def panels(names: Sequence[str], steps: Sequence[Floats], shown: Sequence[Panel]) -> go.Figure:
    """Panels of the same lines against training step, with the range over seeds as a band.

    Args:
        names: of the lines, at most seven. steps: of each line. shown: the panels, two in a row.
    """
    down = -(-len(shown) // ACROSS)
    width, height = (1 - GAP * (ACROSS - 1)) / ACROSS, (1 - DROP * (down - 1)) / down
    traces: list[Any] = []
    layout: dict[str, Any] = {"annotations": [], "legend": {"y": 1.06}}
    for index, panel in enumerate(shown):
        suffix = style.axis_suffix(index)
        row, column = divmod(index, ACROSS)
        left, top = column * (width + GAP), 1 - row * (height + DROP)
        for place, (name, at, line) in enumerate(zip(names, steps, panel.lines, strict=True)):
            traces += _line(name, at, line, style.CATEGORIES[place], suffix)
        layout[f"xaxis{suffix}"] = {
            "domain": [left, left + width],
            "anchor": f"y{suffix}",
            "title": {"text": "step" if row == down - 1 else ""},
        }
        layout[f"yaxis{suffix}"] = {
            "domain": [max(0.0, top - height), top],  # rounding may leave the last row below 0
            "anchor": f"x{suffix}",
            "type": "log" if panel.logarithmic else "linear",
            "exponentformat": "power",
        } | ({} if panel.window is None else {"range": list(panel.window)})
        layout["annotations"].append(
            {"x": left, "y": top, "xref": "paper", "yref": "paper", "text": panel.title, "showarrow": False}
            | {"xanchor": "left", "yanchor": "bottom", "yshift": 4}
        )
    return style.figure(traces, height=90 + PANEL_HEIGHT * down, layout=layout)


def _line(
    name: str, steps: Floats, line: tuple[Floats, Floats, Floats], colour: str, suffix: str
) -> list[go.Scatter]:
    """The middle, and the band where there is more than one seed; the first panel names the line."""
    centre, low, high = line
    shared = {
        "xaxis": f"x{suffix}",
        "yaxis": f"y{suffix}",
        "legendgroup": name,
        "mode": "lines",
    }
    traces = []
    if np.any(high > low):
        edge = np.concatenate([high, low[::-1]])
        traces.append(
            go.Scatter(
                shared,
                x=np.concatenate([steps, steps[::-1]]).astype(np.float32),
                y=edge.astype(np.float32),
                fill="toself",
                fillcolor=style.translucent(colour, BAND),
                line={"width": 0},
                hoverinfo="skip",
                showlegend=False,
            )
        )
    traces.append(
        go.Scatter(
            shared,
            x=steps.astype(np.float32),
            y=centre.astype(np.float32),
            name=for_plotly(name),
            line={"color": colour, "width": 1.8},
            showlegend=suffix == "",
            hovertemplate=f"{for_plotly(name)}<br>step %{{x:.0f}}: %{{y:.5g}}<extra></extra>",
        )
    )
    return traces


def propagation_map(steps: Floats, propagation: Floats) -> go.Figure:
    """ρ of every key position of the last query over training, as in Fig. 7: steps to the right, positions down.

    Args:
        steps: (S,). propagation: ρ, (S, T).
    """
    shown = np.unique(np.linspace(0, len(steps) - 1, MOST_COLUMNS).astype(int))
    length = propagation.shape[1]
    trace = go.Heatmap(
        x=steps[shown].astype(np.float32),
        z=propagation[shown].T.astype(np.float32),
        y=np.arange(1, length + 1),
        zmin=0,
        zmax=1,
        colorscale=style.MAGNITUDE,
        colorbar=style.colour_bar("ρ"),
        hovertemplate="step %{x:.0f}, position %{y}: %{z:.3f}<extra></extra>",
    )
    layout = {"yaxis": {"range": [length + 0.5, 0.5]}}
    return style.figure([trace], "step", "position i of the key", height=MAP_HEIGHT, layout=layout)


def profiles(names: Sequence[str], values: Sequence[Floats]) -> go.Figure:
    """ρ_i against the key's position i, one line a setting; at most seven lines."""
    traces = [
        go.Scatter(
            x=np.arange(1, len(curve) + 1),
            y=curve.astype(np.float32),
            name=for_plotly(name),
            mode="lines",
            line={"color": colour, "width": 1.8},
            hovertemplate=f"{for_plotly(name)}<br>position %{{x}}: %{{y:.4g}}<extra></extra>",
        )
        for name, curve, colour in zip(names, values, style.CATEGORIES, strict=False)
    ]
    return style.figure(traces, "position i of the key", "ρ, mean over steps")
