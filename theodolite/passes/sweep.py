"""The stages of a survey of a model that is read from its files, block by block: all of them while a block is there."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from theodolite.accumulate.means import KeptStreams
from theodolite.accumulate.second_moments import MomentsByLayer
from theodolite.accumulate.sums import State, joined, large_in_files, part_of
from theodolite.corpus.corpus import Corpus
from theodolite.jobs.job import Stage, States, Steps, Unfinished
from theodolite.measure.extra import Extra
from theodolite.models import OpenModel
from theodolite.models.guard import measures
from theodolite.models.sweep import Sweep
from theodolite.passes.survey_pass import SurveyPass
from theodolite.passes.tabulate import refuse_overflow
from theodolite.system.mapped import forget
from theodolite.system.progress import Progress


class SweptStages:
    """Stages that go through the blocks together: each does what is of a block before any goes on to the next.

    The forward passes of a stage end after the block, and go on from there. A stage is made from the states of those
    before it, which hold what is summed up to this block; its steps are run anew for every block. State: those of the
    stages, and `passes`, the hidden states between the blocks.
    """

    def __init__(self, model: OpenModel, stages: Sequence[Stage], work: Unfinished) -> None:
        self.model, self.total = model, model.layers
        self._sweep = Sweep(model.structure.blocks, folder_of(work))
        self._steps: dict[str, Steps] = {}
        live = States(work)
        for stage in stages:
            steps = self._steps[stage.name] = stage.make(live)
            live.tensors[stage.name] = steps.live() if isinstance(steps, SweptText) else steps.state()
            live.notes[stage.name] = steps.notes
        self.notes: dict[str, Any] = {name: steps.notes for name, steps in self._steps.items()}

    def state(self) -> State:
        """Return the states of all stages, and the hidden states of their passes."""
        states = joined({name: steps.state() for name, steps in self._steps.items()})
        return states | joined({"passes": {str(n): hidden for n, hidden in self._sweep.carried.items()}})

    def restore(self, state: State) -> None:
        """Continue from what `state` gave."""
        for name, steps in self._steps.items():
            steps.restore(part_of(state, name))
        self._sweep.carried = {int(n): hidden for n, hidden in part_of(state, "passes").items()}

    @measures("self.model")
    def run(self, progress: Progress) -> None:
        """Run all stages block by block."""
        for name, steps in self._steps.items():
            steps.notes = self.notes[name]  # those of an earlier process
        self._sweep.others = self.notes.get("others")
        for layer in range(progress.done, self.total):
            progress.checkpoint(layer)
            with self.model.block_present(layer), self._sweep.block(layer):
                for steps in self._steps.values():
                    steps.run(Progress(layer + 1, layer))
            self.notes["others"] = self._sweep.others
        progress.checkpoint(self.total)


class SweptText(SurveyPass):
    """The corpus pass, one block at a time; with a `folder` large sums are in files there.

    State: that of `SurveyPass`, with the numbers of moments in place of these (`MomentsByLayer`), and left_out
    (contexts, T), the tokens that the last layer leaves out.
    """

    _moments = MomentsByLayer
    inputs: MomentsByLayer
    residual: MomentsByLayer

    def __init__(
        self,
        model: OpenModel,
        corpus: Corpus,
        seed: int,
        batch: int,
        extra: Sequence[Extra] = (),
        folder: Path | None = None,
    ) -> None:
        with large_in_files(folder):
            super().__init__(model, corpus, seed, batch, extra)
        # The split contexts are run anew, so that their streams need not be kept.
        self.streams = KeptStreams(0, self.means.length, model.width, self.streams.kept, model.source.dtype)
        self.accumulators["streams"] = self.streams
        width = model.structure.attention_width
        self._read_now = torch.zeros(width, width, dtype=torch.float64)
        self._marked = torch.zeros(corpus.contexts.shape, dtype=torch.bool)

    def state(self) -> State:
        """Return all sums so far."""
        return super().state() | {"left_out": self._marked}

    def live(self) -> State:
        """Return all sums, with inputs.moment (L, d, d): at every layer that of the block that is being read."""
        return self.state() | {"inputs.moment": self._read_now.expand(self.inputs.layers, -1, -1)}

    def restore(self, state: State) -> None:
        """Continue from what `state` gave."""
        super().restore(state)
        self._marked.copy_(state["left_out"])

    @measures("self.model")
    def run(self, progress: Progress) -> None:
        """Read all contexts up to the end of a block, and take the numbers of its moments."""
        layer = progress.done
        self.inputs.moments = {layer: self._read_now.zero_()}
        self.read(0, self.total)
        self._read_now.copy_(self.inputs.moments[layer])
        refuse_overflow(layer, self._read_now)
        for closed, moment in list(self.residual.moments.items()):
            refuse_overflow(closed, moment)
            self.residual.close(closed)
        self.state()  # the other stages see what was summed on a GPU
        forget()

    def resume(self, layer: int, hidden: Tensor) -> None:
        """Take up the contexts where the last block left them."""
        self.means.resume(hidden)
        left_out = self._marked[self._first : self._first + len(hidden), : hidden.shape[1]]
        self._left_out = left_out.to(hidden.device) if left_out.any() else None

    def stream(self, layer: int, hidden: Tensor) -> None:
        """Take in the residual stream of one layer."""
        super().stream(layer, hidden)
        contexts = self._marked[self._first : self._first + len(hidden), : hidden.shape[1]]
        contexts.zero_() if self._left_out is None else contexts.copy_(self._left_out)


def folder_of(work: Unfinished) -> Path | None:
    """Return where what does not fit in memory may be kept; None where the work is in memory only."""
    return None if work.out is None else work.folder
