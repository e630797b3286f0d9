"""The page of a training run: what its record tells by now, in the style of the report's pages.

The same page is served, where it asks for itself again every few seconds, or written to a file that stands alone. Every
text of the record is escaped by the template.
"""

from __future__ import annotations

import math
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
from plotly.offline import get_plotlyjs

from theodolite.errors import UsageError
from theodolite.report.content import Tile
from theodolite.report.drawing.grammar import Panel, Sketch
from theodolite.report.exhibit import Choice, Exhibit, Option
from theodolite.report.page import PLOTLY, STATIC, Block, block_of, rendered, static_text
from theodolite.report.style import figure
from theodolite.system.files import disk_errors, write_text
from theodolite.system.wording import counted, head_name, number, visible
from theodolite.watch import figures
from theodolite.watch.figures import Measure
from theodolite.watch.record import Columns, TrainingRecord

LISTED = 200
"""Alarms in the list, at most: the newest."""

MARKED = 2000
"""The same, on the axis of steps."""


def render(record: TrainingRecord, every: float | None = None) -> str:
    """The page as one string of HTML.

    Args:
        record: refreshed.
        every: seconds after which the page asks for itself again; None: it never does, and has Plotly's script inside.
    """
    blocks = [block_of(exhibit) for exhibit in _exhibits(record)]
    live = every is not None
    scripts = (*STATIC, "watch.js") if live else STATIC
    heard = record.heard
    return rendered(
        "watch.html.j2",
        {
            "js": "".join(map(static_text, scripts[1:])),
            "live": live,
            "every": every,
            "shape": _shape(blocks),
            "name": visible(record.run.resolve().name or str(record.run), 80),
            "folder": visible(record.folder),
            "heard": f"{datetime.fromtimestamp(heard):%Y-%m-%d %H:%M:%S}" if heard else "",
            "silent": max(0, round(time.time() - heard)) if heard else "",
            "patience": round(record.patience),
            "tiles": _tiles(record),
            "notes": [visible(note) for note in record.notes()],
            "blocks": blocks,
            "alarms": _alarm_rows(record),
            "listed": LISTED,
            "count": len(record.alarms),
            "cards": "{}",
            "plotly": PLOTLY,
            "plotly_script": "" if live else get_plotlyjs(),
        },
    )


def write_page(run: Path, path: Path) -> Path:
    """Write the page of a training run to one file that needs no other, and return its path.

    Raises:
        UsageError: `run` holds no look and no loss yet.
        WorkError: the file cannot be written.
    """
    record = TrainingRecord(run)
    record.refresh()
    if not len(record.heads.steps) and not record.loss()[0]:
        raise UsageError(
            f"{run} holds no record of a training run yet: give the folder of a GeometryMonitor, or the output_dir "
            "of a Trainer that has a GeometryCallback; without --out the page waits for its first look"
        )
    page = render(record)
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, page)
    return path


def _shape(blocks: list[Block]) -> str:
    """What of a page cannot be renewed in place: its figures and their buttons."""
    return " ".join(
        f"{block.exhibit.key}:{','.join(option.key for _, options in block.options for option in options)}"
        for block in blocks
    )


def _exhibits(record: TrainingRecord) -> list[Exhibit]:
    losses, source = record.loss()
    shown: list[Panel] = [figures.loss_panel(losses)] if losses else []
    heads = record.heads
    for columns, measures in ((heads, figures.OF_LINES), (record.layers, (figures.RESIDUALS,))):
        for measure in measures:
            values = columns.of(measure.column)
            if values is not None:
                shown.append(figures.measure_panel(measure, columns.steps, values, columns.places))
    drawn = []
    alarms = record.alarms[-MARKED:]
    if shown:
        drawn.append(
            Exhibit(
                key="lines",
                title="Over the steps",
                figure=figures.lines(shown, alarms),
                shows="At each look the mean over all heads (layers, for the rank), and the one nearest to an alarm; "
                "hovering names it. Where many looks share a point, the nearest to an alarm among them is drawn. "
                "Dotted: the default limit of alarms. Dashed upright: the first alarm of each kind."
                + (
                    f" Loss from {visible(source, 80)}, on the band of the steps that share a point."
                    if losses
                    else ""
                ),
                look_for="entropy and ρ that fall while the loss does not yet show anything.",
                source="docs/monitor.md",
                wide=True,
            )
        )
    maps = {measure.column: measure for measure in figures.OF_MAP if heads.of(measure.column) is not None}
    if maps:
        drawn += [_strip(record), _map(record, maps)]
    return drawn


