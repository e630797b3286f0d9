"""The record of a training run's looks: JSON lines in a folder, which a resumed run continues.

Nothing is measured, judged or drawn here, and nothing is said to the user.
"""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from theodolite.system.files import disk_errors, json_text, write_text
from theodolite.train.alarms import Alarm
from theodolite.train.geometry import Geometry

FILES = ("heads", "layers", "alarms", "losses")

FOLDER = "geometry"
"""Folder of the record, in a Trainer's `output_dir`."""

JUDGED = {"entropy_share", "propagation", "at_distance", "same_token", "sink_first", "sink_learned"}
"""Columns of the heads that a resumed monitor judges again."""


OF_HEADS = ("entropy_share", "propagation", "sink_first", "sink_later", "largest_logit")
OF_LAYERS = ("rank_collapse",)
"""Columns that the page draws."""

MOST = 1e30
"""Losses as large are no numbers to draw."""


class Columns:
    """Columns of all looks that the page draws, by place: (layer, head) of a head, (layer,) of a layer."""

    def __init__(self, names: Sequence[str], places: Sequence[tuple[int, ...]]) -> None:
        self.places = places
        self._names = names
        self._steps: list[int] = []
        self._looks: list[NDArray[np.float32]] = []

    def add(self, step: int, table: pd.DataFrame) -> None:
        """Add a look; a column that it lacks is NaN."""
        with np.errstate(over="ignore"):
            values = table.reindex(columns=self._names).to_numpy(dtype=np.float32)
        self._steps.append(step)
        self._looks.append(np.where(np.isfinite(values), values, np.nan))

    @property
    def steps(self) -> NDArray[np.int64]:
        """The steps of all S looks, in order."""
        return np.array(self._steps, dtype=np.int64)

    def of(self, name: str) -> NDArray[np.float64] | None:
        """Return a column as (looks, places); None where no look has it."""
        column = self._names.index(name)
        values = np.array([look[:, column] for look in self._looks], dtype=np.float64)
        return values if np.isfinite(values).any() else None


