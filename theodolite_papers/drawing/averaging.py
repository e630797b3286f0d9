"""Figures of the averaging theorem: attention maps, errors against s_tag with their rate; training runs by seed.

They take plain arrays and return Plotly figures. Nothing here computes a statistic or trains.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from theodolite.report import style
from theodolite.report.data import Floats
from theodolite.report.drawing.grammar import HEADROOM, Panel, heat, line, panels
from theodolite.system.wording import for_plotly

SQUARE, GAP = 390, 0.08
TITLES = 70  # pixels: a line of them, below the toolbar
BELOW = 1e-16
"""Errors under it are rounding and are not drawn."""


def attention_maps(pictures: Mapping[str, Floats], separator: int) -> go.Figure:
    """Attention of one sequence, side by side, queries down and keys to the right, both from 1.

    Args:
        pictures: name → (T, T). separator: position of [SEP] from 0; its column is marked.
    """
    shown = []
    axis = {"showgrid": False, "zeroline": False}
    for index, (name, picture) in enumerate(pictures.items()):
        positions = np.arange(1, len(picture) + 1)
        trace = heat(
            np.where(np.tri(len(picture), dtype=bool), picture, np.nan),
            0,
            1,
            "query %{y}, key %{x}: %{z:.3g}<extra></extra>",
            bar="attention" if index == len(pictures) - 1 else None,
            x=positions,
            y=positions,
        )
        rows = axis | {"autorange": "reversed"}
        shown.append(Panel(name, [trace], "key", "" if index else "query", axis, rows))
    drawn = panels(
        shown, len(shown), height=SQUARE - HEADROOM, gaps=(GAP, 0), layout={"margin": {"t": TITLES}}
    )
    for index, picture in enumerate(pictures.values()):
        edges = {"x0": separator + 0.5, "x1": separator + 1.5, "y0": 0.5, "y1": len(picture) + 0.5}
        drawn.add_shape(
            type="rect", **edges, line={"width": 1.5, "color": style.VERMILLION}, row=1, col=index + 1
        )
    return drawn


def convergence(s_tag: Floats, curves: Mapping[str, tuple[Floats, Floats]], y: str) -> go.Figure:
    """Measured sizes against s_tag, logarithmic, each with its derived rate dotted in the same colour.

    Args:
        s_tag: (S,). curves: name → (measured, derived), (S,) each; the derived one may be NaN.
    """
    traces: list[Any] = []
    for index, (name, (measured, derived)) in enumerate(curves.items()):
        colour = style.CATEGORIES[index % len(style.CATEGORIES)]
        for label, values, dash, marker in (
            (name, measured, "solid", 5),
            (f"{name}, derived", derived, "dot", 0),
        ):
            shown = np.where(values > BELOW, values, np.nan)
            if np.isfinite(shown).any():
                hover = f"{for_plotly(label)}<br>s_tag %{{x:g}}: %{{y:.3g}}<extra></extra>"
                own: dict[str, Any] = {"hover": hover, "legendgroup": name, "showlegend": label == name}
                traces += line(s_tag, shown, label, colour, dash=dash, marker=marker, **own)
    highest = max(float(np.nanmax(measured)) for measured, _ in curves.values())
    lowest = min(
        float(np.nanmin(np.where(measured > BELOW, measured, np.nan))) for measured, _ in curves.values()
    )
    window = [
        math.log10(lowest) - 0.3,
        math.log10(highest) + 0.7,
    ]  # a rate means nothing where it exceeds all errors
    layout = {"yaxis": {"type": "log", "range": window, "exponentformat": "power"}, "legend": {"y": 1.04}}
    return style.figure(traces, "s_tag", y, height=420, layout=layout)


def losses(
    steps: Mapping[str, Floats], curves: Mapping[str, Floats], marks: Mapping[str, float]
) -> go.Figure:
    """The squared error of every seed against training step, one colour a kind, with levels to compare it with.

    Args:
        steps: kind → (P,). curves: kind → (seeds, P). marks: name → level, drawn as a dotted line.
    """
    traces: list[Any] = []
    for colour, (name, rows) in zip(style.CATEGORIES, curves.items(), strict=False):
        hover = f"{for_plotly(name)}<br>step %{{x}}: %{{y:.3g}}<extra></extra>"
        for seed, row in enumerate(rows):
            traces += line(steps[name], row, name, colour, width=1.2, hover=hover, showlegend=seed == 0)
    last = max(float(at[-1]) for at in steps.values())
    for dash, (name, level) in zip(("dot", "dash"), marks.items(), strict=False):
        hover = f"{for_plotly(name)}: {level:.3g}<extra></extra>"
        traces += line([0, last], [level, level], name, style.GREY, dash=dash, width=1.5, hover=hover)
    layout = {"yaxis": {"type": "log", "exponentformat": "power"}, "legend": {"y": 1.04}}
    return style.figure(traces, "step", "mean squared error", height=430, layout=layout)


def seeds(
    kinds: Mapping[str, tuple[Floats, Floats, Sequence[str]]],
    titles: tuple[str, str],
    limits: tuple[float, float],
    *,
    logarithmic: bool = False,
) -> go.Figure:
    """Every trained model as a dot: error to the right (logarithmic), a measure upwards, one colour a kind.

    Args:
        kinds: kind → (errors, values, names). titles: of x and y. limits: drawn as lines, of x and y.
        logarithmic: the vertical axis.
    """
    traces: list[Any] = [
        go.Scatter(
            x=errors.astype(np.float32),
            y=values.astype(np.float32),
            text=[for_plotly(name) for name in names],
            name=for_plotly(kind),
            mode="markers",
            marker={"size": 9, "color": colour, "symbol": symbol, "line": {"width": 1}},
            hovertemplate=f"%{{text}}<br>{titles[0]} %{{x:.3g}}<br>{titles[1]} %{{y:.3g}}<extra></extra>",
        )
        for (kind, (errors, values, names)), colour, symbol in zip(
            kinds.items(),
            style.CATEGORIES,
            ("circle", "diamond", "square", "triangle-up", "x", "cross"),
            strict=False,
        )
    ]
    power = {"type": "log", "exponentformat": "power"}
    layout: dict[str, Any] = {
        "xaxis": power,
        "yaxis": power if logarithmic else {"range": [-0.05, 1.05]},
        "legend": {"y": 1.04},
    }
    drawn = style.figure(traces, *titles, height=430, layout=layout)
    limit = {"color": style.GREY, "dash": "dot", "width": 1.5}
    drawn.add_vline(limits[0], line=limit)
    drawn.add_hline(limits[1], line=limit)
    return drawn
