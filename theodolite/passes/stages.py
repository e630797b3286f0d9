"""Passes one after the other: each is resumed, shown and stopped in the same way, and leaves its state.

What a pass reads and sums is its own business. A stage makes its pass from the states of those before it; when all
are done, a table maker turns the states into a run without a model.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from theodolite.accumulate.sums import State, joined, part_of
from theodolite.errors import UsageError
from theodolite.passes.run import Run, Workspace
from theodolite.system.locks import locked
from theodolite.system.progress import Progress, ShowStage

Made = TypeVar("Made")

TABLES_TITLE = "making tables"
"""What is said after the passes, while no model is seen any more."""


class Pass(Protocol):
    """Work that needs the model. Its state is tensors; `notes` are what JSON holds, such as why a layer was refused."""

    total: int
    notes: dict[str, Any]

    def run(self, progress: Progress) -> None:
        """Do the steps from `progress.done` on."""

    def state(self) -> State:
        """What the steps so far have left."""

    def restore(self, state: State) -> None:
        """Continue from what `state` gave."""


@dataclass
class States:
    """What passes have left: tensors under `stage.tensor`, and the notes of each stage.

    Attributes:
        seconds: that the passes took, in this process and before.
    """

    tensors: State = field(default_factory=dict)
    notes: dict[str, dict[str, Any]] = field(default_factory=dict)
    seconds: float = 0.0
    _made: dict[str, Any] = field(default_factory=dict, repr=False)

    def of(self, name: str) -> State:
        """The tensors of a stage, or of one of its accumulators (`corpus.means`); empty where there is none."""
        return part_of(self.tensors, name)

    def once(self, name: str, make: Callable[[], Made]) -> Made:
        """What follows from the states, made by the first who asks for it under this name; it is not saved."""
        if name not in self._made:
            self._made[name] = make()
        made: Made = self._made[name]
        return made

    def add(self, name: str, one_pass: Pass) -> None:
        """Take in what a pass has left."""
        self.tensors |= joined({name: one_pass.state()})
        self.notes[name] = one_pass.notes


@dataclass(frozen=True)
class Stage:
    """A pass by name. `title` is what is said while it runs; `make` may look at the states of earlier stages."""

    name: str
    title: str
    make: Callable[[States], Pass]


def run_into(
    stages: Sequence[Stage],
    tables: Callable[[States], Run],
    out: str | Path | None,
    fingerprint: dict[str, Any],
    *,
    corpus: dict[str, Any] | None = None,
    checkpoint_seconds: float,
    show_progress: ShowStage,
) -> Run:
    """Run all stages and make the tables; with a run folder `out`, resume what an interrupted call left there.

    Args:
        stages: in order.
        tables: the run from the states of all stages.
        out: the run folder to write; None keeps the run in memory.
        fingerprint: what decides every byte of the result.
        corpus: what provenance says of the corpus, to say what differs from what `out` holds.
        checkpoint_seconds: how often progress is saved.
        show_progress: it may raise to stop; all that is whole is saved then.

    Raises:
        UsageError: `out` holds something else.
        WorkError: hidden states became NaN or infinite, or the disk refused.
    """

    def tabulated(states: States) -> Run:
        show_progress(TABLES_TITLE, 0, 1)
        run = tables(states)
        show_progress(TABLES_TITLE, 1, 1)
        return run

    if out is None:
        return tabulated(run_stages(stages, show_progress))
    workspace = Workspace(Path(out), fingerprint, corpus)
    with locked(workspace.out):
        finished = workspace.finished()
        if finished is not None:
            return finished
        states = _run(stages, workspace, checkpoint_seconds, show_progress)
        try:
            run = tabulated(states)
        except BaseException:
            workspace.save_progress(_notes(states, states.seconds), states.tensors)
            raise
        return workspace.finish(run)


def finished_in(out: str | Path, fingerprint: dict[str, Any], corpus: dict[str, Any]) -> Run | None:
    """The run in `out` where `run_into` would make none; its arguments and errors are those of `run_into`."""
    workspace = Workspace(Path(out), fingerprint, corpus)
    with locked(workspace.out):
        return workspace.finished()


def run_stages(stages: Sequence[Stage], show_progress: ShowStage) -> States:
    """Run all stages in memory, for tables that are no `Run`.

    Args:
        stages: in order.
        show_progress: it may raise to stop.

    Raises:
        WorkError: hidden states became NaN or infinite.
    """
    return _run(stages, None, 0.0, show_progress)


def _notes(
    states: States, seconds: float, stage: str = "", done: int = 0, notes: dict[str, Any] | None = None
) -> dict[str, Any]:
    """What is saved beside the tensors: of the finished stages, and of the one under way, if there is one."""
    return {
        "seconds": seconds,
        "finished": states.notes,
        "stage": stage,
        "done": done,
        "notes": notes or {},
    }


def _run(
    stages: Sequence[Stage], workspace: Workspace | None, checkpoint_seconds: float, show_progress: ShowStage
) -> States:
    """All stages, each from where it was left."""
    with _sums_of_this_version(workspace):
        states, unfinished = _resumed(workspace)
    started = time.monotonic() - states.seconds
    saved, finished_on_disk = time.monotonic(), len(states.notes)

    def write(name: str, done: int, notes: dict[str, Any], state: State) -> None:
        nonlocal saved, finished_on_disk
        if workspace is None:
            return
        progress = _notes(states, time.monotonic() - started, name, done, notes)
        workspace.save_progress(progress, states.tensors | joined({name: state}))
        saved, finished_on_disk = time.monotonic(), len(states.notes)

    def save_while(name: str, running: Pass) -> Callable[[int, bool], None]:
        def save(done: int, must: bool) -> None:
            if must or time.monotonic() - saved >= checkpoint_seconds:
                write(name, done, running.notes, running.state())

        return save

    for stage in stages:
        if stage.name in states.notes:
            continue
        show, done = functools.partial(show_progress, stage.title), 0
        try:
            running = stage.make(states)
            if unfinished.stage == stage.name and unfinished.done:
                with _sums_of_this_version(workspace):
                    running.restore(unfinished.state)
                running.notes.update(unfinished.notes)
                done = unfinished.done
            running.run(Progress(running.total, done, show, save_while(stage.name, running)))
        except BaseException:
            # Refused, or stopped before its first save: the stages before it are whole.
            if finished_on_disk < len(states.notes):
                write(stage.name, 0, {}, {})
            raise
        states.add(stage.name, running)
    states.seconds = time.monotonic() - started
    return states


@contextmanager
def _sums_of_this_version(workspace: Workspace | None) -> Iterator[None]:
    """Refuse progress that lacks a sum which is kept now, or has one of another shape."""
    try:
        yield
    except (KeyError, RuntimeError) as error:
        if workspace is None:
            raise
        raise UsageError(
            f"{workspace.folder} holds what another version of theodolite left unfinished, with other sums: remove it "
            "to start afresh"
        ) from error


@dataclass(frozen=True)
class _Unfinished:
    """The stage that an interrupted call was at: how many steps are done, and what they have left."""

    stage: str = ""
    done: int = 0
    notes: dict[str, Any] = field(default_factory=dict)
    state: State = field(default_factory=dict)


def _resumed(workspace: Workspace | None) -> tuple[States, _Unfinished]:
    """The finished stages, and the unfinished one."""
    progress = None if workspace is None else workspace.load_progress()
    if progress is None:
        return States(), _Unfinished()
    notes, tensors = progress
    stage = notes["stage"]
    finished = {name: tensor for name, tensor in tensors.items() if not name.startswith(f"{stage}.")}
    unfinished = _Unfinished(stage, notes["done"], notes["notes"], part_of(tensors, stage))
    return States(finished, notes["finished"], notes["seconds"]), unfinished
