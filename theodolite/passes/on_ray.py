"""The survey on a Ray cluster: the chunks of its text over actors, which Ray restarts when they die.

Chunks and the order in which they are merged are those of one process, and so are the bytes of the result.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

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
from theodolite.system.wording import with_extra

LOCAL = "local"
"""The address of a cluster that is started on this machine, and stopped again."""

TRIES = 3
"""How many processes Ray starts for a worker, one after the other."""

SECONDS, LIMIT = 0.2, 600.0
"""How long the driver waits before it hears of Ctrl-C, and for workers that Ray has no room to start."""

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
) -> Run:
    """Survey a model with workers on a Ray cluster (`pip install '.[ray]'`).

    Every worker opens the checkpoint itself, by the same path or hub name, on a GPU of its own if the cluster has
    GPUs, else on as many cores as PyTorch uses here (`OMP_NUM_THREADS`). Tables and arrays have the bytes of those of
    `survey` on such a device; each resumes what an interrupted call of the other left in `out`.

    Args:
        model: from `open_model`; a CPU does, for here it only says what is to be measured.
        corpus, out, batch, seed, extra, show_progress: as for `survey`.
        address: of a running cluster, as `ray.init` takes it ("auto": the one on this machine); "local" starts one here
            and stops it at the end. A process that is connected to a cluster already uses that one.
        actors: workers at most; None: as many as the cluster has room for.

    Raises:
        UsageError: as `survey`; Ray is missing, no cluster answers, or a node has another checkpoint or other packages;
            the model was changed after it was opened.
        WorkError: as `survey`; or three processes of one worker died; or the cluster had room for none in ten minutes.
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
        ray, began = _imported_ray(), time.monotonic()
        needs, room = _offered()
        device = "cuda" if "GPU" in needs else "cpu"
        work, chunks = work_on(device), chunks_of(len(corpus.contexts), plan.batch)
        # Restarts are counted, not retries: those of calls to a node that is lost fail until Ray knows of it.
        how = {"max_restarts": TRIES - 1, "max_task_retries": -1, "scheduling_strategy": "SPREAD"}
        actor = ray.remote(Worker).options(**how, num_cpus=needs["CPU"], num_gpus=needs.get("GPU", 0))
        opening |= {"device": device, "device_map": None}
        task = opening, fingerprint_of_tables(model) | {"device": device}, (corpus, batch, seed, extra)
        with work.claimed():
            work.check()
            references = [ray.put(part) for part in task]  # Ray has them when it restarts a worker
            count = min(room, actors or room, len(chunks))
            workers = [actor.remote(*references, torch.get_num_threads()) for _ in range(count)]
            _read(workers, chunks, work, show_progress)
            reading = time.monotonic() - began
            parts = {name: work.load(name) for name in work.names()}
            whole = {"made the tables": (parts, work.fingerprint)}
            [(_, run)] = _answers(workers, "finish", whole, lambda: show_progress("finishing", 0, 1))
            run.provenance["wall_seconds"] += reading
            if work.out is not None:
                run = run.save(work.out)
            work.remove()
            return run


def _read(workers: list[Any], chunks: list[Chunk], work: Unfinished, show_progress: ShowStage) -> None:
    """Have the chunks read that nobody has read yet, and save their sums."""
    contexts, saved = chunks[-1].last, work.notes(TEXT)
    # One process may have begun a chunk: whoever merges reads its rest.
    begun = contexts if saved.get("finished") else saved.get("done", 0)
    missing = [chunk for chunk in chunks if chunk.first >= begun and not is_read(work, chunk)]
    left = sum(chunk.last - chunk.first for chunk in missing)

    def heartbeat() -> None:
        show_progress(TEXT_TITLE, contexts - left, contexts)

    calls = {f"read contexts {chunk.first} to {chunk.last - 1}": chunk for chunk in missing}
    for chunk, state in _answers(workers, "read", calls, heartbeat):
        work.save(chunk.name, state, FINISHED)
        left -= chunk.last - chunk.first
    heartbeat()


