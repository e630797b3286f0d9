"""A job: stages one after the other, each made from the states of those before it, resumed, shown and stopped alike.

Unfinished work is on disk, in `OUT.partial`: its fingerprint (`job.json`), and parts (`NAME.safetensors`).
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from theodolite.errors import UsageError
from theodolite.system import files
from theodolite.system.progress import Progress, ShowProgress, ShowStage
from theodolite.system.run_folders import differences

Tensors = dict[str, Tensor]
Notes = dict[str, Any]
Item = TypeVar("Item")
Read = TypeVar("Read")

JOB = "job.json"
CHECKPOINT_SECONDS = 60.0  # how often progress is saved: what a kill costs at most
SAVING_APART = 20  # but not before so many times as long as saving takes


class Unfinished:
    """Parts of what becomes the folder `out`, in `OUT.partial` or another `folder`; without an `out` nothing is saved.

    The fingerprint decides every byte of the result; `corpus`, as of provenance, and `kind` are for messages.
    """

    def __init__(
        self,
        out: str | Path | None,
        fingerprint: Mapping[str, Any],
        corpus: Mapping[str, Any] | None = None,
        kind: str = "survey",
        folder: Path | None = None,
    ) -> None:
        # As JSON gives it back, so that what is read equals what was written.
        self.fingerprint: Notes = json.loads(json.dumps(dict(fingerprint)))
        self.corpus, self.kind = dict(corpus or {}), kind
        self.out: Path | None = None
        if out is not None:
            files.check_target(Path(out))
            # Folders are renamed to their final name, which would replace a link.
            self.out = Path(out).resolve() if Path(out).is_symlink() else Path(out)
            self.folder = folder or self.out.with_name(self.out.name + ".partial")

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """Keep other processes out; errors are those of `locked`."""
        with nullcontext() if self.out is None else files.locked(self.out):
            yield

    def begin(self) -> None:
        """Write into the folder what its work is of; errors are those of `check`."""
        self.check()
        if self.out is not None and not (self.folder / JOB).exists():
            description = {"fingerprint": self.fingerprint, "corpus": self.corpus}
            self._write_first(self.folder / JOB, lambda path: files.write_json_checked(path, description))
            self.check()

    def _write_first(self, path: Path, write: Callable[[Path], object]) -> None:
        """Write a file that several processes may write at once, unless it is there; all write the same."""
        temporary = path.with_name(f"{path.name}.{socket.gethostname()}-{os.getpid()}{files.TEMPORARY}")
        with files.disk_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            try:
                write(temporary)
                if not path.exists():
                    os.replace(temporary, path)
            finally:
                temporary.unlink(missing_ok=True)

    def described(self) -> tuple[Notes, Notes] | None:
        """Read what the folder's work is of (`read_job`); None where there is none, `UsageError` for parts alone."""
        if self.out is None or not self.folder.exists():
            return None
        if (self.folder / JOB).exists():
            return read_job(self.folder)
        names = [path.name for path in self.folder.iterdir()]
        if any(not name.endswith(("lock", files.TEMPORARY)) for name in names):
            raise UsageError(f"{self.folder} does not say what it holds: remove it to start afresh")
        return None

    def check(self) -> None:
        """Raise `UsageError` where the folder holds unfinished work of another fingerprint."""
        saved, corpus = self.described() or (self.fingerprint, {})
        if saved != self.fingerprint:
            differs = differences(saved, self.fingerprint, corpus, self.corpus)
            raise UsageError(
                f"{self.folder} holds an unfinished {self.kind} of another model, corpus or options ({differs}): "
                "choose another --out or remove it"
            )

    @contextmanager
    def same_sums(self) -> Iterator[None]:
        """Raise `UsageError` where a part that is read in here lacks a sum, or has one of another shape."""
        try:
            yield
        except (KeyError, RuntimeError) as error:
            raise UsageError(
                f"{self.folder} holds unfinished work of another version of theodolite, with other sums: remove it "
                "to start afresh"
            ) from error

    def path(self, name: str) -> Path:
        """Return the file of a part on disk."""
        return self.folder / f"{name}.safetensors"

    def names(self) -> list[str]:
        """Return the parts that are there, in order of their names."""
        return sorted(path.stem for path in self.folder.glob("*.safetensors"))

    def load(self, name: str) -> tuple[Tensors, Notes] | None:
        """Load a part's tensors and notes; None where it is not there, `UsageError` where it is damaged."""
        return self._read(name, files.read_checked)

    def notes(self, name: str) -> Notes:
        """Load a part's notes without its tensors; empty where it is not there. Errors are those of `load`."""
        return self._read(name, files.read_notes_checked) or {}

    def _read(self, name: str, read: Callable[[Path], Read]) -> Read | None:
        if self.out is None or not self.path(name).is_file():
            return None
        try:
            return read(self.path(name))
        except files.CorruptFile as error:
            raise UsageError(f"{self.path(name)} is damaged: remove it to redo what it held") from error

    def save(self, name: str, tensors: Tensors, notes: Mapping[str, Any]) -> None:
        """Write a part in the place of the one before, at once or not at all; `WorkError` where the disk refuses."""
        if not (self.folder / JOB).exists():
            self.begin()
        with files.disk_errors(self.folder):
            files.write_atomically(self.path(name), lambda path: files.write_checked(path, tensors, notes))

    def save_once(self, name: str, make: Callable[[], tuple[Tensors, Notes]]) -> None:
        """Write a part that several processes may write, by whichever comes first."""
        self.begin()
        if not self.path(name).is_file():
            tensors, notes = make()
            self._write_first(self.path(name), lambda path: files.write_checked(path, tensors, notes))

    def remove(self) -> None:
        """Forget the work: it is finished."""
        if self.out is not None:
            shutil.rmtree(self.folder, ignore_errors=True)


