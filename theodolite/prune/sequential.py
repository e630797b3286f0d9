"""Run a model block by block over the calibration contexts, so that each block sees the outputs of the pruned ones.

How each block is called is recorded in a pass in which blocks give back what they get: masks and angles do not depend
on it. Where one context, the witness, shows that they do, every context gets a whole pass. After that only the hidden
states that enter the current block are stored, in the model's dtype. The witness goes through the blocks as well: at
the start and at the end it is compared with a pass of the whole model. Nothing here depends on what is done to a block
in between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from theodolite.corpus.corpus import Corpus
from theodolite.errors import WorkError
from theodolite.models import OpenModel
from theodolite.models.structure import first_tensor
from theodolite.passes.corpus_pass import refuse_nonfinite_stream
from theodolite.system.files import disk_errors

Hidden = Float[Tensor, "contexts positions width"]

MAX_ROUNDINGS = 16
"""Tolerance between block-by-block and whole forward passes, in machine epsilons of the largest entry."""

MOST_VARIANTS = 4
"""Distinct argument tensors per shape that a new one is compared with, to store equal ones once."""


def in_file(tensor: Tensor, folder: Path) -> Tensor:
    """Copy a tensor into a file without a name, which the system keeps in memory as far as there is room.

    It is written before it is mapped, so that a full disk is an error.
    """
    flat = tensor.detach().cpu().contiguous()
    with NamedTemporaryFile(dir=folder) as file:
        file.write(flat.view(torch.uint8).numpy().data)
        file.flush()
        mapped = torch.from_file(file.name, shared=True, size=flat.numel(), dtype=flat.dtype)
    return mapped.view(flat.shape)


Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Of a call, by place and by name."""


