"""The survey on many machines: contexts in shards over the workers of a Ray cluster, states merged in order.

Shards and the order in which they are merged depend on the corpus and the batch alone: so the result has the same
bytes however many workers there were, and whichever of them died. The passes that follow the text are made by workers
too, on the same kind of device. What a worker does is in `ray_workers.py`.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from theodolite.accumulate.extra import Extra
from theodolite.accumulate.sums import State
from theodolite.corpus.corpus import Corpus
from theodolite.errors import UsageError
from theodolite.models import OpenModel
from theodolite.models.open import EMBEDDED_ID
from theodolite.passes.corpus_pass import batch_of, check_fit, fingerprint_of
from theodolite.passes.ray_workers import (
    LOCAL,
    Job,
    connected,
    fetched,
    imported_ray,
    offered,
    packed,
    started_workers,
    unpacked,
)
from theodolite.passes.run import Run
from theodolite.passes.stages import ShowStage, Stage, run_into
from theodolite.passes.survey import LATER, TITLES, given, survey_facts, survey_fingerprint
from theodolite.passes.survey_pass import SurveyPass
from theodolite.passes.tabulate import tabulate
from theodolite.system.progress import Progress

SHARDS = 256
"""At most, beside the first, however long the corpus: the driver merges so many states. A death costs 1/256 at most."""

AHEAD = 2
"""Shards for each worker that may be under way or wait for an earlier one: this bounds the memory that they take."""

SECONDS = 0.2
"""How long the driver waits for workers before it shows progress, and hears of Ctrl-C."""

PATIENCE = 60.0
"""Seconds after which, and twice the time of the slowest shard, one is given to an idle worker as well.

Ray starts a dead worker again where there is room; where there is none, its shard would be waited for forever.
"""


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
        say: told in one line of every worker that was started again, and of what is read twice because it is late.

    Raises:
        UsageError: as `survey`; Ray is missing, no cluster answers, or a node has another checkpoint or other packages;
            the model was changed after it was opened.
        WorkError: as `survey`; or the same contexts killed three workers in a row.
    """
    check_fit(model, corpus)
    if model.interventions:
        raise UsageError(
            f"workers open {model.id} anew, without {', '.join(model.interventions)}: survey it with `survey`"
        )
    if actors is not None and actors < 1:
        raise UsageError(f"{actors} actors read nothing: use --actors 1 or more")
    batch = batch_of(corpus, batch)
    with connected(address):
        device, room = offered(torch.get_num_threads())
        job = _job(model, corpus, device, batch, seed, extra)
        count = min(room, actors or room, len(list(shards(len(corpus.contexts), batch))))
        workers = _Workers(job, count, say)
        fingerprint = survey_fingerprint(model, corpus, batch, seed, extra) | {"device": device}

        def remote(name: str) -> Stage:
            return Stage(name, TITLES[name], lambda states: _RemotePass(name, workers, given(name, states)))

        stages = [
            Stage("corpus", TITLES["corpus"], lambda states: _ShardedPass(model, job, workers)),
            survey_facts(model, corpus, seed, fingerprint),
            *map(remote, LATER),
        ]
        return run_into(
            stages,
            lambda states: tabulate(states, extra),
            out,
            fingerprint,
            checkpoint_seconds=checkpoint_seconds,
            show_progress=show_progress,
        )


class _Workers:
    """The workers, started when the first call is made."""

    def __init__(self, job: Job, count: int, say: Callable[[str], None]) -> None:
        self.job = job
        self.count = count
        self.say = say
        self._handles: list[Any] = []

    def __getitem__(self, number: int) -> Any:
        if not self._handles:
            self._handles = started_workers(self.job, self.count)
        return self._handles[number]


@dataclass
class _Reading:
    """A shard that a worker reads: since when, and the reference to its answer."""

    first: int
    last: int
    worker: int
    since: float
    answer: Any

    @property
    def doing(self) -> str:
        return f"read contexts {self.first} to {self.last - 1}"


