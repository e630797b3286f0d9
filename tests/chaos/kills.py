"""A command that is killed, at any moment, and run again gives the bytes of one that was never stopped.

Every command that writes is first run whole, while its file events below the parent of its output are counted: files
opened to be written, renamed, removed, folders made. Then, again and again in an empty folder, it is killed just before
or just after such an event, or before a rename with half of what is renamed on the disk, as a kill in the middle of
writing leaves it; or at a moment of its time; or it is asked to end by a signal. Run again, it must end with status 0,
and all bytes must be those of the whole run, but for the wall time (`without_times`), with nothing beside them.

A command runs in a fork of this process, which has imported everything and computed nothing, so that a kill falls into
the work and not into imports.
"""

from __future__ import annotations

import importlib
import math
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
import typer

from tests import checkpoints
from tests.chaos.stages import Stage, first_time, stages
from tests.chaos.trials import LOST, RIGHT, UNFORESEEN, WRONG, Trial

KIND = "kills"

MOMENTS = 3
"""Kills of a command at moments of its time, each followed by a second one."""

MOST_SHARED = 0.25
"""The least share of a command's kills: of fewer, some commands are left out, because each has to run whole first."""

THIRD = 0.2
"""Share of the kills after which the command is also run a third time, where all is done."""

LATE = 0.25
"""Share of the moments that are drawn from the last tenth of the time."""

ASKING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

LONGEST = 120.0
"""Seconds after which a command that has not ended is said to hang."""

WRITES = {
    "os.rename",
    "os.remove",
    "os.mkdir",
    "os.rmdir",
    "os.link",
    "os.symlink",
    "os.truncate",
    "os.chmod",
}
"""File events besides `open`, as Python's audit calls them; what other languages write lies between two of them."""

TIME = re.compile(rb"(wall_seconds\W[^0-9]{1,60}?)[0-9.e+-]+")
NONCE = re.compile(rb"nonce\W{1,2}[0-9a-f]{32}")


@dataclass(frozen=True)
class Event:
    """A file event of a command: its number from 0, what is done to which name; where it is a rename, `source`."""

    number: int
    what: str
    source: str = ""


@dataclass(frozen=True)
class Moment:
    """Where a command is killed: "before" or "after" an event, or before it with "half" of what is renamed."""

    event: Event
    when: str


def trials(seed: int, share: float) -> Iterator[Trial]:
    """Every command killed about 20 times, and asked to end three times; of a share, every so many of the commands."""
    torch.set_num_threads(1)
    random = np.random.default_rng(seed)
    with tempfile.TemporaryDirectory(prefix="kills-") as place:
        commands = made(Path(place))
        of_each = max(share, MOST_SHARED)
        chosen = random.permutation(len(commands))[: math.ceil(len(commands) * share / of_each)]
        for number in sorted(chosen):
            drawn, stage = np.random.default_rng([seed, number]), commands[number]
            counts = (math.ceil(of_each * count) for count in (stage.kills, MOMENTS, len(ASKING)))
            yield from of_stage(stage, Path(place) / "try", drawn, *counts)


def of_stage(
    stage: Stage,
    place: Path,
    random: np.random.Generator,
    at_events: int,
    at_moments: int = 0,
    asked: int = 0,
) -> Iterator[Trial]:
    """One command in a folder `place`, killed at so many file events and moments, and asked to end so often."""
    expected, seconds, events = whole(stage, place)

    def judged(what: str, status: int, said: str) -> Trial:
        runs = 2 + int(random.random() < THIRD)
        answer, why = judge(stage, place, expected, status, said, runs)
        return Trial(KIND, what, stage.name, answer, why)

    for moment in drawn_moments(events, at_events, random):
        begun(stage, place)
        status, said = ended(_fork(stage, place, moment), place)
        what = f"{moment.when} {moment.event.what}"
        if status != -signal.SIGKILL:
            yield Trial(
                KIND, what, stage.name, WRONG, f"another run has other events (status {status}): {said}"
            )
            continue
        yield judged(what, *again(stage, place))
    for _ in range(at_moments):
        begun(stage, place)
        times = [drawn_time(random, seconds) for _ in range(2)]
        for number in times:
            stopped(stage, place, number, signal.SIGKILL)
        yield judged(f"at {' and '.join(f'{number:.3f} s' for number in times)}", *again(stage, place))
    for number in random.permutation(ASKING)[:asked]:
        begun(stage, place)
        moment_of_it = random.uniform(0.1, 1.0) * seconds
        status, said = stopped(stage, place, moment_of_it, number)
        what = f"{signal.Signals(number).name} at {moment_of_it:.3f} s"
        if wrong := ended_badly(place, expected, status, said):
            yield Trial(KIND, what, stage.name, UNFORESEEN, wrong)
            continue
        yield judged(what, *again(stage, place))
    shutil.rmtree(place)


