"""How every figure looks: three colour scales with one meaning each, categories, the light and dark
templates.

- MAGNITUDE (cividis): how much. The cell of every heat map of amounts.
- SIGNED (blue – neutral – vermillion): which sign and how much. Its neutral is the page's own background.
- ORDER (like viridis, without the ends that vanish on dark or light paper): which position or which layer,
never an amount.
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

_CIVIDIS = [
    "#00224e",
    "#123570",
    "#3b496c",
    "#575d6d",
    "#707173",
    "#8a8678",
    "#a59c74",
    "#c3b369",
    "#e1cc55",
    "#fee838",
]
_DEPTH = ["#5a4a9f", "#456aa0", "#2f8390", "#21948b", "#2ea57c", "#4fb56b", "#86bf3f"]

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
HEIGHT = 300
TICKS = 8  # of a colour bar of whole numbers, about


def _spread(colours: list[str]) -> Scale:
    return [[round(step / (len(colours) - 1), 4), colour] for step, colour in enumerate(colours)]


MAGNITUDE: Scale = _spread(_CIVIDIS)
ORDER: Scale = _spread(_DEPTH)
# The middle of SIGNED is the page's own background.
NEUTRAL, DARK_NEUTRAL = "#fdfcf9", "#15191f"
SIGNED: Scale = _spread(["#004c78", BLUE, NEUTRAL, VERMILLION, "#8c3d00"])


def translucent(colour: str, opacity: float) -> str:
    """A hexadecimal colour as `rgba(…)`."""
    red, green, blue = (int(colour[start : start + 2], 16) for start in (1, 3, 5))
    return f"rgba({red},{green},{blue},{opacity:g})"


BAND, BAND_EDGE, DARK_BAND, DARK_BAND_EDGE = 0.16, 0.5, 0.26, 0.7  # opacities of published ranges
_BRIGHTER = {
    BLUE: "#4a9fd8",
    VERMILLION: "#ef8140",
    GREEN: "#2db58c",
    PURPLE: "#d891b7",
    ORANGE: "#edb02f",
    "#004c78": "#79c0ee",
    "#8c3d00": "#ffb383",
}


def dark_swaps() -> dict[str, str]:
    """Colour in a figure → the colour that takes its place on a dark page."""
    swaps = {NEUTRAL: DARK_NEUTRAL, **_BRIGHTER}
    for colour, brighter in _BRIGHTER.items():
        swaps[translucent(colour, BAND)] = translucent(brighter, DARK_BAND)
        swaps[translucent(colour, BAND_EDGE)] = translucent(brighter, DARK_BAND_EDGE)
    return swaps


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
            "margin": {"l": 52, "r": 16, "t": 30, "b": 44},
            "legend": {
                "orientation": "h",
                "x": 0,
                "y": 1.02,
                "yanchor": "bottom",
                "font": {"size": 11},
                "bgcolor": "rgba(0,0,0,0)",
            },
            "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": line, "activecolor": ink},
            "xaxis": axis,
            "yaxis": axis,
        }
    )


def figure(
    traces: list[Any], x: str = "", y: str = "", *, height: int = HEIGHT, layout: dict[str, Any] | None = None
) -> go.Figure:
    """A figure in the report's style: axis titles `x` and `y`, `height` in pixels, as wide as its place."""
    drawn = go.Figure(traces)
    drawn.update_layout(template=template(), height=height, xaxis_title_text=x, yaxis_title_text=y)
    if layout:
        drawn.update_layout(layout)
    return drawn


def depth_bar(layers: int) -> go.Scatter:
    """A trace without points that carries the colour bar of lines coloured by `order_colour`."""
    return go.Scatter(
        x=[None],
        y=[None],
        mode="markers",
        showlegend=False,
        hoverinfo="skip",
        marker={
            "color": [0],
            "colorscale": ORDER,
            "cmin": 0,
            "cmax": max(1, layers - 1),
            "showscale": True,
            "colorbar": whole_bar("layer", layers - 1),
        },
    )


def whole_bar(title: str, span: int) -> dict[str, Any]:
    """As `colour_bar`, ticks at whole numbers only, of which there are `span` + 1."""
    return colour_bar(title, tickformat="d", dtick=max(1, -(-span // TICKS)))


def colour_bar(title: str, **more: Any) -> dict[str, Any]:
    """A slim colour bar whose title reads upwards beside it."""
    return {"title": {"text": title, "side": "right"}, "thickness": 10, "outlinewidth": 0, "len": 0.95} | more
