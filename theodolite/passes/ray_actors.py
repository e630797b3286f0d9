"""Workers on a Ray cluster: what each of them opens, and how they are started, and started anew when they die.

Where there is no room for a new one, the others do its work. What workers do is not known here.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch

from theodolite.corpus.corpus import Corpus
from theodolite.errors import TheodoliteError, UsageError, WorkError
from theodolite.models import OpenModel, open_model
from theodolite.passes.corpus_pass import fingerprint_of
from theodolite.passes.ray_cluster import WorkerLost, answered, fetched, imported_ray, node_here
from theodolite.system import embedded
from theodolite.system.checksums import read_json_checked
from theodolite.system.choices import Attention

DEATHS = 3
"""Workers that one call may lose before it is given up: a node may be lost twice by chance."""

NOTICE, LIMIT = 30.0, 600.0
"""Seconds without any worker after which it is said what is waited for, and after which nothing is waited for."""


@dataclass(frozen=True)
class Checkpoint:
    """What every worker opens.

    Attributes:
        source: as `open_model` takes it.
        id: what the result calls it.
    """

    source: str | None
    id: str
    dtype: str
    revision: str | None
    attention: Attention | None
    device: str
    threads: int
    expected: dict[str, Any]


@dataclass(frozen=True)
class Job:
    """What every worker opens and reads."""

    checkpoint: Checkpoint
    corpus: Corpus
    batch: int


def refuse_unopenable(model: OpenModel, actors: int | None, alone: str) -> None:
    """Refuse what workers cannot open as it is here.

    Args:
        model, actors: as they were given.
        alone: what works without workers, in words.

    Raises:
        UsageError: the model was changed after it was opened, or is in memory only; or no worker is asked for.
    """
    if model.interventions:
        raise UsageError(f"workers open {model.id} anew, without {', '.join(model.interventions)}: {alone}")
    if model.weights().changed:
        raise UsageError(
            f"workers open {model.id} anew, without what was changed in memory: save it, or {alone}"
        )
    if model.sha256 is None and model.revision is None:
        raise UsageError(f"{model.id} is in memory, and each worker opens a checkpoint: save it, or {alone}")
    if actors is not None and actors < 1:
        raise UsageError(f"{actors} actors read nothing: use --actors 1 or more")


def checkpoint_of(model: OpenModel, device: str) -> Checkpoint:
    """What workers open on this kind of device to have this model."""
    return Checkpoint(
        source=_source(model.id),
        id=model.id,
        dtype=str(model.source.dtype).removeprefix("torch."),
        revision=model.revision,
        attention=cast(Any, model.source.attention),  # of a checkpoint: one of those of transformers
        device=device,
        threads=torch.get_num_threads(),
        expected=fingerprint_of(model) | {"device": device},
    )


def _source(name: str) -> str | None:
    """What a worker opens: it stands in another folder than the driver."""
    if name == embedded.NAME:
        return None
    return str(Path(name).resolve()) if Path(name).is_dir() else name


def device_in(record: Path) -> str | None:
    """The kind of device on which what a finished folder holds was made, by its record; None where that is not there.

    What is finished is read by this, without a cluster that would say on which device it would be made now.
    """
    try:
        return str(read_json_checked(record)["fingerprint"]["device"])
    except (ValueError, KeyError, TypeError):
        return None


class Opener:
    """What every actor is. It opens the model with its first call, so that what is wrong with it is raised there."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._model: OpenModel | None = None

    def place(self) -> str:
        """The node and the process: whoever answers is alive."""
        return f"node {node_here()}, process {os.getpid()}"

    def opened(self) -> OpenModel:
        """The model, opened once and found to be the driver's.

        Raises:
            UsageError: it is another model, or other packages; or as `open_model` has it, naming the node.
            WorkError: as `open_model` has it, naming the node.
        """
        if self._model is not None:
            return self._model
        job, node = self.job.checkpoint, node_here()
        torch.set_num_threads(job.threads)
        try:
            opening: dict[str, Any] = {"dtype": job.dtype, "device": job.device, "revision": job.revision}
            model = open_model(job.source, attention=job.attention, **opening)
        except TheodoliteError as error:
            raise type(error)(f"on node {node}: {error}") from error
        fingerprint = fingerprint_of(model)
        differences = [
            f"{name} is {fingerprint[name]}, not {value}"
            for name, value in job.expected.items()
            if fingerprint[name] != value
        ]
        if differences:
            raise UsageError(f"node {node} would measure something else: {'; '.join(differences)}")
        self._model = replace(model, id=job.id)
        return self._model


