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
from theodolite.report.style import Patch
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
    width = (1 - GAP * (len(pictures) - 1)) / len(pictures)
    traces: list[Any] = []
    layout: dict[str, Any] = {"annotations": [], "shapes": [], "margin": {"t": TITLES}}
    for index, (name, patch) in enumerate(
        zip(pictures, attention_patch(list(pictures.values())), strict=True)
    ):
        suffix = style.axis_suffix(index)
        length = len(patch["z"])
        left = index * (width + GAP)
        positions = np.arange(1, length + 1)
        traces.append(
            go.Heatmap(
                patch,
                x=positions,
                y=positions,
                zmin=0,
                zmax=1,
                colorscale=style.MAGNITUDE,
                showscale=index == len(pictures) - 1,
                colorbar=style.colour_bar("attention"),
                hoverongaps=False,
                hovertemplate="query %{y}, key %{x}: %{z:.3g}<extra></extra>",
                xaxis=f"x{suffix}",
                yaxis=f"y{suffix}",
            )
        )
        axis = {"showgrid": False, "zeroline": False}
        layout[f"xaxis{suffix}"] = axis | {
            "domain": [left, left + width],
            "anchor": f"y{suffix}",
            "title": {"text": "key"},
        }
        layout[f"yaxis{suffix}"] = axis | {
            "anchor": f"x{suffix}",
            "autorange": "reversed",
            "title": {"text": "query" if index == 0 else ""},
        }
        layout["annotations"].append(
            {"x": left, "y": 1, "xref": "paper", "yref": "paper", "text": for_plotly(name)}
            | {"showarrow": False, "xanchor": "left", "yanchor": "bottom", "yshift": 4}
        )
        layout["shapes"].append(
            {"type": "rect", "x0": separator + 0.5, "x1": separator + 1.5, "y0": 0.5, "y1": length + 0.5}
            | {"xref": f"x{suffix}", "yref": f"y{suffix}", "line": {"width": 1.5, "color": style.VERMILLION}}
        )
    return style.figure(traces, height=SQUARE, layout=layout)


def attention_patch(pictures: Sequence[Floats]) -> list[Patch]:
    """What changes in `attention_maps` for other sequences or weights; the future stays blank."""
    patches = []
    for picture in pictures:
        visible = picture.astype(np.float32)
        visible[np.triu_indices(len(visible), 1)] = np.nan
        patches.append({"z": visible})
    return patches


def convergence(s_tag: Floats, curves: Mapping[str, tuple[Floats, Floats]], y: str) -> go.Figure:
    """Measured sizes against s_tag, logarithmic, each with its derived rate dotted in the same colour.

    Args:
        s_tag: (S,). curves: name → (measured, derived), (S,) each; the derived one may be NaN.
    """
    traces: list[Any] = []
    for index, (name, (measured, derived)) in enumerate(curves.items()):
        colour = style.CATEGORIES[index % len(style.CATEGORIES)]
        for label, values, dash, mode in (
            (name, measured, "solid", "lines+markers"),
            (f"{name}, derived", derived, "dot", "lines"),
        ):
            shown = np.where(values > BELOW, values, np.nan)
            if np.isfinite(shown).any():
                traces.append(
                    go.Scatter(
                        x=s_tag.astype(np.float32),
                        y=shown,
                        name=for_plotly(label),
                        mode=mode,
                        line={"color": colour, "dash": dash, "width": 1.8},
                        marker={"size": 5},
                        showlegend=label == name,
                        hovertemplate=f"{for_plotly(label)}<br>s_tag %{{x:g}}: %{{y:.3g}}<extra></extra>",
                    )
                )
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
        for seed, row in enumerate(rows):
            traces.append(
                go.Scatter(
                    x=steps[name].astype(np.float32),
                    y=row.astype(np.float32),
                    name=for_plotly(name),
                    legendgroup=name,
                    showlegend=seed == 0,
                    mode="lines",
                    line={"color": colour, "width": 1.2},
                    hovertemplate=f"{for_plotly(name)}<br>step %{{x}}: %{{y:.3g}}<extra></extra>",
                )
            )
    last = max(float(at[-1]) for at in steps.values())
    for dash, (name, level) in zip(("dot", "dash"), marks.items(), strict=False):
        traces.append(
            go.Scatter(
                x=[0, last],
                y=[level, level],
                name=for_plotly(name),
                mode="lines",
                line={"color": style.GREY, "dash": dash, "width": 1.5},
                hovertemplate=f"{for_plotly(name)}: {level:.3g}<extra></extra>",
            )
        )
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
    line = {"color": style.GREY, "dash": "dot", "width": 1.5}
    layout: dict[str, Any] = {
        "xaxis": {"type": "log", "exponentformat": "power"},
        "yaxis": {"type": "log", "exponentformat": "power"} if logarithmic else {"range": [-0.05, 1.05]},
        "shapes": [
            {
                "type": "line",
                "x0": limits[0],
                "x1": limits[0],
                "y0": 0,
                "y1": 1,
                "yref": "paper",
                "line": line,
            },
            {
                "type": "line",
                "x0": 0,
                "x1": 1,
                "xref": "paper",
                "y0": limits[1],
                "y1": limits[1],
                "line": line,
            },
        ],
        "legend": {"y": 1.04},
    }
    return style.figure(traces, *titles, height=430, layout=layout)
