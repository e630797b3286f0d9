"""The record of a training run's looks: JSON lines in a folder, which a resumed run continues."""

from __future__ import annotations

import itertools
import json
import math
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
FOLDER = "geometry"  # folder of the record, in a Trainer's `output_dir`
OF_HEADS = ("entropy_share", "propagation", "sink_first", "sink_later", "largest_logit")
# Columns that the page draws, and their tables.
DRAWN = dict.fromkeys(OF_HEADS, "heads") | {"rank_collapse": "layers"}
# Columns that a resumed monitor judges again or draws.
NEEDED = {"heads": {*OF_HEADS, "at_distance", "same_token", "sink_learned"}, "layers": {"rank_collapse"}}
Row = dict[str, Any]


class Record:
    """The tables of all looks, and the losses in between, as lines of JSON in a folder; a NaN is `null`."""

    def __init__(self, folder: Path, layers: int, places: Sequence[tuple[int, int]]) -> None:
        self.folder = folder
        self.places: dict[str, list[tuple[int, int | None]]] = {
            "heads": list(places),
            "layers": [(layer, None) for layer in range(layers + 1)],
        }
        self.steps: list[int] = []
        self.alarms: list[Alarm] = []
        self.losses: dict[int, float] = {}
        self.finished = False  # the page says that the run has ended, or is not written any more
        self._drawn: dict[str, list[NDArray[np.float32]]] = {name: [] for name in DRAWN}

    def column(self, name: str) -> NDArray[np.float64] | None:
        """Return a column of `DRAWN` as (looks, places); None where no look has a number in it."""
        values = np.array(self._drawn[name], dtype=np.float64)
        return values if np.isfinite(values).any() else None

    def begin(self, step: int) -> tuple[list[Geometry], str]:
        """Drop what was recorded after `step` (all of it, at step 0); returns the looks that are kept and a message."""
        message = ""
        with disk_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            rows = {name: _rows(self._path(name)) for name in FILES}
            looks: dict[int, dict[str, list[Row]]] = {}
            for name in NEEDED:
                for row in rows[name]:
                    if row["step"] <= step:
                        looks.setdefault(row["step"], {of: [] for of in NEEDED})[name].append(row)
            # What is no complete look of this model is dropped, too.
            whole = {at for at, look in looks.items() if step and self._is_whole(look)}
            if not whole and any(rows.values()):
                message = f"{self.folder} held an earlier record: moved to heads.{self._move_aside()}.jsonl and so on"
            for name in FILES:
                # A loss belongs to a step that is done, whether or not there was a look.
                done = range(step + 1) if name == "losses" else whole
                rows[name] = [row for row in rows[name] if whole and row["step"] in done]
                write_text(self._path(name), _lines(rows[name]))
            for row in rows["losses"]:
                self.keep_loss(row["step"], row.get("loss"))

        def table(at: int, name: str) -> pd.DataFrame:
            return pd.DataFrame(looks[at][name]).drop(columns="step")

        return [Geometry(at, table(at, "heads"), table(at, "layers"), 0.0) for at in sorted(whole)], message

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.jsonl"

    def _move_aside(self) -> int:
        """Rename the files to `heads.1.jsonl` and so on; returns the number."""
        for number in itertools.count(1):
            moved = {self._path(name): self._path(f"{name}.{number}") for name in FILES}
            if not any(path.exists() for path in moved.values()):
                break
        for path, aside in moved.items():
            if path.exists():
                path.rename(aside)
        return number

    def _is_whole(self, look: dict[str, list[Row]]) -> bool:
        """Tell whether these are the rows of one look at a model of this many layers and heads."""
        return all(
            [(row.get("layer"), row.get("head")) for row in rows] == self.places[name]
            and all(row.keys() >= NEEDED[name] for row in rows)
            for name, rows in look.items()
        )

    def keep(self, geometry: Geometry, alarms: list[Alarm]) -> None:
        """Keep what the page draws of one look and its alarms."""
        self.steps.append(geometry.step)
        for name, of in DRAWN.items():
            with np.errstate(over="ignore"):
                values = getattr(geometry, of)[name].to_numpy(dtype=np.float32)
            self._drawn[name].append(np.where(np.isfinite(values), values, np.nan))
        self.alarms += alarms
        self.finished = False

    def write(self, geometry: Geometry, alarms: list[Alarm]) -> None:
        """Append one look and its alarms; `WorkError` where the folder cannot be written."""
        for name in NEEDED:
            table = getattr(geometry, name)
            self._append(name, [{"step": geometry.step, **row} for row in table.to_dict("records")])
        self._append("alarms", [vars(alarm) for alarm in alarms])
        self.keep(geometry, alarms)

    def write_loss(self, step: int, loss: float) -> None:
        """Append the loss of a step, of which the last counts; `WorkError` where the folder cannot be written."""
        self._append("losses", [{"step": step, "loss": loss}])
        self.keep_loss(step, loss)

    def keep_loss(self, step: int, loss: Any) -> None:
        """Keep a loss for the page: a gap where it is no number that a page can show."""
        self.losses[step] = loss if isinstance(loss, float | int) and abs(loss) < 1e30 else math.nan

    def _append(self, name: str, rows: list[Row]) -> None:
        with disk_errors(self.folder), self._path(name).open("a", encoding="utf-8") as file:
            file.write(_lines(rows))


def _lines(rows: list[Row]) -> str:
    return "".join(json_text(row) + "\n" for row in rows)


def _rows(path: Path) -> list[Row]:
    """Read the lines of a file, if there is one, that are a row with a step, `null` as NaN: no half line of a kill."""
    rows = []
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n") if path.exists() else []:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            rows.append({name: math.nan if value is None else value for name, value in row.items()})
    return rows
