"""Hooks of a forward pass: attention inputs, the vectors that enter attention, and the residual stream."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

from theodolite.attention.inputs import AttentionInputs, attend
from theodolite.errors import WorkError
from theodolite.models.calls import capture_current_calls
from theodolite.models.doors.answers import innermost
from theodolite.models.doors.taps import tapped
from theodolite.models.guard import guarded, without_autocast
from theodolite.models.opened import OpenModel
from theodolite.models.source import Inputs
from theodolite.models.structure import Structure, Turns, first_output, first_tensor, removed_on_leaving


@runtime_checkable
class Hooks(Protocol):
    """Functions called in a forward pass, in the order in which the model computes; a subclass has what it needs."""

    def stream(self, layer: int, hidden: Tensor) -> None:
        """Receive the residual stream (batch, positions, d): layer 0 enters the first block, ℓ leaves block ℓ."""
        return

    def resume(self, layer: int, hidden: Tensor) -> None:
        """Receive the residual stream again as it enters a block after the first, where blocks may run alone."""
        return

    def attention_input(self, layer: int, hidden: Tensor) -> None:
        """Receive the input of a block's attention module (after its norm, where the norm comes first)."""
        return

    def attention(self, layer: int, inputs: AttentionInputs) -> Tensor:
        """Receive a block's attention inputs; return the output, (batch, queries, heads, value_width)."""
        return attend(inputs)


def positions_read(model: OpenModel, inputs: Inputs) -> int:
    """Count the positions that the residual stream has for a batch."""
    with guarded(model.root):
        calls = capture_current_calls(model.structure, lambda: model.source.run(inputs))
    return calls[model.attending[0]].hidden.shape[1]


@contextmanager
def hooked(model: OpenModel, hooks: Hooks) -> Iterator[None]:
    """Call `hooks` in every forward pass of `model` while open, and guard it (`guarded`); it is restored on leaving."""
    with guarded(model.root), _hooked(model, hooks):
        yield


@contextmanager
def _hooked(model: OpenModel, hooks: Hooks) -> Iterator[None]:
    structure, trunk = model.structure, model.source.trunk
    entered, left, read = Turns(structure.blocks), Turns(structure.blocks), Turns(structure.attention)
    attending: dict[nn.Module, tuple[int, tuple[int, int]]] = {}

    def begin(_module: nn.Module, _args: Any) -> None:
        for turns in (entered, left, read):
            turns.begin_pass()
        attending.clear()

    # Hooks travel with copies of a module (whose weights are read, say), which are no layers.
    @without_autocast()
    def enter_block(block: nn.Module, args: Any, kwargs: Any) -> None:
        if block in entered:
            layer = entered.take(block)
            received = hooks.stream if layer == 0 else hooks.resume
            received(layer, structure.layout.ordered(first_tensor(args, kwargs)))

    @without_autocast()
    def leave_block(block: nn.Module, _args: Any, output: Any) -> None:
        if block in left:
            hooks.stream(left.take(block) + 1, structure.layout.ordered(first_output(output)))

    def end(_module: nn.Module, _args: Any, _output: Any) -> None:
        # Another tap that is open inside has answered in its place: weights are read in a pass of their own, say.
        for layer, read_of in attending.values() if innermost() is opened else ():
            raise _other_attention(structure, layer, read_of[1])

    @without_autocast()
    def enter_attention(module: nn.Module, args: Any, kwargs: Any) -> None:
        if module in read:
            layer, hidden = read.take(module), structure.attention_layout.ordered(first_tensor(args, kwargs))
            attending[module] = layer, (hidden.shape[0], hidden.shape[1])
            hooks.attention_input(layer, hidden)

    handles = [trunk.register_forward_pre_hook(begin), trunk.register_forward_hook(end)]
    entering = {structure.blocks[0]} if model.streamed is None else set(structure.blocks)
    handles += [block.register_forward_pre_hook(enter_block, with_kwargs=True) for block in entering]
    handles += [module.register_forward_pre_hook(enter_attention, with_kwargs=True) for module in read]
    handles += [block.register_forward_hook(leave_block) for block in left]

    def tap(module: nn.Module, inputs: AttentionInputs) -> Tensor:
        # A decoder's attention to its encoder; the same attention once more, to other values (DiffLlama).
        if module not in attending:
            return attend(inputs)
        layer, read_of = attending.pop(module)
        own_keys = structure.cross or inputs.key.shape[2] == inputs.query.shape[2]
        if (inputs.query.shape[0], inputs.query.shape[2]) != read_of or not own_keys:
            raise _other_attention(structure, layer, read_of[1])
        return hooks.attention(layer, inputs)

    with removed_on_leaving(handles), tapped(model.root, tap) as opened:
        yield


def _other_attention(structure: Structure, layer: int, positions: int) -> WorkError:
    """Explain that a model attends to long texts otherwise than to those it was opened on (BigBird: block-sparse)."""
    return WorkError(
        f"layer {layer} ({structure.names[layer]}): to {positions} tokens it attends otherwise than to a few, in a way "
        "that cannot be read: use shorter contexts"
    )