def drawn_moments(events: list[Event], count: int, random: np.random.Generator) -> list[Moment]:
    """So many moments: half are the last ones, where the result is written, the rest by chance."""
    moments = []
    for event in events:
        moments.append(Moment(event, "before"))
        if event.source:
            moments.append(Moment(event, "half"))
        moments.append(Moment(event, "after"))
    late = min(len(moments), count // 2)
    early = moments[: len(moments) - late]
    chosen = random.permutation(len(early))[: count - late]
    return moments[len(moments) - late :] + [early[index] for index in chosen]


def drawn_time(random: np.random.Generator, seconds: float) -> float:
    low = 0.9 if random.random() < LATE else 0.0
    return float(random.uniform(low, 1.0) * seconds)


def judge(
    stage: Stage, place: Path, expected: dict[str, bytes], status: int, said: str, runs: int
) -> tuple[str, str]:
    """What is to be said of the runs after the disturbed one, the second of which ended so."""
    for run in range(2, runs + 1):
        if run > 2:
            status, said = again(stage, place)
        if status:
            return (LOST if "error:" in said else UNFORESEEN), f"run {run}: status {status}: {said}"
        found = contents(place)
        names = sorted(
            name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name)
        )
        if names:
            return WRONG, f"run {run}: other bytes in {', '.join(names)}"
    return RIGHT, ""


def ended_badly(place: Path, expected: dict[str, bytes], status: int, said: str) -> str:
    """What is wrong with a run that a signal asked to end: it ends with one line of error, or it was done."""
    if not any(place.iterdir()) or contents(place) == expected:
        return ""  # before the command has begun, and after its end, Python answers
    lines = [line for line in said.splitlines() if line.startswith("error: ")]
    if status and (status < 0 or len(lines) != 1 or "Traceback" in said):
        return f"status {status}: {said}"
    locks = [path.name for path in place.rglob("out*.lock")]
    return f"it left {', '.join(locks)}" if locks else ""


def made(folder: Path) -> list[Stage]:
    """`stages`, made in a fork: writing a model computes, and this process must not have computed."""
    (folder / "try").mkdir()
    status, said = ended(_fork(Stage("", lambda _: stages(folder)), folder / "try"), folder / "try")
    assert not status, said
    write, checkpoints.write = checkpoints.write, lambda family, path, *_: path
    try:
        return stages(folder)
    finally:
        checkpoints.write = write


def begun(stage: Stage, place: Path) -> None:
    """An empty folder, or what the command begins with."""
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    first_time(stage, place / "out")


def whole(stage: Stage, place: Path) -> tuple[dict[str, bytes], float, list[Event]]:
    """All that an uninterrupted run leaves, the seconds that it took, and its file events.

    It runs twice: the first time imports what the command imports late, and finds nothing in the caches of the disk.
    """
    notes = place.with_name("notes")

    def noted(out: Path) -> None:
        try:
            stage.run(out)
        finally:
            notes.write_text("\n".join(sys.modules))

    results = []
    for first in (True, False):
        begun(stage, place)
        began = time.monotonic()
        run = replace(stage, run=noted) if first else stage
        status, said = ended(_fork(run, place, count=None if first else notes), place)
        seconds = time.monotonic() - began
        if status:
            raise SystemExit(f"{stage.name} fails by itself (status {status}): {said}")
        results.append(contents(place))
        lines = notes.read_text().splitlines()
        for name in lines if first else ():
            with suppress(Exception):  # what is no module's name
                importlib.import_module(name)
    assert results[0] == results[1], f"{stage.name} gives other bytes by itself"
    return results[0], seconds, [Event(number, *line.split("\t")) for number, line in enumerate(lines)]


def again(stage: Stage, place: Path) -> tuple[int, str]:
    """Run it to its end: its status and what it said."""
    return ended(_fork(stage, place), place)


def stopped(stage: Stage, place: Path, seconds: float, number: int) -> tuple[int, str]:
    """Run it, and send it a signal after so many seconds."""
    child = _fork(stage, place)
    time.sleep(seconds)
    os.kill(child, number)
    return ended(child, place)


