"""The record of a training run as it grows: what is added to its files is read once, and kept as small arrays.

Whatever the files hold is no error: half a line is read when it is whole, a damaged one is counted, and a file that was
moved aside or written anew is read from its start. Nothing is drawn here, and no file is written.
"""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from theodolite.errors import first_line
from theodolite.report.data import Floats
from theodolite.system.wording import counted, listed
from theodolite.train.alarms import ADVICE, Alarm
from theodolite.train.record import FILES, FOLDER, parsed_row

OF_HEADS = ("entropy_share", "propagation", "sink_first", "sink_later", "largest_logit")
OF_LAYERS = ("rank_collapse",)
"""Columns of the record that are shown, where they are there."""

MOST = 2**31
"""Steps, layers and heads must be below this, as a page's whole numbers are."""

CHUNK = 1 << 24  # bytes
QUIET = 600.0
"""Seconds without a word after which a run seems to have stopped, where its pace is not known."""

PATIENCE = 5
"""The same, in the longest of its last silences; at least `LEAST` seconds."""

LEAST = 30.0
REGULAR = 60.0
"""Seconds between two refreshes within which a silence of the run is seen as one."""

Row = dict[str, Any]


class GrowingFile:
    """A file of rows, one a line, that another process appends to.

    Args:
        take: what is done with each row; whether it is one of those that belong there.
        clear: what is done when the file begins again.
    """

    def __init__(self, take: Callable[[Row], bool], clear: Callable[[], None]) -> None:
        self.damaged = 0
        self.changed = 0.0
        self.error = ""
        self._take, self._clear = take, clear
        self._inode, self._offset = -1, 0

    def refresh(self, path: Path) -> bool:
        """Read what is new; whether something changed."""
        before = (self._inode, self._offset, self.error)
        try:
            with path.open("rb") as file:
                status = os.fstat(file.fileno())
                if status.st_ino != self._inode or status.st_size < self._offset:
                    self._begin(status.st_ino)
                self.changed, self.error = status.st_mtime, ""
                file.seek(self._offset)
                for line in self._lines(file):
                    row = parsed_row(line.decode(errors="replace"))
                    if row is None or not 0 <= row["step"] < MOST or not self._take(row):
                        self.damaged += 1
        except FileNotFoundError:
            self.error = ""
            if self._inode >= 0:
                self._begin(-1)
        except OSError as error:
            self.error = error.strerror or first_line(error)
        return before != (self._inode, self._offset, self.error)

    def _begin(self, inode: int) -> None:
        self._inode, self._offset, self.damaged, self.changed = inode, 0, 0, 0.0
        self._clear()

    def _lines(self, file: Any) -> Iterator[bytes]:
        """The whole lines from where the file stands; the rest is left for the next time."""
        rest = b""
        while chunk := file.read(CHUNK):
            *lines, rest = (rest + chunk).split(b"\n")
            self._offset += sum(map(len, lines)) + len(lines)
            yield from lines


class Columns:
    """Some columns of all looks, by step and place: a head is (layer, head), a layer (layer,)."""

    def __init__(self, place: tuple[str, ...], names: tuple[str, ...]) -> None:
        self.names = names
        self._place = place
        self._places: dict[tuple[int, ...], int] = {}
        self._by_step: dict[int, NDArray[np.float32]] = {}
        self._known: set[str] = set()

    def clear(self) -> None:
        """Forget everything."""
        self._places.clear()
        self._by_step.clear()
        self._known.clear()

    def take(self, row: Row) -> bool:
        """Keep a row, if its place is one."""
        place = tuple(row.get(name) for name in self._place)
        if not all(type(index) is int and 0 <= index < MOST for index in place):
            return False
        number = self._places.setdefault(place, len(self._places))  # type: ignore[arg-type]
        values = self._by_step.get(row["step"])
        if values is None or number >= len(values):
            room = 1 << max(number, len(self._places) - 1).bit_length()
            grown = np.full((room, len(self.names)), np.nan, dtype=np.float32)
            if values is not None:
                grown[: len(values)] = values
            self._by_step[row["step"]] = values = grown
        values[number] = [_number(row.get(name)) for name in self.names]
        self._known.update(name for name in self.names if name in row)
        return True

    @property
    def places(self) -> list[tuple[int, ...]]:
        """Those of all looks, in order: P of them."""
        return sorted(self._places)

    @property
    def steps(self) -> NDArray[np.int64]:
        """Of all looks, in order: S of them."""
        return np.array(sorted(self._by_step), dtype=np.int64)

    def of(self, name: str) -> Floats | None:
        """A column as (S, P), NaN where a look lacks it; None where no look has it."""
        if name not in self._known:
            return None
        order = [self._places[place] for place in self.places]
        column = self.names.index(name)
        values = np.full((len(self._by_step), max(order) + 1), np.nan)
        for row, step in zip(values, sorted(self._by_step), strict=True):
            look = self._by_step[step][: len(row), column]
            row[: len(look)] = look
        return values[:, order] if np.isfinite(values).any() else None


