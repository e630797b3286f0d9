"""The figures of a training run: lines and a map of heads against the step, light however many looks there are.

They take arrays by step. Once there are many, looks share a point or a column, where the nearest to an alarm is shown.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray

from theodolite.report import style
from theodolite.report.data import Floats
from theodolite.report.drawing.grammar import Panel, Sketch, heat, line, panels, reference, saturation
from theodolite.system.wording import for_plotly, head_name
from theodolite.train.alarms import ENTROPY, RANK, VANISHING, Alarm, Limits
from theodolite.train.look_sums import residual_place

Steps = NDArray[np.int64]

POINTS, CELLS = 500, 50_000
"""Points of a line, and cells of a map, at most."""

ALARM_COLOURS = {ENTROPY: style.VERMILLION, RANK: style.BLUE, VANISHING: style.ORANGE}
REVISION = {"uirevision": "watch"}
"""With a constant `uirevision` Plotly keeps the reader's zoom when a figure is drawn anew."""

MAP_HEIGHT = (260, 760)  # pixels, least and most
ROW = 14


@dataclass(frozen=True)
class Measure:
    """A column of the record: what it is called, whether low or high values alarm, and up to where colours go.

    `limit`: the default level of alarm. `grows`: by factors, so that its axis is logarithmic.
    """

    column: str
    title: str
    axis: str
    low_alarms: bool
    highest: float | None = 1.0
    limit: float | None = None
    grows: bool = False


ENTROPIES = Measure("entropy_share", "Entropy", "entropy over its maximum", True, limit=Limits.entropy)
PROPAGATION = Measure("propagation", "Signal propagation ρ", "ρ", True, limit=Limits.propagation)
LOGITS = Measure("largest_logit", "Largest logit", "largest logit", False, highest=None, grows=True)
RESIDUALS = Measure("rank_collapse", "Rank of the residual stream", "‖X − 1x̄ᵀ‖/‖X‖", True, limit=Limits.rank)
FIRST_SINK = Measure("sink_first", "First-token sink", "share of contexts with a first-token sink", False)
LATER_SINK = Measure("sink_later", "Later sink", "share of contexts with a later sink", False)
OF_LINES = (ENTROPIES, PROPAGATION, LOGITS)
OF_MAP = (ENTROPIES, PROPAGATION, FIRST_SINK, LATER_SINK, LOGITS)


def first_of_groups(count: int, most: int) -> NDArray[np.int64]:
    """Where groups of neighbours begin, `most` at most; each a power of two, so that they stay as looks are added."""
    size = 1 << max(0, math.ceil(math.log2(count / most))) if count > most else 1
    return np.arange(0, count, size)


def grouped(values: Floats, groups: NDArray[np.int64], low: bool) -> Floats:
    """The lowest or highest of each group of rows; NaN where it has none."""
    extreme: Floats = (np.fmin if low else np.fmax).reduceat(values, groups, axis=0)
    return extreme


def last_of_groups(steps: Steps, groups: NDArray[np.int64]) -> Steps:
    """The last step of each group."""
    return steps[np.append(groups[1:], len(steps)) - 1]


def _means(values: Floats, groups: NDArray[np.int64]) -> Floats:
    """The mean over each group of rows and all of its places; NaN where it has none."""
    finite = np.isfinite(values)
    sums = np.add.reduceat(np.where(finite, values, 0.0).sum(axis=1), groups)
    with np.errstate(invalid="ignore"):
        means: Floats = sums / np.add.reduceat(finite.sum(axis=1), groups)
    return means


