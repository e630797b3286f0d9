"""A job: stages one after the other, each made from the states of those before it, resumed, shown and stopped alike."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import torch

from theodolite.jobs.unfinished import Notes, Tensors, Unfinished
from theodolite.system.progress import Progress, ShowProgress, ShowStage

Item = TypeVar("Item")

CHECKPOINT_SECONDS = 60.0  # how often progress is saved: what a kill costs at most
SAVING_APART = 20  # but not before so many times as long as saving takes


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
