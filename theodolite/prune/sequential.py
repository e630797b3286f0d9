"""A model run block by block over the calibration contexts, so that each block sees what the pruned ones give it.

One pass of the dense model says how it calls each block. After that only the hidden states that enter the current
block are kept, in the model's dtype, and a block is run by itself. Whether that is what the model does is compared at
the start and at the end. Nothing here knows what is done to a block in between.
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
from theodolite.models.head_weights import Call
from theodolite.models.structure import first_tensor
from theodolite.passes.corpus_pass import refuse_bad_numbers

Hidden = Float[Tensor, "contexts positions width"]

MAX_ROUNDINGS = 16
"""Two ways to compute the same differ by at most so many roundings of the model's dtype, of the largest entry."""

MOST_VARIANTS = 4
"""Tensors of one shape among the arguments of blocks that a new one is compared with, so that it is kept once."""


class BlockByBlock:
    """Hidden states that enter the current block, batch by batch, and how each block is called.

    Args:
        model: from `open_model`; its blocks may be changed between calls.
        corpus: the calibration contexts.
        batch: contexts a forward pass.
        between: called after every batch; it may raise to stop.

    Raises:
        WorkError: the family does something between its blocks, so that they cannot be run one by one.
    """

    def __init__(self, model: OpenModel, corpus: Corpus, batch: int, between: Callable[[], None]) -> None:
        self._model, self._between = model, between
        self._ids = list(corpus.contexts.split(batch))
        self._hidden: list[Hidden] = []
        self._calls: list[list[Call]] = []  # by batch, then by block, without hidden states
        self._shared = _SharedArguments()
        for number, ids in enumerate(self._ids):
            calls, hidden, output = self._own_pass(ids)
            self._calls.append(calls)
            self._hidden.append(hidden)
            if not number:
                for layer in range(model.layers):
                    hidden = self._run(layer, 0, hidden)
                self._compare(hidden, output)
            between()

    def read(self, layer: int) -> None:
        """Run a block on all contexts for the sake of those who watch."""
        for _ in self._outputs(layer):
            pass

    def advance(self, layer: int) -> None:
        """Run a block on all contexts: what leaves it enters the next one."""
        for number, output in enumerate(self._outputs(layer)):
            refuse_bad_numbers(layer + 1, output)
            self._hidden[number] = output

    def verify_end(self) -> None:
        """Before the last block: compare what leaves it for the first batch with the model's own pass, as it is now.

        Raises:
            WorkError: what entered the blocks was not what the pruned model gives them.
        """
        last = self._model.layers - 1
        ours = self._run(last, 0, self._hidden[0])
        refuse_bad_numbers(last + 1, ours)
        self._compare(ours, self._own_pass(self._ids[0])[2])

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

    def _own_pass(self, ids: Tensor) -> tuple[list[Call], Hidden, Hidden]:
        """How the model calls each of its blocks on some contexts, what enters the first and leaves the last one."""
        calls: list[Call] = []
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
            family = type(self._model.hf).__name__
            raise WorkError(
                f"{family}: running its blocks one by one differs from the model's own pass by {error:.1e}, so it "
                "cannot be pruned block by block"
            )


class _SharedArguments:
    """Arguments of blocks, without hidden states; tensors that are alike (masks, rotations) are kept once."""

    def __init__(self) -> None:
        self._seen: dict[tuple[torch.Size, torch.dtype, torch.device], list[Tensor]] = {}

    def call(self, call: Call) -> Call:
        """The arguments without their hidden states, each tensor the one that is known where there is one."""
        args, kwargs = call
        if "hidden_states" in kwargs:
            kwargs = {**kwargs, "hidden_states": None}
        else:
            args = (None, *args[1:])
        return tuple(map(self._kept, args)), {name: self._kept(value) for name, value in kwargs.items()}

    def _kept(self, value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(self._kept, value))
        if not isinstance(value, Tensor):
            return value
        alike = self._seen.setdefault((value.shape, value.dtype, value.device), [])
        for known in alike:
            if torch.equal(known, value):
                return known
        if len(alike) < MOST_VARIANTS:
            alike.append(value)
        return value


def _first(output: Any) -> Hidden:
    return output[0] if isinstance(output, tuple) else output