def measure_panel(measure: Measure, steps: Steps, values: Floats, places: Sequence[tuple[int, ...]]) -> Panel:
    """The mean over all heads or layers, and the one that is nearest to an alarm, with its name.

    Args:
        steps: (S,). values: (S, P). places: of the columns, (layer, head), or (layer,) of the residual stream.
    """
    groups = first_of_groups(len(steps), POINTS)
    x = last_of_groups(steps, groups)
    worst = "lowest" if measure.low_alarms else "highest"
    known = np.isfinite(values)
    outermost = np.where(known, values, np.inf if measure.low_alarms else -np.inf)
    by_look = outermost.min(axis=1) if measure.low_alarms else outermost.max(axis=1)
    extremes = (np.minimum if measure.low_alarms else np.maximum).reduceat(by_look, groups)
    ends = np.append(groups[1:], len(steps))
    best = np.argmin if measure.low_alarms else np.argmax
    names = [
        _place(places[int(best(outermost[start:end])) % len(places)])
        for start, end in zip(groups, ends, strict=True)
    ]
    of = "head" if len(places[0]) == 2 else "layer"
    extremes = np.where(np.isfinite(extremes), extremes, np.nan)
    hover = f"{worst} {of} at step %{{x}}: %{{y:.3g}}<br>%{{text}}<extra></extra>"
    traces = line(
        x, extremes, "nearest to an alarm", style.MEASURED, text=names, hover=hover, marker=_dots(groups)
    )
    mean = "mean at step %{x}: %{y:.3g}<extra></extra>"
    means = _means(values, groups)
    traces += line(x, means, "mean", style.REFERENCE, hover=mean, width=1.4)
    if measure.limit is not None:
        traces += reference(x[[0, -1]], measure.limit, "default limit of alarms")
    # A logarithm shows no logit of 0 or less, as those of a head may all be.
    shown = np.concatenate([extremes, means])
    logarithmic = measure.grows and bool((shown[np.isfinite(shown)] > 0).all())
    axis = {"type": "log", "dtick": "D2", "tickformat": "~g"} if logarithmic else {"rangemode": "tozero"}
    return Panel(measure.title, traces, "step", measure.axis, yaxis=axis)


def loss_panel(losses: Mapping[int, float]) -> Panel:
    """The loss, on a band from the lowest to the highest where steps share a point."""
    steps = np.array(sorted(losses), dtype=np.int64)
    values = np.array([losses[step] for step in steps.tolist()])[:, None]
    groups = first_of_groups(len(steps), POINTS)
    means = _means(values, groups)
    band = grouped(values, groups, True)[:, 0], grouped(values, groups, False)[:, 0]
    shown = np.isfinite(means)  # a band must not have gaps
    x = last_of_groups(steps, groups)
    drawn = line(x[shown], means[shown], "", style.MEASURED, band=(band[0][shown], band[1][shown]))[:-1]
    hover = "loss at step %{x}: %{y:.4g}<extra></extra>"
    drawn += line(x, means, "loss", style.MEASURED, hover=hover, marker=_dots(groups), showlegend=False)
    return Panel("Loss", drawn, "step", "loss")


def lines(shown: Sequence[Panel], alarms: Sequence[Alarm]) -> go.Figure:
    """Panels against the step that zoom together, with the first alarm of each kind in all of them."""
    first: dict[str, int] = {}
    for alarm in alarms:
        first[alarm.kind] = min(alarm.step, first.get(alarm.kind, alarm.step))
    marks = [
        (float(step), {"color": ALARM_COLOURS[kind], "width": 1.2, "dash": "dash"})
        for kind, step in first.items()
    ]
    together: list[Panel] = []
    for panel in shown:
        axis = {"matches": "x"} if together else {}
        together.append(
            Panel(panel.title, _named_once(panel, together), panel.x, panel.y, axis, panel.yaxis, marks=marks)
        )
    across = 3 if len(shown) > 4 else 2
    return panels(together, min(across, len(shown)), height=240, gaps=(0.08, 0.2), layout=dict(REVISION))


def _named_once(panel: Panel, before: Sequence[Panel]) -> list[Any]:
    """Its traces, of which those that an earlier panel has too are not in the legend again."""
    known = {trace.legendgroup for other in before for trace in other.traces}
    return [trace.update(showlegend=False) if trace.legendgroup in known else trace for trace in panel.traces]


