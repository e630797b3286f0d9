"""Hooks of a forward pass: attention inputs, the vectors that enter attention, and the residual stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol, runtime_checkable

from torch import Tensor

from theodolite.attention.inputs import AttentionInputs, attend
from theodolite.models.doors.transformers import tapped
from theodolite.models.guard import guarded
from theodolite.models.open import OpenModel
from theodolite.models.structure import first_output, first_tensor, removed_on_leaving


@runtime_checkable
class Hooks(Protocol):
    """What is called in a forward pass, in the order in which the model computes; a subclass has what it needs."""

    def stream(self, layer: int, hidden: Tensor) -> None:
        """The residual stream (batch, positions, d): layer 0 enters the first block, ℓ leaves block ℓ."""
        return

    def attention_input(self, layer: int, hidden: Tensor) -> None:
        """What enters the attention module of a block (after its norm, where the norm comes first)."""
        return

    def attention(self, layer: int, inputs: AttentionInputs) -> Tensor:
        """A block's attention inputs; returns the output, (batch, queries, heads, value_width)."""
        return attend(inputs)


@contextmanager
def hooked(model: OpenModel, hooks: Hooks) -> Iterator[None]:
    """While open, every forward pass of `model` calls `hooks`, and it is `guarded`; it is restored on leaving."""
    with guarded(model.hf), _hooked(model, hooks):
        yield


@contextmanager
def _hooked(model: OpenModel, hooks: Hooks) -> Iterator[None]:
    structure = model.structure

    def entering(call: Callable[[int, Tensor], None], layer: int) -> Callable[..., None]:
        return lambda _module, args, kwargs: call(layer, first_tensor(args, kwargs))

    def leaving(layer: int) -> Callable[..., None]:
        return lambda _module, _args, output: hooks.stream(layer, first_output(output))

    handles = [structure.blocks[0].register_forward_pre_hook(entering(hooks.stream, 0), with_kwargs=True)]
    for layer, (block, attention) in enumerate(zip(structure.blocks, structure.attention, strict=True)):
        if attention is not None:
            enter = entering(hooks.attention_input, layer)
            handles.append(attention.register_forward_pre_hook(enter, with_kwargs=True))
        handles.append(block.register_forward_hook(leaving(layer + 1)))
    tap = tapped(model.hf, lambda module, inputs: hooks.attention(structure.layer_of(module), inputs))
    with removed_on_leaving(handles), tap:
        yield
