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
from theodolite.report.drawing.grammar import (
    Panel,
    band,
    dots,
    heat,
    line,
    map_height,
    panels,
    reference,
    saturation,
)
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
"""Alarms in the list, and in the map, at most: the newest."""

POINTS, CELLS = 500, 50_000
"""Points of a line, and cells of a map, at most."""

ALARM_COLOURS = {ENTROPY: style.VERMILLION, RANK: style.BLUE, VANISHING: style.ORANGE}


@dataclass(frozen=True)
class Measure:
    """A column of the record: what it is called, and whether low or high values alarm.

    `highest`: where colours end; None: at the largest of the map. `limit`: the alarm's default.
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
            "summary": _summary(record),
            "blocks": [page.block_of(exhibit) for exhibit in _exhibits(record)],
            "alarms": [(alarm.step, alarm.kind, _where(alarm), alarm.trend) for alarm in newest],
            "listed": LISTED,
            "count": len(record.alarms),
            "cards": "{}",
            "plotly": get_plotlyjs(),
        },
    )


def _summary(record: Record) -> str:
    """Say in a sentence where the run is: the looks, the loss and the alarms so far."""
    parts = [f"{counted(len(record.steps), 'look')}, the last at step {number(record.steps[-1], 6)}"]
    if record.losses and not math.isnan(record.losses[-1]):
        parts.append(f"loss {number(record.losses[-1], 4)} at step {number(record.loss_steps[-1], 6)}")
    return "; ".join([*parts, counted(len(record.alarms), "alarm") + " so far"]) + "."


def _exhibits(record: Record) -> list[Exhibit]:
    steps, heads = np.array(record.steps, dtype=np.int64), record.places["heads"]
    values = {name: v for name in DRAWN if (v := record.column(name)) is not None}
    shown = [loss_panel(np.array(record.loss_steps), np.array(record.losses))] if record.losses else []
    shown += [
        measure_panel(measure, steps, values[measure.column], record.places[DRAWN[measure.column]])
        for measure in OF_LINES
        if measure.column in values
    ]
    outcome = Outcome()
    if shown:
        outcome.show("watch", "lines", lines(shown, record.alarms))
    maps = {measure.column: measure for measure in OF_MAP if measure.column in values}
    if maps:
        options = [Option(column, measure.title, note=measure.axis) for column, measure in maps.items()]
        figures = {
            column: head_map(measure, steps, values[column], heads, record.alarms[-MARKED:])
            for column, measure in maps.items()
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
    return Panel(measure.title, traces, "step", measure.axis, yaxis={"rangemode": "tozero"})


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
    at, names_at = np.array([alarm.step for alarm in of_heads], dtype=np.int64), list(map(_where, of_heads))
    hover = "%{y} at step %{x}<br>%{text}<extra></extra>"
    look = {"symbol": "x-thin", "size": 7, "line": {"width": 1.6, "color": style.INK}}
    kinds = [alarm.kind for alarm in of_heads]
    crosses = dots(at, names_at, kinds, None, style.INK, hover, marker=look, showlegend=False)
    starts = [n for n, (layer, *_) in enumerate(places) if n == 0 or layer != places[n - 1][0]]
    every = -(-len(starts) // 24)
    rows = {"type": "category", "ticks": "", "range": [len(places) - 0.5, -0.5], "tickmode": "array"}
    rows |= {"tickvals": starts[::every], "ticktext": [f"block {places[n][0]}" for n in starts[::every]]}
    height = map_height(len(places))
    return style.figure([cells_of_heads, crosses], "step", "", height=height, layout={"yaxis": rows})


def _place(place: tuple[int, ...]) -> str:
    """Name a head `L2H5`, or a layer of the residual stream `after block 1`."""
    return head_name(*place) if len(place) == 2 else residual_place(place[0])


def _where(alarm: Alarm) -> str:
    return _place((alarm.layer,) if alarm.head is None else (alarm.layer, alarm.head))


def _dots(points: Steps) -> float:
    """Return the size of a line's points: they are marked while they are few, since one alone must be seen."""
    return 5 if len(points) <= 40 else 0