class BlockByBlock:
    """Hidden states that enter the current block, batch by batch, and how each block is called.

    Args:
        model: from `open_model`; its blocks may be changed between calls.
        corpus: the calibration contexts.
        batch: contexts per forward pass.
        between: called after every batch; it may raise to stop.
        folder: keep hidden states in files without a name there, which memory holds as far as it has room; None: in
            memory.

    Raises:
        WorkError: the family computes something between its blocks, so that they cannot be run one by one; or the
            folder, which is made, cannot be written to.
    """

    def __init__(
        self,
        model: OpenModel,
        corpus: Corpus,
        batch: int,
        between: Callable[[], None],
        folder: Path | None = None,
    ) -> None:
        self._model, self._between, self._folder = model, between, folder
        self._shared = _SharedArguments()
        self._first_context = corpus.ids(slice(0, 1))
        self._witness_calls, self._witness = self._verified_pass()
        record = self._passing_through if self._may_pass_through() else self._pass
        self._hidden: list[Hidden] = []
        self._calls: list[list[Arguments]] = []  # by batch, then by block, without hidden states
        for part in corpus.batches(batch):
            calls, outputs = record(corpus.ids(part))
            self._hidden.append(self._kept(outputs.entered))
            self._calls.append(calls)
            between()

    def read(self, layer: int) -> None:
        """Run a block on all contexts, for its hooks only."""
        for _ in self._outputs(layer):
            pass

    def advance(self, layer: int) -> None:
        """Run a block on all contexts; its outputs become the inputs of the next one."""
        self._witness = self._run(layer, self._witness_calls, self._witness)
        for number, output in enumerate(self._outputs(layer)):
            refuse_nonfinite_stream(layer + 1, output)
            self._hidden[number] = self._kept(output, self._hidden[number])

    def verify_end(self) -> None:
        """Raise `WorkError` where the last block gives the witness another output than a pass of the pruned model."""
        last = self._model.layers - 1
        ours = self._run(last, self._witness_calls, self._witness)
        refuse_nonfinite_stream(last + 1, ours)
        self._compare(ours, _first(self._pass(self._first_context)[1].left))

    def _kept(self, hidden: Hidden, before: Hidden | None = None) -> Hidden:
        """Store hidden states until the next block: in the place of those before, if these are in a file."""
        if self._folder is None:
            return hidden
        if before is not None:
            return before.copy_(hidden)
        with disk_errors(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
            return in_file(hidden, self._folder)

    def _outputs(self, layer: int) -> Iterator[Hidden]:
        for number, calls in enumerate(self._calls):
            yield self._run(layer, calls, self._hidden[number].to(self._model.device))
            self._between()

    def _run(self, layer: int, calls: list[Arguments], hidden: Hidden) -> Hidden:
        args, kwargs = calls[layer]
        if "hidden_states" in kwargs:
            kwargs = {**kwargs, "hidden_states": hidden}
        else:
            args = (hidden, *args[1:])
        with torch.inference_mode():
            return _first(self._model.structure.blocks[layer](*args, **kwargs))

    def _verified_pass(self) -> tuple[list[Arguments], Hidden]:
        """Record how the model's own pass over the witness calls each block, and what enters the first."""
        calls, ends = self._pass(self._first_context)
        self._output = ends.left
        hidden = ends.entered
        for layer in range(self._model.layers):
            hidden = self._run(layer, calls, hidden)
        self._compare(hidden, _first(ends.left))
        return calls, ends.entered

    def _may_pass_through(self) -> bool:
        """Whether blocks are called in the same way when each returns its input."""
        if isinstance(self._output, tuple) and any(part is not None for part in self._output[1:]):
            return False  # T5's give the next ones more than hidden states
        calls, ends = self._passing_through(self._first_context)
        return torch.equal(ends.entered, self._witness) and _equal(calls, self._witness_calls)

    def _pass(self, ids: Tensor) -> tuple[list[Arguments], _Ends]:
        """Run the model's own pass: how each block is called, the input of the first and the output of the last one."""
        calls: list[Arguments] = []
        entered: list[Hidden] = []
        left: list[Any] = []

        def enter(_: nn.Module, args: Any, kwargs: Any) -> None:
            if not calls:
                entered.append(first_tensor(args, kwargs))
            calls.append(self._shared.call((args, kwargs)))

        blocks = self._model.structure.blocks
        hooks = [block.register_forward_pre_hook(enter, with_kwargs=True) for block in blocks]
        hooks.append(blocks[-1].register_forward_hook(lambda _, args, output: left.append(output)))
        try:
            self._model.forward(ids)
        finally:
            for hook in hooks:
                hook.remove()
        return calls, _Ends(entered[0], left[0])

    def _passing_through(self, ids: Tensor) -> tuple[list[Arguments], _Ends]:
        """Run a pass in which every block returns its input; gives the same as `_pass`."""
        rest = self._output[1:] if isinstance(self._output, tuple) else None

        def give_back(*args: Any, **kwargs: Any) -> Any:
            hidden = first_tensor(args, kwargs)
            return hidden if rest is None else (hidden, *rest)

        with ExitStack() as undo:
            for block in self._model.structure.blocks:
                undo.enter_context(_with_forward(block, give_back))
            return self._pass(ids)

    def _compare(self, ours: Hidden, reference: Hidden) -> None:
        largest = reference.abs().max().double().clamp_min(1e-300)
        error = float((ours.double() - reference.double()).abs().max() / largest)
        if not error <= MAX_ROUNDINGS * torch.finfo(reference.dtype).eps:
            family = self._model.source.name
            raise WorkError(
                f"{family}: running its blocks one by one differs from the model's own pass by {error:.1e}, so it "
                "cannot be pruned block by block"
            )


class _Ends(NamedTuple):
    """What enters the first block, and what the last one returns."""

    entered: Hidden
    left: Any


class _SharedArguments:
    """Arguments of blocks without hidden states; equal tensors (masks, rotations) are stored once."""

    def __init__(self) -> None:
        self._tensors: dict[tuple[torch.Size, torch.dtype, torch.device], list[Tensor]] = {}

    def call(self, call: Arguments) -> Arguments:
        """Strip hidden states from arguments, and replace each tensor by an equal one if stored."""
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


@contextmanager
def _with_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """While open, a call of the module runs its hooks and `forward`."""
    own = module.__dict__.get("forward")
    module.__dict__["forward"] = forward
    try:
        yield
    finally:
        if own is None:
            del module.__dict__["forward"]
        else:
            module.__dict__["forward"] = own


def _equal(one: Any, other: Any) -> bool:
    """Whether two arguments, or lists of them, are the same: tensors by their numbers, all else by `==`."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)
    if type(one) is not type(other):
        return False
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(_equal, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_equal(one[name], other[name]) for name in one)
    return one is other or bool(one == other)
