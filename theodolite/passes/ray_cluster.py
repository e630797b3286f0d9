"""A Ray cluster and its workers: how it is reached, how each worker opens the model, and how its answers are taken.

Ray restarts a worker that dies, on whatever node has room; until there is room, the others do its work. What workers
do, and in which order answers are taken in, is not known here. Ray is imported when it is used.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from theodolite.corpus.corpus import Corpus
from theodolite.errors import TheodoliteError, UsageError, WorkError, first_line
from theodolite.models import OpenModel, open_model
from theodolite.passes.corpus_pass import fingerprint_of
from theodolite.system import embedded
from theodolite.system.choices import Attention
from theodolite.system.interrupt import starting_others

LOCAL = "local"
"""The address of a cluster that is started on this machine, and stopped again."""

DEATHS = 3
"""Workers that one call may lose before it is given up: a node may be lost twice by chance."""

QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",  # `uv run` would make Ray upload the working directory
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}

LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""As on those systems, a cluster of this machine alone listens at 127.0.0.1 only; read when Ray is imported.

Else anybody who reaches the machine could give the workers code to run.
"""

Packed = dict[str, tuple[NDArray[Any], NDArray[Any] | None, tuple[int, ...]]]


@dataclass(frozen=True)
class Checkpoint:
    """What every worker opens. `source` is as `open_model` takes it, `id` what the result calls it."""

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