class _ShardedPass(SurveyPass):
    """A pass whose batches are read elsewhere, and whose sums are merged here."""

    def __init__(self, model: OpenModel, job: Job, workers: _Workers) -> None:
        super().__init__(model, job.corpus, job.seed, job.batch, job.extra)
        self._workers = workers
        self._directions: Any = None
        self._places: dict[int, str] = {}
        self._slowest = 0.0

    def run(self, progress: Progress) -> None:
        """As `CorpusPass.run`: the sums are whole between shards."""
        done = progress.done
        todo = deque(shards(self.total, self.batch, done))
        under_way: list[_Reading] = []
        progress.checkpoint(done)
        while done < self.total:
            self._assign(todo, under_way, done)
            head = [reading for reading in under_way if reading.first == done]
            ray = imported_ray()
            ready, _ = ray.wait([reading.answer for reading in head], timeout=SECONDS)
            if not ready:
                progress.report(done)
                continue
            answered = next(reading for reading in head if reading.answer == ready[0])
            self._merge(answered)
            under_way = [reading for reading in under_way if reading.first != done]
            done = answered.last
            progress.checkpoint(done)

    def _assign(self, todo: deque[tuple[int, int]], under_way: list[_Reading], done: int) -> None:
        """Give shards to workers that have none; where no shard is left, the one that is waited for, if it is late."""
        if done and self._directions is None:
            self._directions = imported_ray().put(self.sketches.state()["directions"])
        # The directions that all sketches see are those of the first shard, which is one batch.
        most = AHEAD * self._workers.count if done else 1
        _, unanswered = imported_ray().wait(
            [reading.answer for reading in under_way] or [imported_ray().put(None)],
            num_returns=max(len(under_way), 1),
            timeout=0,
            fetch_local=False,
        )
        busy = {reading.worker for reading in under_way if reading.answer in unanswered}
        for worker in sorted(set(range(self._workers.count)) - busy):
            if todo and len({reading.first for reading in under_way}) < most:
                under_way.append(self._give(worker, *todo.popleft()))
                continue
            head = [reading for reading in under_way if reading.first == done]
            late = max(PATIENCE, 2 * self._slowest)
            if len(head) == 1 and head[0].answer in unanswered and time.monotonic() - head[0].since > late:
                self._workers.say(
                    f"contexts {head[0].first} to {head[0].last - 1} are late: another worker reads them"
                )
                under_way.append(self._give(worker, head[0].first, head[0].last))

    def _give(self, worker: int, first: int, last: int) -> _Reading:
        answer = self._workers[worker].read.remote(first, last, self._directions)
        return _Reading(first, last, worker, time.monotonic(), answer)

    def _merge(self, reading: _Reading) -> None:
        place, state = fetched(reading.answer, reading.doing)
        self.merge(unpacked(state))
        self._slowest = max(self._slowest, time.monotonic() - reading.since)
        before = self._places.setdefault(reading.worker, place)
        if before != place:
            self._places[reading.worker] = place
            self._workers.say(f"the worker on {before} died; one on {place} {reading.doing}")


class _RemotePass:
    """A pass that follows the text, made by a worker."""

    total = 1

    def __init__(self, name: str, workers: _Workers, tensors: State) -> None:
        self.notes: dict[str, Any] = {}
        self._name, self._workers, self._tensors = name, workers, tensors
        self._state: State = {}

    def run(self, progress: Progress) -> None:
        """Wait for the worker, and hear of Ctrl-C."""
        progress.checkpoint(0)
        ray = imported_ray()
        answer = self._workers[0].later.remote(self._name, packed(self._tensors))
        while not ray.wait([answer], timeout=SECONDS)[0]:
            progress.report(0)
        self._state, self.notes = fetched(answer, f"was {TITLES[self._name]}")
        progress.checkpoint(1)

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


def _job(model: OpenModel, corpus: Corpus, device: str, batch: int, seed: int, extra: Sequence[Extra]) -> Job:
    return Job(
        source=_source(model.id),
        id=model.id,
        dtype=str(model.hf.dtype).removeprefix("torch."),
        revision=model.revision,
        device=device,
        threads=torch.get_num_threads(),
        corpus=corpus,
        batch=batch,
        seed=seed,
        extra=extra,
        expected=fingerprint_of(model) | {"device": device},
    )


def _source(name: str) -> str | None:
    """What a worker opens: it stands in another folder than the driver."""
    if name == EMBEDDED_ID:
        return None
    return str(Path(name).resolve()) if Path(name).is_dir() else name