def read_job(folder: Path) -> tuple[Notes, Notes]:
    """Read the fingerprint of the work in a folder, and the notes on its text; `UsageError` where that is damaged."""
    try:
        description = files.read_json_checked(folder / JOB)
        return dict(description["fingerprint"]), dict(description["corpus"])
    except (files.CorruptFile, KeyError, TypeError, ValueError) as error:
        raise UsageError(f"{folder / JOB} is damaged: remove {folder} to start afresh") from error


class Steps(Protocol):
    """Work in steps. Its state is tensors; `notes` are what JSON can hold, such as why a layer was refused."""

    total: int
    notes: dict[str, Any]

    def run(self, progress: Progress) -> None:
        """Do the steps from `progress.done` on."""

    def state(self) -> Tensors:
        """Return the tensors of the steps so far."""

    def restore(self, state: Tensors) -> None:
        """Continue from what `state` gave."""


class Rows(Generic[Item]):
    """Steps that read items one after the other, each of which counts for `size` steps, and join what `read` gives."""

    def __init__(
        self,
        items: Sequence[Item],
        read: Callable[[Item], Tensors],
        size: Callable[[Item], int] = lambda _: 1,
    ) -> None:
        self.total = sum(map(size, items))
        self.notes: dict[str, Any] = {}
        self._items, self._read, self._size = items, read, size
        self._parts: list[Tensors] = []

    def run(self, progress: Progress) -> None:
        """Read the items that are left."""
        done = 0
        for item in self._items:
            if progress.done <= done < progress.total:
                progress.checkpoint(done)
                self._parts.append(self._read(item))
            done += self._size(item)
        progress.checkpoint(done)

    def read_all(self, show: ShowProgress = lambda done, total: None) -> Tensors:
        """Read all items now, outside of a job, and return the rows; `show` may raise to stop."""
        self.run(Progress(self.total, show=show))
        return self.state()

    def state(self) -> Tensors:
        """Return the rows so far."""
        names = self._parts[0] if self._parts else {}
        return {name: torch.cat([part[name] for part in self._parts]) for name in names}

    def restore(self, state: Tensors) -> None:
        """Continue from what `state` gave."""
        self._parts = [state] if state else []