def ended(child: int, place: Path) -> tuple[int, str]:
    """Wait for a fork: its exit status, −N where signal N ended it, and what it said."""
    late = time.monotonic() + LONGEST
    while not (waited := os.waitpid(child, os.WNOHANG))[0]:
        if time.monotonic() > late:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return 1, f"it had not ended after {LONGEST:.0f} s"
        time.sleep(0.002)
    return os.waitstatus_to_exitcode(waited[1]), place.with_name("said").read_text(errors="replace").strip()


def contents(folder: Path) -> dict[str, bytes]:
    """Every file and folder under a folder, without the times that files tell."""
    return {
        str(path.relative_to(folder)): without_times(path) if path.is_file() else b"folder"
        for path in sorted(folder.rglob("*"))
    }


def without_times(path: Path) -> bytes:
    """The bytes of a file, but for how long the work took. A page's nonce is its hash, and so follows from that."""
    data = path.read_bytes()
    if path.suffix in (".json", ".html"):
        data = TIME.sub(rb"\1", data)
    return NONCE.sub(b"nonce", data) if path.suffix == ".html" else data


def _fork(stage: Stage, place: Path, moment: Moment | None = None, count: Path | None = None) -> int:
    """Run a command on `place`/out in a fork, which kills itself at that moment, or notes its events; its number."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        for number in ASKING:  # as a shell leaves them
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        said = os.open(place.with_name("said"), os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
        for stream, to in (
            (0, os.open(os.devnull, os.O_RDWR)),
            (1, os.open(os.devnull, os.O_RDWR)),
            (2, said),
        ):
            os.dup2(to, stream)
        torch.set_num_threads(1)
        if moment or count:
            sys.addaudithook(_Watch(place, moment, count))
        stage.run(place / "out")
        status = 0
    except SystemExit as end:
        status = int(end.code or 0)
    except typer.Exit as end:
        status = end.exit_code
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
    finally:
        os._exit(status)


class _Watch:
    """An audit hook that counts the file events below a folder; at the moment it ends the process, or all are noted."""

    def __init__(self, folder: Path, moment: Moment | None, notes: Path | None) -> None:
        self._folder, self._moment = os.path.realpath(folder), moment
        self._notes = notes and os.open(notes, os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
        self._number = 0

    def __call__(self, name: str, arguments: tuple[Any, ...]) -> None:
        if name not in WRITES and not (name == "open" and _writes(arguments)):
            return
        paths = [_absolute(path, arguments[-1]) for path in arguments[: 2 if name == "os.rename" else 1]]
        if not paths[-1].startswith(self._folder + os.sep):
            return
        if self._notes is not None:
            shown = os.path.relpath(paths[-1], self._folder)
            os.write(self._notes, f"{name} {shown}\t{paths[0] if len(paths) > 1 else ''}\n".encode())
        elif self._moment is not None and self._number == self._moment.event.number:
            if self._moment.when == "after":
                sys.setprofile(_kill_after)
            elif self._moment.when == "half":
                self._number += 1  # what is done now are events too
                _halve(Path(paths[0]))
            if self._moment.when != "after":
                os.kill(os.getpid(), signal.SIGKILL)
        self._number += 1


def _writes(arguments: tuple[Any, ...]) -> bool:
    _, mode, flags = arguments
    return any(letter in (mode or "") for letter in "wax+") or bool((flags or 0) & (os.O_WRONLY | os.O_RDWR))


def _absolute(path: Any, folder: Any) -> str:
    """A name of an event, which may be relative to an open folder."""
    if isinstance(path, int):
        return os.path.realpath(f"/proc/self/fd/{path}")
    start = f"/proc/self/fd/{folder}" if isinstance(folder, int) and folder >= 0 else os.getcwd()
    return os.path.normpath(os.path.join(os.path.realpath(start), os.fsdecode(path)))


def _kill_after(frame: FrameType, event: str, argument: Any) -> None:
    """At the first thing that Python does after the hook has returned: the event has happened."""
    if frame.f_code is not _Watch.__call__.__code__:
        os.kill(os.getpid(), signal.SIGKILL)


def _halve(path: Path) -> None:
    """What a kill leaves that falls into writing: of a folder, its newest file is cut."""
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    if files:
        newest = max(files, key=lambda file: file.stat().st_mtime_ns)
        os.truncate(newest, newest.stat().st_size // 2)
