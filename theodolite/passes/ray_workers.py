"""Workers on a Ray cluster that read parts of a corpus: started, given calls, replaced when they die.

A call's answer counts only once the caller has fetched it. So a worker that dies costs the call that it was at, which
another one makes from the beginning, and nothing is ever counted twice. What the answers mean, and in which order they
are taken in, is not known here. Ray is imported when it is used.
"""

from __future__ import annotations

import os
import socket
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from types import ModuleType, TracebackType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from theodolite.corpus.corpus import Corpus
from theodolite.errors import TheodoliteError, UsageError, WorkError
from theodolite.models import open_model
from theodolite.passes.corpus_pass import fingerprint_of
from theodolite.passes.run import Run
from theodolite.passes.survey_pass import OnePass
from theodolite.passes.tabulate import survey_result

LOCAL = "local"
"""The address of a cluster that is started on this machine, and stopped again."""

DEATHS = 3
"""Workers that one call may kill before it is given up: a node may be lost twice by chance."""

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
class Job:
    """What every worker opens and reads. `source` is as `open_model` takes it, `id` what the run calls it."""

    source: str | None
    id: str
    dtype: str
    revision: str | None
    device: str
    threads: int
    corpus: Corpus
    batch: int
    seed: int
    expected: dict[str, Any]


@dataclass(frozen=True)
class Call:
    """A worker's method and its arguments, with the contexts that it is about."""

    method: str
    arguments: tuple[Any, ...] = ()
    first: int = 0
    last: int = 0

    @property
    def named(self) -> str:
        """What the worker was doing, in words."""
        what = {"open": "it opened the model", "result": "it made the tables"}
        return what.get(self.method, f"it read contexts {self.first} to {self.last - 1}")


OPEN = Call("open")


