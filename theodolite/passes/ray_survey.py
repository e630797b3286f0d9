"""The survey on many machines: contexts in shards over the workers of a Ray cluster, states merged in order.

Shards and the order in which they are merged depend on the corpus and the batch alone: so the result has the same
bytes however many workers there were, and whichever of them died. The passes that follow the text are made by workers
too, on the same kind of device. What a worker does is in `ray_workers.py`.
"""

from __future__ import annotations

import heapq
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from theodolite.accumulate.sums import State
from theodolite.corpus.corpus import Corpus
from theodolite.errors import UsageError, WorkError
from theodolite.measure.extra import Extra
from theodolite.models import OpenModel
from theodolite.models.guard import measures
from theodolite.passes.corpus_pass import batch_of, check_fit
from theodolite.passes.provenance import describe_corpus
from theodolite.passes.ray_actors import DEATHS, Workers
from theodolite.passes.ray_cluster import (
    LOCAL,
    SECONDS,
    WorkerLost,
    answered,
    connected,
    fetched,
    imported_ray,
    offered,
)
from theodolite.passes.ray_workers import Worker, job_of, packed, unpacked
from theodolite.passes.run import Run
from theodolite.passes.stages import Stage, finished_in, run_into
from theodolite.passes.survey import LATER, TITLES, given, survey_facts, survey_fingerprint
from theodolite.passes.survey_pass import SurveyPass
from theodolite.passes.tabulate import tabulate
from theodolite.system.checksums import read_json_checked
from theodolite.system.progress import Progress, ShowStage
from theodolite.system.run_folders import RUN

SHARDS = 256
"""At most, beside the first, however long the corpus: the driver merges so many states. A death costs 1/256 at most."""

AHEAD = 2
"""Shards for each worker that may be under way or wait for an earlier one: this bounds the memory that they take."""


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
    checkpoint_seconds: float = 60.0,
    show_progress: ShowStage = lambda what, done, total: None,
    say: Callable[[str], None] = lambda line: None,
) -> Run:
    """As `survey`, with the contexts read by workers on a Ray cluster (`pip install theodolite[ray]`).

    Every worker opens the checkpoint itself, by the same path or hub name, on a GPU of its own if the cluster has
    GPUs, else on as many cores as PyTorch uses here (`OMP_NUM_THREADS`). Tables and arrays are those of `survey` on
    such a device to 1e-12, relative; each may go on from what an interrupted call of the other left in `out`.

    Args:
        model: from `open_model`; a CPU does, for here it only says what is to be measured.
        corpus, out, batch, seed, extra, checkpoint_seconds, show_progress: as for `survey`.
        address: of a running cluster, as `ray.init` takes it ("auto": the one on this machine); "local" starts one here
            and stops it at the end. A process that is connected to a cluster already uses that one.
        actors: workers at most; None: as many as the cluster has room for.
        say: told in one line of every worker that died or was lost, and what is waited for if there is none.

    Raises:
        UsageError: as `survey`; Ray is missing, no cluster answers, or a node has another checkpoint or other packages;
            the model was changed after it was opened.
        WorkError: as `survey`; or three workers died of the same contexts or the same later pass, or as they started;
            or the cluster had room for none in ten minutes.
    """
    check_fit(model, corpus)
    if corpus.images is not None:
        raise UsageError("workers read text, not images: survey them with `survey` (leave out --ray)")
    _refuse_unopenable(model)
    if actors is not None and actors < 1:
        raise UsageError(f"{actors} actors read nothing: use --actors 1 or more")
    batch = batch_of(corpus, batch)
    fingerprint, described = survey_fingerprint(model, corpus, batch, seed, extra), describe_corpus(corpus)
    if out is not None and (device_there := _device_in(Path(out) / RUN)):
        finished = finished_in(out, fingerprint | {"device": device_there}, described)
        if finished is not None:
            return finished
    with connected(address):
        device, room = offered(torch.get_num_threads())
        job = job_of(model, device, corpus, batch, seed, extra)
        count = min(room, actors or room, len(list(shards(len(corpus.contexts), batch))))
        workers = Workers(Worker, job, count, say)
        fingerprint |= {"device": device}

        def remote(name: str) -> Stage:
            return Stage(name, TITLES[name], lambda states: _RemotePass(name, workers, given(name, states)))

        stages = [
            Stage("corpus", TITLES["corpus"], lambda states: _ShardedPass(model, workers)),
            survey_facts(model, corpus, seed, fingerprint, extra),
            *map(remote, LATER),
        ]
        return run_into(
            stages,
            lambda states: tabulate(states, extra),
            out,
            fingerprint,
            corpus=described,
            checkpoint_seconds=checkpoint_seconds,
            show_progress=show_progress,
        )


def _refuse_unopenable(model: OpenModel) -> None:
    """Refuse a model that was changed after it was opened, or is in memory only."""
    anew = f"workers open {model.id} anew, without"
    if model.interventions:
        raise UsageError(f"{anew} {', '.join(model.interventions)}: survey it with `survey`")
    if model.weights().changed:
        raise UsageError(f"{anew} what was changed in memory: save it, or survey it with `survey`")
    if model.sha256 is None and model.revision is None:
        raise UsageError(
            f"{model.id} is in memory, and each worker opens a checkpoint: save it, or survey it with `survey`"
        )


