"""Run a model block by block over the calibration contexts, so that each block sees the outputs of the pruned ones.

One pass of the dense model records how each block is called. After that only the hidden states that enter the current
block are stored, in the model's dtype. At the start and at the end the result is compared with a forward pass of the
whole model. Nothing here depends on what is done to a block in between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from theodolite.corpus.corpus import Corpus
from theodolite.errors import WorkError
from theodolite.models import OpenModel
from theodolite.models.structure import first_tensor
from theodolite.passes.corpus_pass import refuse_nonfinite_stream

Hidden = Float[Tensor, "contexts positions width"]

MAX_ROUNDINGS = 16
"""Tolerance between block-by-block and whole forward passes, in machine epsilons of the largest entry."""

MOST_VARIANTS = 4
"""Distinct argument tensors per shape that a new one is compared with, to store equal ones once."""


Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Of a call, by place and by name."""


class BlockByBlock:
    """Hidden states that enter the current block, batch by batch, and how each block is called.

    Args:
        model: from `open_model`; its blocks may be changed between calls.
        corpus: the calibration contexts.
        batch: contexts per forward pass.
        between: called after every batch; it may raise to stop.

    Raises:
        WorkError: the family computes something between its blocks, so that they cannot be run one by one.
    """

    def __init__(self, model: OpenModel, corpus: Corpus, batch: int, between: Callable[[], None]) -> None:
        self._model, self._between = model, between
        self._ids = [corpus.ids(part) for part in corpus.batches(batch)]
        self._hidden: list[Hidden] = []
        self._calls: list[list[Arguments]] = []  # by batch, then by block, without hidden states
        self._shared = _SharedArguments()
        for number, ids in enumerate(self._ids):
            calls, hidden, output = self._model_pass(ids)
            self._calls.append(calls)
            self._hidden.append(hidden)
            if not number:
                for layer in range(model.layers):
                    hidden = self._run(layer, 0, hidden)
                self._compare(hidden, output)
            between()

    def read(self, layer: int) -> None:
        """Run a block on all contexts, for its hooks only."""
        for _ in self._outputs(layer):
            pass

    def advance(self, layer: int) -> None:
        """Run a block on all contexts; its outputs become the inputs of the next one."""
        for number, output in enumerate(self._outputs(layer)):
            refuse_nonfinite_stream(layer + 1, output)
            self._hidden[number] = output

    def verify_end(self) -> None:
        """Compare the output of the last block on the first batch with a forward pass of the pruned model.

        Raises:
            WorkError: they differ: the hidden states were not those of the pruned model.
        """
        last = self._model.layers - 1
        ours = self._run(last, 0, self._hidden[0])
        refuse_nonfinite_stream(last + 1, ours)
        self._compare(ours, self._model_pass(self._ids[0])[2])

    def _outputs(self, layer: int) -> Iterator[Hidden]:
        for number, hidden in enumerate(self._hidden):
            yield self._run(layer, number, hidden)
            self._between()

    def _run(self, layer: int, number: int, hidden: Hidden) -> Hidden:
        args, kwargs = self._calls[number][layer]
        if "hidden_states" in kwargs:
            kwargs = {**kwargs, "hidden_states": hidden}
        else:
            args = (hidden, *args[1:])
        with torch.inference_mode():
            return _first(self._model.structure.blocks[layer](*args, **kwargs))

    def _model_pass(self, ids: Tensor) -> tuple[list[Arguments], Hidden, Hidden]:
        """A forward pass: how each block is called, the input of the first and the output of the last one."""
        calls: list[Arguments] = []
        ends: list[Hidden] = []

        def enter(_: nn.Module, args: Any, kwargs: Any) -> None:
            if not calls:
                ends.append(first_tensor(args, kwargs))
            calls.append(self._shared.call((args, kwargs)))

        def leave(_: nn.Module, args: Any, output: Any) -> None:
            ends.append(_first(output))

        blocks = self._model.structure.blocks
        hooks = [block.register_forward_pre_hook(enter, with_kwargs=True) for block in blocks]
        hooks.append(blocks[-1].register_forward_hook(leave))
        try:
            self._model.forward(ids)
        finally:
            for hook in hooks:
                hook.remove()
        first, last = ends
        return calls, first, last

    def _compare(self, ours: Hidden, reference: Hidden) -> None:
        largest = reference.abs().max().double().clamp_min(1e-300)
        error = float((ours.double() - reference.double()).abs().max() / largest)
        if not error <= MAX_ROUNDINGS * torch.finfo(reference.dtype).eps:
            family = self._model.source.name
            raise WorkError(
                f"{family}: running its blocks one by one differs from the model's own pass by {error:.1e}, so it "
                "cannot be pruned block by block"
            )


class _SharedArguments:
    """Arguments of blocks without hidden states; equal tensors (masks, rotations) are stored once."""

    def __init__(self) -> None:
        self._tensors: dict[tuple[torch.Size, torch.dtype, torch.device], list[Tensor]] = {}

    def call(self, call: Arguments) -> Arguments:
        """The arguments without hidden states, each tensor replaced by an equal one if stored."""
        args, kwargs = call
        if "hidden_states" in kwargs:
            kwargs = {**kwargs, "hidden_states": None}
        else:
            args = (None, *args[1:])
        return tuple(map(self._stored, args)), {name: self._stored(value) for name, value in kwargs.items()}

    def _stored(self, value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(self._stored, value))
        if not isinstance(value, Tensor):
            return value
        alike = self._tensors.setdefault((value.shape, value.dtype, value.device), [])
        for known in alike:
            if torch.equal(known, value):
                return known
        if len(alike) < MOST_VARIANTS:
            alike.append(value)
        return value


def _first(output: Any) -> Hidden:
    return output[0] if isinstance(output, tuple) else output