class Worker:
    """The actor. Each method returns a receipt, which is small, and an answer, which may not be."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def open(self) -> tuple[tuple[str, int], None]:
        """Open the model and find that it is the driver's; the receipt is the node and the process id.

        Raises:
            UsageError: it is another model, or other packages; or as `open_model` has it, naming the node.
            WorkError: as `open_model` has it, naming the node.
        """
        job, node = self.job, _node()
        torch.set_num_threads(job.threads)
        try:
            model = open_model(job.source, dtype=job.dtype, device=job.device, revision=job.revision)
        except TheodoliteError as error:
            raise type(error)(f"on node {node}: {error}") from error
        found = fingerprint_of(model)
        other = [name for name, value in job.expected.items() if found[name] != value]
        if other:
            has = "; ".join(f"{name} is {found[name]}, not {job.expected[name]}" for name in other)
            raise UsageError(f"node {node} would measure something else: {has}")
        self.model = replace(model, id=job.id)
        return (node, os.getpid()), None

    def read(self, first: int, last: int, directions: Tensor | None) -> tuple[None, Packed]:
        """What a pass that reads only these contexts sums; `directions` of a pass that began elsewhere."""
        one_pass = self._pass()
        if directions is not None:
            one_pass.sketches.look_along(directions)
        one_pass.read(self.job.batch, first, last)
        return None, packed(one_pass.state())

    def result(self, state: Packed, fingerprint: dict[str, Any], seconds: float) -> tuple[None, Run]:
        """The run from the state of a pass over the whole corpus."""
        one_pass = self._pass()
        one_pass.restore(unpacked(state))
        return None, survey_result(one_pass, fingerprint, seconds)

    def _pass(self) -> OnePass:
        return OnePass(self.model, self.job.corpus, self.job.seed)


@dataclass
class Hand:
    """A worker as the driver sees it: the call that it is at, and the references to its receipt and answer."""

    actor: Any
    call: Call | None = None
    receipt: Any = None
    answer: Any = None
    place: str = "a node"


class Crew:
    """Workers, of whom each makes one call at a time; to be used as a context manager, at whose end they stop.

    Args:
        job: what they open and read.
        actors: how many.
        say: told in a line of every worker that died.
    """

    def __init__(self, job: Job, actors: int, say: Callable[[str], None]) -> None:
        self.size = actors
        self._ray = _imported()
        self._say = say
        self._options = {"num_cpus": job.threads, "scheduling_strategy": "SPREAD", "max_restarts": 0}
        if job.device == "cuda":
            self._options |= {"num_cpus": 1, "num_gpus": 1}
        self._job = job
        self._sent: Any = None
        self._queue: deque[Call] = deque()
        self._deaths: Counter[tuple[str, int]] = Counter()
        self._hands: list[Hand] = []

    def __enter__(self) -> Crew:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for hand in self._hands:
            self._dismiss(hand)

    def start(self) -> None:
        """Have the workers come and open the model; the driver does not wait for them."""
        self._sent = self._ray.put(self._job)
        self._hands = [self._hired() for _ in range(self.size)]

    def give(self, call: Call, *, again: bool = False) -> None:
        """Have some worker make this call; one that is made `again` comes before all others."""
        place = self._queue.appendleft if again else self._queue.append
        place(call)
        self._assign()

    def answers(self, seconds: float) -> Iterator[tuple[Call, Any]]:
        """Calls that were answered, each with the reference that `fetch` takes; waits for `seconds` at most.

        Raises:
            TheodoliteError: what a worker raised.
            WorkError: a worker failed in another way, or the same call killed `DEATHS` workers.
        """
        busy = {hand.receipt: hand for hand in self._hands if hand.call is not None}
        ready, _ = self._ray.wait(list(busy), timeout=seconds)
        for hand in (busy[receipt] for receipt in ready):
            call, answer = hand.call, hand.answer
            assert call is not None
            try:
                receipt = self._ray.get(hand.receipt)
            except self._ray.exceptions.RayTaskError as error:
                raise _ordinary(error, hand) from error
            except self._ray.exceptions.RayError as error:
                self._replace(hand, error)
                continue
            hand.call = hand.receipt = hand.answer = None
            self._deaths.pop(_key(call), None)
            if call == OPEN:
                hand.place = "node {}, process {}".format(*receipt)
                self._assign()
            else:
                self._assign()
                yield call, answer

    def fetch(self, call: Call, answer: Any) -> Any:
        """An answer; None where it went with its node, and the call is made again."""
        try:
            return self._ray.get(answer)
        except self._ray.exceptions.RayError:
            self._say(f"what was found when {call.named} was lost with its node; it is read again")
            self.give(call, again=True)
            return None

    def put(self, value: Any) -> Any:
        """A reference to a value that is sent to each node once, however many calls take it."""
        return self._ray.put(value)

    def _hired(self) -> Hand:
        hand = Hand(self._ray.remote(Worker).options(**self._options).remote(self._sent))
        self._start(hand, OPEN)
        return hand

    def _start(self, hand: Hand, call: Call) -> None:
        hand.call = call
        method = getattr(hand.actor, call.method)
        hand.receipt, hand.answer = method.options(num_returns=2).remote(*call.arguments)

    def _assign(self) -> None:
        for hand in self._hands:
            if hand.call is None and self._queue:
                self._start(hand, self._queue.popleft())

    def _replace(self, hand: Hand, error: Exception) -> None:
        call = hand.call
        assert call is not None
        self._deaths[_key(call)] += 1
        self._dismiss(hand)
        if self._deaths[_key(call)] >= DEATHS:
            raise WorkError(
                f"{DEATHS} workers in a row died when {call.named}, the last on {hand.place}: if they ran out of "
                f"memory, {'use larger machines' if call == OPEN else 'use a smaller --batch'}"
            ) from error
        self._say(f"a worker on {hand.place} died when {call.named}; another takes over")
        self._hands[self._hands.index(hand)] = self._hired()
        if call != OPEN:
            self.give(call, again=True)

    def _dismiss(self, hand: Hand) -> None:
        with suppress(self._ray.exceptions.RayError):
            self._ray.kill(hand.actor)


def _key(call: Call) -> tuple[str, int]:
    return call.method, call.first


def _ordinary(error: Any, hand: Hand) -> Exception:
    """What was raised inside a worker, as itself where it is ours to explain."""
    cause = error.cause
    if isinstance(cause, TheodoliteError | MemoryError):
        return cause
    first = (str(cause).strip().splitlines() or [""])[0]
    return WorkError(f"a worker on {hand.place} failed: {type(cause).__name__}: {first}")


def _node() -> str:
    return str(_imported().util.get_node_ip_address())


def packed(state: dict[str, Tensor]) -> Packed:
    """A state as arrays that travel without a copy, without the rows along dimension 1 that are zero in all layers.

    A part of a corpus fills few groups of contexts and few places of the sample, and these are most of a state.
    """
    found: Packed = {}
    for name, tensor in state.items():
        rows = None
        if tensor.ndim > 2:
            filled = (tensor != 0).flatten(2).any(dim=2).any(dim=0)
            rows = filled.nonzero().flatten()
        values = tensor if rows is None or len(rows) == tensor.shape[1] else tensor[:, rows]
        indices = None if values is tensor or rows is None else rows.numpy()
        found[name] = (values.contiguous().numpy(), indices, tuple(tensor.shape))
    return found


def unpacked(state: Packed) -> dict[str, Tensor]:
    """What `packed` was given."""
    found = {}
    for name, (values, rows, shape) in state.items():
        own = torch.from_numpy(np.array(values))  # Ray's own arrays are read-only
        if rows is not None:
            whole = own.new_zeros(shape)
            whole[:, torch.from_numpy(np.array(rows))] = own
            own = whole
        found[name] = own
    return found


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
    ray = _imported()
    if ray.is_initialized():
        yield
        return
    try:
        _knock(address)
        ray.init(address=address, **quiet)
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        first = (str(error).strip().splitlines() or [""])[0]
        raise UsageError(
            f"no Ray cluster at {address} ({first}): start one with `ray start --head`, or give no address"
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


def _knock(address: str) -> None:
    """Find in seconds that nobody is at HOST:PORT; Ray itself would try for minutes."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if colon and "://" not in host:
        socket.create_connection((host, int(port)), timeout=5).close()


def offered(threads: int) -> tuple[str, int]:
    """The kind of device and the number of workers of the cluster: one a GPU, or one for so many cores of a node.

    Raises:
        UsageError: no node has so many.
    """
    nodes = [node["Resources"] for node in _imported().nodes() if node["Alive"]]
    gpus = sum(int(node.get("GPU", 0)) for node in nodes)
    if gpus:
        return "cuda", gpus
    workers = sum(int(node.get("CPU", 0)) // threads for node in nodes)
    if not workers:
        raise UsageError(
            f"no node of the Ray cluster has the {threads} CPUs that a worker is to use: set OMP_NUM_THREADS to fewer"
        )
    return "cpu", workers


def _imported() -> ModuleType:
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    try:
        import ray
    except ImportError as error:
        raise UsageError("a survey on many machines needs `pip install theodolite[ray]`") from error
    return ray