def alarm_strip(alarms: Sequence[Alarm], steps: Steps) -> go.Figure:
    """When which kind of alarm came: a mark each, on the axis of all steps."""
    kinds = list(ALARM_COLOURS)[::-1]
    # Nothing that is seen, but the axes: without alarms they would have no data, and a range that is set ends a zoom.
    ends, row = np.array([steps[0], steps[-1]], dtype=np.int64), kinds[0]
    traces = [go.Scatter(x=ends, y=[row, row], mode="markers", opacity=0, hoverinfo="skip", showlegend=False)]
    for kind, colour in ALARM_COLOURS.items():
        same = [alarm for alarm in alarms if alarm.kind == kind]
        traces.append(
            go.Scatter(
                x=np.array([alarm.step for alarm in same], dtype=np.int64),
                y=[kind] * len(same),
                text=[for_plotly(f"{where(alarm)}: {alarm.trend}") for alarm in same],
                mode="markers",
                name=kind,
                marker={
                    "size": 11,
                    "color": colour,
                    "symbol": "line-ns",
                    "line": {"width": 2, "color": colour},
                },
                hovertemplate="step %{x}: %{y}<br>%{text}<extra></extra>",
                showlegend=False,
            )
        )
    layout = REVISION | {
        "yaxis": {
            "categoryorder": "array",
            "categoryarray": kinds,
            "tickvals": kinds,
            "range": [-0.6, len(kinds) - 0.4],
        },
        "margin": {"t": 12},
    }
    return style.figure(traces, "step", height=170, layout=layout)


def head_map(
    measure: Measure,
    steps: Steps,
    values: Floats,
    places: Sequence[tuple[int, ...]],
    alarms: Sequence[Alarm],
) -> Sketch:
    """All heads (rows) at all looks (columns), the first layer on top; a cross where a head began to alarm."""
    groups = first_of_groups(len(steps), max(100, min(POINTS, CELLS // len(places))))
    cells = grouped(values, groups, measure.low_alarms)
    highest = measure.highest or max(saturation([cells]), 1e-6)
    names = [_place(place) for place in places]
    hover = f"%{{y}} at step %{{x}}<br>{measure.axis} %{{z:.3g}}<extra></extra>"
    x = last_of_groups(steps, groups)
    cells_of_heads = heat(cells.T, 0.0, highest, hover, bar=measure.axis, plain=True, x=x, y=names)
    of_heads = [alarm for alarm in alarms if (alarm.layer, alarm.head) in set(places)]
    crosses = {
        "type": "scatter",
        "x": np.array([alarm.step for alarm in of_heads], dtype=np.int64),
        "y": [head_name(alarm.layer, alarm.head or 0) for alarm in of_heads],
        "text": [alarm.kind for alarm in of_heads],
        "mode": "markers",
        "marker": {"symbol": "x-thin", "size": 7, "line": {"width": 1.6, "color": style.INK}},
        "hovertemplate": "%{y} at step %{x}<br>%{text}<extra></extra>",
        "showlegend": False,
    }
    starts = [n for n, (layer, *_) in enumerate(places) if n == 0 or layer != places[n - 1][0]]
    every = -(-len(starts) // 24)
    border = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "line": {"width": 1, "color": style.GREY}}
    layout = REVISION | {
        "yaxis": {
            "type": "category",
            "showgrid": False,
            "ticks": "",
            "range": [len(places) - 0.5, -0.5],
            "tickmode": "array",
            "tickvals": starts[::every],
            "ticktext": [f"layer {places[n][0]}" for n in starts[::every]],
        },
        "xaxis": {"showgrid": False, "autorangeoptions": _edges(x)},
        "shapes": [border | {"y0": n - 0.5, "y1": n - 0.5} for n in starts[1:]],
        "margin": {"t": 12},
    }
    height = min(MAP_HEIGHT[1], max(MAP_HEIGHT[0], 90 + ROW * len(places)))
    return Sketch([cells_of_heads, crosses], "step", "", height, layout)


def where(alarm: Alarm) -> str:
    """`L2H5`, or `after block 1` of the residual stream."""
    return residual_place(alarm.layer) if alarm.head is None else head_name(alarm.layer, alarm.head)


def _place(place: tuple[int, ...]) -> str:
    return head_name(*place) if len(place) == 2 else residual_place(place[0])


def _edges(x: Steps) -> dict[str, float]:
    """Where the axis of a map ends, by itself: with its outermost cells, half of the way to a neighbour beyond them.

    A `range` would do the same but for the reader's zoom, which goes where that changes.
    """
    if len(x) == 1:
        return {"clipmin": float(x[0]) - 0.5, "clipmax": float(x[0]) + 0.5}
    return {"clipmin": float(1.5 * x[0] - 0.5 * x[1]), "clipmax": float(1.5 * x[-1] - 0.5 * x[-2])}


def _dots(groups: NDArray[np.int64]) -> float:
    """Points are marked while they are few, and one alone must be seen."""
    return 5 if len(groups) <= 40 else 0
