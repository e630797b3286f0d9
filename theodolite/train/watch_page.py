"""`watch.html`: the record of a training run as a page that needs no other file, and reloads itself until the end."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from pandas.api.typing import DataFrameGroupBy
from plotly.offline import get_plotlyjs

from theodolite.report import page, style
from theodolite.report.drawing import grammar
from theodolite.report.exhibit import Choice, Exhibit, Option
from theodolite.report.outcome import Outcome
from theodolite.system.wording import counted, head_name, number, visible
from theodolite.train.alarms import Limits
from theodolite.train.geometry import residual_place
from theodolite.train.record import DRAWN, FOLDER, OF_HEADS, Record

PAGE = "watch.html"
RELOAD = 30  # seconds after which an open page reads itself again
LISTED = 200  # alarms in the list, at most: the newest
POINTS = 500  # of a line, at most: of looks that share one, the nearest to an alarm is shown
CELLS = 50_000  # of a map, at most


class Measure(NamedTuple):
    """A column of the record: what it is called, whether low values alarm or high ones, and the default limit."""

    title: str
    axis: str
    low_alarms: bool = True
    limit: float | None = None


MEASURES = {
    "entropy_share": Measure("Entropy", "entropy over its maximum", limit=Limits.entropy),
    "propagation": Measure("Signal propagation ρ", "ρ", limit=Limits.propagation),
    "largest_logit": Measure("Largest logit", "largest logit", low_alarms=False),
    "rank_collapse": Measure("Rank of the residual stream", "‖X − 1x̄ᵀ‖/‖X‖", limit=Limits.rank),
    "sink_first": Measure("First-token sink", "share of contexts with a first-token sink", low_alarms=False),
    "sink_later": Measure("Later sink", "share of contexts with a later sink", low_alarms=False),
}
OF_LINES = ("entropy_share", "propagation", "largest_logit", "rank_collapse")


def write_page(record: Record, *, finished: bool) -> None:
    """Write the page of a record beside it, which reloads itself while the run is not finished; or `WorkError`."""
    page.write_page(record.folder / PAGE, render(record, finished=finished))


def render(record: Record, *, finished: bool) -> str:
    """Render the page as one string of HTML, with Plotly's script inside."""
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
            "alarms": [
                (each.step, each.kind, _place((each.layer, each.head)), each.trend) for each in newest
            ],
            "listed": LISTED,
            "count": len(record.alarms),
            "cards": "{}",
            "plotly": get_plotlyjs(),
        },
    )


def _summary(record: Record) -> str:
    """Say in a sentence where the run is: the looks, the loss and the alarms so far."""
    parts = [f"{counted(len(record.steps), 'look')}, the last at step {number(record.steps[-1], 6)}"]
    step, loss = next(reversed(record.losses.items()), (0, math.nan))
    if not math.isnan(loss):
        parts.append(f"loss {number(loss, 4)} at step {number(step, 6)}")
    return "; ".join([*parts, counted(len(record.alarms), "alarm") + " so far"]) + "."


def _exhibits(record: Record) -> list[Exhibit]:
    """Draw what the record has numbers of: lines, and the map of heads."""
    tables = {
        name: pd.DataFrame(values, record.steps, [_place(at) for at in record.places[of]])
        for name, of in DRAWN.items()
        if (values := record.column(name)) is not None
    }
    shown = [_loss_panel(pd.DataFrame({"loss": record.losses}))] if record.losses else []
    of_lines = [name for name in OF_LINES if name in tables]
    shown += [_panel(name, tables[name], showlegend=name == of_lines[0]) for name in of_lines]
    outcome = Outcome()
    if shown:
        # They zoom together.
        together = [shown[0], *(replace(panel, xaxis={"matches": "x"}) for panel in shown[1:])]
        across = min(len(shown), 3 if len(shown) > 4 else 2)
        outcome.show("watch", "lines", grammar.panels(together, across, height=240, gaps=(0.08, 0.2)))
    maps = [name for name in OF_HEADS if name in tables]
    if maps:
        layers = [layer for layer, _ in record.places["heads"]]
        options = [Option(name, MEASURES[name].title, note=MEASURES[name].axis) for name in maps]
        figures = {name: _head_map(name, tables[name], layers) for name in maps}
        outcome.show("watch", "heads", Choice("colour", options, figures.__getitem__))
    return outcome.exhibits


