"""Pruning on many machines: workers of a Ray cluster share the contexts; matrices are pruned by the driver.

Each worker opens the checkpoint, holds the hidden states of its shards of the text, runs the current block on them and
sends their moments, which are merged here in the order of the shards; the pruned block goes to all workers. Shards
depend on the corpus and the batch alone: so the result has the same bytes however many workers there were, and
whichever of them died. The contexts of one that died are read again by another, through the blocks pruned so far. Of a
model whose blocks are read from its files as they run, workers hold the current block, and Ray has the pruned ones.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from theodolite.corpus.corpus import Corpus
from theodolite.errors import UsageError
from theodolite.models import OpenModel
from theodolite.models.block_matrices import Matrix, block_matrices, one_expert_at_a_time
from theodolite.models.guard import guarded, measures
from theodolite.passes.packed_states import Packed, packed, unpacked
from theodolite.passes.ray_actors import (
    DEATHS,
    Job,
    Opener,
    Workers,
    checkpoint_of,
    device_in,
    given_up,
    refuse_unopenable,
)
from theodolite.passes.ray_cluster import (
    LOCAL,
    SECONDS,
    WorkerLost,
    connected,
    fetched,
    imported_ray,
    offered,
)
from theodolite.prune.calibration import InThisProcess
from theodolite.prune.checkpoint import WriteExtras
from theodolite.prune.moments import InputMoments
from theodolite.prune.plan import Plan, planned
from theodolite.prune.pruned import Pruned
from theodolite.prune.pruning_run import PruningRun, in_this_process
from theodolite.prune.sequential import BlockByBlock, shards
from theodolite.system.progress import ShowProgress
from theodolite.system.pruned_folders import SETTINGS
from theodolite.system.pruning_options import PruningOptions, Sparsity

OPENED = "opened the model and began to read"

PATIENCE = 60.0
"""Seconds for a worker to be started (again), before those that are there share its contexts."""


@measures
def prune_on_ray(
    model: OpenModel,
    corpus: Corpus,
    method: str,
    sparsity: Sparsity = None,
    *,
    address: str = LOCAL,
    actors: int | None = None,
    write_extras: WriteExtras = lambda pruned, folder: None,
    show_progress: ShowProgress = lambda done, total: None,
    say: Callable[[str], None] = lambda line: None,
    **options: Any,
) -> Pruned:
    """As `prune_model`, with the blocks run by workers on a Ray cluster (`pip install theodolite[ray]`).

    Every worker opens the checkpoint itself, as for `survey_on_ray`; matrices are pruned here, or on `devices`. By
    Wanda, OATS and magnitude the bytes are those of `prune_model` on such a device. By SparseGPT, GPTQ and with `bits`
    they are the same for any number of workers, but sums of full moments may differ in last bits from those of one
    process. Each goes on from what an interrupted call of the other left in `out`.

    Args:
        model: from `open_model`, and pruned in place; or from `open_streamed`: then workers stream it as well.
        corpus, method, sparsity, write_extras, show_progress: as for `prune_model`.
        address, actors: as for `survey_on_ray`; there are at most `sequential.SHARDS` workers.
        say: told in one line of every worker that died or was lost, and what is waited for if there is none.
        options: further ones of `prune_model`.

    Raises:
        UsageError: as `prune_model` and `survey_on_ray`; or what needs all of the text in one process (`recover`,
            `sparsity_by`).
        WorkError: as `prune_model`; or three workers died of the same contexts, or as they started; or the cluster had
            room for none in ten minutes. With `out`, finished blocks are saved: the same call goes on from them.
    """
    unknown = options.keys() - signature(PruningOptions).parameters.keys()
    if unknown:
        raise UsageError(f"prune_on_ray has no option {min(unknown)}: give those of prune_model")
    asked = PruningOptions(method, sparsity, **options)
    if isinstance(model, OpenModel):  # else it is refused by its type
        refuse_unopenable(model, actors, "prune it with `prune_model`")
    plan = planned(model, corpus, asked, on_ray=True)
    if asked.out is not None and (
        device_there := device_in(Path(asked.out) / SETTINGS)
    ):  # then no block is run
        there = PruningRun(plan.read_on(device_there), in_this_process, show_progress)
        return there.finished(write_extras)
    with connected(address):
        device, room = offered(torch.get_num_threads())
        plan = plan.read_on(device)
        names = [[matrix.key for matrix in block] for block in plan.matrices]
        checkpoint = checkpoint_of(model, device)
        job = PruningJob(checkpoint, plan.calibration, plan.batch, plan.options.moments_damping, names)
        count = min(room, actors or room, len(shards(plan.calibration, plan.batch)))
        workers = Workers(PruningWorker, job, count, say)
        run = PruningRun(plan, lambda plan, keep, between: _OnRay(plan, workers, between), show_progress)
        return run.finished(write_extras)


@dataclass(frozen=True)
class PruningJob(Job):
    """What every worker opens and reads; `damping` is as `InputMoments` takes it, `names` are keys of each block."""

    damping: float | None
    names: list[list[str]]


class PruningWorker(Opener):
    """The actor: some shards of the text, on their way through the blocks."""

    job: PruningJob
    _text: InThisProcess | None = None
    _matrices: list[list[Matrix]]
    _held: ExitStack  # the current block of a model that is streamed
    _layer: int

    def begin(self, only: list[int]) -> None:
        """Hold the hidden states of these shards before the first block.

        A model whose blocks are pruned already is opened anew: how blocks are called may depend on them.
        """
        if self._text is not None:
            self._held.close()
            self._text = self._model = None
        self._held, self._layer = ExitStack(), -1
        job = self.job
        with self._reading() as model:
            every = block_matrices(model)
            self._matrices = [
                [matrix for matrix in block if matrix.key in names]
                for block, names in zip(every, job.names, strict=True)
            ]
            stream = BlockByBlock(model, job.corpus, job.batch, lambda: None, only=only)
            self._text = InThisProcess(stream, job.damping)

    def read(self, layer: int, shard: int) -> tuple[bool, Packed]:
        """That it was read, and the moments of a shard: two objects, the first of which is small."""
        with self._reading(layer):
            return True, packed(self._begun.moments(layer, self._matrices[layer], [shard]).state())

    def advance(self, layer: int, pruned: list[Tensor]) -> None:
        """Write the pruned matrices of a block; what it gives is what enters the next."""
        with self._reading(layer):
            self._write(layer, pruned)
            self._begun.advance(layer)

    def verify_end(self, layer: int, pruned: list[Tensor], before: list[Any]) -> None:
        """Write those of the last block, and compare with the whole model.

        Args:
            before: references to those of the blocks before it, where the model does not keep them.
        """
        with self._reading(layer) as model:
            self._write(layer, pruned)
            streamed, ray = model.streamed, imported_ray()
            with (
                streamed.edited(lambda at: self._write(at, ray.get(before[at])))
                if streamed
                else nullcontext()
            ):
                self._begun.verify_end()

    @property
    def _begun(self) -> InThisProcess:
        assert self._text is not None
        return self._text

    @contextmanager
    def _reading(self, layer: int | None = None) -> Iterator[OpenModel]:
        """While open, the model is ours; a block of it stays in memory until another one is asked for."""
        model = self.opened()
        with guarded(model.root), one_expert_at_a_time(model.root):
            if layer is not None and layer != self._layer:
                self._held.close()
                self._held.enter_context(model.block_present(layer))
                self._layer = layer
            yield model

    def _write(self, layer: int, pruned: list[Tensor]) -> None:
        for matrix, its in zip(self._matrices[layer], pruned, strict=True):
            matrix.write(its)


class _OnRay:
    """A text that is on the workers, as `Calibration` has it."""

    def __init__(self, plan: Plan, workers: Workers, between: Callable[[], None]) -> None:
        self._plan, self._workers, self._between = plan, workers, between
        self._advanced = 0  # blocks that every worker is past
        self._sent: list[Any] = []  # references to these, where they are no longer in memory here
        self._lost: Counter[int] = Counter()  # by shard, in the current step
        self._worker_of: dict[int, int] = {}  # by shard
        numbers = range(len(shards(plan.calibration, plan.batch)))
        ready = self._ready(workers.count)
        self._worker_of = {shard: ready[shard % len(ready)] for shard in numbers}
        asked = {worker: self._begin(worker) for worker in set(self._worker_of.values())}
        for worker, answer in asked.items():
            try:
                self._waited(answer, OPENED)
            except WorkerLost:
                self._replace(worker, OPENED)

    def moments(self, layer: int, matrices: Sequence[Matrix]) -> InputMoments:
        """Merged from those of the shards, in order."""
        moments = InputMoments(matrices, self._plan.options.moments_damping)
        asked: dict[int, tuple[int, Any, Any]] = {}  # shard → its worker, that it was read, its sums
        ahead, total = len(set(self._worker_of.values())), len(self._worker_of)
        merged = 0
        while merged < total:
            for shard in range(merged, min(merged + ahead, total)):
                if shard not in asked:
                    worker = self._worker_of[shard]
                    call = self._workers[worker].read.options(num_returns=2)
                    asked[shard] = (worker, *call.remote(layer, shard))
            worker, read, sums = asked[merged]
            doing = f"read shard {merged} of the text in block {layer}"
            try:
                self._waited(read, doing)
                moments.merge(unpacked(self._waited(sums, doing)))
            except WorkerLost:
                self._replace(worker, doing)
                asked = {shard: call for shard, call in asked.items() if call[0] != worker}
                continue
            del asked[merged]
            merged += 1
        self._lost.clear()
        return moments

    def advance(self, layer: int) -> None:
        """Send the pruned block to all workers, which run it."""
        pruned = self._pruned(layer)
        self._each("advance", f"ran the pruned block {layer}", layer, pruned)
        if self._plan.model.streamed is not None:
            self._sent.append(pruned)
        self._advanced = layer + 1

    def verify_end(self) -> None:
        """On every worker."""
        last = self._plan.model.layers - 1
        self._each("verify_end", "compared the blocks with the model", last, self._pruned(last), self._sent)

    def _each(self, method: str, doing: str, *given: Any) -> None:
        """Every worker with contexts does something with a pruned block."""
        finished: set[int] = set()
        asked: dict[int, Any] = {}
        while waiting := sorted(set(self._worker_of.values()) - finished):
            for worker in waiting:
                if worker not in asked:
                    asked[worker] = getattr(self._workers[worker], method).remote(*given)
            try:
                self._waited(asked[waiting[0]], doing)
                finished.add(waiting[0])
            except WorkerLost:
                heir = self._replace(waiting[0], doing)
                finished.discard(heir)  # it has begun again, for more contexts
                for worker in (waiting[0], heir):
                    asked.pop(worker, None)
        self._lost.clear()

    def _begin(self, worker: int) -> Any:
        return self._workers[worker].begin.remote(self._shards_of(worker))

    def _pruned(self, layer: int) -> Any:
        """A reference to the pruned matrices of a block."""
        if layer < len(self._sent):
            return self._sent[layer]
        with self._plan.model.block_present(layer):
            return imported_ray().put([matrix.read().cpu() for matrix in self._plan.matrices[layer]])

    def _shards_of(self, worker: int) -> list[int]:
        return [shard for shard, its in self._worker_of.items() if its == worker]

    def _waited(self, answer: Any, doing: str) -> Any:
        """What a worker answers; Ctrl-C is heard until then."""
        while not imported_ray().wait([answer], timeout=SECONDS)[0]:
            self._between()
        return fetched(answer, doing)

    def _ready(self, wanted: int) -> list[int]:
        """So many workers that are alive and have no contexts; fewer, or those with the fewest, if none come."""
        deadline = time.monotonic() + PATIENCE
        while True:
            alive = self._workers.alive()
            idle = [worker for worker in alive if not self._shards_of(worker)]
            if len(idle) >= wanted:
                return idle
            if alive and time.monotonic() > deadline:
                return idle or sorted(alive, key=lambda worker: len(self._shards_of(worker)))
            time.sleep(SECONDS)
            self._between()

    def _replace(self, worker: int, doing: str) -> int:
        """Give the contexts of a worker that was lost to another one, and bring it to the current block."""
        while True:
            shards_lost = self._shards_of(worker)
            self._lost.update(shards_lost)
            if max(self._lost.values()) >= DEATHS:
                raise given_up(doing)
            self._workers.lose(worker, doing)
            self._worker_of |= dict.fromkeys(shards_lost, -1)
            worker = self._ready(1)[0]
            self._worker_of |= dict.fromkeys(shards_lost, worker)
            doing = OPENED
            try:
                self._waited(self._begin(worker), doing)
                for layer in range(self._advanced):
                    doing = f"ran the pruned block {layer} again"
                    self._waited(self._workers[worker].advance.remote(layer, self._pruned(layer)), doing)
                return worker
            except WorkerLost:
                continue
