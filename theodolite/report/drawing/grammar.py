"""The grammar of figures: lines with errors, maps, and panels of them. Every figure is made of these three.

They take plain arrays. Values are written as float32, which is what a page can show.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import plotly.graph_objects as go
from numpy.typing import ArrayLike
from plotly.subplots import make_subplots

from theodolite.report import style
from theodolite.report.data import Floats
from theodolite.system.wording import for_plotly

BAND = 0.14  # opacity
GAPS = (0.11, 0.14)  # between panels, of the figure's width and height
PANEL_HEIGHT, HEADROOM = 230, 90  # pixels: of a row of panels, and above the first


def line(
    x: Any,
    y: Any,
    name: str,
    colour: str,
    *,
    errors: Floats | None = None,
    band: tuple[Floats, Floats] | None = None,
    dash: str = "solid",
    width: float = 1.8,
    marker: float = 0,
    hover: str = "",
    **more: Any,
) -> list[go.Scatter]:
    """A line with whiskers or on a band.

    Args:
        x, y: (n,). name: in the legend, where lines of one name are switched together.
        errors: half the lengths of the whiskers, (n,). band: its lower and upper edge, (n,) each.
        marker: size of the points in pixels; 0: none. hover: what hovering tells, Plotly's template.
        more: further entries of the line's trace.
    """
    x, y, label = _numbers(x), _numbers(y), for_plotly(name)
    traces = []
    if band is not None and np.any(band[1] > band[0]):
        traces.append(
            go.Scatter(
                x=np.concatenate([x, x[::-1]]),
                y=np.concatenate([band[1], band[0][::-1]]).astype(np.float32),
                fill="toself",
                fillcolor=style.translucent(colour, BAND),
                line={"width": 0},
                mode="lines",
                legendgroup=name,
                hoverinfo="skip",
                showlegend=False,
            )
        )
    own: dict[str, Any] = {
        "x": x,
        "y": y,
        "error_y": None if errors is None else style.error_bars(errors),
        "name": label,
        "legendgroup": name,
        "mode": "lines+markers" if marker else "lines",
        "line": {"color": colour, "width": width, "dash": dash},
        "marker": {"size": marker} if marker else None,
        "hovertemplate": hover or f"{label}<br>%{{x}}: %{{y:.4g}}<extra></extra>",
    }
    return [*traces, go.Scatter(**(own | more))]


def heat(
    z: Floats,
    low: float,
    high: float,
    hover: str,
    *,
    scale: style.Scale = style.MAGNITUDE,
    bar: str | None = None,
    cells: bool = False,
    **more: Any,
) -> go.Heatmap:
    """A map of amounts (rows, columns), NaN left blank.

    Args:
        low, high: where the colours saturate. hover: what hovering tells, Plotly's template.
        bar: the title of its colour bar; None: none. cells: a hairline between cells.
        more: further entries of the trace.
    """
    own: dict[str, Any] = {
        "z": _numbers(z),
        "zmin": low,
        "zmax": high,
        "colorscale": scale,
        "showscale": bar is not None,
        "colorbar": None if bar is None else style.colour_bar(bar),
        "hovertemplate": hover,
        "hoverongaps": False,
    }
    if cells:
        own |= {"xgap": 1, "ygap": 1}
    return go.Heatmap(**(own | more))


@dataclass(frozen=True)
class Panel:
    """One of several figures side by side: its title, its traces, and what its axes are besides their titles."""

    title: str
    traces: Sequence[Any]
    x: str = ""
    y: str = ""
    xaxis: dict[str, Any] = field(default_factory=dict)
    yaxis: dict[str, Any] = field(default_factory=dict)


def panels(
    shown: Sequence[Panel],
    across: int,
    *,
    height: int = PANEL_HEIGHT,
    gaps: tuple[float, float] = GAPS,
    widths: Sequence[float] | None = None,
    layout: dict[str, Any] | None = None,
) -> go.Figure:
    """Figures side by side, `across` of them in a row of `height` pixels, each under its title.

    Args:
        gaps: between them, of the width and of the height of all. widths: of the columns, relative; None: equal.
    """
    rows = math.ceil(len(shown) / across)
    places = [(number // across + 1, number % across + 1) for number in range(len(shown))]
    drawn = make_subplots(
        rows,
        across,
        specs=[
            [{} if (row, column) in places else None for column in range(1, across + 1)]
            for row in range(1, rows + 1)
        ],
        subplot_titles=[for_plotly(panel.title) for panel in shown],
        horizontal_spacing=gaps[0] if across > 1 else None,
        vertical_spacing=gaps[1] if rows > 1 else None,
        column_widths=widths,
    )
    for panel, (row, column) in zip(shown, places, strict=True):
        drawn.add_traces(list(panel.traces), rows=row, cols=column)
        drawn.update_xaxes(panel.xaxis, title_text=panel.x, row=row, col=column)
        drawn.update_yaxes(panel.yaxis, title_text=panel.y, row=row, col=column)
    for title, (row, column) in zip(
        drawn.layout.annotations,
        (place for panel, place in zip(shown, places, strict=True) if panel.title),
        strict=True,
    ):
        left = next(drawn.select_xaxes(row=row, col=column)).domain[0]
        title.update(x=left, xanchor="left", yshift=4, font_size=12)
    return style.finished(drawn, height=HEADROOM + height * rows, layout=layout)


def _numbers(values: ArrayLike) -> Any:
    """Numbers as float32; whole numbers and words as they are."""
    array = np.asarray(values)
    return array.astype(np.float32) if array.dtype.kind == "f" else array