def _grouped(table: pd.DataFrame, most: int) -> tuple[Any, DataFrameGroupBy]:
    """Group the rows of a table (steps, places) into `most` groups of neighbours; returns their last steps, too."""
    size = math.ceil(len(table) / most)
    group = np.arange(len(table)) // size
    return table.index.to_series().groupby(group).last().to_numpy(), table.groupby(group)


def _panel(name: str, table: pd.DataFrame, showlegend: bool) -> grammar.Panel:
    """Draw the mean over heads or layers against the step, and the place nearest to an alarm."""
    measure = MEASURES[name]
    sign, worst = (1, "lowest") if measure.low_alarms else (-1, "highest")
    x, groups = _grouped(sign * table, POINTS)
    nearest = groups.min()
    hover = f"{worst} {DRAWN[name].rstrip('s')} at step %{{x}}: %{{y:.3g}}<br>%{{text}}<extra></extra>"
    names = nearest.fillna(np.inf).idxmin(axis=1).tolist()
    look: dict[str, Any] = {"text": names, "hover": hover, "marker": _dots(x), "showlegend": showlegend}
    extremes, means = sign * nearest.min(axis=1).to_numpy(), sign * groups.mean().mean(axis=1).to_numpy()
    traces = grammar.line(x, extremes, "nearest to an alarm", style.MEASURED, **look)
    look = {"hover": "mean at step %{x}: %{y:.3g}<extra></extra>", "showlegend": showlegend}
    traces += grammar.line(x, means, "mean", style.REFERENCE, width=1.4, **look)
    if measure.limit is not None:
        ends, what = x[[0, -1]], "default limit of alarms"
        traces += grammar.reference(ends, measure.limit, what, showlegend=showlegend)
    return grammar.Panel(measure.title, traces, "step", measure.axis, yaxis={"rangemode": "tozero"})


def _loss_panel(losses: pd.DataFrame) -> grammar.Panel:
    """Draw the loss, on a band from the lowest to the highest where steps share a point."""
    x, groups = _grouped(losses, POINTS)
    means = groups.mean()["loss"].to_numpy()
    shown = np.isfinite(means)  # a band must not have gaps
    low, high = (ends["loss"].to_numpy()[shown] for ends in (groups.min(), groups.max()))
    drawn = grammar.band(x[shown], low, high, style.MEASURED, legendgroup="")
    hover = "loss at step %{x}: %{y:.4g}<extra></extra>"
    drawn += grammar.line(x, means, "loss", style.MEASURED, hover=hover, marker=_dots(x), showlegend=False)
    return grammar.Panel("Loss", drawn, "step", "loss")


def _head_map(name: str, table: pd.DataFrame, layers: Sequence[int]) -> go.Figure:
    """Draw all heads (rows) at all looks (columns), the first block on top."""
    measure = MEASURES[name]
    x, groups = _grouped(table, max(100, min(POINTS, CELLS // len(layers))))
    cells = (groups.min() if measure.low_alarms else groups.max()).to_numpy().T
    highest = max(grammar.saturation([cells]), 1e-6) if name == "largest_logit" else 1.0
    hover = f"%{{y}} at step %{{x}}<br>{measure.axis} %{{z:.3g}}<extra></extra>"
    cells_of_heads = grammar.heat(cells, 0.0, highest, hover, bar=measure.axis, x=x, y=list(table.columns))
    starts = [layers.index(layer) for layer in dict.fromkeys(layers)]
    starts = starts[:: math.ceil(len(starts) / 24)]
    rows = {"type": "category", "ticks": "", "range": [len(layers) - 0.5, -0.5], "tickmode": "array"}
    rows |= {"tickvals": starts, "ticktext": [f"block {layers[n]}" for n in starts]}
    height = grammar.map_height(len(layers))
    return style.figure([cells_of_heads], "step", "", height=height, layout={"yaxis": rows})


def _place(place: tuple[int, int | None]) -> str:
    """Name a head `L2H5`, or a layer of the residual stream `after block 1`."""
    layer, head = place
    return residual_place(layer) if head is None else head_name(layer, head)


def _dots(points: Any) -> float:
    """Return the size of a line's points: they are marked while they are few, since one alone must be seen."""
    return 5 if len(points) <= 40 else 0
