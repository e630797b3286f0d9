"""The survey on a Ray cluster: the chunks of its text over actors, which Ray restarts when they die.

Chunks and the order in which they are merged are those of one process, and so are the bytes of the result.
"""

from __future__ import annotations

import functools
import math
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import torch

from theodolite.corpus.corpus import Corpus
from theodolite.errors import TheodoliteError, UsageError, WorkError, first_line
from theodolite.jobs.job import FINISHED, Job
from theodolite.jobs.unfinished import Tensors, Unfinished
from theodolite.measure.extra import Extra
from theodolite.models import OpenModel
from theodolite.models.guard import measures
from theodolite.passes.chunks import Chunk, chunks_of
from theodolite.passes.corpus_pass import fingerprint_of_tables
from theodolite.passes.run import Run, describe_corpus, finished_run
from theodolite.passes.survey import TEXT, TEXT_TITLE, SurveyPlan, is_read, opened, opening_of
from theodolite.system.progress import Progress, ShowStage, starting_others
from theodolite.system.run_folders import is_run, provenance_at

Call = TypeVar("Call")
Answers = Callable[..., Iterator[tuple[Any, Any]]]
"""`_answers` of the workers at hand."""

LOCAL = "local"
"""The address of a cluster that is started on this machine, and stopped again."""

TRIES = 3
"""How often a worker is given work that its process dies of; then another worker is given it as often."""

SECONDS, LIMIT = 0.2, 600.0
"""How long the driver waits before it hears of Ctrl-C, and for a first worker."""

PATIENCE = 60.0
"""Seconds after which an idle worker gets work that another one has.

Ray restarts a worker whose node is gone where there is room for it, and else lets its calls wait for ever.
"""

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
        WorkError: as `survey`; or six worker processes died of the same contexts; or the cluster had room for none in
            ten minutes.
    """
    plan = SurveyPlan(model, corpus, batch, seed, extra)
    if corpus.images is not None or corpus.pictured is not None:
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
        ray, threads, began = _imported_ray(), torch.get_num_threads(), time.monotonic()
        needs, room = _offered(threads)
        device = "cuda" if "GPU" in needs else "cpu"
        work, chunks = work_on(device), chunks_of(len(corpus.contexts), plan.batch)
        # However often a worker dies it is restarted; only what it dies of is given up.
        how = {"max_restarts": -1, "max_task_retries": TRIES - 1, "scheduling_strategy": "SPREAD"}
        actor = ray.remote(Worker).options(**how, num_cpus=needs["CPU"], num_gpus=needs.get("GPU", 0))
        opening |= {"device": device, "device_map": None}
        task = opening, fingerprint_of_tables(model) | {"device": device}, (corpus, batch, seed, extra)
        with work.claimed():
            work.check()
            held = [ray.put(part) for part in task]  # so that Ray still has it when it restarts a worker
            count = min(room, actors or room, len(chunks))
            workers = {actor.remote(*held, threads): 0 for _ in range(count)}
            answers = functools.partial(_answers, workers, needs, say)
            _read(chunks, work, answers, show_progress)
            reading = time.monotonic() - began
            parts = {name: work.load(name) for name in work.names()}
            whole = {"made the tables": (parts, work.fingerprint)}
            [(_, run)] = answers("finish", whole, lambda: show_progress("finishing", 0, 1))
            seconds = run.provenance["wall_seconds"] + reading
            run = replace(run, provenance=run.provenance | {"wall_seconds": seconds})
            if work.out is not None:
                run = run.save(work.out)
            work.remove()
            return run


def _read(chunks: Sequence[Chunk], work: Unfinished, answers: Answers, show_progress: ShowStage) -> None:
    """Have the chunks read that nobody has read yet, and save their sums."""
    contexts, saved = chunks[-1].last, work.notes(TEXT)
    # One process may have begun a chunk: whoever merges reads its rest.
    begun = contexts if saved.get("finished") else saved.get("done", 0)
    missing = [chunk for chunk in chunks if chunk.first >= begun and not is_read(work, chunk)]
    left = sum(chunk.last - chunk.first for chunk in missing)

    def hear() -> None:
        show_progress(TEXT_TITLE, contexts - left, contexts)

    calls = {f"read contexts {chunk.first} to {chunk.last - 1}": chunk for chunk in missing}
    for chunk, state in answers("read", calls, hear):
        work.save(chunk.name, state, FINISHED)
        left -= chunk.last - chunk.first
    hear()


class Worker:
    """The actor. It opens the model with its first call, so that what is wrong with it is raised there.

    Each method returns the id of the process that did the work, too.

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

    def ready(self) -> tuple[int, None]:
        """Answer: there was room for this worker."""
        return os.getpid(), None

    def plan(self) -> SurveyPlan:
        """Return the survey of the model, which is opened once and must be the driver's; errors name the node."""
        if self._plan is not None:
            return self._plan
        node = _imported_ray().util.get_node_ip_address()
        torch.set_num_threads(self.threads)
        try:
            model = opened(self.opening)
        except TheodoliteError as error:
            raise type(error)(f"on node {node}: {error}") from error
        own = fingerprint_of_tables(model)
        differ = [f"{name} is {own[name]}, not {of}" for name, of in self.expected.items() if own[name] != of]
        if differ:
            raise UsageError(f"node {node} would measure something else: {'; '.join(differ)}")
        self._plan = SurveyPlan(model, *self.survey)
        return self._plan

    def read(self, chunk: Chunk) -> tuple[int, Tensors]:
        """Read a chunk; return its sums."""
        steps = self.plan().chunk_pass(chunk)
        steps.run(Progress(steps.total))
        return os.getpid(), steps.state()

    def finish(self, unfinished: tuple[dict[str, Any], dict[str, Any]]) -> tuple[int, Run]:
        """Make the run of the parts of unfinished work, and of its fingerprint."""
        parts, fingerprint = unfinished
        work = Unfinished(None, fingerprint)
        for name, part in parts.items():
            work.save(name, *part)
        plan = self.plan()
        return os.getpid(), plan.tables(Job(plan.stages(), work).run())


