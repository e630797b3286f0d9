"""The figures that only experiments need: curves, maps, heads on two measures, numbers over published ones."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import plotly.graph_objects as go

from theodolite.estimates import Floats
from theodolite.report import style
from theodolite.report.data import layer_numbers, need_column
from theodolite.report.drawing.grammar import (
    HEADROOM,
    Panel,
    bars,
    cosine_map,
    dots,
    heat,
    line,
    panels,
    saturation,
)
from theodolite.report.style import layer_axis, order_colour
from theodolite.system.wording import for_plotly, head_name, number, percent
from theodolite_papers.hidden_geometry import published

if TYPE_CHECKING:
    from theodolite import Run

PANEL_GAP = 0.06  # between maps side by side, of the width
MAP_HEIGHT, SQUARE_HEIGHT, CURVES_HEIGHT = 380, 320, 400
DEPTH_TICKS = 8  # of a colour bar of layers, about
SHARE = {"range": [-0.02, 1.05]}
POWERS: dict[str, Any] = {"type": "log", "exponentformat": "power"}
TWOS: dict[str, Any] = {"type": "log", "dtick": "D2", "tickformat": "~g"}
"""Axes of a share, and of logarithms: powers of ten, or 1, 2 and 5 times them."""


Values = npt.NDArray[Any]
"""Numbers or names along an axis."""


@dataclass(frozen=True)
class Line:
    """Name and style of a curve; `legend`: whether its name stands there."""

    name: str
    colour: str
    dash: str = "solid"
    width: float = 2.0
    marker: float = 0
    legend: bool = True


PUBLISHED = Line("published", style.GREY, "dash")
CORRECTED = Line("corrected", style.BLUE)
FINITE = Line("finite length", style.GREEN)
EXACT = Line("exact", style.VERMILLION)


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
    baselines: bool = False,
) -> go.Figure:
    """Draw layer measures with their standard errors, by name; `baselines`: each is followed by its own, dotted."""
    first = Line("", THIS_MODEL, width=2.4, marker=6)
    second = replace(first, colour=style.BLUE)
    looks = [first, replace(second, dash="dash")]
    if baselines:
        looks = [look for each in (first, second) for look in (each, replace(each, dash="dot", marker=0))]
    lines = [replace(look, name=name) for name, look in zip(measured, looks, strict=False)]
    values, errors = zip(*measured.values(), strict=True)
    axes: dict[str, Any] = {"xaxis": layer_axis(layers), "yaxis": axis or {"rangemode": "tozero"}}
    return curves(layers, lines, values, ("layer", y), errors=errors, height=350, **axes)


def propagation_curves(
    theta: Floats, etas: Sequence[float], published: Floats, corrected: Floats
) -> go.Figure:
    """Draw ρ(θ) of one ξ for every η: corrected solid, published dashed, one colour an η; both (etas, positions)."""
    lines, values = [], []
    for index, eta in enumerate(etas):
        colour = order_colour(index / max(1, len(etas) - 1))
        lines.append(Line(f"η = {eta:g}", colour))
        lines.append(Line(f"η = {eta:g}, published", colour, "dash", 1.4, legend=False))
        values += [corrected[index], published[index]]
    return curves(theta, lines, values, ("θ", "ρ(θ)"), yaxis=SHARE)


def with_window(drawn: go.Figure, name: str, low: float, high: float) -> go.Figure:
    """Shade an interval of the figure's x axis, named at the top."""
    look = {"fillcolor": style.translucent(style.CATEGORIES[0], style.BAND), "line_width": 0}
    return drawn.add_vrect(
        low, high, **look, annotation_text=for_plotly(name), annotation_position="top left"
    )


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
    """Make the colour bar of a map: of amounts, or of `signed` differences, which stands below if there are `both`."""
    if not both:
        return style.colour_bar(title)
    upper = {"y": 1, "yanchor": "top", "len": 0.46}
    lower = {"y": 0, "yanchor": "bottom", "len": 0.46}
    return style.colour_bar(name, **lower) if signed else style.colour_bar(title, **upper)


PREDICTED = (PUBLISHED, CORRECTED, FINITE, EXACT)


