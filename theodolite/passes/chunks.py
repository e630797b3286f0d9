"""A text read in chunks: each is summed from zero, and the sums are merged in order.

Chunks follow from the corpus and the batch alone. So the result has the same bytes whether one process reads them one
after the other or many read some each, wherever one of them is stopped.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from theodolite.accumulate.sums import State, joined, part_of
from theodolite.jobs.unfinished import Unfinished
from theodolite.passes.survey_pass import SurveyPass
from theodolite.system.progress import Progress

CHUNKS = 64
"""Chunks of a text at most, and so processes that can share it; their states lie on disk until they are merged."""

NewPass = Callable[[], SurveyPass]


@dataclass(frozen=True)
class Chunk:
    """The contexts `first … last − 1`, whole batches of them."""

    number: int
    first: int
    last: int

    @property
    def name(self) -> str:
        """The name of its part of unfinished work."""
        return f"chunk-{self.number:03d}"


def chunks_of(contexts: int, batch: int) -> list[Chunk]:
    """Cut a text into chunks of whole batches, at most `CHUNKS` of them."""
    size = batch * math.ceil(contexts / (CHUNKS * batch))
    firsts = range(0, contexts, size)
    return [Chunk(number, first, min(first + size, contexts)) for number, first in enumerate(firsts)]


class ChunkPass:
    """The steps of one chunk, its contexts, by a new pass over the whole text.

    The directions are of the sketches, which every chunk must look along: those of the first batch.
    """

    def __init__(self, new_pass: NewPass, chunk: Chunk, directions: Tensor | None) -> None:
        self.total = chunk.last - chunk.first
        self.notes: dict[str, Any] = {}
        self._chunk, self._pass = chunk, new_pass()
        if directions is not None:
            self._pass.sketches.look_along(directions)

    def run(self, progress: Progress) -> None:
        """Read the contexts that are left."""
        first = self._chunk.first
        progress.checkpoint(progress.done)
        self._pass.read(
            first + progress.done, self._chunk.last, lambda done: progress.checkpoint(done - first)
        )

    def state(self) -> State:
        """Return the sums, packed."""
        return packed(self._pass.state())

    def restore(self, state: State) -> None:
        """Continue from what `state` gave."""
        self._pass.restore(unpacked(state))


class TextInChunks:
    """Read a survey's text: every chunk whose sums no other process has left in `work`.

    State: the sums of the chunks so far, and under `chunk` those of the chunk that is being read.
    """

    def __init__(self, new_pass: NewPass, work: Unfinished) -> None:
        self._new_pass, self._work = new_pass, work
        self._whole = new_pass()
        self._part: SurveyPass | None = None
        self.total = self._whole.total
        self.chunks = chunks_of(self.total, self._whole.batch)
        self.notes: dict[str, Any] = {}

    def run(self, progress: Progress) -> None:
        """Read or merge the chunks that are left, in order."""
        done = progress.done
        progress.checkpoint(done)
        for chunk in self.chunks:
            if chunk.last <= done:
                continue
            state = self._saved(chunk) if done <= chunk.first else None
            if state is None:
                self._read(chunk, max(chunk.first, done), progress)
            else:
                with self._work.same_sums():
                    self._whole.merge(state)
            self._part = None
            progress.checkpoint(chunk.last)

    def _saved(self, chunk: Chunk) -> State | None:
        """Return the sums that another process has left of the chunk; None where there are none."""
        state, notes = self._work.load(chunk.name) or ({}, {})
        return unpacked(state) if notes.get("finished") else None

    def _read(self, chunk: Chunk, first: int, progress: Progress) -> None:
        def checkpoint(done: int) -> None:
            if done < chunk.last:  # the end of a chunk is one when it is merged
                progress.checkpoint(done)

        if not chunk.first:  # merged with nothing, it is what it is
            self._whole.read(first, chunk.last, checkpoint)
            return
        if self._part is None:
            self._part = self._new_pass()
            self._part.sketches.look_along(self._whole.sketches.state()["directions"])
        self._part.read(first, chunk.last, checkpoint)
        self._whole.merge(self._part.state())

    def state(self) -> State:
        """Return the sums so far."""
        part = {} if self._part is None else joined({"chunk": self._part.state()})
        return self._whole.state() | part

    def restore(self, state: State) -> None:
        """Continue from what `state` gave."""
        self._whole.restore(state)
        if part := part_of(state, "chunk"):
            self._part = self._new_pass()
            self._part.restore(part)


def packed(state: State) -> State:
    """Leave out the rows along dimension 1 that are zero in all layers; `unpacked` puts them back.

    A chunk of a text fills few groups of contexts and few places of the sample, and these are most of a state.
    """
    tensors: State = {}
    for name, tensor in state.items():
        tensors[name] = tensor
        if tensor.ndim > 2:
            rows = (tensor != 0).flatten(2).any(dim=2).any(dim=0).nonzero().flatten()
            if len(rows) < tensor.shape[1]:
                tensors[name] = tensor[:, rows]
                tensors[f"{name} rows"], tensors[f"{name} size"] = rows, torch.tensor(tensor.shape[1])
    return tensors


def unpacked(state: State) -> State:
    """Return the state that `packed` was given."""
    tensors: State = {}
    for name, tensor in state.items():
        if name.endswith((" rows", " size")):
            continue
        tensors[name] = tensor
        if f"{name} rows" in state:
            size = (tensor.shape[0], int(state[f"{name} size"]), *tensor.shape[2:])
            tensors[name] = tensor.new_zeros(size)
            tensors[name][:, state[f"{name} rows"]] = tensor
    return tensors
