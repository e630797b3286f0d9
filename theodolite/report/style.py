"""How every figure looks: three colour scales with one meaning each, categories, the light and dark
templates.

- MAGNITUDE (cividis): how much. The cell of every heat map of amounts.
- SIGNED (blue – neutral – vermillion): which sign and how much. Its neutral is the page's own background.
- ORDER (viridis without its ends): which position or which layer, never an amount.
- CATEGORIES (Okabe–Ito): kinds.
All are told apart by colour-blind readers. Figures name no text or grid colour of their own: those come from
the template, which the page swaps with the reader's light or dark setting. This module must not read a run.
"""

from __future__ import annotations

from typing import Any

import plotly.graph_objects as go

Scale = list[list[Any]]
Patch = dict[str, Any]  # what changes in one trace when a figure shows another layer, head or measure

BLUE, VERMILLION, GREEN, PURPLE = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
ORANGE, SKY, GREY = "#E69F00", "#56B4E9", "#8A8F98"
CATEGORIES = [BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY, GREY]

_CIVIDIS = ["#00224e", "#123570", "#3b496c", "#575d6d", "#707173", "#8a8678", "#a59c74", "#c3b369", "#e1cc55", "#fee838"]
_VIRIDIS = ["#46327e", "#3b528b", "#2c728e", "#21918c", "#28ae80", "#5ec962", "#addc30"]

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
HEIGHT = 300


def _spread(colours: list[str]) -> Scale:
    return [[round(step / (len(colours) - 1), 4), colour] for step, colour in enumerate(colours)]


MAGNITUDE: Scale = _spread(_CIVIDIS)
ORDER: Scale = _spread(_VIRIDIS)
# The middle is the light page's own background; the page puts its dark background there when it is dark.
NEUTRAL, DARK_NEUTRAL = "#fdfcf9", "#1b2027"
SIGNED: Scale = _spread(["#004c78", BLUE, NEUTRAL, VERMILLION, "#8c3d00"])


def order_colour(share: float) -> str:
    """The ORDER scale at `share` of its way, as a hexadecimal colour between its two nearest stops."""
    place = min(max(share, 0.0), 1.0) * (len(ORDER) - 1)
    low = min(int(place), len(ORDER) - 2)
    stops = [[int(ORDER[low + step][1][start : start + 2], 16) for start in (1, 3, 5)] for step in (0, 1)]
    mixed = [round(first + (second - first) * (place - low)) for first, second in zip(*stops, strict=True)]
    return "#" + "".join(f"{value:02x}" for value in mixed)


def template(dark: bool = False) -> go.layout.Template:
    """The Plotly template of the light or the dark page: colours of text, lines and the automatic scales."""
    ink, grid, line = ("#d9dce1", "#2b313a", "#59616d") if dark else ("#2a2f36", "#e7e5df", "#a9a79f")
    panel = "#242a33" if dark else "#ffffff"
    axis = {
        "gridcolor": grid,
        "linecolor": line,
        "zerolinecolor": line,
        "zerolinewidth": 1,
        "ticks": "outside",
        "tickcolor": line,
        "ticklen": 4,
        "automargin": True,
        "title": {"standoff": 8, "font": {"size": 12}},
    }
    return go.layout.Template(
        layout={
            "font": {"family": FONT, "size": 12, "color": ink},
            "paper_bgcolor": "rgba(0,0,0,0)",
            "plot_bgcolor": "rgba(0,0,0,0)",
            "colorway": CATEGORIES,
            "colorscale": {"sequential": MAGNITUDE, "sequentialminus": MAGNITUDE[::-1], "diverging": SIGNED},
            "hoverlabel": {
                "bgcolor": panel,
                "bordercolor": line,
                "font": {"family": FONT, "size": 12, "color": ink},
                "align": "left",
            },
            "hovermode": "closest",
            "margin": {"l": 52, "r": 16, "t": 16, "b": 44},
            "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "font": {"size": 11}},
            "xaxis": axis,
            "yaxis": axis,
        }
    )


def figure(
    traces: list[Any], x: str = "", y: str = "", *, height: int = HEIGHT, layout: dict[str, Any] | None = None
) -> go.Figure:
    """A figure in the report's style: axis titles `x` and `y`, `height` in pixels, width left to the reader."""
    drawn = go.Figure(traces)
    drawn.update_layout(template=template(), height=height, xaxis_title_text=x, yaxis_title_text=y)
    if layout:
        drawn.update_layout(layout)
    return drawn


def colour_bar(title: str, **more: Any) -> dict[str, Any]:
    """A slim colour bar whose title reads upwards beside it."""
    return {"title": {"text": title, "side": "right"}, "thickness": 10, "outlinewidth": 0, "len": 0.95} | more