def simulation(
    positions: Floats, simulated: Floats, errors: tuple[Floats, Floats], predictions: Sequence[Floats]
) -> go.Figure:
    """Draw ρ_i of one pair of mean and scale: points with both standard errors, and the four predictions."""
    name, at = "simulated, error over", (positions, simulated, None)
    hover = "token %{x}: simulated %{y:.3f} ± %{error_y.array:.2g} over draws<extra></extra>"
    by_draws = style.error_bars(errors[1], width=4, thickness=1.0)
    by_walks = style.error_bars(errors[0], width=0, thickness=2.5)
    drawn = curves(
        positions,
        PREDICTED,
        predictions,
        ("token i", "ρᵢ"),
        height=440,
        yaxis=SHARE,
        legend={"font": {"size": 10}},
    )
    drawn.add_trace(
        dots(*at, f"{name} draws of W_QK", style.ORANGE, hover, error_y=by_draws, marker={"size": 5})
    )
    skipped: dict[str, Any] = {"marker": {"size": 1}, "hoverinfo": "skip"}
    return drawn.add_trace(dots(*at, f"{name} walks", style.PURPLE, "", error_y=by_walks, **skipped))


def entropies(
    scales: Sequence[float], means: Sequence[float], values: Floats, errors: Floats, least: float
) -> go.Figure:
    """Draw mean attention entropy against the scale of the eigenvalues, a line a mean; logarithmic axes."""
    colours = [style.order_colour(index / max(1, len(means) - 1)) for index in range(len(means))]
    lines = [Line(f"mean {mean:g}", colour, marker=7) for mean, colour in zip(means, colours, strict=True)]
    x = {"type": "log", "tickvals": list(scales), "ticktext": [f"{scale:g}" for scale in scales]}
    y = TWOS | {"range": [math.log10(least), math.log10(5)]}
    titles = "scale of the eigenvalues", "entropy in nats"
    at = np.array(scales, dtype=np.float64)
    return curves(at, lines, list(values), titles, errors=list(errors), xaxis=x, yaxis=y)


def whiskers(middle: Floats, low: Floats, high: Floats) -> dict[str, Any]:
    """Make error bars from the lower to the upper end of an interval."""
    up, down = (part.astype(np.float32) for part in (high - middle, middle - low))
    return {"type": "data", "symmetric": False, "array": up, "arrayminus": down, "thickness": 1.2, "width": 3}


def grouped_bars(
    groups: Sequence[str], values: Mapping[str, tuple[Floats, Floats]], y: str, limits: tuple[float, float]
) -> go.Figure:
    """Draw grouped bars with their intervals: name → (values, (2, groups) lower and upper)."""
    traces = []
    for (name, (heights, interval)), colour in zip(values.items(), style.CATEGORIES, strict=False):
        hover = f"%{{x}}<br>{for_plotly(name)}: %{{y:.3f}}<extra></extra>"
        own = {"error_y": whiskers(heights, *interval)}
        traces.append(bars(list(groups), heights, for_plotly(name), colour, hover, **own))
    layout = {"barmode": "group", "yaxis": {"range": list(limits)}}
    return style.figure(traces, "", y, height=CURVES_HEIGHT, layout=layout)


THIS_MODEL = style.MEASURED
PAPER = dict(zip(published.MODELS, (style.BLUE, style.ORANGE, style.GREEN, style.PURPLE), strict=True))
DASHES = dict(zip(published.TEXTS, ("dot", "solid", "dash"), strict=True))
LINE = 1.3
PANEL_ROW = 26  # pixels a row
NARROW = 16  # characters in a line of an axis title


def against_published(
    run: Run, name: str, rows: published.Rows, y: str, errors: Floats, *, log: bool = False
) -> go.Figure:
    """Draw a layer column over the rows of Table 4, 5 or 6, one line per model and text, rescaled to this depth."""
    layers, values = layer_numbers(run), need_column(run.layers, name)
    drawn = over_layers(layers, {"this model": (values, errors)}, y, TWOS if log else None)
    depth = np.linspace(0, float(layers.max()), 13).round(4)
    printed: list[Any] = []
    for model in published.MODELS:
        for text, row in zip(published.TEXTS, rows[model], strict=True):
            hover = f"{model} on {text}, layer %{{customdata}}: %{{y:g}}<extra></extra>"
            own: dict[str, Any] = {"width": LINE, "dash": DASHES[text], "opacity": 0.75, "hover": hover}
            own |= {"customdata": list(range(13)), "showlegend": text == "OpenWebText"}
            printed += line(depth, row, model, PAPER[model], **own)
    drawn.add_traces(printed)
    drawn.data = (*drawn.data[1:], drawn.data[0])  # this model in front
    return drawn


