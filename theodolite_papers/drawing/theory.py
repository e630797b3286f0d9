"""Figures of what theory predicts: split weights, the bounds of both theorems, heads on two measures."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import plotly.graph_objects as go

from theodolite.report import style
from theodolite.report.data import Floats
from theodolite.report.drawing.grammar import dots, heat, line, saturation
from theodolite.system.wording import for_plotly, head_name, number
from theodolite_papers.drawing.localization import POWERS, TWOS, Line
from theodolite_papers.drawing.localization import curves as drawn_curves

THIS_MODEL = style.MEASURED
ORDERS = (style.BLUE, style.GREEN, style.PURPLE)  # of the differences in Theorem 1
TILES_ACROSS = 6
TILE_GAP, TILE_HEADROOM = 5, 11  # in cells of a map
TILE_PIXELS = 190
LARGEST_ERROR = 30.0  # of a kernel: beyond that a bound says nothing and would press the curves together


def weight_tiles(rotated: Floats, diagonal: Floats) -> Floats:
    """The maps of one layer's heads as tiles of one picture, −1 … 1: survivors below 0, the diagonal above.

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
    """One layer's heads as tiles of one picture, as in `weight_tiles`: rows less their means, of −1 … 1."""
    centred = logits - logits.mean(axis=-1, keepdims=True)
    return _in_tiles([np.clip(tile / saturation([tile]), -1, 1) for tile in centred])


def _in_tiles(tiles: Sequence[Floats]) -> Floats:
    """Square matrices of one size as one picture, NaN between them and above each, where its name stands."""
    side = len(tiles[0])
    across, step, tall = min(len(tiles), TILES_ACROSS), side + TILE_GAP, side + TILE_HEADROOM
    picture = np.full((math.ceil(len(tiles) / across) * tall, across * step - TILE_GAP), np.nan)
    for index, tile in enumerate(tiles):
        row, column = divmod(index, across)
        top = row * tall + TILE_HEADROOM
        picture[top : top + side, column * step : column * step + side] = tile
    return picture


def weight_maps(tiles: Floats, names: Sequence[str], side: int) -> go.Figure:
    """`weight_tiles` with the heads' names above them; `side`: cells along a tile."""
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


def head_values(
    grid: Floats, what: str, *, decades: bool = False, notes: Sequence[Sequence[str]] = ()
) -> go.Figure:
    """One number per head over layer × head: a share of one, or (`decades`) a ratio coloured by its logarithm."""
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
    """Every head on two measures, coloured by its block; `titles` of x and y."""
    depth = max(1.0, float(layers.max()))
    names = [head_name(int(layer), int(head)) for layer, head in zip(layers, heads, strict=True)]
    colours = [style.order_colour(layer / depth) for layer in layers]
    hover = f"%{{text}}<br>{titles[0]} %{{x:.3g}}<br>{titles[1]} %{{y:.3g}}<extra></extra>"
    shown = dots(x, y, names, None, colours, hover, showlegend=False)
    return style.figure([shown, style.depth_bar(int(depth) + 1)], *titles, height=380)


def smoothness_bounds(
    cutoffs: Sequence[int], bounds: Floats, attained: Floats, trivial: Floats, layer: int
) -> go.Figure:
    """Theorem 1 at one layer: the bound for each order of difference (dashed), the attained error, no approximation."""
    all_values = np.concatenate([bounds.ravel(), attained.ravel(), trivial])
    positive = all_values[np.isfinite(all_values) & (all_values > 0)]
    # What is left at the last k is rounding: a curve may leave the picture below.
    low = max(float(positive.min()), float(trivial.max()) * 1e-7)
    traces: list[Any] = []
    for order, (values, colour) in enumerate(zip(bounds[layer], ORDERS, strict=True), start=1):
        hover = f"k = %{{x}}: bound with m = {order} %{{y:.3g}}<extra></extra>"
        traces += line(cutoffs, values, f"bound, m = {order}", colour, dash="dash", hover=hover)
    hover = "k = %{x}: attained %{y:.3g}<extra></extra>"
    traces += line(cutoffs, attained[layer], "attained", THIS_MODEL, width=2.4, marker=6, hover=hover)
    none, hover = "no approximation, ‖G‖/T", "‖G‖/T = %{y:.3g}<extra></extra>"
    flat = np.full(len(cutoffs), trivial[layer])
    traces += line(cutoffs, flat, none, style.GREY, dash="dot", width=1.5, hover=hover)
    ticks = [k for k in (1, 2, 5, 10, 20, 50, 100) if k <= max(cutoffs)]
    x = {"type": "log", "tickvals": ticks, "ticktext": [str(tick) for tick in ticks]}
    y = POWERS | {"range": [math.log10(low) - 0.3, math.log10(float(positive.max())) + 0.3]}
    titles = "k, number of frequencies kept", "error, ‖G − approximation‖/T"
    return style.figure(traces, *titles, height=430, layout={"xaxis": x, "yaxis": y})


