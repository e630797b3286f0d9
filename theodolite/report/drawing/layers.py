"""Figures of the residual stream, from layer 0, the input of the first block: curves over depth, outliers, spiral."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from theodolite.errors import UsageError
from theodolite.estimates import Floats
from theodolite.measure.column import declared
from theodolite.passes.run import Run
from theodolite.report import data, style
from theodolite.report.drawing.grammar import dots, heat, line, map_height, reference, rows_down
from theodolite.report.exhibit import CAPTIONS, Choice, Draw, Option, by_residual_layer, exhibit
from theodolite.system.wording import for_plotly, harmless, with_error

DIMENSIONS = 40  # of a map at most


def _chart(
    run: Run, y: str, curves: Mapping[str, Sequence[str]], yaxis: dict[str, Any], below: Sequence[Any] = ()
) -> go.Figure:
    """Draw columns of the layer table (name in the legend, dash), those that the run has, over the traces `below`."""
    data.need_column(run.layers, next(iter(curves)))
    layers, described, drawn = data.layer_numbers(run), declared("layers", run.provenance), list(below)
    for name, (label, *dash) in curves.items():
        if (values := data.column(run.layers, name)) is None:
            continue
        errors, hidden, shown = data.error_of(run, name), data.at_floor(run, name), "%{y:.4g}"
        look: dict[str, Any] = {"dash": dash[0] if dash else "solid", "width": 2.2, "marker": 5}
        if np.nansum(errors) != 0 or hidden.any():  # hovering gives the values in words
            numbers, shown = zip(values, errors, hidden, strict=True), "%{customdata}"
            words = [data.AT_FLOOR if noise else with_error(value, error) for value, error, noise in numbers]
            look |= {"errors": errors, "customdata": words}
        hover = f"layer %{{x}}<br>{label}: {shown}<extra></extra>"
        drawn += line(layers, values, label, style.MEASURED, hover=hover, **look)
    # What noise or chance alone gives, of all curves that declare it, once each.
    for floor in sorted({described[name].floor for name in curves if name in described} - {""}):
        if (values := data.column(run.layers, floor)) is not None:
            name = "noise floor" if floor.endswith("_floor") else described[floor].title
            drawn += reference(layers, values, name, dash="dash")
    return style.figure(drawn, "layer", y, layout={"xaxis": style.layer_axis(layers), "yaxis": yaxis})


def _declare(key: str, caption: dict[str, Any]) -> None:
    """Declare a figure that `exhibits.toml` draws, as a function of the key's name."""
    curves = caption["curves"]

    def draw(run: Run) -> go.Figure:
        if curves.get("some") and not run.layers.filter(list(curves["columns"])).gt(0).any(axis=None):
            raise UsageError(f"this run has none of what the figure {draw.__name__} shows")
        below: list[Any] = []
        if "limit" in curves:
            ends = data.layer_numbers(run)[[0, -1]]
            limit = data.limit_of("layers", next(iter(curves["columns"]))).limit
            below = reference(ends, limit, curves["limit"], dash="dash")
        return _chart(run, curves["y"], curves["columns"], curves["axis"], below)

    draw.__name__ = draw.__qualname__ = key.replace("-", "_")
    draw.__doc__ = f"{caption['shows']} Source: {caption['source']}."
    exhibit(key)(draw)


for _key, _caption in CAPTIONS.items():
    if "curves" in _caption:
        _declare(_key, _caption)


def _by_own(run: Run, draw: Draw) -> Choice:
    own = data.caller_columns(run, "layers")
    return Choice("column", [Option(c.name, c.title, c.group, harmless(c.meaning)) for c in own], draw)


@exhibit("own-columns", picker=_by_own, alone=False)
def own_column(run: Run, name: str) -> go.Figure:
    """Draw a column of the layers table that the caller declared, at every layer."""
    title = for_plotly(declared("layers", run.provenance)[name].title)
    return _chart(run, title, {name: (title,)}, {})


def largest_columns(values: Floats) -> list[int]:
    """Pick the columns with the largest maxima, `DIMENSIONS` at most, and return them in order."""
    highest = np.nan_to_num(values).max(axis=0)
    return sorted(np.argsort(-highest, kind="stable")[:DIMENSIONS].tolist())


@exhibit()
def outlier_shares(run: Run) -> go.Figure:
    """Map the share of tokens with |x| ≥ 6 in the dimensions where it is highest."""
    shares = np.nan_to_num(data.need(run, "outlier_share"))
    if not shares.any():
        raise UsageError("this run has no dimension with |x| ≥ 6 in any token past the first")
    dimensions = [dimension for dimension in largest_columns(shares) if shares[:, dimension].any()]
    hover = "layer %{y}, dimension %{x}<br>%{z:.1%} of tokens<extra></extra>"
    bar, x = style.colour_bar("share of tokens", tickformat="~%"), list(map(str, dimensions))
    cells = heat(shares[:, dimensions], 0, float(shares.max()), hover, bar=bar, cells=True, x=x)
    across = {"type": "category", "tickangle": -90, "tickfont": {"size": 10}}
    layout = {"xaxis": across, "yaxis": rows_down(len(shares))}
    return style.figure([cells], "feature dimension", "layer", height=map_height(len(shares)), layout=layout)


@exhibit(picker=by_residual_layer)
def spiral(run: Run, layer: int = 0) -> go.Figure:
    """Draw the positional basis (violet to green) and cvecs (red) of one layer on the basis' two main components.

    Song & Zhong 2024, Fig. 1.
    """
    basis, grid = data.need(run, "positional_pca")[layer], data.grid_of(run)
    first = grid.leading if grid else 1
    positions = np.array(data.evenly(len(basis) - first, 160), dtype=np.int32) + first
    points = basis[positions].astype(np.float32)
    names = [grid.token_text(position) if grid else f"position {position}" for position in positions.tolist()]
    cvecs = data.array(run, "cvec_pca")
    contexts = np.zeros((0, 2)) if cvecs is None else cvecs[layer][data.evenly(cvecs.shape[1], 250)]
    x, y = contexts[:, :2].T
    hover, look = "a context vector<extra></extra>", {"size": 3.5, "opacity": 0.4}
    traces = [dots(x, y, None, "context vectors", style.CONTEXT, hover, marker=look)]
    coloured = {"size": 5.5, "color": positions, "colorscale": style.ORDER, "showscale": False}
    hover, drawn = "%{customdata}<br>%{x:.4g}, %{y:.4g}<extra></extra>", coloured | {"line": {"width": 0}}
    named: dict[str, Any] = {"hover": hover, "customdata": names}
    traces += line(points[:, 0], points[:, 1], "positions", style.GREY, width=1, marker=drawn, **named)
    few = {"nticks": 5}
    layout = {"showlegend": False, "xaxis": few, "yaxis": few}
    return style.figure(traces, "component 1", "component 2", height=400, layout=layout)