def averages(rows: Mapping[str, Mapping[str, tuple[float, float]]], quantities: Sequence[str]) -> go.Figure:
    """Draw Table 1 as dots: a panel per quantity, a line per row, a bar of one standard deviation over layers."""
    names = [for_plotly(name) for name in rows]
    shown: list[Panel] = []
    for quantity in quantities:
        cells = np.array([row.get(quantity, (math.nan, math.nan)) for row in rows.values()])
        hover = f"%{{y}}<br>{quantity}: %{{x:.4g}}<extra></extra>"
        own: dict[str, Any] = {
            "mode": "markers",
            "error_x": dict(style.error_bars(cells[:, 1]) or {}, color=style.GREY),
        }
        own["marker"] = {"size": 9, "color": [THIS_MODEL] + [style.REFERENCE] * (len(names) - 1)}
        points = line(cells[:, 0], names, "", THIS_MODEL, hover=hover, **own)
        title = "<br>".join(textwrap.wrap(quantity, NARROW))  # beside others
        axis: dict[str, Any] = {"autorange": "reversed", "type": "category"}
        axis |= {"matches": "y", "showticklabels": False, "ticks": ""} if shown else {}
        shown.append(Panel("", points, title, "", {"rangemode": "tozero", "nticks": 4}, axis))
    height, gaps = 110 + PANEL_ROW * len(names) - HEADROOM, (0.035, 0)
    return panels(shown, len(shown), height=height, gaps=gaps, layout={"showlegend": False})


def shares_by_cutoff(
    measured: Mapping[str, Mapping[int, float]], paper: Mapping[str, Mapping[int, float]]
) -> go.Figure:
    """Draw the share of energy in the K × K lowest frequencies against K: solid as measured, dotted as in Table 3."""
    shown = {}
    for (name, printed), colour in zip(paper.items(), ORDERS, strict=True):
        shown[Line(name, colour, width=2.2, marker=6)] = measured[name]
        shown[Line(f"{name}, GPT-2 in Table 3", colour, "dot", LINE, 4)] = printed
    shown = {curve: shares for curve, shares in shown.items() if shares}
    values = [np.array([*shares.values()]) for shares in shown.values()]
    cutoffs = [np.array([*map(str, shares)]) for shares in shown.values()]
    axes: dict[str, Any] = {"yaxis": {"range": [0, 1.05]}, "xaxis": {"type": "category"}}
    return curves(cutoffs, [*shown], values, ("K", "share of energy"), height=360, **axes)


