"""Figures of two models compared, and of one head of several models on one prompt. They take plain tables."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from theodolite.report import style
from theodolite.report.data import Floats
from theodolite.report.drawing.prompt import MARK
from theodolite.report.drawing.traces import sink_name
from theodolite.report.style import Patch
from theodolite.system.wording import for_plotly, head_name, number, percent

STATUS_COLOURS = {
    "survived": style.BLUE,
    "lost": style.VERMILLION,
    "new": style.GREEN,
    "undecided": style.GREY,
}
FEWEST = 0.004
"""Where a share of 0 is drawn on a logarithmic axis."""

GAP = 0.035  # between panels, of the figure's width
COLUMNS = 4  # models side by side; more of them stand in several rows
PAGE, OUTPUT_HEIGHT = 900, 430  # pixels: the width that panels share, and the height of those of outputs
ROW_GAP = 120  # pixels between rows of panels: the sinks below, the title of the next one
WRAP = 110  # letters that the titles in a row share in a line


@dataclass(frozen=True)
class Dots:
    """A table with a unit a row, of which two columns are drawn against each other, coloured by `status`.

    Attributes:
        before, after: the columns.
        named: what is said of a row.
        title: of both axes, before "before" and "after".
        limits: of both axes; None: as wide as the dots need.
        shares: logarithmic axes of shares, on which 0 has its place too.
    """

    before: str
    after: str
    title: str
    limits: tuple[float, float] | None = None
    shares: bool = False


SINK_DOTS = Dots("before", "after", "share of contexts", shares=True)
TAG_DOTS = Dots("before", "after", "η² in the head's output", (-0.03, 1.0))
OUTPUT_DOTS = Dots("norm_before", "norm_after", "size of the head's output")
SPECTRUM_DOTS = Dots("frobenius_before", "frobenius_after", "‖W_QK‖")


def scatter(table: pd.DataFrame, dots: Dots) -> go.Figure:
    """One dot per unit, before across and after upwards; on the dotted line nothing changed."""
    of_line, *of_dots = scatter_patch(table, dots)
    line = go.Scatter(
        mode="lines",
        line={"color": style.GREY, "dash": "dot", "width": 1},
        showlegend=False,
        hoverinfo="skip",
        **of_line,
    )
    traces = [
        go.Scatter(
            name=status,
            mode="markers",
            marker={"size": 9, "color": colour, "opacity": 0.75},
            hovertemplate="%{text}<extra>" + status + "</extra>",
            **patch,
        )
        for (status, colour), patch in zip(STATUS_COLOURS.items(), of_dots, strict=True)
    ]
    axis: dict[str, Any] = {"range": list(dots.limits)} if dots.limits else {}
    if dots.shares:
        ticks = [FEWEST, 0.01, 0.03, 0.1, 0.3, 1.0]
        axis = {
            "type": "log",
            "range": [float(np.log10(FEWEST * 0.8)), float(np.log10(1.25))],
            "tickvals": ticks,
            "ticktext": ["none", *(percent(tick) for tick in ticks[1:])],
        }
    layout = {"xaxis": axis, "yaxis": axis}
    titles = (f"{dots.title}, before", f"{dots.title}, after")
    return style.figure([line, *traces], *titles, height=420, layout=layout)


def scatter_patch(table: pd.DataFrame, dots: Dots) -> list[Patch]:
    """What changes in `scatter` for another table."""
    values = table[[dots.before, dots.after]].to_numpy(np.float64)
    values = np.maximum(values, FEWEST) if dots.shares else values
    farthest = 1.0 if dots.shares or dots.limits else float(np.nanmax(values, initial=0.1))
    ends = [FEWEST if dots.shares else 0.0, farthest]
    patches: list[Patch] = [{"x": ends, "y": ends}]
    for status in STATUS_COLOURS:
        own = (table["status"] == status).to_numpy()
        x, y = values[own].T.astype(np.float32)
        patches.append({"x": x, "y": y, "text": [_said(row, dots) for _, row in table[own].iterrows()]})
    return patches


def _said(row: pd.Series, dots: Dots) -> str:
    name = sink_name(row) if "kind" in row else head_name(row["layer"], row["head"])
    show = percent if dots.shares else number
    said = f"{for_plotly(name)}<br>{dots.title}: {show(row[dots.before])} → {show(row[dots.after])}"
    return f"{said}<br>cosine of the directions {number(row['cosine'])}" if "cosine" in row else said


def entropies(table: pd.DataFrame) -> go.Figure:
    """Entropy of every head as a share of the highest possible, before and after, and the change in nats."""
    grids = _entropy_grids(table)
    largest = float(np.nanmax(np.abs(grids[2]))) or 1.0
    share = {"zmin": 0, "zmax": 1, "colorscale": style.MAGNITUDE}
    looks = [
        ("before", share, "of the highest"),
        ("after", share | {"showscale": False}, "of the highest"),
        ("change in nats", {"zmin": -largest, "zmax": largest, "colorscale": style.SIGNED}, "nats"),
    ]
    bars = [style.colour_bar("", x=0.605), None, style.colour_bar("", x=1.01)]
    traces, layout = [], _panels([name for name, _, _ in looks], [0.0, 0.335, 0.74], 0.26)
    for place, ((name, look, unit), grid, bar) in enumerate(zip(looks, grids, bars, strict=True)):
        own = str(place + 1) if place else ""
        traces.append(
            go.Heatmap(
                z=grid.astype(np.float32),
                colorbar=bar,
                xaxis=f"x{own}",
                yaxis=f"y{own}",
                hovertemplate=f"L%{{y}}H%{{x}}, {name}: %{{z:.3f}} {unit}<extra></extra>",
                **look,
            )
        )
        layout[f"xaxis{own}"] |= {"title": {"text": "head"}, "dtick": max(1, grid.shape[1] // 12)}
        layout[f"yaxis{own}"] |= {
            "dtick": max(1, len(grid) // 12),
            "title": {"text": "" if place else "layer"},
            "autorange": "reversed",
        }
    return style.figure(traces, height=min(640, max(280, 150 + 26 * len(grids[0]))), layout=layout)


def entropies_patch(table: pd.DataFrame) -> list[Patch]:
    """What changes in `entropies` for another table; the change keeps its own scale."""
    grids = _entropy_grids(table)
    largest = float(np.nanmax(np.abs(grids[2]))) or 1.0
    limits: list[Patch] = [{}, {}, {"zmin": -largest, "zmax": largest}]
    return [{"z": grid.astype(np.float32)} | limit for grid, limit in zip(grids, limits, strict=True)]


def _entropy_grids(table: pd.DataFrame) -> list[Floats]:
    layer, head = (table[name].to_numpy(dtype=int) for name in ("layer", "head"))
    grids = []
    for name in ("share_before", "share_after", "difference"):
        grid = np.full((layer.max() + 1, head.max() + 1), np.nan)
        grid[layer, head] = table[name]
        grids.append(grid)
    return grids


def outliers(table: pd.DataFrame, dimensions: Sequence[int], layers: int) -> go.Figure:
    """Share of tokens beyond 6 by outlier dimension and residual layer, before and after.

    Args:
        table: one row per layer and dimension; blank where a dimension is no outlier. dimensions: the rows of the maps.
        layers: of the residual stream.
    """
    width = (1 - 2 * GAP) / 2
    traces, layout = [], _panels(["before", "after"], [0.0, width + 2 * GAP], width)
    for place, (side, patch) in enumerate(
        zip(("before", "after"), outliers_patch(table, dimensions, layers), strict=True)
    ):
        own = str(place + 1) if place else ""
        traces.append(
            go.Heatmap(
                y=[str(dimension) for dimension in dimensions],
                zmin=0,
                zmax=1,
                colorscale=style.MAGNITUDE,
                showscale=place == 0,
                colorbar=style.colour_bar("share of tokens"),
                xaxis=f"x{own}",
                yaxis=f"y{own}",
                hoverongaps=False,
                hovertemplate=f"dimension %{{y}}, layer %{{x}}, {side}: %{{z:.1%}}<extra></extra>",
                **patch,
            )
        )
        layout[f"xaxis{own}"] |= {
            "title": {"text": "residual layer"},
            "dtick": max(1, layers // 12),
            "range": [-0.5, layers - 0.5],
        }
        layout[f"yaxis{own}"] |= {"type": "category", "title": {"text": "" if place else "dimension"}}
    return style.figure(traces, height=min(700, 170 + 22 * len(dimensions)), layout=layout)


def outliers_patch(table: pd.DataFrame, dimensions: Sequence[int], layers: int) -> list[Patch]:
    """What changes in `outliers` for another table."""
    row = [dimensions.index(dimension) for dimension in table["dimension"]]
    grids = np.full((2, len(dimensions), layers), np.nan)
    for grid, side in zip(grids, ("before", "after"), strict=True):
        grid[row, table["layer"].to_numpy(dtype=int)] = table[side]
    return [{"z": grid.astype(np.float32)} for grid in grids]


POSITION_CURVES = {
    "rank": ("rank_before", "rank_after"),
    "relative norm": ("relative_norm_before", "relative_norm_after"),
}


def positions(table: pd.DataFrame) -> go.Figure:
    """Rank and relative norm of the positional basis by layer, before and after; what of its directions is left."""
    layer, patches = table["layer"].to_numpy(), iter(positions_patch(table))
    width = (1 - 4 * GAP) / 3
    titles = [*POSITION_CURVES, "overlap of the directions"]
    layout = _panels(titles, [place * (width + 2 * GAP) for place in range(3)], width)
    traces = []
    for place, title in enumerate(titles):
        own = str(place + 1) if place else ""
        curves = (
            {"overlap": style.GREEN, "curve": style.PURPLE}
            if place == 2
            else {"before": style.REFERENCE, "after": style.MEASURED}
        )
        for name, colour in curves.items():
            traces.append(
                go.Scatter(
                    x=layer,
                    name=name,
                    mode="lines+markers",
                    line={"color": colour},
                    xaxis=f"x{own}",
                    yaxis=f"y{own}",
                    showlegend=place != 1,
                    hovertemplate=f"layer %{{x}}, {title}, {name}: %{{y:.3g}}<extra></extra>",
                    **next(patches),
                )
            )
        layout[f"xaxis{own}"] |= {"title": {"text": "residual layer"}, "dtick": max(1, len(layer) // 8)}
        layout[f"yaxis{own}"] |= {"rangemode": "tozero", "showgrid": True}
    layout["legend"] = {"y": 1.12}
    return style.figure(traces, height=340, layout=layout)


def positions_patch(table: pd.DataFrame) -> list[Patch]:
    """What changes in `positions` for another table."""
    patches: list[Patch] = [
        {"y": table[name].to_numpy(np.float32)} for pair in POSITION_CURVES.values() for name in pair
    ]
    return patches + [{"y": table[name].to_numpy(np.float32)} for name in ("overlap", "curve")]


def parallel_map(figures: Mapping[str, go.Figure], *, square: bool = False) -> go.Figure:
    """Figures of one head on one prompt in several models, next to each other; of the tokens only sinks are written.

    Args:
        figures: name of the model → a heat map of `figures_prompt`, all with the same colours.
        square: cells as wide as high.
    """
    rows = -(-len(figures) // COLUMNS)
    columns = -(-len(figures) // rows)
    width = (1 - GAP * (columns - 1)) / columns
    panel = PAGE * width if square else OUTPUT_HEIGHT
    whole = rows * panel + (rows - 1) * ROW_GAP
    tops = [1 - row * (panel + ROW_GAP) / whole for row in range(rows)]
    starts = [place % columns * (width + GAP) for place in range(len(figures))]
    heights = [
        (max(tops[place // columns] - panel / whole, 0.0), tops[place // columns])
        for place in range(len(figures))
    ]
    layout = _panels(list(figures), starts, width, heights)
    traces = []
    for place, figure in enumerate(figures.values()):
        own = str(place + 1) if place else ""
        traces.append(figure.data[0].update(xaxis=f"x{own}", yaxis=f"y{own}", showscale=place == 0))
        for axis in ("xaxis", "yaxis"):
            layout[f"{axis}{own}"] |= _fewer_labels(figure.layout[axis].to_plotly_json())
        if place % columns:
            layout[f"yaxis{own}"] |= {"title": {"text": ""}}
        if square:
            layout[f"xaxis{own}"] |= {"constrain": "domain"}
            layout[f"yaxis{own}"] |= {"scaleanchor": f"x{own}", "constrain": "domain"}
    layout["margin"] = {"l": 80, "t": 40, "b": 70}
    return style.figure(traces, height=round(whole) + 110, layout=layout)


def _fewer_labels(axis: dict[str, Any]) -> dict[str, Any]:
    """An axis with room beside others: of tokens only the sinks, of dimensions every fourth label."""
    labels = list(zip(axis["tickvals"], axis["ticktext"], strict=True))
    of_tokens = "tickangle" in axis
    kept = [label for label in labels if MARK in label[1]] if of_tokens else labels[::4]
    names = {"tickvals": [place for place, _ in kept], "ticktext": [text for _, text in kept]}
    return axis | names


def _panels(
    titles: Sequence[str],
    starts: Sequence[float],
    width: float,
    heights: Sequence[tuple[float, float]] | None = None,
) -> dict[str, Any]:
    """Axes of panels, each under its title; all as high as the figure, or from and to their own `heights`."""
    layout: dict[str, Any] = {"annotations": []}
    in_a_row = len(set(starts))
    for place, (title, start) in enumerate(zip(titles, starts, strict=True)):
        own = str(place + 1) if place else ""
        low, high = heights[place] if heights else (0.0, 1.0)
        axis = {"showgrid": False, "zeroline": False}
        layout[f"xaxis{own}"] = axis | {"domain": [start, start + width], "anchor": f"y{own}"}
        layout[f"yaxis{own}"] = axis | {"domain": [low, high], "anchor": f"x{own}"}
        layout["annotations"].append(
            {
                "text": "<br>".join(map(for_plotly, textwrap.wrap(title, WRAP // in_a_row))),
                "x": start + width / 2,
                "y": high,
                "xref": "paper",
                "yref": "paper",
                "xanchor": "center",
                "yanchor": "bottom",
                "showarrow": False,
            }
        )
    return layout