def _device_in(record: Path) -> str | None:
    """The kind of device on which a finished run was made, read without a cluster; None where there is no such run."""
    try:
        return str(read_json_checked(record)["fingerprint"]["device"])
    except (ValueError, KeyError, TypeError):
        return None


def _given_up(doing: str) -> WorkError:
    """What is raised for work that has lost `DEATHS` workers, the last when it was doing something."""
    return WorkError(
        f"the same work ended {DEATHS} worker processes, the last when it {doing}: if they ran out of memory, use a "
        "smaller --batch or larger machines"
    )


@dataclass(frozen=True)
class _Shard:
    """Contexts that a worker reads, and the references to its answer: that they were read, and the sums."""

    first: int
    last: int
    worker: int
    read: Any
    sums: Any

    @property
    def doing(self) -> str:
        return f"read contexts {self.first} to {self.last - 1}"


class _ShardedPass(SurveyPass):
    """A pass whose batches are read elsewhere, and whose sums are merged here."""

    def __init__(self, model: OpenModel, workers: Workers) -> None:
        job = workers.job
        super().__init__(model, job.corpus, job.seed, job.batch, job.extra)
        self._workers = workers
        self._directions: Any = None
        self._lost: Counter[int] = Counter()  # by the first context of a shard
        self._todo: list[tuple[int, int]] = []  # a heap: whichever shard is waited for is given first
        self._under_way: dict[int, _Shard] = {}  # by the first context

    def run(self, progress: Progress) -> None:
        """As `CorpusPass.run`: the sums are whole between shards."""
        done = progress.done
        self._todo = list(shards(self.total, self.batch, done))
        progress.checkpoint(done)
        while done < self.total:
            self._give_shards(done)
            head = self._under_way.get(done)
            if head is None:  # no worker is alive
                time.sleep(SECONDS)
            elif imported_ray().wait([head.read], timeout=SECONDS)[0] and self._merge(head):
                done = head.last
                progress.checkpoint(done)
                continue
            progress.report(done)

    def _give_shards(self, done: int) -> None:
        """Give shards to the workers that are alive and idle, first those that were lost."""
        ended = {first: shard for first, shard in self._under_way.items() if answered(shard.read)}
        for shard in ended.values():
            self._taken(shard, shard.read)
        if done and self._directions is None:
            self._directions = imported_ray().put(self.sketches.state()["directions"])
        busy = {shard.worker for first, shard in self._under_way.items() if first not in ended}
        # The directions that all sketches see are those of the first shard, which is one batch.
        room = (AHEAD * self._workers.count if done else 1) - len(self._under_way)
        idle = [worker for worker in self._workers.alive() if worker not in busy]
        for worker in idle[: min(room, len(self._todo))]:
            first, last = heapq.heappop(self._todo)
            call = self._workers[worker].read.options(num_returns=2)
            self._under_way[first] = _Shard(first, last, worker, *call.remote(first, last, self._directions))

    def _merge(self, shard: _Shard) -> bool:
        """Whether the sums of a shard that was read are still there, and now in this pass's."""
        sums = self._taken(shard, shard.sums)
        if sums is None:
            return False
        self.merge(unpacked(sums))
        del self._under_way[shard.first]
        return True

    def _taken(self, shard: _Shard, reference: Any) -> Any:
        """A part of the answer; None if it is lost: then the shard is to be read again."""
        try:
            return fetched(reference, shard.doing)
        except WorkerLost as error:
            self._lost[shard.first] += 1
            if self._lost[shard.first] >= DEATHS:
                raise _given_up(shard.doing) from error
            del self._under_way[shard.first]
            heapq.heappush(self._todo, (shard.first, shard.last))
            self._workers.lose(shard.worker, shard.doing)
            return None


class _RemotePass:
    """A pass that follows the text, made by a worker."""

    total = 1

    def __init__(self, name: str, workers: Workers, tensors: State) -> None:
        self.notes: dict[str, Any] = {}
        self._name, self._workers, self._tensors = name, workers, tensors
        self._state: State = {}

    def run(self, progress: Progress) -> None:
        """Wait for the worker, and hear of Ctrl-C."""
        progress.checkpoint(0)
        tensors = imported_ray().put(packed(self._tensors))
        doing = f"was {TITLES[self._name]}"
        for _ in range(DEATHS):
            worker = self._first_alive(progress)
            answer = self._workers[worker].later.remote(self._name, tensors)
            while not imported_ray().wait([answer], timeout=SECONDS)[0]:
                progress.report(0)
            try:
                self._state, self.notes = fetched(answer, doing)
            except WorkerLost:
                self._workers.lose(worker, doing)
            else:
                progress.checkpoint(1)
                return
        raise _given_up(doing)

    def _first_alive(self, progress: Progress) -> int:
        while not (alive := self._workers.alive()):
            time.sleep(SECONDS)
            progress.report(0)
        return alive[0]

    def state(self) -> State:
        """What the worker found."""
        return self._state

    def restore(self, state: State) -> None:
        """It is done as a whole or not at all."""


def shards(contexts: int, batch: int, done: int = 0) -> Iterator[tuple[int, int]]:
    """(first, last) of each shard from context `done` on, a multiple of `batch`; the very first is one batch.

    Their ends are multiples of `batch` that do not depend on `done`: every forward pass is that of a single process.
    """
    step = batch * math.ceil(contexts / (SHARDS * batch))
    first = done
    while first < contexts:
        last = batch if first < batch else first + step - (first - batch) % step
        yield first, min(last, contexts)
        first = last
