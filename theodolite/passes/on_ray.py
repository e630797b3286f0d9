"""The survey on a Ray cluster: the chunks of its text over actors, which Ray restarts when they die.

Chunks and the order in which they are merged are those of one process, and so are the bytes of the result.
"""

from __future__ import annotations

import math
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from theodolite.corpus.corpus import Corpus
from theodolite.errors import TheodoliteError, UsageError, WorkError, first_line
from theodolite.jobs.job import FINISHED, Job
from theodolite.jobs.unfinished import Unfinished
from theodolite.measure.extra import Extra
from theodolite.models import OpenModel
from theodolite.models.guard import measures
from theodolite.passes.chunks import Chunk, chunks_of
from theodolite.passes.corpus_pass import fingerprint_of
from theodolite.passes.run import Run, describe_corpus, finished_run
from theodolite.passes.survey import TEXT, TEXT_TITLE, SurveyPlan, is_read, opened, opening_of
from theodolite.system.progress import Progress, ShowStage, starting_others
from theodolite.system.run_folders import is_run, provenance_at

LOCAL = "local"
"""The address of a cluster that is started on this machine, and stopped again."""

TRIES = 3
"""How often work is given to a worker process that dies of it."""

SECONDS, LIMIT = 0.2, 600.0
"""How long the driver waits before it hears of Ctrl-C, and for a first worker."""

PATIENCE = 60.0
"""Seconds after which an idle worker gets work that another one has: its node may be gone."""

ENVIRONMENT = {
    "RAY_DEDUP_LOGS_SKIP_REGEX": ".",  # else Ray prints pages of each worker that dies, at any level of logs
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",  # `uv run` would make Ray upload the working directory
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}


@measures("model")
def survey_on_ray(
    model: OpenModel,
    corpus: Corpus,
    out: str | Path | None = None,
    *,
    address: str = LOCAL,
    actors: int | None = None,
    batch: int | None = None,
    seed: int = 0,
    extra: Sequence[Extra] = (),
    show_progress: ShowStage = lambda what, done, total: None,
    say: Callable[[str], None] = lambda line: None,
) -> Run:
    """Survey a model with workers on a Ray cluster (`pip install theodolite[ray]`).

    Every worker opens the checkpoint itself, by the same path or hub name, on a GPU of its own if the cluster has
    GPUs, else on as many cores as PyTorch uses here (`OMP_NUM_THREADS`). Tables and arrays have the bytes of those of
    `survey` on such a device; each resumes what an interrupted call of the other left in `out`.

    Args:
        model: from `open_model`; a CPU does, for here it only says what is to be measured.
        corpus, out, batch, seed, extra, show_progress: as for `survey`.
        address: of a running cluster, as `ray.init` takes it ("auto": the one on this machine); "local" starts one here
            and stops it at the end. A process that is connected to a cluster already uses that one.
        actors: workers at most; None: as many as the cluster has room for.
        say: told in one line of every worker that died.

    Raises:
        UsageError: as `survey`; Ray is missing, no cluster answers, or a node has another checkpoint or other packages;
            the model was changed after it was opened.
        WorkError: as `survey`; or three worker processes died of the same contexts; or the cluster had room for none in
            ten minutes.
    """
    plan = SurveyPlan(model, corpus, batch, seed, extra)
    if corpus.images is not None:
        raise UsageError("workers read text, not images: survey them with `survey` (leave out --ray)")
    opening = opening_of(model)
    if opening is None:
        changed = ", ".join(model.interventions) or "what was changed in memory"
        raise UsageError(
            f"workers open {model.id} anew, without {changed}: save it, or survey it with `survey`"
        )
    if actors is not None and actors < 1:
        raise UsageError(f"{actors} actors read nothing: use --actors 1 or more")

    def work_on(device: str) -> Unfinished:
        return Unfinished(out, plan.fingerprint | {"device": device}, describe_corpus(corpus))

    if out is not None and is_run(out):  # no cluster is needed for it
        made_on = (provenance_at(out).get("fingerprint") or {}).get("device", model.device.type)
        if (finished := finished_run(work_on(made_on))) is not None:
            return finished
    with connected(address):
        needs, room = _offered(torch.get_num_threads())
        device = "cuda" if "GPU" in needs else "cpu"
        work, chunks = work_on(device), chunks_of(len(corpus.contexts), plan.batch)
        with work.claimed():
            work.check()
            began = time.monotonic()
            opening |= {"device": device, "device_map": None}
            task = opening, fingerprint_of(model) | {"device": device}, (corpus, batch, seed, extra)
            pool = _Pool(task, needs, min(room, actors or room, len(chunks)), say)
            _read(chunks, work, pool, show_progress)
            reading = time.monotonic() - began
            run = _finish(work, pool, show_progress)
            seconds = run.provenance["wall_seconds"] + reading
            run = replace(run, provenance=run.provenance | {"wall_seconds": seconds})
            if work.out is not None:
                run = run.save(work.out)
            work.remove()
            return run