class Workers:
    """Handles of workers that are started with the first call, and anew when they die; they end with the handles.

    Ray itself restarts none: it would not say how often it did, and a call to one that it restarts fails all the same.

    Args:
        say: told in one line what is waited for, and of every worker that was lost.
    """

    def __init__(self, kind: type[Opener], job: Job, count: int, say: Callable[[str], None]) -> None:
        self.job = job
        self._kind = kind
        self.count = count
        self._say = say
        self._places: dict[int, str] = {}  # where each worker was when it last answered
        self._job: Any = None  # for as long as a worker may be started with it
        self._handles: dict[int, Any] = {}
        self._asked: dict[int, Any] = {}  # by worker that has not answered yet: where it is
        # In a row before they answered; the last of `DEATHS` are not replaced.
        self._died: Counter[int] = Counter()
        self._why = ""  # the last of them did
        self._since: float | None = None  # when there began to be none
        self._told = False

    def __getitem__(self, number: int) -> Any:
        return self._handles[number]

    def alive(self) -> list[int]:
        """Workers that have answered where they are.

        Raises:
            WorkError: for long there was none, or all died before they answered.
        """
        if not self._handles:
            self._job = imported_ray().put(self.job)
            for number in range(self.count):
                self._start(number)
        for number, place in list(self._asked.items()):
            if not answered(place):
                continue
            try:
                self._places[number] = fetched(place, "was started")
                self._died[number] = 0
                del self._asked[number]
            except WorkerLost as lost:
                self._why = str(lost)
                self._died[number] += 1
                if self._died[number] < DEATHS:
                    self._start(number)
                else:
                    del self._asked[number]
        gone = [number for number in range(self.count) if self._died[number] >= DEATHS]
        if len(gone) == self.count:
            raise WorkError(
                f"workers died before they did anything, {DEATHS} in a row ({self._why}): try `python -c 'import "
                "theodolite.passes.ray_workers'` on the nodes of the Ray cluster, and read their logs "
                "(/tmp/ray/session_latest/logs)"
            )
        alive = [number for number in range(self.count) if number not in (*self._asked, *gone)]
        self._wait(bool(alive))
        return alive

    def lose(self, number: int, doing: str) -> None:
        """A call to this worker was lost when it was doing something: another is started in its place."""
        if number not in self._asked:  # else this was told, and is being done
            self._say(f"the worker on {self._places[number]} was lost when it {doing}; another takes over")
            self._start(number)

    def _start(self, number: int) -> None:
        """It gets no call until it answers; the one before ends with its handle, where it was only out of reach."""
        actor = imported_ray().remote(self._kind).options(scheduling_strategy="SPREAD", **self._needs)
        self._handles[number] = actor.remote(self._job)
        self._asked[number] = self[number].place.remote()

    @property
    def _needs(self) -> dict[str, int]:
        opened = self.job.checkpoint
        return {"num_cpus": 1, "num_gpus": 1} if opened.device == "cuda" else {"num_cpus": opened.threads}

    def _wait(self, any_alive: bool) -> None:
        """Say what is waited for, after a while, and end it after a long while."""
        now = time.monotonic()
        self._since = None if any_alive else self._since or now
        waited = now - self._since if self._since else 0.0
        if waited > LIMIT:
            raise WorkError(
                f"waited {LIMIT / 60:g} minutes for a worker, {self._lacking()}: end what else runs there, give "
                "another address, or rerun when there is room to go on from what is saved"
            )
        if waited > NOTICE and not self._told:
            self._told = True
            self._say(f"waiting for a worker, {self._lacking()}")

    def _lacking(self) -> str:
        """What a worker needs, and what there is."""
        ray = imported_ray()
        free, there = ray.available_resources(), ray.cluster_resources()
        needs = {name.removeprefix("num_").upper()[:-1]: count for name, count in self._needs.items()}
        asked = " and ".join(f"{count} {name}" for name, count in needs.items())
        has = " and ".join(f"{free.get(name, 0):g} of {there.get(name, 0):g} {name}" for name in needs)
        return f"which needs {asked} of one node; the Ray cluster has {has} free"


def given_up(doing: str) -> WorkError:
    """What is raised for work that has lost `DEATHS` workers, the last when it was doing something."""
    return WorkError(
        f"the same work ended {DEATHS} worker processes, the last when it {doing}: if they ran out of memory, use a "
        "smaller --batch or larger machines"
    )
