"""The figures that several experiments need: curves, maps, intervals, vectors, heads on two measures, tiles."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import plotly.graph_objects as go

from theodolite.estimates import Estimate, Floats
from theodolite.report import style
from theodolite.report.data import evenly
from theodolite.report.drawing import grammar
from theodolite.report.drawing.grammar import HEADROOM, Panel, bars, dots, heat, line, panels, saturation
from theodolite.system.wording import for_plotly, head_name, number

PANEL_GAP = 0.06  # between maps side by side, of the width
MAP_HEIGHT, SQUARE_HEIGHT, CURVES_HEIGHT = 380, 320, 400
DEPTH_TICKS = 8  # of a colour bar of layers, about
DIMENSIONS = 64  # of vectors, that are drawn: the largest
SHARE = {"range": [-0.02, 1.05]}
POWERS: dict[str, Any] = {"type": "log", "exponentformat": "power"}
TWOS: dict[str, Any] = {"type": "log", "dtick": "D2", "tickformat": "~g"}
"""Axes of a share, and of logarithms: powers of ten, or 1, 2 and 5 times them."""

LINE = 1.3  # width of one of many lines
Values = npt.NDArray[Any]  # numbers or names along an axis


@dataclass(frozen=True)
class Line:
    """Name and style of a curve; `legend`: whether its name stands there."""

    name: str
    colour: str
    dash: str = "solid"
    width: float = 2.0
    marker: float = 0
    legend: bool = True


def in_order(names: Sequence[str], **look: Any) -> list[Line]:
    """Make lines of one look whose colours show their order."""
    last = max(1, len(names) - 1)
    return [Line(name, style.order_colour(place / last), **look) for place, name in enumerate(names)]


def by_category(names: Iterable[str], **look: Any) -> list[Line]:
    """Make lines of one look in the colours of categories, as many as there are colours."""
    return [Line(name, colour, **look) for name, colour in zip(names, style.CATEGORIES, strict=False)]


def curves(
    x: Values | Sequence[Values],
    lines: Sequence[Line],
    values: Sequence[Floats],
    titles: tuple[str, str],
    *,
    errors: Sequence[Floats | None] = (),
    height: int = CURVES_HEIGHT,
    **layout: Any,
) -> go.Figure:
    """Draw curves over one axis, or each over its own `x`, with their standard errors; `titles` of x and y."""
    at = [x] * len(lines) if isinstance(x, np.ndarray) else x
    traces: list[Any] = []
    for curve, x_of, y, error in zip(lines, at, values, errors or [None] * len(lines), strict=True):
        hover = f"{for_plotly(curve.name)}<br>{titles[0]} %{{x:.4g}}: %{{y:.4g}}<extra></extra>"
        look: dict[str, Any] = {"dash": curve.dash, "width": curve.width, "marker": curve.marker}
        look |= {"hover": hover, "showlegend": curve.legend}
        traces += line(x_of, y, curve.name, curve.colour, errors=error, **look)
    return style.figure(traces, *titles, height=height, layout=layout)


def depth_bar(count: int) -> dict[str, Any]:
    """Return a trace without points that carries the colour bar of lines coloured by `order_colour`."""
    scale = {"color": [0], "colorscale": style.ORDER, "cmin": 0, "cmax": max(1, count - 1), "showscale": True}
    bar = style.colour_bar("layer", tickformat="d", dtick=max(1, -(-(count - 1) // DEPTH_TICKS)))
    bare = {"x": [None], "y": [None], "showlegend": False, "hoverinfo": "skip"}
    return {"type": "scatter", "mode": "markers", "marker": scale | {"colorbar": bar}} | bare


def over_layers(
    layers: Floats,
    measured: Mapping[str, tuple[Floats, Floats | None]],
    y: str,
    axis: Mapping[str, Any] | None = None,
    *,
    baseline: bool = False,
) -> go.Figure:
    """Draw one or two layer measures with their standard errors, by name; `baseline`: the second is that, dotted."""
    first = Line("", style.MEASURED, width=2.4, marker=6)
    other: dict[str, Any] = (
        {"dash": "dot", "marker": 0} if baseline else {"dash": "dash", "colour": style.BLUE}
    )
    looks = first, replace(first, **other)
    lines = [replace(look, name=name) for name, look in zip(measured, looks, strict=False)]
    values, errors = zip(*measured.values(), strict=True)
    axes: dict[str, Any] = {"xaxis": style.layer_axis(layers), "yaxis": axis or {"rangemode": "tozero"}}
    return curves(layers, lines, values, ("layer", y), errors=errors, height=350, **axes)


def maps(
    pictures: Mapping[str, Floats],
    axes: tuple[Floats, Floats],
    titles: tuple[str, str, str],
    limits: tuple[float, float],
    *,
    signed: Sequence[str] = (),
    square: bool = False,
) -> go.Figure:
    """Draw heat maps side by side: name → (rows, columns), all on the same axes and, but for `signed`, one scale.

    axes: values of x and y. titles: of x, y and the colours. signed: names of maps that are coloured by their sign.
    """
    largest = max((float(np.nanmax(np.abs(pictures[name]))) for name in signed), default=0.0) or 1.0
    first_of_scale = {name in signed: name for name in list(pictures)[::-1]}
    colour_bars = {name: style.colour_bar(titles[2]) for name in first_of_scale.values()}
    if len(first_of_scale) > 1:  # of amounts, and below it of signed differences
        upper, lower = {"y": 1, "yanchor": "top", "len": 0.46}, {"y": 0, "yanchor": "bottom", "len": 0.46}
        of_amounts, of_signs = first_of_scale[False], first_of_scale[True]
        colour_bars = {
            of_amounts: style.colour_bar(titles[2], **upper),
            of_signs: style.colour_bar(of_signs, **lower),
        }
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
            bar=colour_bars.get(name),
            x=axes[0],
            y=axes[1],
        )
        rows = bare | ({"autorange": "reversed"} if square else {})
        shown.append(Panel(name, [trace], titles[0], "" if index else titles[1], bare, rows, square=square))
    height = SQUARE_HEIGHT if square else MAP_HEIGHT
    return panels(shown, len(shown), height=height - HEADROOM, gaps=(PANEL_GAP, 0))


def cosine_map(
    cosines: Floats,
    names: Sequence[str],
    quantity: str,
    ticks: Sequence[tuple[float, str]],
    borders: Sequence[int] = (),
    **layout: Any,
) -> go.Figure:
    """Draw a square map of cosines between things in groups, from the top left.

    Args:
        names: what hovering calls each of them. ticks: of both axes, (place, name). layout: further entries.
        borders: the first of each group but the first group, for the lines between them.
    """
    axis: dict[str, Any] = {"type": "category", "ticks": "", "constrain": "domain"}
    axis |= {"tickvals": [place for place, _ in ticks], "ticktext": [name for _, name in ticks]}
    hover = f"%{{y}}<br>%{{x}}<br>{quantity} %{{z:.2f}}<extra></extra>"
    cells = heat(cosines, -1, 1, hover, scale=style.SIGNED, bar=quantity, x=list(names), y=list(names))
    axes = {"xaxis": axis, "yaxis": axis | {"autorange": "reversed", "scaleanchor": "x"}}
    drawn = style.figure([cells], height=470, layout=axes).update_layout(layout)
    look = {"width": 1, "color": style.GREY}
    for border in borders:
        drawn.add_vline(border - 0.5, line=look)
        drawn.add_hline(border - 0.5, line=look)
    return drawn


def by_dimension(
    vectors: Floats, tokens: Sequence[str], sinks: Sequence[int], scale_of: Floats | None = None
) -> go.Figure:
    """Draw vectors (tokens, d), a row per token, in the dimensions largest there or in `scale_of` (rows, d)."""
    largest = np.abs(vectors if scale_of is None else scale_of).max(axis=0)
    dimensions = np.sort(np.argsort(-largest, kind="stable")[:DIMENSIONS])
    limit = float(largest.max()) or 1.0
    hover = "%{y}<br>dimension %{customdata}: %{z:.3g}<extra></extra>"
    named = [[str(dimension) for dimension in dimensions]] * len(tokens)
    look: dict[str, Any] = {"scale": style.SIGNED, "y": grammar.token_names(tokens), "customdata": named}
    trace = heat(vectors[:, dimensions], -limit, limit, hover, bar="value", **look)
    ticks = evenly(len(dimensions), 16)
    across = {"tickvals": ticks, "ticktext": [str(dimensions[tick]) for tick in ticks]}
    down = grammar.token_axis(tokens, sinks) | {"autorange": "reversed", "tickangle": 0}
    layout = {"xaxis": across, "yaxis": down, "margin": {"l": 90}}
    return style.figure([trace], "dimension of the residual stream", "token", height=760, layout=layout)


def grouped_bars(
    groups: Sequence[str], values: Mapping[str, tuple[Floats, Floats]], y: str, limits: tuple[float, float]
) -> go.Figure:
    """Draw grouped bars with their intervals: name → (values, (2, groups) lower and upper)."""
    traces = []
    for (name, (heights, interval)), colour in zip(values.items(), style.CATEGORIES, strict=False):
        hover = f"%{{x}}<br>{for_plotly(name)}: %{{y:.3f}}<extra></extra>"
        up, down = (part.astype(np.float32) for part in (interval[1] - heights, heights - interval[0]))
        ends = {"type": "data", "symmetric": False, "array": up, "arrayminus": down}
        own: dict[str, Any] = {"error_y": ends | {"thickness": 1.2, "width": 3}}
        traces.append(bars(list(groups), heights, for_plotly(name), colour, hover, **own))
    layout = {"barmode": "group", "yaxis": {"range": list(limits)}}
    return style.figure(traces, "", y, height=CURVES_HEIGHT, layout=layout)


ORDERS = (style.BLUE, style.GREEN, style.PURPLE)  # colours of three matrices, or of three orders
TILES_ACROSS = 6
TILE_GAP, TILE_HEADROOM = 5, 11  # in cells of a map
TILE_PIXELS = 190


def weight_tiles(rotated: Floats, diagonal: Floats) -> Floats:
    """Lay out the maps of one layer's heads as tiles, −1 … 1: survivors below 0, the diagonal above.

    Magnitudes are square roots of shares of the head's largest; NaN separates the tiles.
    """
    tiles = []
    for survivors, of_head in zip(rotated, diagonal, strict=True):
        largest = max(survivors.max(), of_head.max()) or 1.0
        tile, red = -np.sqrt(survivors / largest), np.sqrt(of_head / largest)
        on = np.diag_indices(len(red))
        tile[on] = np.where(red >= -tile[on], red, tile[on])
        tiles.append(tile)
    return _in_tiles(tiles)


def positional_tiles(logits: Floats) -> Floats:
    """Lay out one layer's heads as tiles, as in `weight_tiles`: rows less their means, of −1 … 1."""
    centred = logits - logits.mean(axis=-1, keepdims=True)
    return _in_tiles([np.clip(tile / saturation([tile]), -1, 1) for tile in centred])