def _read(chunks: Sequence[Chunk], work: Unfinished, pool: _Pool, show_progress: ShowStage) -> None:
    """Have the chunks read that nobody has read yet, and save their sums."""
    contexts = chunks[-1].last
    saved = work.notes(TEXT)  # of one process, which may have begun a chunk: whoever merges reads its rest
    begun = contexts if saved.get("finished") else saved.get("done", 0)
    missing = [chunk for chunk in chunks if chunk.first >= begun and not is_read(work, chunk)]
    left = sum(chunk.last - chunk.first for chunk in missing)

    def hear() -> None:
        show_progress(TEXT_TITLE, contexts - left, contexts)

    hear()
    doing = [f"read contexts {chunk.first} to {chunk.last - 1}" for chunk in missing]
    for number, arrays in pool.answers("read", [(chunk,) for chunk in missing], doing, hear):
        chunk = missing[number]
        work.save(chunk.name, _tensors(arrays), FINISHED)
        left -= chunk.last - chunk.first
        hear()


def _finish(work: Unfinished, pool: _Pool, show_progress: ShowStage) -> Run:
    """Have one worker merge all parts, make the stages after the text, and then the tables."""
    loaded = ((name, work.load(name) or ({}, {})) for name in work.names())
    parts = {name: _imported_ray().put((_arrays(state), notes)) for name, (state, notes) in loaded}
    calls, doing = [(parts, work.fingerprint)], ["made the tables"]
    [(_, run)] = pool.answers("finish", calls, doing, lambda: show_progress("finishing", 0, 1))
    finished: Run = run
    return finished


class Worker:
    """The actor. It opens the model with its first call, so that what is wrong with it is raised there.

    Args:
        opening, expected: what `opened` needs, and the fingerprint that the model must have.
        survey: corpus, batch, seed and added accumulators.
        threads: of torch.
    """

    def __init__(
        self, opening: dict[str, Any], expected: dict[str, Any], survey: tuple[Any, ...], threads: int
    ) -> None:
        self.opening, self.expected, self.survey, self.threads = opening, expected, survey, threads
        self._plan: SurveyPlan | None = None

    def ready(self) -> int:
        """Return the process id: there was room for this worker."""
        return os.getpid()

    def plan(self) -> SurveyPlan:
        """Open the model, once, check that it is the driver's, and return the survey's plan; errors name the node."""
        if self._plan is not None:
            return self._plan
        node = _imported_ray().util.get_node_ip_address()
        torch.set_num_threads(self.threads)
        try:
            model = opened(self.opening)
        except TheodoliteError as error:
            raise type(error)(f"on node {node}: {error}") from error
        own = fingerprint_of(model)
        differ = [f"{name} is {own[name]}, not {of}" for name, of in self.expected.items() if own[name] != of]
        if differ:
            raise UsageError(f"node {node} would measure something else: {'; '.join(differ)}")
        self._plan = SurveyPlan(model, *self.survey)
        return self._plan

    def read(self, chunk: Chunk) -> tuple[int, dict[str, Any]]:
        """Read a chunk; return the process id and the sums."""
        steps = self.plan().chunk_pass(chunk)
        steps.run(Progress(steps.total))
        return os.getpid(), _arrays(steps.state())

    def finish(self, parts: dict[str, Any], fingerprint: dict[str, Any]) -> tuple[int, Run]:
        """Make the run of what others have read; `parts` are references to the parts of unfinished work."""
        work = Unfinished(None, fingerprint)
        for name, part in parts.items():
            arrays, notes = _imported_ray().get(part)
            work.save(name, _tensors(arrays), notes)
        plan = self.plan()
        return os.getpid(), plan.tables(Job(plan.stages(), work).run())


def _arrays(state: dict[str, torch.Tensor]) -> dict[str, Any]:
    """A state as it travels: NumPy's arrays, which Ray sends without a copy."""
    return {name: tensor.contiguous().numpy() for name, tensor in state.items()}


def _tensors(arrays: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: torch.tensor(array) for name, array in arrays.items()}  # copied: Ray's are read-only


