"""Figures over depth: one small figure of curves per layer measure, and outliers.

Layer 0 is the input of the first block, layer ℓ the residual stream after block ℓ; position 0 is left out of
every curve except those that name it. Whiskers are one standard error.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from theodolite.errors import UsageError
from theodolite.estimates import Floats
from theodolite.passes.run import Run
from theodolite.report import style
from theodolite.report.data import (
    AT_FLOOR,
    at_floor,
    caller_columns,
    column,
    columns_of,
    error_of,
    layer_numbers,
    limit_of,
    need,
    need_column,
)
from theodolite.report.drawing.grammar import (
    heat,
    line,
    map_height,
    reference,
    rows_down,
)
from theodolite.report.exhibit import CAPTIONS, Choice, Draw, Option, exhibit
from theodolite.system.wording import for_plotly, harmless, with_error

DIMENSIONS = 40  # of a map at most
NAMED: dict[str, Any] = {"type": "category"}  # an axis of dimensions or tokens
TURNED = {"tickangle": -90, "tickfont": {"size": 10}}  # its names, where there are many
CurveStyle = Sequence[str]
"""A curve's name in the legend, and its dash where it is not solid."""


def _chart(
    run: Run, y: str, curves: Mapping[str, CurveStyle], yaxis: dict[str, Any], below: Sequence[Any] = ()
) -> go.Figure:
    """Draw columns of the layer table against the layer, those that the run has, over the traces `below`.

    Raises:
        UsageError: the run lacks the first of them.
    """
    need_column(run.layers, next(iter(curves)))
    drawn = [
        trace
        for name, look in curves.items()
        if column(run.layers, name) is not None
        for trace in _curve(run, name, *look)
    ]
    drawn += _floors(run, curves)
    layout = {"xaxis": style.layer_axis(layer_numbers(run)), "yaxis": yaxis}
    return style.figure([*below, *drawn], "layer", y, layout=layout)


def _floors(run: Run, curves: Iterable[str]) -> list[Any]:
    """Draw what noise or chance alone gives, of all curves that declare it, once each."""
    described = columns_of(run, "layers")
    floors = {described[name].floor for name in curves if name in described} - {""}
    return [
        trace
        for floor in sorted(floors)
        if (values := column(run.layers, floor)) is not None
        for trace in reference(
            layer_numbers(run),
            values,
            "noise floor" if floor.endswith("_floor") else described[floor].title,
            dash="dash",
        )
    ]


def _curve(run: Run, name: str, label: str, dash: str = "solid") -> list[Any]:
    """Draw a column; where it has standard errors, or is hidden by noise, hovering gives its values in words."""
    values, errors, hidden = need_column(run.layers, name), error_of(run, name), at_floor(run, name)
    look: dict[str, Any] = {"dash": dash, "width": 2.2, "marker": 5}
    if np.nansum(errors) == 0 and not hidden.any():
        hover = f"layer %{{x}}<br>{label}: %{{y:.4g}}<extra></extra>"
        return line(layer_numbers(run), values, label, style.MEASURED, hover=hover, **look)
    numbers = zip(values, errors, hidden, strict=True)
    look["customdata"] = [AT_FLOOR if noise else with_error(value, error) for value, error, noise in numbers]
    hover = f"layer %{{x}}<br>{label}: %{{customdata}}<extra></extra>"
    return line(layer_numbers(run), values, label, style.MEASURED, errors=errors, hover=hover, **look)


def _declare(key: str, curves: dict[str, Any]) -> None:
    """Declare a figure that `exhibits.toml` draws, as a function of the key's name."""

    def draw(run: Run) -> go.Figure:
        below: list[Any] = []
        if "limit" in curves:
            ends, limit = layer_numbers(run)[[0, -1]], limit_of("layers", next(iter(curves["columns"]))).limit
            below = reference(ends, limit, curves["limit"], dash="dash")
        return _chart(run, curves["y"], curves["columns"], curves["axis"], below)

    draw.__name__ = draw.__qualname__ = key.replace("-", "_")
    draw.__doc__ = f"{CAPTIONS[key]['shows']} Source: {CAPTIONS[key]['source']}."
    exhibit(key)(draw)


for _key, _caption in CAPTIONS.items():
    if "curves" in _caption:
        _declare(_key, _caption["curves"])


def _by_own(run: Run, draw: Draw) -> Choice:
    options = [Option(c.name, c.title, c.group, harmless(c.meaning)) for c in caller_columns(run, "layers")]
    return Choice("column", options, lambda name: draw(name=name))


@exhibit(
    "own-columns",
    picker=_by_own,
    when=lambda run: bool(caller_columns(run, "layers")),
    alone=False,
    given={"name": lambda run: caller_columns(run, "layers")[0].name},
)
def own_column(run: Run, name: str) -> go.Figure:
    """Draw a column of the layers table that the caller declared, at every layer."""
    title = for_plotly(columns_of(run, "layers")[name].title)
    return _chart(run, title, {name: (title,)}, {})


@exhibit(
    when=lambda run: run.layers.filter(["massive_activations", "massive_activations_first"]).sum().gt(0).any()
)
def massive_activations(run: Run) -> go.Figure:
    """Draw the number of massive activations (|x| > 100 and > 1000 × the layer's median), first token apart."""
    curves = {
        "massive_activations": ("positions ≥ 1",),
        "massive_activations_first": ("first token", "dash"),
        "massive_activations_last": ("end token", "dot"),
    }
    return _chart(run, "count", curves, {"rangemode": "tozero"})


def largest_columns(values: Floats) -> list[int]:
    """Pick the columns with the largest maxima, `DIMENSIONS` at most, and return them in order."""
    highest = np.nan_to_num(values).max(axis=0)
    return sorted(np.argsort(-highest, kind="stable")[:DIMENSIONS].tolist())


@exhibit()
def outlier_shares(run: Run) -> go.Figure:
    """Map the share of tokens with |x| ≥ 6 in the dimensions where it is highest.

    Colours run to the highest share: outliers in one token of a hundred are seen, too.
    """
    shares = np.nan_to_num(need(run, "outlier_share"))
    if not shares.any():
        raise UsageError("this run has no dimension with |x| ≥ 6 in any token past the first")
    dimensions = [dimension for dimension in largest_columns(shares) if shares[:, dimension].any()]
    cells = heat(
        shares[:, dimensions],
        0,
        float(shares.max()),
        "layer %{y}, dimension %{x}<br>%{z:.1%} of tokens<extra></extra>",
        bar=style.colour_bar("share of tokens", tickformat="~%"),
        cells=True,
        x=[str(dimension) for dimension in dimensions],
    )
    layout = {"xaxis": NAMED | TURNED, "yaxis": rows_down(len(shares))}
    return style.figure([cells], "feature dimension", "layer", height=map_height(len(shares)), layout=layout)
