"""Figures of signal propagation: curves of theory against each other and a simulation, maps, heads."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import plotly.graph_objects as go

from theodolite.report import style
from theodolite.report.data import Floats
from theodolite.report.drawing.grammar import HEADROOM, Panel, dots, heat, line, panels
from theodolite.system.wording import for_plotly

PANEL_GAP = 0.06  # between maps side by side, of the width
MAP_HEIGHT, SQUARE_HEIGHT, CURVES_HEIGHT = 380, 320, 400
SHARE = {"range": [-0.02, 1.05]}
POWERS: dict[str, Any] = {"type": "log", "exponentformat": "power"}
TWOS: dict[str, Any] = {"type": "log", "dtick": "D2", "tickformat": "~g"}
"""Axes of a share, and of logarithms: powers of ten, or 1, 2 and 5 times them."""


@dataclass(frozen=True)
class Line:
    """Name and style of a curve."""

    name: str
    colour: str
    dash: str = "solid"
    width: float = 2.0
    marker: float = 0


PUBLISHED = Line("published", style.GREY, "dash")
CORRECTED = Line("corrected", style.BLUE)
FINITE = Line("finite length", style.GREEN)
EXACT = Line("exact", style.VERMILLION)


def curves(
    x: Floats,
    lines: Sequence[Line],
    values: Sequence[Floats],
    titles: tuple[str, str],
    *,
    errors: Sequence[Floats | None] = (),
    height: int = CURVES_HEIGHT,
    **layout: Any,
) -> go.Figure:
    """Curves over one axis, with their standard errors; `titles` of x and y."""
    traces: list[Any] = []
    for curve, y, error in zip(lines, values, errors or [None] * len(lines), strict=True):
        hover = f"{for_plotly(curve.name)}<br>{titles[0]} %{{x:.4g}}: %{{y:.4g}}<extra></extra>"
        traces += _curve(x, y, curve, hover, error)
    return style.figure(traces, *titles, height=height, layout=layout)


def _curve(x: Floats, y: Floats, curve: Line, hover: str, errors: Floats | None = None) -> list[Any]:
    own: dict[str, Any] = {"dash": curve.dash, "width": curve.width, "marker": curve.marker}
    return line(x, y, curve.name, curve.colour, errors=errors, hover=hover, **own)


def propagation_curves(
    theta: Floats, etas: Sequence[float], published: Floats, corrected: Floats
) -> go.Figure:
    """ρ(θ) of one ξ for every η: corrected solid, published dashed, one colour an η; both (etas, positions)."""
    lines, values = [], []
    for index, eta in enumerate(etas):
        colour = style.order_colour(index / max(1, len(etas) - 1))
        lines += [Line(f"η = {eta:g}", colour), Line(f"η = {eta:g}, published", colour, "dash", 1.4)]
        values += [corrected[index], published[index]]
    drawn = curves(theta, lines, values, ("θ", "ρ(θ)"), yaxis=SHARE)
    for trace in drawn.data[1::2]:
        trace.showlegend = False
    return drawn


def with_windows(drawn: go.Figure, windows: Mapping[str, tuple[float, float]]) -> go.Figure:
    """The figure with shaded intervals of its x axis, named at the top."""
    for index, (name, (low, high)) in enumerate(windows.items()):
        colour = style.CATEGORIES[index % len(style.CATEGORIES)]
        drawn.add_vrect(
            x0=low,
            x1=high,
            fillcolor=style.translucent(colour, style.BAND),
            line_width=0,
            annotation_text=for_plotly(name),
            annotation_position="top left",
        )
    return drawn


def maps(
    pictures: Mapping[str, Floats],
    axes: tuple[Floats, Floats],
    titles: tuple[str, str, str],
    limits: tuple[float, float],
    *,
    signed: Sequence[str] = (),
    square: bool = False,
) -> go.Figure:
    """Heat maps side by side: name → (rows, columns), all on the same axes and, but for `signed`, one scale.

    axes: values of x and y. titles: of x, y and the colours. signed: names of maps that are coloured by their sign.
    """
    largest = max((float(np.nanmax(np.abs(pictures[name]))) for name in signed), default=0.0) or 1.0
    first_of_scale = {name in signed: name for name in list(pictures)[::-1]}
    both = len(first_of_scale) > 1
    bare: dict[str, Any] = {"showgrid": False, "zeroline": False}
    shown = []
    for index, (name, picture) in enumerate(pictures.items()):
        low, high = (-largest, largest) if name in signed else limits
        where = f"{titles[0]} %{{x:.4g}}, {titles[1]} %{{y:.4g}}"
        hover = f"{for_plotly(name)}<br>{where}<br>{titles[2]} %{{z:.4g}}"
        trace = heat(
            picture,
            low,
            high,
            f"{hover}<extra></extra>",
            scale=style.SIGNED if name in signed else style.MAGNITUDE,
            bar=_scale_bar(titles[2], name, name in signed, both)
            if name in first_of_scale.values()
            else None,
            x=axes[0],
            y=axes[1],
        )
        rows = bare | ({"autorange": "reversed"} if square else {})
        y = "" if index else titles[1]
        shown.append(Panel(name, [trace], titles[0], y, bare, rows, square=square))
    height = SQUARE_HEIGHT if square else MAP_HEIGHT
    return panels(shown, len(shown), height=height - HEADROOM, gaps=(PANEL_GAP, 0))


def _scale_bar(title: str, name: str, signed: bool, both: bool) -> dict[str, Any]:
    """The colour bar of a map: of amounts, or of `signed` differences, which stands below where there are `both`."""
    if not both:
        return style.colour_bar(title)
    upper = {"y": 1, "yanchor": "top", "len": 0.46}
    lower = {"y": 0, "yanchor": "bottom", "len": 0.46}
    return style.colour_bar(name, **lower) if signed else style.colour_bar(title, **upper)


PREDICTED = (PUBLISHED, CORRECTED, FINITE, EXACT)


def simulation(
    positions: Floats, simulated: Floats, errors: tuple[Floats, Floats], predictions: Sequence[Floats]
) -> go.Figure:
    """ρ_i of one pair of mean and scale: points with both standard errors, and the four predictions."""
    name, at = "simulated, error over", (positions, simulated, None)
    hover = "token %{x}: simulated %{y:.3f} ± %{error_y.array:.2g} over draws<extra></extra>"
    by_draws = style.error_bars(errors[1], width=4, thickness=1.0)
    by_walks = style.error_bars(errors[0], width=0, thickness=2.5)
    traces = [
        dots(*at, f"{name} draws of W_QK", style.ORANGE, hover, error_y=by_draws, marker={"size": 5}),
        dots(*at, f"{name} walks", style.PURPLE, "", error_y=by_walks, marker={"size": 1}, hoverinfo="skip"),
    ]
    for curve, values in zip(PREDICTED, predictions, strict=True):
        traces += _curve(positions, values, curve, f"token %{{x}}: {curve.name} %{{y:.3f}}<extra></extra>")
    layout = {"yaxis": SHARE, "legend": {"font": {"size": 10}}}
    return style.figure(traces, "token i", "ρᵢ", height=440, layout=layout)


def entropies(
    scales: Sequence[float], means: Sequence[float], values: Floats, errors: Floats, least: float
) -> go.Figure:
    """Mean attention entropy against the scale of the eigenvalues, a line a mean; logarithmic axes."""
    colours = [style.order_colour(index / max(1, len(means) - 1)) for index in range(len(means))]
    lines = [Line(f"mean {mean:g}", colour, marker=7) for mean, colour in zip(means, colours, strict=True)]
    x = {"type": "log", "tickvals": list(scales), "ticktext": [f"{scale:g}" for scale in scales]}
    y = TWOS | {"range": [math.log10(least), math.log10(5)]}
    titles = "scale of the eigenvalues", "entropy in nats"
    at = np.array(scales, dtype=np.float64)
    return curves(at, lines, list(values), titles, errors=list(errors), xaxis=x, yaxis=y)


def whiskers(middle: Floats, low: Floats, high: Floats) -> dict[str, Any]:
    """Error bars from the lower to the upper end of an interval."""
    up, down = (part.astype(np.float32) for part in (high - middle, middle - low))
    return {"type": "data", "symmetric": False, "array": up, "arrayminus": down, "thickness": 1.2, "width": 3}


def bars(
    groups: Sequence[str], values: Mapping[str, tuple[Floats, Floats]], y: str, limits: tuple[float, float]
) -> go.Figure:
    """Grouped bars with their intervals: name → (values, (2, groups) lower and upper)."""
    traces = [
        go.Bar(
            x=list(groups),
            y=heights.astype(np.float32),
            name=for_plotly(name),
            marker={"color": colour},
            error_y=whiskers(heights, *interval),
            hovertemplate=f"%{{x}}<br>{for_plotly(name)}: %{{y:.3f}}<extra></extra>",
        )
        for (name, (heights, interval)), colour in zip(values.items(), style.CATEGORIES, strict=False)
    ]
    layout = {"barmode": "group", "yaxis": {"range": list(limits)}}
    return style.figure(traces, "", y, height=CURVES_HEIGHT, layout=layout)
