"""Figures of heads: maps of all, one head's spectrum and signal propagation, sinks by position and on pictures."""

from __future__ import annotations

import textwrap
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from theodolite.attention.summary import SINK_THRESHOLD
from theodolite.errors import UsageError
from theodolite.measure.column import Column, declared
from theodolite.measure.head_roles import COMMON_ROLES, ROLES
from theodolite.measure.tags import KINDS, NAMED
from theodolite.passes.run import Run
from theodolite.report import data, style
from theodolite.report.drawing import grammar
from theodolite.report.drawing.grammar import bars, dots, head_cells, heat, line, map_height, rows_down
from theodolite.report.exhibit import Choice, Draw, Option, by_block, by_head, exhibit
from theodolite.system.wording import for_plotly, head_name, shown_token

CURVE_POINTS = 40  # of which a page has three times as many as heads
OVERVIEW = ("entropy", *(role.column for role in COMMON_ROLES))  # maps drawn small
ROLE_COLOURS = dict(zip((role.name for role in ROLES), [*style.CATEGORIES, style.INK], strict=True))
POSITION_BINS = 128
PICTURE = 180  # pixels: the height of a row of pictures
LEAST_SCALE = 0.1  # of contexts: where no position is a sink in more, colours end there
KIND_NAMES = dict(zip(KINDS, ("first token", "later token", "learned column", "local sink"), strict=True))


def head_measures(run: Run) -> list[Column]:
    """Return the columns that pickers offer and that this run has for at least one head, in their order."""

    def is_there(measure: Column) -> bool:
        values = data.column(run.heads, measure.name)
        return values is not None and (not measure.rare or bool(np.nan_to_num(values).any()))

    return list(filter(is_there, data.offered(run).values()))


def _role_colours(run: Run) -> dict[str, str]:
    """Return the roles that some head has, each with its colour; `UsageError` where none has one."""
    present = {role.name for roles in data.roles_of_heads(run) for role in roles}
    if not present:
        raise UsageError("this run has no head with a role")
    return {name: colour for name, colour in ROLE_COLOURS.items() if name in present}


@exhibit()
def roles(run: Run) -> go.Figure:
    """Map every head's clearest role over blocks × heads."""
    colours = _role_colours(run)
    known, count = list(colours), len(colours)
    clearest = [known.index(of[0].name) if of else np.nan for of in data.roles_of_heads(run)]
    grid = data.laid_out(run, np.array(clearest))
    return head_cells(
        grid,
        -0.5,
        count - 0.5,
        "<b>L%{y}H%{x}</b><br>%{text}<extra></extra>",
        scale=[[edge / count, colour] for i, colour in enumerate(colours.values()) for edge in (i, i + 1)],
        bar=style.colour_bar("", tickvals=list(range(count)), ticktext=known, ticks=""),
        text=[["no role" if np.isnan(code) else known[int(code)] for code in row] for row in grid],
    )


@exhibit()
def at_stake(run: Run) -> go.Figure:
    """Draw how many heads of each block have each role."""
    layers, places = run.heads["layer"].to_numpy(dtype=int), np.arange(data.blocks(run))
    names, traces = [{role.name for role in of} for of in data.roles_of_heads(run)], []
    for name, colour in _role_colours(run).items():
        heights = np.bincount(layers[[name in of for of in names]], minlength=len(places))
        traces.append(bars(places, heights, name, colour, f"block %{{x}}: %{{y}} heads<extra>{name}</extra>"))
    layout = {"barmode": "stack", "yaxis": {"rangemode": "tozero"}}
    return style.figure(traces, "block", "heads", height=340, layout=layout)


def _by_measure(run: Run, draw: Draw) -> Choice:
    options = [
        Option(m.name, m.title, m.group, f"{m.meaning} Source: {m.source}." if m.source else m.meaning)
        for m in head_measures(run)
    ]
    shown = [name for name in OVERVIEW if data.column(run.heads, name) is not None]
    return Choice("measure", options, draw, grid=shown)