def part_of(tensors: Tensors, name: str) -> Tensors:
    """Return the tensors that are called `name.KEY`, by their keys."""
    prefix = name + "."
    return {key.removeprefix(prefix): tensor for key, tensor in tensors.items() if key.startswith(prefix)}


@dataclass
class States:
    """The tensors and notes of the finished stages, by name, and the seconds they took, also before this process."""

    work: Unfinished
    tensors: dict[str, Tensors] = field(default_factory=dict)
    notes: dict[str, Notes] = field(default_factory=dict)
    seconds: float = 0.0

    def of(self, name: str) -> Tensors:
        """Return the tensors of a stage, or those of one prefix in it (`corpus.means`); empty where there are none."""
        stage, _, part = name.partition(".")
        tensors = self.tensors.get(stage, {})
        return part_of(tensors, part) if part else tensors


@dataclass(frozen=True)
class Stage:
    """Steps by name, and what is said while they run; `parts` are stages that they do together (`name.tensor`)."""

    name: str
    title: str
    make: Callable[[States], Steps]
    parts: tuple[str, ...] = ()


class Job:
    """Stages, and the unfinished work that they are saved to and resumed from; `show_progress` may raise to stop."""

    def __init__(
        self,
        stages: Sequence[Stage],
        work: Unfinished,
        show_progress: ShowStage = lambda what, done, total: None,
    ) -> None:
        self.stages, self.work = stages, work
        self.states = States(work)
        self._show = show_progress
        self._unsaved: list[str] = []  # finished stages that are not on disk yet
        self._saved_at = self._began = time.monotonic()
        self._save_seconds = 0.0  # that the last time took

    def run(self) -> States:
        """Do what is left of all stages; what a stage raises is raised when all that is whole is saved."""
        self.work.check()
        for stage in self.stages:
            tensors, saved = self.work.load(stage.name) or ({}, {})
            if saved:
                self._began = min(self._began, time.monotonic() - saved["seconds"])
            if saved.get("finished"):
                self._add(stage, tensors, saved["notes"])
                continue
            try:
                steps = stage.make(self.states)
                if saved.get("done"):
                    with self.work.same_sums():
                        steps.restore(tensors)
                    steps.notes.update(saved["notes"])
                del tensors
                save = functools.partial(self._checkpoint, stage.name, steps)
                show = functools.partial(self._show, stage.title)
                steps.run(Progress(steps.total, saved.get("done", 0), show, save))
            except BaseException:
                self.save()  # refused, or stopped before its first save: the stages before it are whole
                raise
            self._add(stage, steps.state(), steps.notes)
            self._unsaved.append(stage.name)
        self.states.seconds = time.monotonic() - self._began
        return self.states

    def save(self) -> None:
        """Save the finished stages that are not saved yet."""
        while self._unsaved and self.work.out is not None:
            name = self._unsaved[0]
            self._save(name, self.states.tensors[name], self.states.notes[name], finished=True)
            self._unsaved.pop(0)

    def _add(self, stage: Stage, tensors: Tensors, notes: Notes) -> None:
        states = self.states
        states.tensors[stage.name], states.notes[stage.name] = tensors, notes
        for part in stage.parts:
            states.tensors[part], states.notes[part] = states.of(f"{stage.name}.{part}"), notes[part]

    def _checkpoint(self, name: str, steps: Steps, done: int, must: bool) -> None:
        if self.work.out is None:
            return
        began = time.monotonic()
        apart = began - self._saved_at
        if must or apart >= max(CHECKPOINT_SECONDS, SAVING_APART * self._save_seconds):
            self.save()
            self._save(name, steps.state(), steps.notes, done=done)
            self._saved_at = time.monotonic()
            self._save_seconds = self._saved_at - began

    def _save(self, name: str, tensors: Tensors, notes: Notes, **how: Any) -> None:
        seconds = time.monotonic() - self._began
        self.work.save(name, tensors, {"notes": notes, "seconds": seconds, **how})


def run_stages(stages: Sequence[Stage], show_progress: ShowStage) -> States:
    """Run all stages in memory; errors are those of `Job.run`."""
    return Job(stages, Unfinished(None, {}), show_progress=show_progress).run()
