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
    """A table with one row per unit, of which two columns are drawn against each other, coloured by `status`.

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
OUTPUT_DOTS = Dots("norm_before", "norm_after", "norm of the head's output")
SPECTRUM_DOTS = Dots("frobenius_before", "frobenius_after", "‖W_QK‖")


def scatter(table: pd.DataFrame, dots: Dots) -> go.Figure:
    """One dot per unit, before on x and after on y; on the dotted line nothing changed."""
    diagonal, *dot_patches = scatter_patch(table, dots)
    line = go.Scatter(
        mode="lines",
        line={"color": style.GREY, "dash": "dot", "width": 1},
        showlegend=False,
        hoverinfo="skip",
        **diagonal,
    )
    traces = [
        go.Scatter(
            name=status,
            mode="markers",
            marker={"size": 9, "color": colour, "opacity": 0.75},
            hovertemplate="%{text}<extra>" + status + "</extra>",
            **patch,
        )
        for (status, colour), patch in zip(STATUS_COLOURS.items(), dot_patches, strict=True)
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
    largest = 1.0 if dots.shares or dots.limits else float(np.nanmax(values, initial=0.1))
    diagonal = [FEWEST if dots.shares else 0.0, largest]
    patches: list[Patch] = [{"x": diagonal, "y": diagonal}]
    for status in STATUS_COLOURS:
        of_status = (table["status"] == status).to_numpy()
        x, y = values[of_status].T.astype(np.float32)
        patches.append(
            {"x": x, "y": y, "text": [_hover_text(row, dots) for _, row in table[of_status].iterrows()]}
        )
    return patches


def _hover_text(row: pd.Series, dots: Dots) -> str:
    name = sink_name(row) if "kind" in row else head_name(row["layer"], row["head"])
    show = percent if dots.shares else number
    text = f"{for_plotly(name)}<br>{dots.title}: {show(row[dots.before])} → {show(row[dots.after])}"
    return f"{text}<br>cosine of the directions {number(row['cosine'])}" if "cosine" in row else text


def entropies(table: pd.DataFrame) -> go.Figure:
    """Entropy of every head as a share of the maximum, before and after, and the change in nats."""
    grids = _entropy_grids(table)
    largest = float(np.nanmax(np.abs(grids[2]))) or 1.0
    share = {"zmin": 0, "zmax": 1, "colorscale": style.MAGNITUDE}
    panels = [
        ("before", share, "of the highest"),
        ("after", share | {"showscale": False}, "of the highest"),
        ("change in nats", {"zmin": -largest, "zmax": largest, "colorscale": style.SIGNED}, "nats"),
    ]
    bars = [style.colour_bar("", x=0.605), None, style.colour_bar("", x=1.01)]
    traces, layout = [], _panels([name for name, _, _ in panels], [0.0, 0.335, 0.74], 0.26)
    for index, ((name, colours, unit), grid, bar) in enumerate(zip(panels, grids, bars, strict=True)):
        suffix = style.axis_suffix(index)
        traces.append(
            go.Heatmap(
                z=grid.astype(np.float32),
                colorbar=bar,
                xaxis=f"x{suffix}",
                yaxis=f"y{suffix}",
                hovertemplate=f"L%{{y}}H%{{x}}, {name}: %{{z:.3f}} {unit}<extra></extra>",
                **colours,
            )
        )
        layout[f"xaxis{suffix}"] |= {"title": {"text": "head"}, "dtick": max(1, grid.shape[1] // 12)}
        layout[f"yaxis{suffix}"] |= {
            "dtick": max(1, len(grid) // 12),
            "title": {"text": "" if index else "layer"},
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
    for index, (side, patch) in enumerate(
        zip(("before", "after"), outliers_patch(table, dimensions, layers), strict=True)
    ):
        suffix = style.axis_suffix(index)
        traces.append(
            go.Heatmap(
                y=[str(dimension) for dimension in dimensions],
                zmin=0,
                zmax=1,
                colorscale=style.MAGNITUDE,
                showscale=index == 0,
                colorbar=style.colour_bar("share of tokens"),
                xaxis=f"x{suffix}",
                yaxis=f"y{suffix}",
                hoverongaps=False,
                hovertemplate=f"dimension %{{y}}, layer %{{x}}, {side}: %{{z:.1%}}<extra></extra>",
                **patch,
            )
        )
        layout[f"xaxis{suffix}"] |= {
            "title": {"text": "residual layer"},
            "dtick": max(1, layers // 12),
            "range": [-0.5, layers - 0.5],
        }
        layout[f"yaxis{suffix}"] |= {"type": "category", "title": {"text": "" if index else "dimension"}}
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
    """Rank, relative norm and retained directions of the positional basis by layer, before and after."""
    layer, patches = table["layer"].to_numpy(), iter(positions_patch(table))
    width = (1 - 4 * GAP) / 3
    titles = [*POSITION_CURVES, "overlap of the directions"]
    layout = _panels(titles, [index * (width + 2 * GAP) for index in range(3)], width)
    traces = []
    for index, title in enumerate(titles):
        suffix = style.axis_suffix(index)
        curves = (
            {"overlap": style.GREEN, "curve": style.PURPLE}
            if index == 2
            else {"before": style.REFERENCE, "after": style.MEASURED}
        )
        for name, colour in curves.items():
            traces.append(
                go.Scatter(
                    x=layer,
                    name=name,
                    mode="lines+markers",
                    line={"color": colour},
                    xaxis=f"x{suffix}",
                    yaxis=f"y{suffix}",
                    showlegend=index != 1,
                    hovertemplate=f"layer %{{x}}, {title}, {name}: %{{y:.3g}}<extra></extra>",
                    **next(patches),
                )
            )
        layout[f"xaxis{suffix}"] |= {"title": {"text": "residual layer"}, "dtick": max(1, len(layer) // 8)}
        layout[f"yaxis{suffix}"] |= {"rangemode": "tozero", "showgrid": True}
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
    total = rows * panel + (rows - 1) * ROW_GAP
    tops = [1 - row * (panel + ROW_GAP) / total for row in range(rows)]
    starts = [index % columns * (width + GAP) for index in range(len(figures))]
    heights = [
        (max(tops[index // columns] - panel / total, 0.0), tops[index // columns])
        for index in range(len(figures))
    ]
    layout = _panels(list(figures), starts, width, heights)
    traces = []
    for index, figure in enumerate(figures.values()):
        suffix = style.axis_suffix(index)
        traces.append(figure.data[0].update(xaxis=f"x{suffix}", yaxis=f"y{suffix}", showscale=index == 0))
        for axis in ("xaxis", "yaxis"):
            layout[f"{axis}{suffix}"] |= _fewer_labels(figure.layout[axis].to_plotly_json())
        if index % columns:
            layout[f"yaxis{suffix}"] |= {"title": {"text": ""}}
        if square:
            layout[f"xaxis{suffix}"] |= {"constrain": "domain"}
            layout[f"yaxis{suffix}"] |= {"scaleanchor": f"x{suffix}", "constrain": "domain"}
    layout["margin"] = {"l": 80, "t": 40, "b": 70}
    return style.figure(traces, height=round(total) + 110, layout=layout)


def _fewer_labels(axis: dict[str, Any]) -> dict[str, Any]:
    """An axis with room beside others: of tokens only the sinks, of dimensions every fourth label."""
    labels = list(zip(axis["tickvals"], axis["ticktext"], strict=True))
    of_tokens = "tickangle" in axis
    written = [label for label in labels if MARK in label[1]] if of_tokens else labels[::4]
    names = {"tickvals": [value for value, _ in written], "ticktext": [text for _, text in written]}
    return axis | names


def _panels(
    titles: Sequence[str],
    starts: Sequence[float],
    width: float,
    heights: Sequence[tuple[float, float]] | None = None,
) -> dict[str, Any]:
    """Axes of panels, each under its title; all as high as the figure, or from and to their own `heights`."""
    layout: dict[str, Any] = {"annotations": []}
    across = len(set(starts))
    for index, (title, start) in enumerate(zip(titles, starts, strict=True)):
        suffix = style.axis_suffix(index)
        low, high = heights[index] if heights else (0.0, 1.0)
        axis = {"showgrid": False, "zeroline": False}
        layout[f"xaxis{suffix}"] = axis | {"domain": [start, start + width], "anchor": f"y{suffix}"}
        layout[f"yaxis{suffix}"] = axis | {"domain": [low, high], "anchor": f"x{suffix}"}
        layout["annotations"].append(
            {
                "text": "<br>".join(map(for_plotly, textwrap.wrap(title, WRAP // across))),
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