@dataclass
class Worker:
    """The actor. It opens the model with its first call, so that what is wrong with it is raised there."""

    opening: dict[str, Any]
    expected: dict[str, Any]
    """The fingerprint that the model must have."""
    survey: tuple[Corpus, int | None, int, Sequence[Extra]]
    threads: int
    _plan: SurveyPlan | None = None

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

    def read(self, chunk: Chunk) -> Tensors:
        """Read a chunk; return its sums."""
        steps = self.plan().chunk_pass(chunk)
        steps.run(Progress(steps.total))
        return steps.state()

    def finish(self, unfinished: tuple[dict[str, Any], dict[str, Any]]) -> Run:
        """Make the run of the parts of unfinished work, and of its fingerprint."""
        parts, fingerprint = unfinished
        work = Unfinished(None, fingerprint)
        for name, part in parts.items():
            work.save(name, *part)
        plan = self.plan()
        return plan.tables(Job(plan.stages(), work).run())


def _answers(
    workers: list[Any], method: str, calls: Mapping[str, Any], heartbeat: Callable[[], None]
) -> Iterator[tuple[Any, Any]]:
    """Yield the argument of each call with its answer, as they come; `calls` has the arguments by what is done.

    `heartbeat` is called again and again, and may raise. A worker is given a call when it has started and is idle.
    """
    ray = _imported_ray()
    left, last_answer = list(calls), time.monotonic()
    under_way = {worker.__ray_ready__.remote(): (worker, "") for worker in workers}
    while left or any(doing for _, doing in under_way.values()):
        heartbeat()
        if time.monotonic() - last_answer > LIMIT:
            offered, _ = _offered()  # or no node is large enough any more
            if len(left) == len(calls):
                needs = " and ".join(f"{count} {name}" for name, count in offered.items())
                raise WorkError(
                    f"waited {LIMIT / 60:g} minutes for a worker, which needs of one node {needs}: end what else runs "
                    "there, give another address, or rerun when there is room"
                )
        for reference in ray.wait([*under_way], timeout=SECONDS)[0]:
            worker, doing = under_way.pop(reference)
            answer, last_answer = _answer(reference, doing), time.monotonic()
            if left:
                following = left.pop(0)
                under_way[getattr(worker, method).remote(calls[following])] = worker, following
            elif any(other for _, other in under_way.values()):
                workers.remove(worker)
                ray.kill(worker)  # there is room now to restart one whose node is gone
            if doing:
                yield calls[doing], answer


def _answer(reference: Any, doing: str) -> Any:
    """Return what a worker returned; what it raised is raised here."""
    ray = _imported_ray()
    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, TheodoliteError | MemoryError | torch.OutOfMemoryError):
            raise error.cause from error
        why = f"{type(error.cause).__name__}: {first_line(error.cause)}"
        raise WorkError(f"a worker failed when it {doing}: {why}") from error
    except ray.exceptions.RayError as error:
        if not doing:
            raise WorkError(
                f"a worker died before it did anything: try `python -c 'import {__name__}'` on the nodes of the "
                "Ray cluster, and read their logs (/tmp/ray/session_latest/logs)"
            ) from error
        raise WorkError(
            f"{TRIES} processes of a worker died, the last when it {doing}: if they ran out of memory, use a smaller "
            "--batch or larger machines; rerun to resume"
        ) from error


@contextmanager
def connected(address: str) -> Iterator[None]:
    """Connect to the cluster at an address, or start one here, unless this process is connected already."""
    if address == LOCAL and "ray" not in sys.modules:
        # Read when Ray is imported: it listens at 127.0.0.1 only, so that nobody else gives the workers code to run.
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
            ray.init(address=address, log_to_driver=False, logging_level="ERROR", include_dashboard=False)
    except Exception as error:
        # Ray's own are of many kinds: a node that starts too slowly is a bare Exception.
        raise UsageError(
            f"no Ray cluster at {address} ({first_line(error)}): start one with `ray start --head`, or give no address"
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


def _offered() -> tuple[dict[str, int], int]:
    """Return what a worker takes of one node, a GPU or the cores of PyTorch, and for how many workers there is room."""
    threads = torch.get_num_threads()
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
        raise UsageError(f"work on many machines needs Ray: {with_extra('ray')}") from error
    return ray