@exhibit(picker=_by_measure)
def head_map(run: Run, measure: str) -> go.Figure:
    """Map one head measure over blocks × heads; hovering tells what it means."""
    if (grid := data.head_grid(run, measure)) is None:
        raise UsageError(f"this run has no head measure {measure!r}")
    described = declared("heads", run.provenance)[measure]
    robust = float(np.percentile(np.abs(grid[np.isfinite(grid)]), 98.0)) or 1.0  # where colours saturate
    bar, (low, high) = described.unit, described.range
    scale = style.SIGNED if low < 0 else style.MAGNITUDE
    if described.decades:
        grid, bar = np.log10(grid, where=grid > 0, out=np.full_like(grid, np.nan)), "log₁₀"
        some = grid[np.isfinite(grid)]
        low, high = (float(some.min()), float(some.max())) if some.size else (0.0, 1.0)
    elif described.unit == "nats" and data.array(run, "visible_keys") is not None:
        high = float(data.entropy_limits(run).mean(axis=1).max())
    low, high = -robust if np.isinf(low) else low, robust if np.isinf(high) else high
    value = "10^%{z:.3f}" if described.decades else "%{z:.4g}"
    unit = f" {for_plotly(described.unit)}" if described.unit else ""
    meaning = "<br>".join(map(for_plotly, textwrap.wrap(described.meaning, 58)))
    named = f"<b>L%{{y}}H%{{x}}</b><br>{for_plotly(described.title)}"
    hover = f"{named}: {value}{unit}<br><i>{meaning}</i><extra></extra>"
    return head_cells(grid, low, high if high > low else low + 1.0, hover, scale=scale, bar=bar)


@exhibit(picker=by_head)
def spectrum(run: Run, layer: int = 0, head: int = 0, name: str = "spectrum") -> go.Figure:
    """Draw the d_h non-zero eigenvalues of one head's W_QK (`name="spectrum"`) or W_QK Σ̂ (`"spectrum_data"`)."""
    x, y = data.need(run, name)[layer, head].T
    look = {"size": 7, "opacity": 0.8, "line": {"width": 0}}
    hover = "%{x:.4g} + %{y:.4g} i<extra></extra>"
    points = dots(x, y, None, None, style.PREDICTED, hover, marker=look)
    layout = {"yaxis": {"scaleanchor": "x", "scaleratio": 1}, "xaxis": {"zeroline": True}}
    return style.figure([points], "real part", "imaginary part", height=360, layout=layout)


@exhibit(picker=by_head)
def propagation(run: Run, layer: int = 0, head: int = 0) -> go.Figure:
    """Draw ρ(θ) of one head, θ = i/T: the share of inputs whose signal propagates, predicted and measured.

    Bao et al. 2024, eq. 6 and Figs. 2, 3 and 7, with the corrected variance of Lemma 1.
    """
    traces: list[dict[str, Any]] = []
    for name, label, colour, width, dash in (
        ("propagation_by_position", "measured", style.MEASURED, 2.2, "solid"),
        ("propagation_predicted_data", "predicted from W_QK Σ̂", style.PREDICTED, 1.8, "solid"),
        ("propagation_predicted", "predicted from W_QK", style.PREDICTED, 1.8, "dash"),
    ):
        if (values := data.array(run, name)) is None:
            continue
        shown = np.array(data.evenly(values.shape[2], CURVE_POINTS), dtype=np.int32)
        theta, rho = (shown + 1) / values.shape[2], values[layer, head, shown]
        hover = f"θ %{{x:.3f}}<br>{label}: %{{y:.3f}}<extra></extra>"
        traces += line(theta, rho, label, colour, dash=dash, width=width, hover=hover)
    if not traces:
        raise UsageError("this run has no propagation curve of any head")
    titles = ("position in the context, θ = i/T", "propagation probability ρ")
    layout = {"yaxis": {"range": [-0.02, 1.05]}, "xaxis": {"range": [0, 1.01]}}
    return style.figure(traces, *titles, height=360, layout=layout)


