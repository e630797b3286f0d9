"""A command that is killed, at any moment, and run again gives the bytes of one that was never stopped.

Every command that writes is first run whole, while its file events are counted: files opened to be written, renamed,
removed, folders made. Then, again and again from the same files, it is killed before or after such an event, or before
a rename with half of what is renamed on the disk, as a kill in the middle of writing leaves it; or at a moment of its
time. Run again, it must end with status 0 and with all bytes of the whole run.

A command runs in a fork of this process, which has imported everything and computed nothing, so that a kill falls into
the work and not into imports.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import torch

from tests.chaos.commands import (
    COMMANDS,
    LOST,
    RIGHT,
    UNFORESEEN,
    WRONG,
    Files,
    Trial,
    called,
    contents,
    other_bytes,
)
from theodolite_papers.catalogue import EXPERIMENTS

list(EXPERIMENTS.values())  # their modules are imported

MOMENTS = 3
"""Kills of a command at moments of its time, each followed by a second one."""

LONGEST = 120.0
"""Seconds after which a command that has not ended is said to hang."""

WRITES = {
    f"os.{name}" for name in ("rename", "remove", "mkdir", "rmdir", "link", "symlink", "truncate", "chmod")
}
"""File events besides `open`, as Python's audit calls them; what other languages write lies between two of them."""


class Moment(NamedTuple):
    """Where a command is killed: "before" or "after" a file event, or before it with "half" of what is renamed."""

    when: str
    number: int
    what: str


def trials(seed: int) -> Iterator[Trial]:
    """Every command killed about 20 times."""
    torch.set_num_threads(1)
    random = np.random.default_rng(seed)
    for name, command in COMMANDS.items():
        if command.kills:
            yield from of_command(name, random, command.kills, MOMENTS)


def of_command(name, random, at_events, at_moments=0):
    """One command, killed at so many file events and moments."""
    with tempfile.TemporaryDirectory(prefix="kills-") as folder:
        forks = Forks(Path(folder), name)
        for moment in drawn_moments(forks.events, at_events, random):
            status, said = forks.disturbed(Watch(forks.files.root, moment))
            what = f"{moment.when} {moment.what}"
            if status != -signal.SIGKILL:
                yield Trial(what, name, WRONG, f"another run has other events (status {status}): {said}")
                continue
            yield forks.judged(what)
        for _ in range(at_moments):
            times = random.uniform(0.0, forks.seconds, 2)
            for which, seconds in enumerate(times):
                forks.disturbed(kill_after=seconds, anew=not which)
            yield forks.judged(f"at {' and '.join(f'{seconds:.3f} s' for seconds in times)}")


def drawn_moments(events: list[str], count: int, random: np.random.Generator) -> list[Moment]:
    """So many moments: half are the last ones, where the result is written, the rest by chance."""
    moments = [
        Moment(when, number, what)
        for number, what in enumerate(events)
        for when in ("before", *(["half"] if what.startswith("os.rename") else []), "after")
    ]
    late = min(len(moments), count // 2)
    early = moments[: len(moments) - late]
    chosen = random.permutation(len(early))[: count - late]
    return moments[len(moments) - late :] + [early[index] for index in chosen]


class Forks:
    """One command in forks; at first twice undisturbed, for the bytes, the seconds and the file events of its run.

    The first time imports what the command imports late, and finds nothing in the caches of the disk.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.files, self._folder, self._name = Files(folder), folder, name
        # Writing a model computes, and this process must not have computed.
        status, said = self._ended(self._fork(lambda: self.files.prepare([COMMANDS[name]]) or (0, "", "")))
        assert not status, said
        notes, results = folder / "notes", []
        for first in (True, False):
            began = time.monotonic()
            if first:
                status, said = self.disturbed(after=lambda: notes.write_text("\n".join(sys.modules)))
            else:
                status, said = self.disturbed(Watch(self.files.root, notes=notes))
            self.seconds = time.monotonic() - began
            assert not status, f"{name} fails by itself: {said}"
            results.append(contents(self.files.root))
            for module in notes.read_text().splitlines() if first else ():
                with suppress(Exception):  # what is no module's name
                    importlib.import_module(module)
        assert not other_bytes(*results), f"{name} gives other bytes by itself"
        self.expected, self.events = results[0], notes.read_text().splitlines()

    def disturbed(self, watch=None, kill_after=None, anew=True, after=lambda: None):
        """Run it, from its beginning unless it goes on: its status, −N where signal N ended it, and what it said."""
        if anew:
            self.files.restore()

        def work() -> tuple[int, str, str]:
            if watch is not None:
                sys.addaudithook(watch)
            try:
                return called(COMMANDS[self._name], self.files.root)
            finally:
                after()

        child = self._fork(work)
        if kill_after is not None:
            time.sleep(kill_after)
            os.kill(child, signal.SIGKILL)
        return self._ended(child)

    def judged(self, what: str) -> Trial:
        """What is to be said of the run after the disturbed one."""
        status, said = self.disturbed(anew=False)
        answer, why = RIGHT, ""
        if status:
            answer, why = LOST if "error:" in said else UNFORESEEN, f"status {status}: {said}"
        elif other := other_bytes(contents(self.files.root), self.expected):
            answer, why = WRONG, f"other bytes in {other}"
        return Trial(what, self._name, answer, why)

    def _fork(self, work: Callable[[], tuple[int, str, str]]) -> int:
        child = os.fork()
        if child:
            return child
        status = 1
        try:
            os.dup2(os.open(os.devnull, os.O_RDWR), 0)
            os.dup2(os.open(os.devnull, os.O_RDWR), 1)
            os.dup2(os.open(self._folder / "said", os.O_CREAT | os.O_TRUNC | os.O_WRONLY), 2)
            torch.set_num_threads(1)
            status, _, said = work()
            os.write(2, said.encode())
        except BaseException as error:
            os.write(2, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(status)

    def _ended(self, child: int) -> tuple[int, str]:
        late = time.monotonic() + LONGEST
        while not (waited := os.waitpid(child, os.WNOHANG))[0]:
            if time.monotonic() > late:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                return 1, f"it had not ended after {LONGEST:.0f} s"
            time.sleep(0.002)
        said = (self._folder / "said").read_text(errors="replace").strip()
        return os.waitstatus_to_exitcode(waited[1]), said


class Watch:
    """An audit hook that counts the file events below a folder; at the moment it ends the process, or all are noted."""

    def __init__(self, folder: Path, moment: Moment | None = None, notes: Path | None = None) -> None:
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
            os.write(self._notes, f"{name} {os.path.relpath(paths[-1], self._folder)}\n".encode())
        elif self._moment is not None and self._number == self._moment.number:
            if self._moment.when == "after":
                sys.setprofile(_kill_after)
            else:
                self._number += 1  # what is done now are events too
                if self._moment.when == "half":
                    _halve(Path(paths[0]))
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
    if frame.f_code is not Watch.__call__.__code__:
        os.kill(os.getpid(), signal.SIGKILL)


def _halve(path: Path) -> None:
    """What a kill leaves that falls into writing: of a folder, its newest file is cut."""
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    if files:
        newest = max(files, key=lambda file: file.stat().st_mtime_ns)
        os.truncate(newest, newest.stat().st_size // 2)
