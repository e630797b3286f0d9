"""`watch.html`: the record of a training run as a page that needs no other file, and reloads itself until the end.

Light however many looks there are: lines and maps have few points, where the nearest to an alarm of those that share
one is shown. The template escapes every text.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from numpy.typing import NDArray
from pandas.api.typing import DataFrameGroupBy
from plotly.offline import get_plotlyjs

from theodolite.estimates import Floats
from theodolite.report import page, style
from theodolite.report.drawing.grammar import Panel, band, dots, heat, line, panels, reference, saturation
from theodolite.report.exhibit import Choice, Exhibit, Option
from theodolite.report.outcome import Outcome
from theodolite.system.wording import counted, head_name, number, visible
from theodolite.train.alarms import ENTROPY, RANK, VANISHING, Alarm, Limits
from theodolite.train.geometry import residual_place
from theodolite.train.record import DRAWN, FOLDER, Record

Steps = NDArray[np.int64]
Places = Sequence[tuple[int, ...]]

PAGE = "watch.html"
RELOAD = 30
"""Seconds after which an open page reads itself again."""

LISTED, MARKED = 200, 2000
"""Alarms in the list, and in the figures, at most: the newest."""

POINTS, CELLS = 500, 50_000
"""Points of a line, and cells of a map, at most."""

ALARM_COLOURS = {ENTROPY: style.VERMILLION, RANK: style.BLUE, VANISHING: style.ORANGE}

MAP_HEIGHT = (260, 760)  # pixels, least and most
ROW = 14


@dataclass(frozen=True)
class Measure:
    """A column of the record: what it is called, and whether low or high values alarm.

    `highest`: where colours end; None: it grows by factors, and its axis is logarithmic. `limit`: the alarm's default.
    """

    column: str
    title: str
    axis: str
    low_alarms: bool
    highest: float | None = 1.0
    limit: float | None = None


ENTROPIES = Measure("entropy_share", "Entropy", "entropy over its maximum", True, limit=Limits.entropy)
PROPAGATION = Measure("propagation", "Signal propagation ρ", "ρ", True, limit=Limits.propagation)
LOGITS = Measure("largest_logit", "Largest logit", "largest logit", False, highest=None)
RESIDUALS = Measure("rank_collapse", "Rank of the residual stream", "‖X − 1x̄ᵀ‖/‖X‖", True, limit=Limits.rank)
FIRST_SINK = Measure("sink_first", "First-token sink", "share of contexts with a first-token sink", False)
LATER_SINK = Measure("sink_later", "Later sink", "share of contexts with a later sink", False)
OF_LINES = (ENTROPIES, PROPAGATION, LOGITS, RESIDUALS)
OF_MAP = (ENTROPIES, PROPAGATION, FIRST_SINK, LATER_SINK, LOGITS)


def write_page(record: Record, *, finished: bool) -> None:
    """Write the page of a record beside it, which reloads itself while the run is not finished; or `WorkError`."""
    assert record.folder is not None
    page.write_page(record.folder / PAGE, render(record, finished=finished))


def render(record: Record, *, finished: bool) -> str:
    """Render the page as one string of HTML, with Plotly's script inside."""
    assert record.folder is not None
    folder = record.folder.resolve()
    run = folder.parent if folder.name == FOLDER else folder
    newest = record.alarms[: -LISTED - 1 : -1]
    return page.rendered(
        "watch.html.j2",
        {
            "reload": 0 if finished else RELOAD,
            "name": visible(run.name or str(run), 80),
            "folder": visible(folder),
            "written": f"{datetime.now():%Y-%m-%d %H:%M:%S}",
            "tiles": _tiles(record),
            "blocks": [page.block_of(exhibit) for exhibit in _exhibits(record)],
            "alarms": [(alarm.step, alarm.kind, where(alarm), alarm.trend) for alarm in newest],
            "listed": LISTED,
            "count": len(record.alarms),
            "cards": "{}",
            "plotly": get_plotlyjs(),
        },
    )


