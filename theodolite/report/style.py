"""Style of every figure: three colour scales with one meaning each, roles, the light and dark templates.

- MAGNITUDE (paper to plum): amounts, from zero, which is the page's own background, up.
- SIGNED (blue – paper – vermillion): sign and amount; zero is the page's own background too.
- ORDER (violet to green): positions, layers or components in order; never an amount.
- Roles: a colour that stands for one thing in every figure of a survey's report (MEASURED, POSITION, …).
Colour-blind readers tell them apart (`tests/report/test_style.py` has the distances). Figures name no text or grid
colour of their own: those come from the template, which the page swaps with the reader's light or dark setting.
"""

from __future__ import annotations

import functools
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import plotly.graph_objects as go
from plotly import colors

from theodolite.system.wording import for_plotly

Scale = list[list[Any]]
Patch = dict[str, Any]  # what changes in one trace when a figure shows another layer, head or measure

# Searched from the hues of Okabe & Ito for the largest least distance in three kinds of colour blindness, with a
# contrast of 3 to the page; INK is that of the page's text.
INK, DARK_INK, GREY = "#22272e", "#dfe2e7", "#8b8d94"
BLUE, VERMILLION, GREEN, PURPLE = "#0d38a5", "#992600", "#007a48", "#923480"
ORANGE, SKY = "#bb8300", "#558eff"
CATEGORIES = [BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY, GREY]

MEASURED = INK  # of the model that the report is of
POSITION, CONTEXT, BOTH = BLUE, VERMILLION, PURPLE  # parts of hidden states and of logits
PREDICTED = ORANGE  # by theory, from the weights
REFERENCE = GREY  # published, random, uniform, constant, or a limit

# The page's backgrounds: no amount, no sign.
NEUTRAL, DARK_NEUTRAL = "#fdfcf9", "#15191f"
HAIRLINE, DARK_HAIRLINE = "#e7e5df", "#2b313a"
_PLUM = [NEUTRAL, "#f1dcea", "#deb2d0", "#c585b3", "#a45a93", "#7b336f", "#4a1545"]
_DARK_PLUM = [DARK_NEUTRAL, "#3a2039", "#643361", "#904e8a", "#ba74b0", "#dfa3d4", "#fbdff4"]
_SIGNED = ["#004c78", "#0072b2", NEUTRAL, "#d55e00", "#8c3d00"]
_DARK_SIGNED = ["#79c0ee", "#4a9fd8", DARK_NEUTRAL, "#ef8140", "#ffb383"]
_DEPTH = ["#5a4a9f", "#456aa0", "#2f8390", "#21948b", "#2ea57c", "#4fb56b", "#86bf3f"]

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
HEIGHT = 300

MAGNITUDE: Scale = colors.make_colorscale(_PLUM)
SIGNED: Scale = colors.make_colorscale(_SIGNED)
ORDER: Scale = colors.make_colorscale(_DEPTH)


def translucent(colour: str, opacity: float) -> str:
    """Write a hexadecimal colour as `rgba(…)`."""
    red, green, blue = colors.hex_to_rgb(colour)
    return f"rgba({red},{green},{blue},{opacity:g})"


OVERLAY: Scale = [[0.0, translucent("#ff1493", 0)], [1.0, translucent("#ff1493", 0.95)]]
"""Amounts on a picture, which shows through where there is none; the same on a dark page."""

BAND, DARK_BAND = 0.16, 0.26  # opacities of areas between two curves
_BRIGHT = ["#2e73ed", "#df7331", "#26c191", "#bd5abd", "#f1d055", "#a9cbff", "#7d7680", "#eef0f4"]
_BRIGHTER = dict(zip([*CATEGORIES, INK], _BRIGHT, strict=True))


def dark_swaps() -> dict[str, str]:
    """Return for each colour of a figure the one that takes its place on a dark page."""
    swaps = {HAIRLINE: DARK_HAIRLINE} | _BRIGHTER
    swaps |= dict(zip(_PLUM + _SIGNED, _DARK_PLUM + _DARK_SIGNED, strict=True))
    for colour, brighter in _BRIGHTER.items():
        swaps[translucent(colour, BAND)] = translucent(brighter, DARK_BAND)
    return swaps


def css() -> str:
    """Return the colours that pages share with their figures, as CSS variables, light and dark."""

    def variables(page: str, ink: str, plum: list[str]) -> str:
        ramp = f"linear-gradient(90deg, {', '.join(plum)})"
        return f":root {{ --paper: {page}; --ink: {ink}; --ramp: {ramp}; }}"

    light, dark = variables(NEUTRAL, INK, _PLUM), variables(DARK_NEUTRAL, DARK_INK, _DARK_PLUM)
    return f"{light}\n@media screen and (prefers-color-scheme: dark) {{ {dark} }}\n"


def order_colour(share: float) -> str:
    """Return the colour at `share` of the ORDER scale, in hexadecimal, between its two nearest stops."""
    [channels] = colors.sample_colorscale(ORDER, [min(max(share, 0.0), 1.0)], colortype="tuple")
    return "#" + "".join(f"{round(255 * channel):02x}" for channel in channels)