def _strip(record: TrainingRecord) -> Exhibit:
    return Exhibit(
        key="alarms",
        title="Alarms",
        figure=figures.alarm_strip(record.alarms[-MARKED:], record.heads.steps),
        shows="Each alarm at the look that raised it; the list is below. A head or layer alarms once for each kind "
        "until it has recovered.",
        look_for="several kinds at once, or heads that follow one another.",
        source="docs/monitor.md",
        wide=True,
    )


def _map(record: TrainingRecord, maps: dict[str, Measure]) -> Exhibit:
    steps, places = record.heads.steps, record.heads.places

    def draw(column: str) -> Sketch:
        values = record.heads.of(column)
        assert values is not None
        return figures.head_map(maps[column], steps, values, places, record.alarms[-MARKED:])

    sketches = {column: draw(column) for column in maps}
    first = next(iter(sketches.values()))
    options = [Option(column, measure.title, note=measure.axis) for column, measure in maps.items()]
    return Exhibit(
        key="heads",
        title="Every head over the steps",
        figure=figure(first.traces, first.x, first.y, height=first.height, layout=first.layout),
        shows="One row per head, the first layer on top, one column per look, as wide as its steps; crosses where a "
        "head began to alarm. Where looks share a column, the nearest to an alarm of them is drawn: the lowest entropy "
        "and ρ, the highest sink share and logit.",
        look_for="rows that lose their colour together (entropy, ρ), or gain it (sinks, logits).",
        source="docs/monitor.md",
        choice=Choice("colour", options, sketches.__getitem__, mode="buttons"),
        wide=True,
    )


def _tiles(record: TrainingRecord) -> list[Tile]:
    tiles = []
    steps = record.heads.steps
    if len(steps):
        tiles.append(Tile("step of the last look", number(int(steps[-1]), 6), counted(len(steps), "look")))
    losses, _ = record.loss()
    if losses:
        last = max(losses)
        value = losses[last]
        tiles.append(Tile("loss", "no number" if math.isnan(value) else number(value, 4), f"at step {last}"))
    for measure in figures.OF_LINES:
        tiles += _extreme_tile(record.heads, measure)
    if len(steps):
        last_alarm = record.alarms[-1] if record.alarms else None
        note = f"the last at step {last_alarm.step}" if last_alarm else "none so far"
        tiles.append(Tile("alarms so far", number(len(record.alarms)), note))
    return tiles


def _extreme_tile(columns: Columns, measure: Measure) -> list[Tile]:
    """The head nearest to an alarm at the last look, if that has this column."""
    values = columns.of(measure.column)
    if values is None or not np.isfinite(values[-1]).any():
        return []
    last = values[-1]
    index = int(np.nanargmin(last) if measure.low_alarms else np.nanargmax(last))
    label = f"lowest {measure.axis}" if measure.low_alarms else measure.axis
    return [Tile(label, number(float(last[index])), head_name(*columns.places[index]))]


def _alarm_rows(record: TrainingRecord) -> list[tuple[int, str, str, str]]:
    """The newest alarms first: step, kind, where, and where its value goes."""
    newest: list[Any] = record.alarms[: -LISTED - 1 : -1]
    return [(alarm.step, alarm.kind, figures.where(alarm), alarm.trend) for alarm in newest]