def _in_tiles(tiles: Sequence[Floats]) -> Floats:
    """Tile square matrices of one size, NaN between them and above each, where its name stands."""
    side = len(tiles[0])
    across, step, tall = min(len(tiles), TILES_ACROSS), side + TILE_GAP, side + TILE_HEADROOM
    picture = np.full((math.ceil(len(tiles) / across) * tall, across * step - TILE_GAP), np.nan)
    for index, tile in enumerate(tiles):
        row, column = divmod(index, across)
        top = row * tall + TILE_HEADROOM
        picture[top : top + side, column * step : column * step + side] = tile
    return picture


def weight_maps(tiles: Floats, names: Sequence[str], side: int) -> go.Figure:
    """Draw `weight_tiles` with the heads' names above them; `side`: cells along a tile."""
    across = min(len(names), TILES_ACROSS)
    trace = heat(tiles, -1, 1, "", scale=style.SIGNED, hoverinfo="skip")
    labels, boxes = [], []
    look: dict[str, Any] = {"showarrow": False, "yanchor": "bottom", "font": {"size": 11}}
    for head, name in enumerate(names):
        left = (head % across) * (side + TILE_GAP)
        top = (head // across) * (side + TILE_HEADROOM) + TILE_HEADROOM
        labels.append({"x": left + side / 2, "y": top - 2, "text": for_plotly(name)} | look)
        edges = {"x0": left - 0.5, "x1": left + side - 0.5, "y0": top - 0.5, "y1": top + side - 0.5}
        boxes.append({"type": "rect", "line": {"width": 1, "color": style.GREY}} | edges)
    bare = {"visible": False, "constrain": "domain"}
    layout = {
        "annotations": labels,
        "shapes": boxes,
        "xaxis": bare,
        "yaxis": bare | {"autorange": "reversed", "scaleanchor": "x"},
        "margin": {"l": 8, "r": 8, "t": 8, "b": 8},
    }
    height = 30 + TILE_PIXELS * math.ceil(len(names) / across) * 6 // max(across, 4)
    return style.figure([trace], height=height, layout=layout)


def intervals(estimates: Mapping[str, Estimate], x: str, axis: Mapping[str, Any]) -> go.Figure:
    """Draw estimates below one another, by name, with their 95 % intervals; `x`: what they are."""
    names = ["<br>".join(textwrap.wrap(name, 44)) for name in estimates]
    values, margins = np.array([(of.value, of.margin) for of in estimates.values()]).T
    own: dict[str, Any] = {"mode": "markers+text", "textposition": "top center", "cliponaxis": False}
    own |= {"marker": {"size": 11}, "error_x": style.error_bars(margins)}
    texts, hover = [number(value) for value in values], "%{y}: %{x:.3g}<extra></extra>"
    shown = dots(values, names, texts, None, style.BLUE, hover, **own)
    layout = {"yaxis": {"autorange": "reversed", "automargin": True}, "xaxis": axis}
    return style.figure([shown], x, "", height=150 + 50 * len(names), layout=layout)


def head_values(
    grid: Floats, what: str, *, decades: bool = False, notes: Sequence[Sequence[str]] = ()
) -> go.Figure:
    """Draw one number per head over layer × head: a share of one, or (`decades`) a ratio coloured by its logarithm."""
    colour_values, bar, limits = grid, style.colour_bar(what), (0.0, 1.0)
    if decades:
        with np.errstate(divide="ignore", invalid="ignore"):
            colour_values = np.where(grid > 0, np.log10(grid), np.nan)
        finite = colour_values[np.isfinite(colour_values)]
        lowest, highest = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)
        limits = (min(0.0, lowest), max(math.log10(2), highest))
        bases = (1, 1.5, 2, 3, 5, 7) if limits[1] - limits[0] < 1 else (1, 3)
        steps = [base * 10.0**power for power in range(-3, 6) for base in bases]
        ticks = [step for step in steps if limits[0] <= math.log10(step) <= limits[1] + 1e-9]
        bar |= {"tickvals": np.log10(ticks).tolist(), "ticktext": [number(tick) for tick in ticks]}
    text = [[f"{what}: {number(value)}" for value in row] for row in grid]
    if notes:
        rows = zip(text, notes, strict=True)
        text = [["<br>".join(pair) for pair in zip(*of_layer, strict=True)] for of_layer in rows]
    hover = "<b>L%{y}H%{x}</b><br>%{text}<extra></extra>"
    trace = heat(colour_values, *limits, hover, cells=True, text=text, showscale=True, colorbar=bar)
    return style.figure([trace], "head", "layer", layout=style.head_map_layout(*grid.shape))


def head_scatter(x: Floats, y: Floats, layers: Floats, heads: Floats, titles: tuple[str, str]) -> go.Figure:
    """Draw every head on two measures, coloured by its block; `titles` of x and y."""
    depth = max(1.0, float(layers.max()))
    names = [head_name(int(layer), int(head)) for layer, head in zip(layers, heads, strict=True)]
    colours = [style.order_colour(layer / depth) for layer in layers]
    hover = f"%{{text}}<br>{titles[0]} %{{x:.3g}}<br>{titles[1]} %{{y:.3g}}<extra></extra>"
    shown = dots(x, y, names, None, colours, hover, showlegend=False)
    return style.figure([shown, depth_bar(int(depth) + 1)], *titles, height=380)