class Record:
    """The tables of all looks, and the losses in between, as lines of JSON in a folder; a NaN is `null`.

    Args:
        folder: where; None: nowhere.
        layers, places: of the model, and of its heads, to know its own complete looks.

    Attributes:
        heads, layers: what the page draws of the looks.
        alarms: of all looks.
        loss_steps, losses: each step's last loss.
        finished: the page says that the run has ended.
    """

    def __init__(self, folder: Path | None, layers: int = 0, places: Sequence[tuple[int, int]] = ()) -> None:
        self.folder = folder
        self.heads = Columns(OF_HEADS, list(places))
        self.layers = Columns(OF_LAYERS, [(layer,) for layer in range(layers + 1)])
        self.alarms: list[Alarm] = []
        self.loss_steps, self.losses = array("q"), array("d")
        self.finished = False

    def begin(self, step: int) -> tuple[list[Geometry], str]:
        """Drop what was recorded after `step` (all of it, at step 0); returns the looks that are kept, and a message.

        If nothing is kept, or something is no complete look of this model, the old files are moved aside first.

        Raises:
            WorkError: the folder cannot be written.
        """
        if self.folder is None:
            return [], ""
        message = ""
        with disk_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            lines = {name: _complete_lines(self._path(name)) for name in FILES}
            rows = {name: [row for line in lines[name] if (row := parsed_row(line))] for name in FILES}
            heads, layers = (_by_step(rows[name], step) for name in ("heads", "layers"))
            whole = {at for at in heads.keys() & layers.keys() if self._whole(heads[at], layers[at])}
            steps = sorted(whole) if step else []
            damaged = sum(len(lines[name]) - len(rows[name]) for name in FILES)
            others = len((heads.keys() | layers.keys()) - whole)
            if any(lines.values()) and (not steps or damaged or others):
                message = f"{self.folder} held an earlier record: moved to heads.{self._move_aside()}.jsonl and so on"
                if step and (damaged or others):
                    message += (
                        f"; {len(steps)} looks kept, {others} dropped that are no complete looks of this model, "
                        f"{damaged} damaged lines"
                    )
            for name in FILES:
                # A loss belongs to a step that is done, whether or not there was a look.
                done = range(step + 1) if name == "losses" else whole
                rows[name] = [row for row in rows[name] if steps and row["step"] in done]
                write_text(self._path(name), "".join(map(_line, rows[name])))
            for row in rows["losses"]:
                self._keep_loss(row["step"], row.get("loss"))
        return [Geometry(at, _table(heads[at]), _table(layers[at]), 0.0) for at in steps], message

    def _path(self, name: str, number: int | None = None) -> Path:
        """The path of a file; with a number, of one that was moved aside."""
        assert self.folder is not None
        return self.folder / (f"{name}.jsonl" if number is None else f"{name}.{number}.jsonl")

    def _move_aside(self) -> int:
        """Rename the files to `heads.1.jsonl` and so on; returns the number."""
        number = 1
        while any(self._path(name, number).exists() for name in FILES):
            number += 1
        for name in FILES:
            if self._path(name).exists():
                self._path(name).rename(self._path(name, number))
        return number

    def _whole(self, heads: list[dict[str, Any]], layers: list[dict[str, Any]]) -> bool:
        """Whether these are the rows of one look at a model of this many layers and heads."""
        return (
            [(row.get("layer"), row.get("head")) for row in heads] == self.heads.places
            and [(row.get("layer"),) for row in layers] == self.layers.places
            and all(map(_numeric, heads + layers))
            and all(row.keys() >= JUDGED for row in heads)
            and all("rank_collapse" in row for row in layers)
        )

    def keep(self, geometry: Geometry, alarms: list[Alarm]) -> None:
        """Keep what the page draws of one look and its alarms."""
        if self.folder is not None:
            self.heads.add(geometry.step, geometry.heads)
            self.layers.add(geometry.step, geometry.layers)
            self.alarms += alarms
            self.finished = False

    def write(self, geometry: Geometry, alarms: list[Alarm]) -> None:
        """Append one look and its alarms; `WorkError` where the folder cannot be written."""
        for name, table in (("heads", geometry.heads), ("layers", geometry.layers)):
            self._append(name, [{"step": geometry.step, **row} for row in table.to_dict("records")])
        self._append("alarms", [vars(alarm) for alarm in alarms])
        self.keep(geometry, alarms)

    def write_loss(self, step: int, loss: float) -> None:
        """Append the loss of a step, of which the last counts; `WorkError` where the folder cannot be written."""
        self._append("losses", [{"step": step, "loss": loss}])
        self._keep_loss(step, loss)

    def _keep_loss(self, step: int, loss: Any) -> None:
        """Keep a loss for the page: a gap where it is no number that a page can show."""
        if self.folder is None:
            return
        value = float(loss) if type(loss) in (int, float) and abs(loss) < MOST else math.nan
        if self.loss_steps and self.loss_steps[-1] == step:
            self.losses[-1] = value
        else:
            self.loss_steps.append(step)
            self.losses.append(value)

    def _append(self, name: str, rows: list[dict[str, Any]]) -> None:
        if self.folder is None:
            return
        with disk_errors(self.folder), self._path(name).open("a", encoding="utf-8") as file:
            file.write("".join(map(_line, rows)))


def _line(row: dict[str, Any]) -> str:
    return json_text(row) + "\n"


def _complete_lines(path: Path) -> list[str]:
    """Read a file's lines, without the half line at which a process was killed; none where there is no file."""
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n") if path.exists() else [""]
    return lines if parsed_row(lines[-1]) else lines[:-1]


def parsed_row(line: str) -> dict[str, Any] | None:
    """Parse a row with a step; None if the line is none."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) and type(row.get("step")) is int else None


def _numeric(row: dict[str, Any]) -> bool:
    """Whether all values are numbers or `null`, but for the regime, a text."""
    return all(
        isinstance(value, str)
        if name == "regime"
        else value is None or type(value) is float or (type(value) is int and abs(value) < 2**53)
        for name, value in row.items()
    )


def _by_step(rows: list[dict[str, Any]], last: int) -> dict[int, list[dict[str, Any]]]:
    """Group rows by step, up to the last one."""
    by_step: dict[int, list[dict[str, Any]]] = {}
    for row in rows:
        if row["step"] <= last:
            by_step.setdefault(row["step"], []).append(row)
    return by_step


def _table(rows: list[dict[str, Any]]) -> pd.DataFrame:
    """Make a look's table from its rows."""
    table = pd.DataFrame(rows).drop(columns="step")
    numbers = [name for name in table.columns if name != "regime"]
    table[numbers] = table[numbers].apply(pd.to_numeric)  # a column of `null` only is one of NaN
    return table