@functools.cache
def template(dark: bool = False) -> go.layout.Template:
    """Make the Plotly template of the light or the dark page: colours of text, lines and the automatic scales."""
    ink, grid, line = ("#d9dce1", DARK_HAIRLINE, "#59616d") if dark else ("#2a2f36", HAIRLINE, "#a9a79f")
    panel = "#242a33" if dark else "#ffffff"
    font, clear = {"family": FONT, "size": 12, "color": ink}, "rgba(0,0,0,0)"
    legend = {"orientation": "h", "y": 1.02, "yanchor": "bottom", "font": {"size": 11}, "bgcolor": clear}
    axis: dict[str, Any] = dict.fromkeys(("linecolor", "zerolinecolor", "tickcolor"), line)
    axis |= {"gridcolor": grid, "zerolinewidth": 1, "ticks": "outside", "ticklen": 4, "automargin": True}
    axis |= {"title": {"standoff": 8, "font": {"size": 12}}}
    return go.layout.Template(
        layout={
            "font": font,
            "paper_bgcolor": clear,
            "plot_bgcolor": clear,
            "colorway": CATEGORIES,
            "colorscale": {"sequential": MAGNITUDE, "sequentialminus": MAGNITUDE[::-1], "diverging": SIGNED},
            "hoverlabel": {"bgcolor": panel, "bordercolor": line, "font": font, "align": "left"},
            "hovermode": "closest",
            "margin": {"l": 52, "r": 16, "t": 30, "b": 44},
            "legend": legend,
            "modebar": {"bgcolor": clear, "color": line, "activecolor": ink},
            "xaxis": axis,
            "yaxis": axis,
        }
    )


def figure(
    traces: Sequence[dict[str, Any]],
    x: str = "",
    y: str = "",
    *,
    height: int = HEIGHT,
    layout: dict[str, Any] | None = None,
) -> go.Figure:
    """Make a figure in the report's style: axis titles `x` and `y`, `height` in pixels, as wide as its place."""
    layout = {"template": template(), "height": height} | (layout or {})
    frame = frame_of(traces)
    for axis, title in (("xaxis", x), ("yaxis", y)):
        layout[axis] = {"title": {"text": title}} | layout.get(axis, {}) | frame
    if len(traces) == 1 and frame and traces[0].get("xgap"):
        layout["plot_bgcolor"] = HAIRLINE  # between cells, and where there is no number
    known = [{key: value for key, value in trace.items() if value is not None} for trace in traces]
    return go.Figure(known, layout, _validate=False)


def frame_of(traces: Iterable[dict[str, Any]]) -> dict[str, bool]:
    """Return what an axis of a map needs: a frame, since zero looks like the page; a grid would lie over its cells."""
    is_map = any(trace["type"] == "heatmap" for trace in traces)
    return {"showline": True, "mirror": True, "showgrid": False, "zeroline": False} if is_map else {}


def standalone(shown: go.Figure, title: str, note: str) -> go.Figure:
    """Complete a figure that stands by itself, in a notebook or a file: a title, a note, and light paper."""
    lines = textwrap.wrap(note, 104)
    header = 46 + 17 * len(lines)  # a legend stands right below
    margin = shown.layout.margin.t
    top = shown.layout.template.layout.margin.t if margin is None else margin
    subtitle = {"text": "<br>".join(map(for_plotly, lines)), "font": {"size": 12}}
    place = {"x": 0, "pad": {"l": 12, "t": 12}, "y": 1, "yref": "container", "yanchor": "top"}
    return shown.update_layout(
        title={"text": for_plotly(title), "subtitle": subtitle, "font": {"size": 16}} | place,
        margin_t=top + header,
        height=(shown.layout.height or HEIGHT) + header,
        paper_bgcolor=NEUTRAL,
    )


def error_bars(errors: Any, *, width: int = 3, thickness: float = 1.2) -> dict[str, Any] | None:
    """Make symmetric error bars, of length 0 where there is no error; None where there is none at all."""
    errors = np.asarray(errors, dtype=np.float32)
    if not np.isfinite(errors).any():
        return None
    return {"type": "data", "array": np.nan_to_num(errors), "thickness": thickness, "width": width}


def every_tick(count: int) -> dict[str, int]:
    """Set a tick at each of `count` whole numbers where all can be read; else leave it to Plotly."""
    return {"dtick": 1} if count <= 16 else {}


def layer_axis(layers: npt.NDArray[np.float64]) -> dict[str, Any]:
    """Make an axis of residual layers, with room for the markers at its ends."""
    return {"range": [layers.min() - 0.3, layers.max() + 0.3], "zeroline": False} | every_tick(len(layers))


def head_map_layout(layers: int, heads: int) -> dict[str, Any]:
    """Return the layout of a map of heads: heads across, blocks down, and its height."""
    return {
        "xaxis": {"ticks": ""} | every_tick(heads),
        "yaxis": {"ticks": "", "autorange": "reversed"} | every_tick(layers),
        "margin": {"r": 8},
        "height": min(720, max(230, 90 + 28 * layers)),
    }


def colour_bar(title: str, **more: Any) -> dict[str, Any]:
    """Make a slim colour bar whose title reads upwards beside it."""
    shown = {"text": title, "side": "right", "font": {"size": 12}}  # as the axes'; Plotly's own is larger
    return {"title": shown, "thickness": 10, "outlinewidth": 0, "len": 0.95} | more