class Opener:
    """What every actor is. It opens the model with its first call, so that what is wrong with it is raised there."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._model: OpenModel | None = None

    def place(self) -> str:
        """The node and the process: whoever answers is alive."""
        return f"node {_node()}, process {os.getpid()}"

    def opened(self) -> OpenModel:
        """The model, opened once and found to be the driver's.

        Raises:
            UsageError: it is another model, or other packages; or as `open_model` has it, naming the node.
            WorkError: as `open_model` has it, naming the node.
        """
        if self._model is not None:
            return self._model
        job, node = self.job.checkpoint, _node()
        torch.set_num_threads(job.threads)
        try:
            model = open_model(
                job.source,
                dtype=job.dtype,
                device=job.device,
                revision=job.revision,
                attention=job.attention,
            )
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
    """Handles of workers that Ray starts, with the first call, and starts again; they end with the handles.

    A call to a worker that died fails at once, and is nobody's until the driver gives it to another: where a node is
    lost, Ray itself would wait for room that may never come.
    """

    def __init__(self, kind: type[Opener], job: Job, count: int) -> None:
        self.job = job
        self._kind = kind
        self.count = count
        self.places: dict[int, str] = {}
        """Where each worker was when it last answered."""
        self._reference: Any = None  # for as long as a worker may be started again with it
        self._handles: list[Any] = []
        self._asked: dict[int, Any] = {}  # by worker that has not answered yet, or was lost: where it is

    def __getitem__(self, number: int) -> Any:
        return self._handles[number]

    def alive(self) -> list[int]:
        """Workers that have answered since they were last lost; those that have not are asked (again)."""
        if not self._handles:
            self._start()
        ray = imported_ray()
        for number, place in list(self._asked.items()):
            if not answered(place):
                continue
            try:
                self.places[number] = ray.get(place)
                del self._asked[number]
            except ray.exceptions.RayError:
                self.lose(number)
        return [number for number in range(self.count) if number not in self._asked]

    def lose(self, number: int) -> None:
        """A call to this worker was lost: it gets none until it answers."""
        self._asked[number] = self[number].place.remote()

    def _start(self) -> None:
        ray, opened = imported_ray(), self.job.checkpoint
        resources = (
            {"num_cpus": 1, "num_gpus": 1} if opened.device == "cuda" else {"num_cpus": opened.threads}
        )
        actor = ray.remote(self._kind).options(
            scheduling_strategy="SPREAD", max_restarts=-1, max_task_retries=0, **resources
        )
        self._reference = ray.put(self.job)
        self._handles = [actor.remote(self._reference) for _ in range(self.count)]
        for number in range(self.count):
            self.lose(number)


def answered(reference: Any) -> bool:
    """Whether a call has ended, well or not; nothing is fetched."""
    return bool(imported_ray().wait([reference], timeout=0, fetch_local=False)[0])


class WorkerLost(Exception):
    """The worker died, or its node was lost: there is no answer."""


def fetched(answer: Any, doing: str) -> Any:
    """What a worker answered.

    Args:
        answer: the reference.
        doing: what the call did, in words.

    Raises:
        TheodoliteError, MemoryError, OutOfMemoryError: what the worker raised.
        WorkError: it failed in another way.
        WorkerLost: there is no answer, or it went with its node.
    """
    ray = imported_ray()
    try:
        return ray.get(answer)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, TheodoliteError | MemoryError | torch.OutOfMemoryError):
            raise error.cause from error
        why = f"{type(error.cause).__name__}: {first_line(error.cause)}"
        raise WorkError(f"a worker failed when it {doing}: {why}") from error
    except ray.exceptions.RayError as error:
        raise WorkerLost from error


def given_up(doing: str) -> WorkError:
    """What is raised for a call that has lost `DEATHS` workers."""
    return WorkError(
        f"{DEATHS} workers died when each {doing}: if they ran out of memory, use a smaller --batch or larger "
        "machines"
    )


def _node() -> str:
    return str(imported_ray().util.get_node_ip_address())


def packed(state: dict[str, Tensor]) -> Packed:
    """A state as arrays that travel without a copy, without the rows along dimension 1 that are zero in all layers.

    A part of a corpus fills few groups of contexts and few places of the sample, and these are most of a state.
    """
    arrays: Packed = {}
    for name, tensor in state.items():
        rows = None
        if tensor.ndim > 2:
            filled = (tensor != 0).flatten(2).any(dim=2).any(dim=0)
            rows = filled.nonzero().flatten()
        values = tensor if rows is None or len(rows) == tensor.shape[1] else tensor[:, rows]
        indices = None if values is tensor or rows is None else rows.numpy()
        arrays[name] = (values.contiguous().numpy(), indices, tuple(tensor.shape))
    return arrays


def unpacked(state: Packed) -> dict[str, Tensor]:
    """What `packed` was given."""
    tensors = {}
    for name, (values, rows, shape) in state.items():
        filled = torch.from_numpy(np.array(values))  # Ray's own arrays are read-only
        tensors[name] = filled if rows is None else filled.new_zeros(shape)
        if rows is not None:
            tensors[name][:, torch.from_numpy(np.array(rows))] = filled
    return tensors


@contextmanager
def connected(address: str) -> Iterator[None]:
    """Be a driver of the cluster at an address, or of one that is started here; of neither, if this process is one.

    Raises:
        UsageError: Ray is not installed, or there is no cluster.
    """
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if address == LOCAL:
        quiet["include_dashboard"] = False
        if "ray" not in sys.modules:
            os.environ.update(LOOPBACK)
    ray = imported_ray()
    if ray.is_initialized():
        yield
        return
    try:
        _refuse_silence(address)
        # At Ray's own handler, SIGTERM would end the process in the middle of a step.
        with starting_others():
            ray.init(address=address, **quiet)
    except (
        Exception
    ) as error:  # Ray's own are of many kinds: a node that starts too slowly is a bare Exception
        raise UsageError(
            f"no Ray cluster at {address} ({first_line(error)}): start one with `ray start --head`, or give no address"
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


def _refuse_silence(address: str) -> None:
    """Find in seconds that nobody is at HOST:PORT; Ray itself would try for minutes."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if colon and "://" not in host:
        socket.create_connection((host, int(port)), timeout=5).close()


def offered(threads: int) -> tuple[str, int]:
    """The kind of device and the number of workers of the cluster: one a GPU, or one for so many cores of a node.

    Raises:
        UsageError: no node has so many.
    """
    nodes = [node["Resources"] for node in imported_ray().nodes() if node["Alive"]]
    gpus = sum(int(node.get("GPU", 0)) for node in nodes)
    if gpus:
        return "cuda", gpus
    workers = sum(int(node.get("CPU", 0)) // threads for node in nodes)
    if not workers:
        raise UsageError(
            f"no node of the Ray cluster has the {threads} CPUs that a worker is to use: set OMP_NUM_THREADS to fewer"
        )
    return "cpu", workers


def imported_ray() -> ModuleType:
    """Ray, made quiet.

    Raises:
        UsageError: it is not installed.
    """
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    try:
        import ray
    except ImportError as error:
        raise UsageError("work on many machines needs `pip install theodolite[ray]`") from error
    return ray
