"""The survey on many machines: contexts in shards over the workers of a Ray cluster, states merged in order.

What is summed is a survey's business (`survey_pass.py`), and how workers live and die that of `ray_workers.py`. Shards and the
order in which they are merged depend on the corpus and the batch alone: so the result has the same bytes however many
workers there were, and whichever of them died.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from theodolite.corpus.corpus import Corpus
from theodolite.errors import UsageError
from theodolite.models import OpenModel
from theodolite.passes.corpus_pass import ShowProgress, batch_of, check_fit, fingerprint_of, read_into_run
from theodolite.passes.ray_workers import LOCAL, Call, Crew, Job, connected, offered, packed, unpacked
from theodolite.passes.run import Run
from theodolite.passes.survey import survey_fingerprint
from theodolite.passes.survey_pass import OnePass

SHARDS = 256
"""At most, beside the first, however long the corpus: the driver merges so many states. A death costs 1/256 at most."""

AHEAD = 2
"""Shards for each worker that may be under way or wait for an earlier one: this bounds the memory that they take."""

SECONDS = 0.2
"""How long the driver waits for workers before it shows progress, and hears of Ctrl-C."""

EMBEDDED_ID = "theodolite/topics"


def survey_on_ray(
    model: OpenModel,
    corpus: Corpus,
    out: str | Path | None = None,
    *,
    address: str = LOCAL,
    actors: int | None = None,
    batch: int | None = None,
    seed: int = 0,
    checkpoint_seconds: float = 60.0,
    show_progress: ShowProgress = lambda done, total: None,
    say: Callable[[str], None] = lambda line: None,
) -> Run:
    """As `survey`, with the contexts read by workers on a Ray cluster (`pip install theodolite[ray]`).

    Every worker opens the checkpoint itself, by the same path or hub name, on a GPU of its own if the cluster has
    GPUs, else on as many cores as PyTorch uses here (`OMP_NUM_THREADS`). Tables and arrays are those of `survey` on
    such a device to 1e-12, relative; each may go on from what an interrupted call of the other left in `out`.

    Args:
        model: from `open_model`; a CPU does, for here it only says what is to be measured.
        corpus, out, batch, seed, checkpoint_seconds, show_progress: as for `survey`.
        address: of a running cluster, as `ray.init` takes it ("auto": the one on this machine); "local" starts one here
            and stops it at the end. A process that is connected to a cluster already uses that one.
        actors: workers at most; None: as many as the cluster has room for.
        say: told in one line of every worker that died and was replaced.

    Raises:
        UsageError: as `survey`; Ray is missing, no cluster answers, or a node has another checkpoint or other packages;
            the model was changed after it was opened.
        WorkError: as `survey`; or the same contexts killed three workers in a row.
    """
    check_fit(model, corpus)
    if model.edits:
        raise UsageError(
            f"workers open {model.id} anew, without {', '.join(model.edits)}: survey it with `survey`"
        )
    if actors is not None and actors < 1:
        raise UsageError(f"{actors} actors read nothing: use --actors 1 or more")
    batch = batch_of(corpus, batch)
    threads = torch.get_num_threads()
    with connected(address):
        device, room = offered(threads)
        job = _job(model, corpus, device, threads, batch, seed)
        wanted = min(room, actors or room, len(list(shards(len(corpus.contexts), batch))))
        with Crew(job, wanted, say) as crew:
            return read_into_run(
                lambda: ShardedPass(model, corpus, seed, crew),
                lambda done, fingerprint, seconds: done.result(fingerprint, seconds),
                out,
                batch=batch,
                fingerprint=survey_fingerprint(model, corpus, batch, seed) | {"device": device},
                checkpoint_seconds=checkpoint_seconds,
                show_progress=show_progress,
            )


class ShardedPass(OnePass):
    """A pass whose batches are read elsewhere, and whose sums are merged here."""

    def __init__(self, model: OpenModel, corpus: Corpus, seed: int, crew: Crew) -> None:
        super().__init__(model, corpus, seed)
        self._crew = crew

    def run(
        self, batch: int, done: int, show_progress: ShowProgress, save: Callable[[int, bool], None]
    ) -> None:
        """As `Reading.run`, where `save` is called between shards: what counts is what has been merged."""
        total = len(self.corpus.contexts)
        todo = deque(shards(total, batch, done))
        found: dict[int, tuple[Call, Any]] = {}
        given, directions = 0, None
        self._crew.start()
        while done < total:
            try:
                show_progress(done, total)
            except BaseException:
                save(done, True)
                raise
            if done and directions is None:
                directions = self._crew.put(self.sketches.state()["directions"])
            # The directions that all sketches see are those of the first shard, which is one batch.
            most = AHEAD * self._crew.size if done else 1
            while todo and given < most:
                first, last = todo.popleft()
                self._crew.give(Call("read", (first, last, directions), first, last))
                given += 1
            found |= {call.first: (call, answer) for call, answer in self._crew.answers(SECONDS)}
            while done in found:
                call, answer = found.pop(done)
                part = self._crew.fetch(call, answer)
                if part is None:
                    break
                self.merge(unpacked(part))
                given, done = given - 1, call.last
                save(done, False)
        show_progress(total, total)

    def result(self, fingerprint: dict[str, Any], seconds: float) -> Run:
        """The run, made by a worker: it needs the model, and is to be made on the same kind of device."""
        call = Call("result", (self._crew.put(packed(self.state())), fingerprint, seconds))
        self._crew.give(call)
        run = None
        while run is None:
            for answered, answer in self._crew.answers(SECONDS):
                run = self._crew.fetch(answered, answer)
        return run


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


def _job(model: OpenModel, corpus: Corpus, device: str, threads: int, batch: int, seed: int) -> Job:
    return Job(
        source=_source(model.id),
        id=model.id,
        dtype=str(model.hf.dtype).removeprefix("torch."),
        revision=model.revision,
        device=device,
        threads=threads,
        corpus=corpus,
        batch=batch,
        seed=seed,
        expected=fingerprint_of(model) | {"device": device},
    )


def _source(name: str) -> str | None:
    """What a worker opens: it stands in another folder than the driver."""
    if name == EMBEDDED_ID:
        return None
    return str(Path(name).resolve()) if Path(name).is_dir() else name