def factorisation(
    levels: Floats,
    curves: Mapping[str, tuple[Floats, Floats]],
    bound: tuple[Floats, Floats],
    marks: Mapping[str, float],
) -> go.Figure:
    """Theorem 2: mean error of the factorised kernel against incoherence, log-log, with the bound (dashed)."""
    drawn = bound[1] <= LARGEST_ERROR
    low = min(float(means.min()) for means, _ in curves.values()) / 2
    traces: list[Any] = []
    for (name, (means, errors)), colour, symbol in zip(
        curves.items(), (THIS_MODEL, style.BLUE), ("circle", "circle-open"), strict=True
    ):
        hover = f"{for_plotly(name)}<br>incoherence %{{x:.3g}}: error %{{y:.3g}}<extra></extra>"
        own: dict[str, Any] = {"width": 2, "marker": 8, "marker_symbol": symbol, "hover": hover}
        traces += line(levels, means, name, colour, errors=errors, **own)
    lines = {"bound": (bound[0][drawn], bound[1][drawn], style.GREY, "dash")}
    for (name, value), dash in zip(marks.items(), ("solid", "dot"), strict=True):
        lines[name] = (np.array([value, value]), np.array([low, LARGEST_ERROR]), style.GREEN, dash)
    for name, (x, y, colour, dash) in lines.items():
        hover = f"{for_plotly(name)}<br>incoherence %{{x:.3g}}<extra></extra>"
        traces += line(x, y, name, colour, dash=dash, width=1.6, hover=hover)
    ends = [math.log10(end(*levels, *marks.values())) for end in (min, max)]
    layout = {"xaxis": TWOS | {"range": [ends[0] - 0.1, ends[1] + 0.1]}}
    layout["yaxis"] = POWERS | {"dtick": 1, "range": [math.log10(low), math.log10(LARGEST_ERROR)]}
    titles = "incoherence", "relative error of the kernel"
    return style.figure(traces, *titles, height=430, layout=layout)


def error_over_incoherence(widths: Floats, curves: Mapping[str, tuple[Floats, Floats]]) -> go.Figure:
    """Theorem 2 with noise: error over incoherence against the width, log-log, one line an incoherence."""
    lines = [Line(name, colour, marker=6) for name, colour in zip(curves, style.CATEGORIES, strict=False)]
    values, errors = zip(*curves.values(), strict=True)
    x = {"type": "log", "tickvals": widths.tolist(), "ticktext": [f"{d:g}" for d in widths]}
    titles = "width d", "error over incoherence"
    return drawn_curves(widths, lines, values, titles, errors=errors, height=380, xaxis=x, yaxis=TWOS)


def layer_lines(layers: Floats, curves: Mapping[str, tuple[Floats, Floats]], y: str) -> go.Figure:
    """Layer measures with their standard errors, pairwise in one colour: measured solid, then its baseline dotted."""
    looks = [
        Line("", colour, dash, marker=marker)
        for colour in (THIS_MODEL, style.BLUE)
        for dash, marker in (("solid", 6), ("dot", 0))
    ]
    lines = [replace(look, name=name) for name, look in zip(curves, looks, strict=False)]
    values, errors = zip(*curves.values(), strict=True)
    x, from_0 = style.layer_axis(layers), {"rangemode": "tozero"}
    return drawn_curves(layers, lines, values, ("layer", y), errors=errors, height=360, xaxis=x, yaxis=from_0)