def layer_cosines(cosines: Floats) -> go.Figure:
    """Draw the mean cosine between a token's vectors at every two layers, (N, N)."""
    rows = [f"layer {layer}" for layer in range(len(cosines))]
    layers = range(0, len(rows), max(1, len(rows) // 12))
    return cosine_map(cosines, rows, "mean cosine", [(float(layer), str(layer)) for layer in layers])


def singular_values_against(learned: Floats, fixed: Floats, fixed_name: str) -> go.Figure:
    """Draw singular values over the first: of each layer's learned basis, and, thick, of a fixed one."""
    depth = max(1, len(learned) - 1)
    shown = [
        (Line(f"layer {layer}", order_colour(layer / depth), width=LINE, legend=False), values)
        for layer, values in enumerate(learned)
    ]
    shown.append((Line(fixed_name, THIS_MODEL, width=3.0), fixed))
    shown = [(curve, values / values.max()) for curve, values in shown if values.max() > 0]
    # Beyond 10⁻⁸ it is rounding.
    relative = [np.where(values > 1e-8, values, np.nan) for _, values in shown]
    titles, y = ("number", "singular value over the largest"), POWERS | {"dtick": 1}
    number_of = np.arange(1, len(fixed) + 1)
    drawn = curves(number_of, [curve for curve, _ in shown], relative, titles, height=380, yaxis=y)
    return drawn.add_trace(depth_bar(len(learned)))


def layer_norms(norms: Floats, errors: Floats, ratios: Mapping[int, float]) -> go.Figure:
    """Draw the mean norm of the vectors at every layer, log axis, and dots where the paper's ratios would put it."""
    layers = np.arange(len(norms), dtype=np.float64)
    axis = TWOS | {"tickformat": "~s"}
    drawn = over_layers(layers, {"this model": (norms, errors)}, "mean ‖h‖₂", axis)
    hover = "GPT-2: %{text} × layer 0<extra></extra>"
    heights, names = norms[0] * np.array([*ratios.values()]), [number(ratio, 4) for ratio in ratios.values()]
    printed, marker = "layer 0 times the ratio of GPT-2", {"size": 9, "symbol": "diamond-open"}
    return drawn.add_trace(dots([*ratios], heights, names, printed, style.REFERENCE, hover, marker=marker))


ORDERS = (style.BLUE, style.GREEN, style.PURPLE)  # of the differences in Theorem 1
TILES_ACROSS = 6
TILE_GAP, TILE_HEADROOM = 5, 11  # in cells of a map
TILE_PIXELS = 190
LARGEST_ERROR = 30.0  # of a kernel: beyond that a bound says nothing and would press the curves together


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


def smoothness_bounds(
    cutoffs: Sequence[int], bounds: Floats, attained: Floats, trivial: Floats, layer: int
) -> go.Figure:
    """Draw Theorem 1 at one layer: the bound for each order (dashed), the attained error, no approximation."""
    all_values = np.concatenate([bounds.ravel(), attained.ravel(), trivial])
    positive = all_values[np.isfinite(all_values) & (all_values > 0)]
    # What is left at the last k is rounding: a curve may leave the picture below.
    low = max(float(positive.min()), float(trivial.max()) * 1e-7)
    lines = [Line(f"bound, m = {order}", colour, "dash", 1.8) for order, colour in enumerate(ORDERS, start=1)]
    lines.append(Line("attained", THIS_MODEL, width=2.4, marker=6))
    lines.append(Line("no approximation, ‖G‖/T", style.GREY, "dot", 1.5))
    values = [*bounds[layer], attained[layer], np.full(len(cutoffs), trivial[layer])]
    ticks = [k for k in (1, 2, 5, 10, 20, 50, 100) if k <= max(cutoffs)]
    x = {"type": "log", "tickvals": ticks, "ticktext": [str(tick) for tick in ticks]}
    y = POWERS | {"range": [math.log10(low) - 0.3, math.log10(float(positive.max())) + 0.3]}
    titles = "k, number of frequencies kept", "error, ‖G − approximation‖/T"
    return curves(np.array(cutoffs), lines, values, titles, height=430, xaxis=x, yaxis=y)


def factorisation(
    levels: Floats,
    measured: Mapping[str, tuple[Floats, Floats]],
    bound: tuple[Floats, Floats],
    here: tuple[str, float],
) -> go.Figure:
    """Draw Theorem 2: mean error of the factorised kernel against incoherence, log-log, with the bound (dashed).

    here: name and incoherence of the model; one that is at the noise floor is not drawn.
    """
    low = min(float(means.min()) for means, _ in measured.values()) / 2
    shown: list[tuple[Line, Floats, Floats, Floats | None]] = [
        (Line(name, colour, marker=8), levels, means, errors)
        for (name, (means, errors)), colour in zip(measured.items(), (THIS_MODEL, style.BLUE), strict=True)
    ]
    informative = bound[1] <= LARGEST_ERROR
    shown.append((Line("bound", style.GREY, "dash", 1.6), bound[0][informative], bound[1][informative], None))
    name, incoherence = here
    if incoherence > 0:
        vertical = np.full(2, incoherence), np.array([low, LARGEST_ERROR])
        shown.append((Line(name, style.GREEN, width=1.6), *vertical, None))
    lines, x, values, errors = zip(*shown, strict=True)
    ends = [math.log10(end(*levels, incoherence if incoherence > 0 else levels[0])) for end in (min, max)]
    axes: dict[str, Any] = {"xaxis": TWOS | {"range": [ends[0] - 0.1, ends[1] + 0.1]}}
    axes["yaxis"] = POWERS | {"dtick": 1, "range": [math.log10(low), math.log10(LARGEST_ERROR)]}
    titles = "incoherence", "relative error of the kernel"
    return curves(x, lines, values, titles, errors=errors, height=430, **axes)


def error_over_incoherence(widths: Floats, measured: Mapping[str, tuple[Floats, Floats]]) -> go.Figure:
    """Draw Theorem 2 with noise: error over incoherence against the width, log-log, one line an incoherence."""
    lines = [Line(name, colour, marker=6) for name, colour in zip(measured, style.CATEGORIES, strict=False)]
    values, errors = zip(*measured.values(), strict=True)
    x = {"type": "log", "tickvals": widths.tolist(), "ticktext": [f"{d:g}" for d in widths]}
    titles = "width d", "error over incoherence"
    return curves(widths, lines, values, titles, errors=errors, height=380, xaxis=x, yaxis=TWOS)


def accuracies(
    names: Sequence[str], measured: tuple[Floats, Floats], paper: Mapping[str, Floats]
) -> go.Figure:
    """Draw the accuracy by number of digits: this model with standard errors, and rows of the paper."""

    def points(name: str, values: Floats, colour: str, **own: Any) -> dict[str, Any]:
        shown = [percent(float(value)) for value in values]
        return dots(names, values, shown, name, colour, f"%{{x}}<br>{name}: %{{text}}<extra></extra>", **own)

    traces = [points("this model", measured[0], THIS_MODEL, error_y=style.error_bars(measured[1]))]
    for (name, values), colour in zip(paper.items(), (style.BLUE, style.GREEN), strict=True):
        traces.append(points(name, values, colour, marker={"symbol": "diamond-open"}))
    layout = {"yaxis": {"range": [-0.03, 1.05], "tickformat": ".0%"}, "xaxis": {"type": "category"}}
    return style.figure(traces, "", "exact-match accuracy", height=360, layout=layout)