def _tiles(record: Record) -> list[tuple[str, str, str]]:
    """Return the key numbers at the newest step: label, value and a line of context of each."""
    tiles = []
    if record.steps:
        looks = counted(len(record.steps), "look")
        tiles.append(("step of the last look", number(record.steps[-1], 6), looks))
    if record.losses:
        loss = record.losses[-1]
        value = "no number" if math.isnan(loss) else number(loss, 4)
        tiles.append(("loss", value, f"at step {record.loss_steps[-1]}"))
    for measure in OF_LINES[:3]:
        values = record.column(measure.column)
        if values is not None and np.isfinite(values[-1]).any():
            last = values[-1]
            index = int(np.nanargmin(last) if measure.low_alarms else np.nanargmax(last))
            label = f"lowest {measure.axis}" if measure.low_alarms else measure.axis
            tiles.append((label, number(float(last[index])), _place(record.places["heads"][index])))
    if record.steps:
        note = f"the last at step {record.alarms[-1].step}" if record.alarms else "none so far"
        tiles.append(("alarms so far", number(len(record.alarms)), note))
    return tiles


def _exhibits(record: Record) -> list[Exhibit]:
    steps, heads = np.array(record.steps, dtype=np.int64), record.places["heads"]
    values = {name: v for name in DRAWN if (v := record.column(name)) is not None}
    shown = [loss_panel(np.array(record.loss_steps), np.array(record.losses))] if record.losses else []
    shown += [
        measure_panel(measure, steps, values[measure.column], record.places[DRAWN[measure.column]])
        for measure in OF_LINES
        if measure.column in values
    ]
    alarms = record.alarms[-MARKED:]
    outcome = Outcome()
    if shown:
        outcome.show("watch", "lines", lines(shown, alarms))
    maps = {measure.column: measure for measure in OF_MAP if measure.column in values}
    if not maps:
        return outcome.exhibits
    options = [Option(column, measure.title, note=measure.axis) for column, measure in maps.items()]
    figures = {
        column: head_map(measure, steps, values[column], heads, alarms) for column, measure in maps.items()
    }
    outcome.show("watch", "heads", Choice("colour", options, figures.__getitem__))
    return outcome.exhibits


def first_of_groups(count: int, most: int) -> NDArray[np.int64]:
    """Return where groups of neighbours begin, `most` at most; of a power of two each, so that they stay for long."""
    size = 1 << max(0, math.ceil(math.log2(count / most))) if count > most else 1
    return np.arange(0, count, size)


def _grouped(steps: Steps, values: Floats, names: Sequence[str], most: int) -> tuple[Steps, DataFrameGroupBy]:
    """Group the rows of `values` (S, P) into `most` groups of neighbours; also returns each group's last step."""
    starts = first_of_groups(len(steps), most)
    group = np.searchsorted(starts, np.arange(len(steps)), side="right")
    frame = pd.DataFrame(values, columns=list(names))
    return steps[np.append(starts[1:], len(steps)) - 1], frame.groupby(group)


def _mean(groups: DataFrameGroupBy) -> Floats:
    """Average over each group of rows and all of its places; NaN where it has none."""
    means: Floats = (groups.sum().sum(axis=1) / groups.count().sum(axis=1)).to_numpy()
    return means


def measure_panel(measure: Measure, steps: Steps, values: Floats, places: Places) -> Panel:
    """Draw the mean of `values` (S, P) over heads or layers at `steps` (S), and the place nearest to an alarm."""
    x, groups = _grouped(steps, values, [_place(place) for place in places], POINTS)
    sign, worst = (1, "lowest") if measure.low_alarms else (-1, "highest")
    nearest = groups.min() if measure.low_alarms else -groups.max()
    extremes, means = sign * nearest.min(axis=1).to_numpy(), _mean(groups)
    of = "head" if len(places[0]) == 2 else "layer"
    hover = f"{worst} {of} at step %{{x}}: %{{y:.3g}}<br>%{{text}}<extra></extra>"
    names = nearest.fillna(np.inf).idxmin(axis=1).tolist()
    look: dict[str, Any] = {"text": names, "hover": hover, "marker": _dots(x)}
    traces = line(x, extremes, "nearest to an alarm", style.MEASURED, **look)
    hover = "mean at step %{x}: %{y:.3g}<extra></extra>"
    traces += line(x, means, "mean", style.REFERENCE, hover=hover, width=1.4)
    if measure.limit is not None:
        traces += reference(x[[0, -1]], measure.limit, "default limit of alarms")
    # A logarithm shows no logit of 0 or less, as those of a head may all be.
    drawn = np.concatenate([extremes, means])
    drawn = drawn[np.isfinite(drawn)]
    axis: dict[str, Any] = {"rangemode": "tozero"}
    if measure.highest is None and (drawn > 0).all():
        decades = float(np.log10(drawn.max() / drawn.min())) if len(drawn) else 0.0
        axis = {"type": "log", "dtick": "D2" if decades < 2 else 1, "tickformat": "~g"}
    return Panel(measure.title, traces, "step", measure.axis, yaxis=axis)