def _answers(
    workers: dict[Any, int],
    needs: dict[str, int],
    say: Callable[[str], None],
    method: str,
    calls: Mapping[str, Call],
    hear: Callable[[], None],
) -> Iterator[tuple[Call, Any]]:
    """Yield each call with its answer, as they come. Ray restarts a worker that dies, and gives it its call again.

    Args:
        workers: with the id of the process of each, 0 until it has started.
        needs: the resources of one node that a worker takes.
        say: told of every worker that died.
        calls: the argument of `method` of each call, by what it does.
        hear: called again and again; it may raise.
    """
    ray = _imported_ray()
    given = dict.fromkeys(calls, -math.inf)  # when
    under_way = {worker.ready.remote(): (worker, "") for worker in workers}
    idle: list[Any] = []
    failed: set[str] = set()
    began = time.monotonic()
    while given:
        hear()
        now = time.monotonic()
        if not any(workers.values()) and now - began > LIMIT:
            raise WorkError(
                f"waited {LIMIT / 60:g} minutes for a worker, {_lacking(needs)}: end what else runs there, give "
                "another address, or rerun when there is room"
            )
        due = [doing for doing in sorted(given, key=given.__getitem__) if now - given[doing] > PATIENCE]
        for doing, worker in zip(due, idle.copy(), strict=False):
            idle.remove(worker)
            under_way[getattr(worker, method).remote(calls[doing])] = worker, doing
            given[doing] = now
        for reference in ray.wait([*under_way], timeout=SECONDS)[0]:
            worker, doing = under_way.pop(reference)
            if doing and doing not in given:
                idle.append(worker)  # another one was faster
                continue
            answer = _answer(reference, doing, doing in failed)
            if answer is None:  # another one does it, and this one is asked when it is there again
                if doing:
                    failed.add(doing)
                    given[doing] = -math.inf
                under_way[worker.ready.remote()] = worker, ""
                continue
            idle.append(worker)
            if workers[worker] not in (0, answer[0]):
                say(f"the worker of process {workers[worker]} died, and Ray restarted it")
            workers[worker] = answer[0]
            if doing:
                del given[doing]
                yield calls[doing], answer[1]


def _lacking(needs: dict[str, int]) -> str:
    """Say what a worker needs, and what is free."""
    ray = _imported_ray()
    free, there = ray.available_resources(), ray.cluster_resources()
    resources = [
        f"{count} {name} ({free.get(name, 0):g} of {there.get(name, 0):g} in the Ray cluster are free)"
        for name, count in needs.items()
    ]
    return f"which needs of one node {' and '.join(resources)}"


def _answer(reference: Any, doing: str, failed: bool) -> Any:
    """Return what a worker returned; None where it cannot be reached, unless the same `failed` before.

    What the worker raised is raised here.
    """
    ray = _imported_ray()
    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, TheodoliteError | MemoryError | torch.OutOfMemoryError):
            raise error.cause from error
        why = f"{type(error.cause).__name__}: {first_line(error.cause)}"
        raise WorkError(f"a worker failed when it {doing}: {why}") from error
    except ray.exceptions.RayError as error:
        if isinstance(error, ray.exceptions.ActorUnavailableError) and not failed:
            return None  # its process died of it, again and again, or its node is gone
        if not doing:
            raise WorkError(
                f"a worker died before it did anything: try `python -c 'import {__name__}'` on the nodes of the "
                "Ray cluster, and read their logs (/tmp/ray/session_latest/logs)"
            ) from error
        raise WorkError(
            f"the same work ended {2 * TRIES} worker processes, the last when it {doing}: if they ran out of memory, "
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
