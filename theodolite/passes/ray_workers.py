"""What a worker of a survey on Ray does: it opens the model, reads contexts, and makes the passes after the text."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from theodolite.accumulate.sums import State
from theodolite.corpus.corpus import Corpus
from theodolite.errors import TheodoliteError, UsageError
from theodolite.measure.extra import Extra
from theodolite.models import OpenModel, open_model
from theodolite.passes.corpus_pass import fingerprint_of
from theodolite.passes.ray_cluster import node_here
from theodolite.passes.survey import later_pass
from theodolite.passes.survey_pass import SurveyPass
from theodolite.system import embedded
from theodolite.system.choices import Attention
from theodolite.system.progress import Progress

Packed = dict[str, tuple[NDArray[Any], NDArray[Any] | None, tuple[int, ...]]]
"""A state as it travels between machines: arrays, without most of what is zero."""


def packed(state: dict[str, Tensor]) -> Packed:
    """A state as arrays that travel without a copy, without the rows along dimension 1 that are zero in all layers.

    A part of a corpus fills few groups of contexts and few places of the sample, and these are most of a state.
    """
    arrays: Packed = {}
    for name, tensor in state.items():
        values, rows = tensor, None
        if tensor.ndim > 2:
            filled = (tensor != 0).flatten(2).any(dim=2).any(dim=0).nonzero().flatten()
            if len(filled) < tensor.shape[1]:
                values, rows = tensor[:, filled], filled.numpy()
        arrays[name] = (values.contiguous().numpy(), rows, tuple(tensor.shape))
    return arrays


def unpacked(state: Packed) -> dict[str, Tensor]:
    """What `packed` was given."""
    tensors = {}
    for name, (values, rows, shape) in state.items():
        filled = torch.from_numpy(np.array(values))  # Ray's own arrays are read-only
        tensors[name] = filled if rows is None else filled.new_zeros(shape)
        if rows is not None:
            tensors[name][:, torch.from_numpy(np.array(rows))] = filled
    return tensors


@dataclass(frozen=True)
class Job:
    """What every worker opens and reads.

    Attributes:
        source: as `open_model` takes it.
        id: what the result calls it.
        expected: the fingerprint that it must have.
    """

    source: str | None
    id: str
    dtype: str
    revision: str | None
    attention: Attention | None
    device: str
    threads: int
    expected: dict[str, Any]
    corpus: Corpus
    batch: int
    seed: int
    extra: Sequence[Extra]


def job_of(
    model: OpenModel, device: str, corpus: Corpus, batch: int, seed: int, extra: Sequence[Extra]
) -> Job:
    """The job of workers that open this model on this kind of device."""
    source = str(Path(model.id).resolve()) if Path(model.id).is_dir() else model.id  # they stand elsewhere
    return Job(
        source=None if model.id == embedded.NAME else source,
        id=model.id,
        dtype=str(model.source.dtype).removeprefix("torch."),
        revision=model.revision,
        attention=cast(Any, model.source.attention),  # of a checkpoint: one of those of transformers
        device=device,
        threads=torch.get_num_threads(),
        expected=fingerprint_of(model) | {"device": device},
        corpus=corpus,
        batch=batch,
        seed=seed,
        extra=extra,
    )


class Worker:
    """The actor. It opens the model with its first call, so that what is wrong with it is raised there."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._model: OpenModel | None = None

    def place(self) -> str:
        """The node and the process: whoever answers is alive."""
        return f"node {node_here()}, process {os.getpid()}"

    def opened(self) -> OpenModel:
        """The model, opened once and found to be the driver's.

        Raises:
            UsageError: it is another model, or other packages; or as `open_model` has it, naming the node.
            WorkError: as `open_model` has it, naming the node.
        """
        if self._model is not None:
            return self._model
        job, node = self.job, node_here()
        torch.set_num_threads(job.threads)
        try:
            opening: dict[str, Any] = {"dtype": job.dtype, "device": job.device, "revision": job.revision}
            model = open_model(job.source, attention=job.attention, **opening)
        except TheodoliteError as error:
            raise type(error)(f"on node {node}: {error}") from error
        fingerprint = fingerprint_of(model)
        differences = [
            f"{name} is {fingerprint[name]}, not {value}"
            for name, value in job.expected.items()
            if fingerprint[name] != value
        ]
        if differences:
            raise UsageError(f"node {node} would measure something else: {'; '.join(differences)}")
        self._model = replace(model, id=job.id)
        return self._model

    def read(self, first: int, last: int, directions: Tensor | None) -> tuple[bool, Packed]:
        """That it was read, and what a pass over these contexts only sums: two objects, the first of which is small.

        `directions` are those of the sketches of a pass that began elsewhere.
        """
        job = self.job
        corpus_pass = SurveyPass(self.opened(), job.corpus, job.seed, job.batch, job.extra)
        if directions is not None:
            corpus_pass.sketches.look_along(directions)
        corpus_pass.read(first, last)
        return True, packed(corpus_pass.state())

    def later(self, name: str, given: Packed) -> tuple[State, dict[str, Any]]:
        """The state and the notes of one of the passes that follow the text."""
        job = self.job
        running = later_pass(name, self.opened(), job.corpus, job.seed, unpacked(given))
        running.run(Progress(running.total))
        return running.state(), running.notes
