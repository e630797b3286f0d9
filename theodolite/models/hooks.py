"""Watch a forward pass: attention inputs, the vectors that enter attention, and the residual stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

from theodolite.attention.inputs import AttentionInputs, attend
from theodolite.models.doors.transformers import tapped
from theodolite.models.open import OpenModel
from theodolite.models.structure import first_tensor


@runtime_checkable
class Watcher(Protocol):
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
def watched(model: OpenModel, watcher: Watcher) -> Iterator[None]:
    """While open, every forward pass of `model` tells `watcher`; the model is restored on leaving."""
    structure = model.structure
    layer_of = {id(module): layer for layer, module in enumerate(structure.attention)}

    def enter(layer: int, tell: Callable[[int, Tensor], None]) -> Callable[..., None]:
        return lambda _module, args, kwargs: tell(layer, first_tensor(args, kwargs))

    def leave(layer: int) -> Callable[..., None]:
        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            watcher.stream(layer, output[0] if isinstance(output, tuple) else output)

        return hook

    hooks = [structure.blocks[0].register_forward_pre_hook(enter(0, watcher.stream), with_kwargs=True)]
    for layer, (block, attention) in enumerate(zip(structure.blocks, structure.attention, strict=True)):
        tell = enter(layer, watcher.attention_input)
        hooks.append(attention.register_forward_pre_hook(tell, with_kwargs=True))
        hooks.append(block.register_forward_hook(leave(layer + 1)))
    try:
        with tapped(model.hf, lambda module, inputs: watcher.attention(layer_of[id(module)], inputs)):
            yield
    finally:
        for hook in hooks:
            hook.remove()