class TrainingRecord:
    """What is known of a training run by now.

    Args:
        run: the folder of the record, or the Trainer's `output_dir` that holds it; it need not exist yet.

    Attributes:
        heads, layers: the columns that are shown.
        losses: loss by step; NaN where it was no number.
        alarms: all of them, in order of the file.
    """

    def __init__(self, run: Path) -> None:
        self.run = run
        self.heads, self.layers = Columns(("layer", "head"), OF_HEADS), Columns(("layer",), OF_LAYERS)
        self.losses: dict[int, float] = {}
        self.alarms: list[Alarm] = []
        self._files = {
            "heads": GrowingFile(self.heads.take, self.heads.clear),
            "layers": GrowingFile(self.layers.take, self.layers.clear),
            "alarms": GrowingFile(self._take_alarm, self.alarms.clear),
            "losses": GrowingFile(self._take_loss, self.losses.clear),
        }
        self._earlier: list[str] = []
        self._trainer: tuple[Path, float, dict[int, float]] | None = None
        self._silences: deque[float] = deque(maxlen=8)
        self._refreshed = -math.inf

    @property
    def folder(self) -> Path:
        """Where the record lies, or will lie."""
        inside = self.run / FOLDER
        return inside if not (self.run / "heads.jsonl").exists() and inside.is_dir() else self.run

    def refresh(self) -> bool:
        """Read what is new; whether something changed."""
        folder, heard = self.folder, self.heard
        earlier, trainer = self._earlier, self._trainer
        changed = [self._files[name].refresh(folder / f"{name}.jsonl") for name in FILES]
        self._earlier = _moved_aside(folder)
        self._trainer = _trainer_losses(folder.parent if folder.name == FOLDER else folder, trainer)
        now = time.monotonic()
        if heard < self.heard and heard and now - self._refreshed < REGULAR:
            self._silences.append(self.heard - heard)
        self._refreshed = now
        return any(changed) or earlier != self._earlier or trainer != self._trainer

    @property
    def heard(self) -> float:
        """When a file of the record was last written, in seconds since 1970; 0 where there is none."""
        return max(file.changed for file in self._files.values())

    @property
    def patience(self) -> float:
        """Seconds without a word after which the run seems to have stopped."""
        return max(LEAST, PATIENCE * max(self._silences)) if self._silences else QUIET

    def loss(self) -> tuple[dict[int, float], str]:
        """The losses by step, and the file that they are from: the record's own, else the Trainer's newest."""
        if self.losses or self._trainer is None:
            return self.losses, "losses.jsonl"
        path, _, losses = self._trainer
        return losses, f"{path.parent.name}/{path.name}"

    def notes(self) -> list[str]:
        """What a reader must know of the files."""
        notes = []
        for name, file in self._files.items():
            if file.damaged:
                notes.append(f"{counted(file.damaged, 'damaged line')} of {name}.jsonl left out.")
            if file.error:
                notes.append(f"{name}.jsonl cannot be read: {file.error}.")
        if self._earlier:
            notes.append(f"Records of earlier runs, moved aside: {listed(self._earlier)}.")
        return notes

    def _take_alarm(self, row: Row) -> bool:
        alarm = _alarm(row)
        if alarm is not None:
            self.alarms.append(alarm)
        return alarm is not None

    def _take_loss(self, row: Row) -> bool:
        if "loss" not in row:
            return False
        self.losses[row["step"]] = _number(row["loss"])
        return True


def _number(value: Any) -> float:
    """A number of a row as a page can show it; NaN where it is none."""
    return float(value) if type(value) in (int, float) and abs(value) < 1e30 else math.nan


def _alarm(row: Row) -> Alarm | None:
    """The alarm that a row tells; None where it tells none."""
    kind, layer, head = row.get("kind"), row.get("layer", -1), row.get("head")
    places = [layer] if head is None else [layer, head]
    if (
        not isinstance(kind, str)
        or kind not in ADVICE
        or not all(type(index) is int and 0 <= index < MOST for index in places)
    ):
        return None
    value, slope = _number(row.get("value")), _number(row.get("slope"))
    if slope and math.isinf(value / slope):
        return None
    return Alarm(row["step"], kind, layer, head, value, slope, row.get("collapsed") is True)


def _moved_aside(folder: Path) -> list[str]:
    """Names of earlier heads tables, in the order of their numbers."""
    numbers = (re.fullmatch(r"heads\.(\d{1,9})\.jsonl", path.name) for path in folder.glob("heads.*.jsonl"))
    return [f"heads.{number}.jsonl" for number in sorted(int(found[1]) for found in numbers if found)]


def _trainer_losses(
    output: Path, known: tuple[Path, float, dict[int, float]] | None
) -> tuple[Path, float, dict[int, float]] | None:
    """The Trainer's newest state in a folder or its checkpoints, when it was written, and its losses by step."""
    changed: dict[Path, float] = {}
    for path in (output / "trainer_state.json", *output.glob("checkpoint-*/trainer_state.json")):
        try:
            changed[path] = path.stat().st_mtime
        except OSError:
            continue  # none, or a checkpoint that was just removed
    if not changed:
        return None
    newest = max(changed, key=lambda path: changed[path])
    if known is not None and known[:2] == (newest, changed[newest]):
        return known
    try:
        history = json.loads(newest.read_text(encoding="utf-8"))["log_history"]
        logged = [entry for entry in history if "loss" in entry and type(entry.get("step")) is int]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return known  # half written, or of another program
    losses = {entry["step"]: _number(entry["loss"]) for entry in logged if 0 <= entry["step"] < MOST}
    return newest, changed[newest], losses
