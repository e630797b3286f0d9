"""The figures that only experiments need: a run's numbers over the published ones, and comparisons of two bases."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import plotly.graph_objects as go

from theodolite.report import published, style
from theodolite.report.data import Floats, layer_numbers, need_column
from theodolite.report.drawing.grammar import HEADROOM, Panel, cosine_map, dots, line, panels
from theodolite.report.style import layer_axis, order_colour
from theodolite.system.wording import for_plotly, number
from theodolite_papers.drawing.localization import POWERS, TWOS

if TYPE_CHECKING:
    from theodolite import Run

THIS_MODEL = style.MEASURED
PAPER = dict(zip(published.MODELS, (style.BLUE, style.ORANGE, style.GREEN, style.PURPLE), strict=True))
DASHES = dict(zip(published.TEXTS, ("dot", "solid", "dash"), strict=True))
LINE = 1.3
PANEL_GAP = 0.035
PANEL_ROW = 26  # pixels a row
NARROW = 16  # characters in a line of an axis title


def _this_model(layers: Floats, values: Floats, name: str, errors: Floats | None, **own: Any) -> list[Any]:
    hover = f"layer %{{x}}<br>{for_plotly(name)}: %{{y:.4g}}<extra></extra>"
    look: dict[str, Any] = {"colour": THIS_MODEL, "width": 2.4, "marker": 6, "hover": hover} | own
    return line(layers, values, name, errors=errors, **look)


def against_published(
    run: Run, name: str, rows: published.Rows, y: str, errors: Floats | None = None, *, log: bool = False
) -> go.Figure:
    """A layer column over the rows of Table 4, 5 or 6, one line per model and text."""
    layers = layer_numbers(run)
    depth = np.linspace(0, float(layers.max()), 13).round(4)
    traces: list[Any] = []
    for model in published.MODELS:
        for text, values in zip(published.TEXTS, rows[model], strict=True):
            hover = f"{model} on {text}, layer %{{customdata}}: %{{y:g}}<extra></extra>"
            own: dict[str, Any] = {"width": LINE, "dash": DASHES[text], "opacity": 0.75, "hover": hover}
            own |= {"customdata": list(range(13)), "showlegend": text == "OpenWebText"}
            traces += line(depth, values, model, PAPER[model], **own)
    traces += _this_model(layers, need_column(run.layers, name), "this model", errors)
    axis = TWOS if log else {"rangemode": "tozero"}
    return style.figure(traces, "layer", y, height=420, layout={"xaxis": layer_axis(layers), "yaxis": axis})


def averages(rows: Mapping[str, Mapping[str, tuple[float, float]]], quantities: Sequence[str]) -> go.Figure:
    """Table 1 as dots: one panel per quantity, one line per row, a bar of one standard deviation over layers."""
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
    height, gaps = 110 + PANEL_ROW * len(names) - HEADROOM, (PANEL_GAP, 0)
    return panels(shown, len(shown), height=height, gaps=gaps, layout={"showlegend": False})


def shares_by_cutoff(
    measured: Mapping[str, Mapping[int, float]], paper: Mapping[str, Mapping[int, float]]
) -> go.Figure:
    """Share of energy in the K × K lowest frequencies against K: solid as measured, dotted as in Table 3."""
    colours = (style.VERMILLION, style.BLUE, style.GREEN)
    traces: list[Any] = []
    for (name, published_shares), colour in zip(paper.items(), colours, strict=True):
        here: dict[str, Any] = {"dash": "solid", "width": 2.2, "marker": 6}
        there: dict[str, Any] = {"dash": "dot", "width": LINE, "marker": 4}
        both = (name, measured.get(name), here), (f"{name}, GPT-2 in Table 3", published_shares, there)
        for label, shares, look in both:
            if shares:
                hover = f"{label}<br>K = %{{x}}: %{{y:.3f}}<extra></extra>"
                cutoffs = [str(cutoff) for cutoff in shares]
                traces += line(cutoffs, [*shares.values()], label, colour, hover=hover, **look)
    layout = {"yaxis": {"range": [0, 1.05]}, "xaxis": {"type": "category"}}
    return style.figure(traces, "K", "share of energy", height=360, layout=layout)


def two_texts(
    layers: Floats, curves: Mapping[str, tuple[Floats, Floats | None]], y: str, *, share: bool = False
) -> go.Figure:
    """One layer measure on two texts: name → (values, standard errors); the first is solid, the second dashed."""
    traces: list[Any] = []
    looks = {"colour": THIS_MODEL}, {"colour": style.BLUE, "dash": "dash"}
    for (name, (values, errors)), look in zip(curves.items(), looks, strict=False):
        traces += _this_model(layers, values, name, errors, **look)
    axis = {"range": [0, 1.05]} if share else {"rangemode": "tozero"}
    return style.figure(traces, "layer", y, height=340, layout={"xaxis": layer_axis(layers), "yaxis": axis})


def layer_cosines(cosines: Floats) -> go.Figure:
    """Mean cosine between a token's vectors at every two layers, (N, N)."""
    rows = [f"layer {layer}" for layer in range(len(cosines))]
    layers = range(0, len(rows), max(1, len(rows) // 12))
    return cosine_map(cosines, rows, "mean cosine", [(float(layer), str(layer)) for layer in layers])


def singular_values_against(learned: Floats, fixed: Floats, fixed_name: str) -> go.Figure:
    """Singular values over the first: of each layer's learned basis, and, thick, of a fixed one."""
    traces: list[Any] = [style.depth_bar(len(learned))]
    curves = [
        (f"layer {layer}", values, order_colour(layer / max(1, len(learned) - 1)), LINE)
        for layer, values in enumerate(learned)
    ]
    for name, values, colour, width in [*curves, (fixed_name, fixed, THIS_MODEL, 3.0)]:
        if not values.max() > 0:
            continue
        relative = values / values.max()
        above_rounding = relative > 1e-8  # beyond that it is rounding
        number_of = np.arange(1, len(values) + 1)[above_rounding]
        hover = f"{name}, number %{{x}}<br>%{{y:.3g}} of the largest<extra></extra>"
        own: dict[str, Any] = {"width": width, "hover": hover, "showlegend": name == fixed_name}
        traces += line(number_of, relative[above_rounding], name, colour, **own)
    titles = "number", "singular value over the largest"
    return style.figure(traces, *titles, height=380, layout={"yaxis": POWERS | {"dtick": 1}})


def layer_norms(norms: Floats, errors: Floats, ratios: Mapping[int, float]) -> go.Figure:
    """Mean norm of the vectors at every layer, log axis, and dots where the paper's ratios would put it."""
    layers = np.arange(len(norms), dtype=np.float64)
    hover = "GPT-2: %{text} × layer 0<extra></extra>"
    heights, names = norms[0] * np.array([*ratios.values()]), [number(ratio, 4) for ratio in ratios.values()]
    own: dict[str, Any] = {"marker": {"size": 9, "symbol": "diamond-open"}}
    printed = dots(
        [*ratios], heights, names, "layer 0 times the ratio of GPT-2", style.REFERENCE, hover, **own
    )
    traces = [*_this_model(layers, norms, "this model", errors), printed]
    layout = {"xaxis": layer_axis(layers), "yaxis": TWOS | {"tickformat": "~s"}}
    return style.figure(traces, "layer", "mean ‖h‖₂", height=360, layout=layout)