@exhibit()
def sinks_by_position(run: Run) -> go.Figure:
    """Draw the share of contexts in which a position (or one of a cell's) is a sink of each block's strongest head."""
    strongest = np.nan_to_num(data.need(run, "sink_by_position")).max(axis=1)
    strongest[np.setdiff1d(np.arange(len(strongest)), run.heads["layer"])] = np.nan  # no head was looked at
    length = strongest.shape[1]
    starts = [0, *[1 + step for step in data.evenly(length - 1, POSITION_BINS - 1)]] if length > 1 else [0]
    largest = np.maximum.reduceat(strongest, starts, axis=1)
    lasts = [start - 1 for start in [*starts[1:], length]]
    names = [str(a) if a == b else f"{a}–{b}" for a, b in zip(starts, lasts, strict=True)]
    most = max(float(np.nan_to_num(largest).max(initial=0.0)), LEAST_SCALE)
    hover = "block %{y}, position %{customdata}<br>%{z:.1%} of contexts<extra></extra>"
    bar = style.colour_bar("share of contexts", tickformat=".0%")
    cells = heat(largest, 0, most, hover, bar=bar, customdata=[names] * len(largest))
    ticks = data.evenly(len(names), 9)
    named = {"tickvals": ticks, "ticktext": [names[tick] for tick in ticks]}
    layout = {"xaxis": named, "yaxis": rows_down(len(largest))}
    height = map_height(len(largest))
    return style.figure([cells], "position of the sink", "block", height=height, layout=layout)


@exhibit(picker=by_block)
def received_on_pictures(run: Run, layer: int = 0) -> go.Figure:
    """Draw on a few images the attention that each patch receives, from the head of a block that pays it most."""
    grid = data.grid_of(run)
    if grid is None:
        raise UsageError("this run has no images; survey a model of images to get them")
    received = data.need(run, "example_received")[layer, :, grid.leading :]
    most = max(SINK_THRESHOLD, float(received.max()))
    axis = {"ticks": "", "showticklabels": False}
    hover = "row %{y}, column %{x}<br>receives %{z:.3f}<extra></extra>"
    shown = []
    for number, patches in enumerate(received):
        bar = "attention received" if number == len(received) - 1 else None
        cells = heat(patches.reshape(grid.shape), 0, most, hover, scale=style.OVERLAY, bar=bar)
        down = axis | {"autorange": "reversed"}
        shown.append(grammar.Panel(f"image {number}", [cells], xaxis=axis, yaxis=down, square=True))
    drawn = grammar.panels(shown, len(shown), height=PICTURE, gaps=(0.03, 0.1))
    place = {"x": -0.5, "y": -0.5, "sizex": grid.columns, "sizey": grid.rows}
    for number, picture in enumerate(data.need(run, "example_picture")[: len(shown)], 1):
        axes = {f"{axis}ref": axis if number == 1 else f"{axis}{number}" for axis in "xy"}
        drawn.add_layout_image(source=_data_uri(picture), sizing="stretch", layer="below", **place, **axes)
    return drawn


def _data_uri(picture: Any) -> str:
    """Encode a picture (rows, columns, colours) as a PNG in a link, thinned where it is large."""
    from plotly import express  # takes 0.4 s to import, and few pages have pictures

    step = -(-max(picture.shape[:2]) // 224)
    pixels = np.ascontiguousarray(picture[::step, ::step], dtype=np.uint8)
    image = express.imshow(pixels, binary_string=True, binary_backend="pypng", binary_compression_level=9)
    return str(image.data[0].source)


def sink_name(row: pd.Series) -> str:
    """Name a head and its sink: `L4H1 “↵”`."""
    token = f"“{shown_token(row['token'])}”" if row["kind"] in NAMED else KIND_NAMES[row["kind"]]
    return f"{head_name(row['layer'], row['head'])} {token}"