class _Pool:
    """Workers: Ray restarts one that dies, and gives it its call again.

    Args:
        task: a worker's arguments but for the threads. needs: the resources of one node that a worker takes.
    """

    def __init__(
        self, task: tuple[Any, ...], needs: dict[str, int], count: int, say: Callable[[str], None]
    ) -> None:
        ray = _imported_ray()
        self._needs, self._say = needs, say
        # However often a worker dies it is restarted; only what it dies of is given up.
        how = {"max_restarts": -1, "max_task_retries": TRIES - 1, "scheduling_strategy": "SPREAD"}
        how |= {f"num_{name.lower()}s": amount for name, amount in needs.items()}
        actor = ray.remote(Worker).options(**how)
        self._task = [
            ray.put(part) for part in task
        ]  # held, so that Ray still has it when it restarts a worker
        workers = [actor.remote(*self._task, torch.get_num_threads()) for _ in range(count)]
        self._starting = {worker.ready.remote(): worker for worker in workers}
        self._processes: dict[Any, int] = {}  # of the workers that have started
        self._idle: list[Any] = []

    def answers(
        self, method: str, calls: Sequence[tuple[Any, ...]], doing: Sequence[str], hear: Callable[[], None]
    ) -> Iterator[tuple[int, Any]]:
        """Yield the number and the answer of each call, as they come; `hear` is called repeatedly, and may raise."""
        given, under_way = dict.fromkeys(range(len(calls)), -math.inf), dict[Any, Any]()
        began = time.monotonic()
        while given:
            hear()
            now = time.monotonic()
            if not self._processes and now - began > LIMIT:
                raise WorkError(
                    f"waited {LIMIT / 60:g} minutes for a worker, {self._lacking()}: end what else runs there, give "
                    "another address, or rerun when there is room"
                )
            due = [call for call in sorted(given, key=given.__getitem__) if now - given[call] > PATIENCE]
            for call in due[: len(self._idle)]:
                worker = self._idle.pop(0)
                under_way[getattr(worker, method).remote(*calls[call])] = worker, call
                given[call] = now
            waiting = [*self._starting, *under_way]
            for reference in _imported_ray().wait(waiting, timeout=SECONDS, fetch_local=False)[0]:
                if worker := self._starting.pop(reference, None):
                    self._processes[worker] = self._answer(reference, None)
                    self._idle.append(worker)
                    continue
                worker, call = under_way.pop(reference)
                self._idle.append(worker)
                if call not in given:
                    continue
                answer = self._answer(reference, doing[call])
                if answer is None:
                    given[call] = -math.inf
                    continue
                del given[call]
                before, self._processes[worker] = self._processes[worker], answer[0]
                if answer[0] != before:
                    self._say(f"the worker of process {before} died, and Ray restarted it")
                yield call, answer[1]

    def _lacking(self) -> str:
        """Say what a worker needs, and what is free."""
        free, there = _imported_ray().available_resources(), _imported_ray().cluster_resources()
        needs = [
            f"{count} {name} ({free.get(name, 0):g} of {there.get(name, 0):g} in the Ray cluster are free)"
            for name, count in self._needs.items()
        ]
        return f"which needs of one node {' and '.join(needs)}"

    def _answer(self, reference: Any, doing: str | None) -> Any:
        """Return a worker's answer, None if it was lost with its node; what the worker raised is raised here."""
        errors = _imported_ray().exceptions
        try:
            return _imported_ray().get(reference)
        except errors.RayTaskError as error:
            if isinstance(error.cause, TheodoliteError | MemoryError | torch.OutOfMemoryError):
                raise error.cause from error
            why = f"{type(error.cause).__name__}: {first_line(error.cause)}"
            raise WorkError(f"a worker failed when it {doing}: {why}") from error
        except errors.ObjectLostError:
            return None
        except errors.RayError as error:
            if doing is None:
                raise WorkError(
                    f"a worker died before it did anything: try `python -c 'import {__name__}'` on the nodes of the "
                    "Ray cluster, and read their logs (/tmp/ray/session_latest/logs)"
                ) from error
            raise WorkError(
                f"the same work ended {TRIES} worker processes, the last when it {doing}: if they ran out of memory, "
                "use a smaller --batch or larger machines"
            ) from error


@contextmanager
def connected(address: str) -> Iterator[None]:
    """Connect to the cluster at an address, or start one here, unless this process is connected already.

    Raises:
        UsageError: Ray is not installed, or there is no cluster.
    """
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if address == LOCAL:
        quiet["include_dashboard"] = False
        if "ray" not in sys.modules:
            # Read when Ray is imported: it listens at 127.0.0.1 only. Else anybody who reaches the machine could give
            # the workers code to run.
            os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    ray = _imported_ray()
    if ray.is_initialized():
        yield
        return
    try:
        host, colon, port = address.removeprefix("ray://").rpartition(":")
        if colon and "://" not in host:  # Ray itself would try for minutes
            socket.create_connection((host, int(port)), timeout=5).close()
        # At Ray's own handler, SIGTERM would end the process in the middle of a step.
        with starting_others():
            ray.init(address=address, **quiet)
    except Exception as error:
        # Ray's own are of many kinds: a node that starts too slowly is a bare Exception.
        raise UsageError(
            f"no Ray cluster at {address} ({first_line(error)}): start one with `ray start --head`, or give no address"
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


def _offered(threads: int) -> tuple[dict[str, int], int]:
    """Return what a worker takes of one node, a GPU or `threads` cores, and for how many workers there is room."""
    nodes = [node["Resources"] for node in _imported_ray().nodes() if node["Alive"]]
    if gpus := sum(int(node.get("GPU", 0)) for node in nodes):
        return {"CPU": 1, "GPU": 1}, gpus
    workers = sum(int(node.get("CPU", 0)) // threads for node in nodes)
    if not workers:
        raise UsageError(
            f"no node of the Ray cluster has the {threads} CPUs that a worker is to use: set OMP_NUM_THREADS to fewer"
        )
    return {"CPU": threads}, workers


def _imported_ray() -> ModuleType:
    """Import Ray, made quiet; `UsageError` where it is not installed."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        import ray
    except ImportError as error:
        raise UsageError("work on many machines needs `pip install theodolite[ray]`") from error
    return ray