def loss_panel(steps: Steps, losses: Floats) -> Panel:
    """Draw the loss, on a band from the lowest to the highest where steps share a point."""
    x, groups = _grouped(steps, losses, ["loss"], POINTS)
    means = _mean(groups)
    shown = np.isfinite(means)  # a band must not have gaps
    low, high = (ends["loss"].to_numpy()[shown] for ends in (groups.min(), groups.max()))
    drawn = band(x[shown], low, high, style.MEASURED, legendgroup="")
    hover = "loss at step %{x}: %{y:.4g}<extra></extra>"
    drawn += line(x, means, "loss", style.MEASURED, hover=hover, marker=_dots(x), showlegend=False)
    return Panel("Loss", drawn, "step", "loss")


def lines(shown: Sequence[Panel], alarms: Sequence[Alarm]) -> go.Figure:
    """Draw panels against the step that zoom together, with the first alarm of each kind in all of them."""
    first = {alarm.kind: alarm.step for alarm in reversed(alarms)}
    marks = [
        (float(step), {"color": ALARM_COLOURS[kind], "width": 1.2, "dash": "dash"})
        for kind, step in first.items()
    ]
    named: set[str | None] = set()  # in the legend once, whatever the number of panels
    together = []
    for place, panel in enumerate(shown):
        traces = [
            trace | ({"showlegend": False} if trace["legendgroup"] in named else {}) for trace in panel.traces
        ]
        named |= {trace["legendgroup"] for trace in traces}
        axis = {"matches": "x"} if place else {}
        together.append(replace(panel, traces=traces, xaxis=axis, marks=marks))
    across = 3 if len(shown) > 4 else 2
    return panels(together, min(across, len(shown)), height=240, gaps=(0.08, 0.2))


def head_map(
    measure: Measure, steps: Steps, values: Floats, places: Places, alarms: Sequence[Alarm]
) -> go.Figure:
    """Draw all heads (rows) at all looks (columns), the first block on top; a cross where a head began to alarm."""
    names = [_place(place) for place in places]
    x, groups = _grouped(steps, values, names, max(100, min(POINTS, CELLS // len(places))))
    cells = (groups.min() if measure.low_alarms else groups.max()).to_numpy().T
    highest = measure.highest or max(saturation([cells]), 1e-6)
    hover = f"%{{y}} at step %{{x}}<br>{measure.axis} %{{z:.3g}}<extra></extra>"
    cells_of_heads = heat(cells, 0.0, highest, hover, bar=measure.axis, x=x, y=names)
    of_heads = [alarm for alarm in alarms if alarm.head is not None]
    at, names_at = np.array([alarm.step for alarm in of_heads], dtype=np.int64), list(map(where, of_heads))
    hover = "%{y} at step %{x}<br>%{text}<extra></extra>"
    look = {"symbol": "x-thin", "size": 7, "line": {"width": 1.6, "color": style.INK}}
    kinds = [alarm.kind for alarm in of_heads]
    crosses = dots(at, names_at, kinds, None, style.INK, hover, marker=look, showlegend=False)
    starts = [n for n, (layer, *_) in enumerate(places) if n == 0 or layer != places[n - 1][0]]
    every = -(-len(starts) // 24)
    border = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "line": {"width": 1, "color": style.GREY}}
    rows = {"type": "category", "ticks": "", "range": [len(places) - 0.5, -0.5], "tickmode": "array"}
    rows |= {"tickvals": starts[::every], "ticktext": [f"block {places[n][0]}" for n in starts[::every]]}
    lines_between = [border | {"y0": n - 0.5, "y1": n - 0.5} for n in starts[1:]]
    layout = {"yaxis": rows, "shapes": lines_between, "margin": {"t": 12}}
    height = min(MAP_HEIGHT[1], max(MAP_HEIGHT[0], 90 + ROW * len(places)))
    return style.figure([cells_of_heads, crosses], "step", "", height=height, layout=layout)


def where(alarm: Alarm) -> str:
    """Name a place: `L2H5`, or `after block 1` of the residual stream."""
    return residual_place(alarm.layer) if alarm.head is None else head_name(alarm.layer, alarm.head)


def _place(place: tuple[int, ...]) -> str:
    return head_name(*place) if len(place) == 2 else residual_place(place[0])


def _dots(points: Steps) -> float:
    """Return the size of a line's points: they are marked while they are few, since one alone must be seen."""
    return 5 if len(points) <= 40 else 0
