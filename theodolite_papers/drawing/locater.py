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
from theodolite.report.drawing import grammar
from theodolite.report.drawing.grammar import heat, line
from theodolite.system.wording import for_plotly

ACROSS = 2
MAP_HEIGHT = 380
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
    drawn = []
    for index, panel in enumerate(shown):
        traces: list[Any] = []
        colours = style.CATEGORIES[: len(names)]
        for name, at, (centre, low, high), colour in zip(names, steps, panel.lines, colours, strict=True):
            hover = f"{for_plotly(name)}<br>step %{{x:.0f}}: %{{y:.5g}}<extra></extra>"
            traces += line(at, centre, name, colour, band=(low, high), hover=hover, showlegend=index == 0)
        axis: dict[str, Any] = {"type": "log" if panel.logarithmic else "linear", "exponentformat": "power"}
        axis |= {} if panel.window is None else {"range": list(panel.window)}
        if panel.logarithmic and panel.window is None:
            lowest = min(float(low.min()) for _, low, _ in panel.lines)
            highest = max(float(high.max()) for *_, high in panel.lines)
            if 5 * lowest < highest < 100 * lowest:  # plotly's own labels, 2 to 9, would lie on one another
                axis |= {"dtick": "D2", "tickformat": "~g"}
        x = "step" if index // ACROSS == down - 1 else ""
        drawn.append(grammar.Panel(panel.title, traces, x, yaxis=axis))
    return grammar.panels(drawn, ACROSS, layout={"legend": {"y": 1.06}})


def propagation_map(steps: Floats, propagation: Floats) -> go.Figure:
    """ρ of every key position of the last query over training, as in Fig. 7: steps to the right, positions down.

    Args:
        steps: (S,). propagation: (S, T).
    """
    columns = np.unique(np.linspace(0, len(steps) - 1, MOST_COLUMNS).astype(int))
    length = propagation.shape[1]
    hover = "step %{x:.0f}, position %{y}: %{z:.3f}<extra></extra>"
    positions = np.arange(1, length + 1)
    trace = heat(propagation[columns].T, 0, 1, hover, bar="ρ", x=steps[columns], y=positions)
    layout = {"yaxis": {"range": [length + 0.5, 0.5]}}
    return style.figure([trace], "step", "position i of the key", height=MAP_HEIGHT, layout=layout)


def profiles(names: Sequence[str], values: Sequence[Floats]) -> go.Figure:
    """ρ_i against the key's position i, one line a setting; at most seven lines."""
    traces: list[Any] = []
    for name, curve, colour in zip(names, values, style.CATEGORIES, strict=False):
        hover = f"{for_plotly(name)}<br>position %{{x}}: %{{y:.4g}}<extra></extra>"
        traces += line(np.arange(1, len(curve) + 1), curve, name, colour, hover=hover)
    return style.figure(traces, "position i of the key", "ρ, mean over steps")
