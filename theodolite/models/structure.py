"""Where a model keeps its attention modules and its blocks, found in one forward pass.

No family is named here. The attention modules are those that call the tap; a block is a member of a `ModuleList` that
holds one, in the order in which blocks run. A block that holds none (a convolution, a state space) is a layer as well,
with a stream and no heads. What does not fit this picture is refused by name.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from theodolite.attention.inputs import AttentionInputs, attend
from theodolite.errors import UsageError, WorkError
from theodolite.models.doors.transformers import tapped


class NoAttention(WorkError):
    """A layer's block does not attend, so that it has no heads."""


@dataclass(frozen=True)
class Structure:
    """The blocks of a model in the order of its layers, and the attention module of each.

    Attributes:
        attention: of each block its attention module, or None where it does not attend.
        names: of the attention modules; of a block that does not attend its own.
        blocks: the blocks.
        heads_of: query heads of each layer, 0 where it does not attend.
        head_width, value_width: of a query and of a value, where they are widest.
    """

    attention: tuple[nn.Module | None, ...]
    names: tuple[str, ...]
    blocks: tuple[nn.Module, ...]
    heads_of: tuple[int, ...]
    head_width: int
    value_width: int

    @property
    def heads(self) -> int:
        """Query heads of the layer that has most."""
        return max(self.heads_of)

    @functools.cached_property
    def attending(self) -> tuple[int, ...]:
        """The layers that attend."""
        return tuple(layer for layer, module in enumerate(self.attention) if module is not None)

    def attention_at(self, layer: int) -> nn.Module:
        """The attention module of a layer.

        Raises:
            NoAttention: the layer's block does not attend.
        """
        module = self.attention[layer]
        if module is None:
            raise NoAttention(f"layer {layer} ({self.names[layer]}) does not attend, so it has no heads")
        return module

    @functools.cached_property
    def _layers(self) -> dict[nn.Module, int]:
        return {self.attention_at(layer): layer for layer in self.attending}

    def layer_of(self, attention: nn.Module) -> int:
        """The layer of an attention module."""
        return self._layers[attention]


def find_structure(model: PreTrainedModel, sample: dict[str, Any]) -> Structure:
    """Run `sample` once and see who calls the tap.

    Raises:
        UsageError: nothing calls it, a module is shared between layers, a block has two attention modules, or
            layers differ in their number of heads.
    """
    family = type(model).__name__
    if model.config.is_encoder_decoder:
        raise UsageError(f"{family} is an encoder-decoder; theodolite reads models with one stack of blocks")
    calls = _attention_calls(model, sample)
    if not calls:
        raise UsageError(
            f"{family} has no attention that goes through the attention interface of transformers; "
            "theodolite does not support this family yet"
        )
    if len({id(module) for module, _ in calls}) < len(calls):
        raise UsageError(
            f"{family} calls an attention module more than once a pass; theodolite needs one a layer"
        )
    name_of = {id(module): name for name, module in model.named_modules()}
    names = [name_of[id(module)] for module, _ in calls]
    places = [_block_of(model, name) for name in names]
    attention_of = {id(stack[number]): call for (stack, number), call in zip(places, calls, strict=True)}
    if len(attention_of) < len(calls):
        raise UsageError(f"{family} has a block with two attention modules; theodolite needs one a block")
    stacks = {id(stack): stack for stack, _ in places}.values()
    blocks = _in_order(model, [block for stack in stacks for block in stack], {m for m, _ in calls}, sample)
    attending = [attention_of.get(id(block)) for block in blocks]
    names = [
        name_of[id(block if call is None else call[0])] for block, call in zip(blocks, attending, strict=True)
    ]
    return Structure(
        attention=tuple(None if call is None else call[0] for call in attending),
        names=tuple(names),
        blocks=tuple(blocks),
        heads_of=tuple(0 if call is None else call[1].query.shape[1] for call in attending),
        head_width=max(inputs.query.shape[-1] for _, inputs in calls),
        value_width=max(inputs.value.shape[-1] for _, inputs in calls),
    )


def _attention_calls(
    model: PreTrainedModel, sample: dict[str, Any]
) -> list[tuple[nn.Module, AttentionInputs]]:
    """Who calls the tap in a forward pass, and with what, in order."""
    calls: list[tuple[nn.Module, AttentionInputs]] = []

    def record(module: nn.Module, inputs: AttentionInputs) -> Tensor:
        calls.append((module, inputs))
        return attend(inputs)

    with tapped(model, record), torch.inference_mode():
        backbone(model)(**sample)
    return calls


def _in_order(
    model: PreTrainedModel, blocks: list[nn.Module], attention: set[nn.Module], sample: dict[str, Any]
) -> list[nn.Module]:
    """Those of the blocks that run, in the order in which they do.

    Raises:
        UsageError: what enters one of them, or its attention, is not the one residual stream.
    """
    ran: list[nn.Module] = []
    shapes: dict[bool, set[tuple[int, ...]]] = {True: set(), False: set()}

    def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
        shapes[module in attention].add(tuple(first_tensor(args, kwargs).shape))
        if module not in attention:
            ran.append(module)

    modules = {*blocks, *attention}
    hooks = [module.register_forward_pre_hook(enter, with_kwargs=True) for module in modules]
    with removed_on_leaving(hooks), torch.inference_mode():
        backbone(model)(**sample)
    if len(shapes[True] | shapes[False]) > 1 or any(len(shape) != 3 for shape in shapes[False]):
        raise UsageError(
            f"{type(model).__name__} has no one residual stream: its blocks read hidden states of shapes "
            f"{sorted(shapes[False])}, its attention of {sorted(shapes[True])}"
        )
    return ran


def backbone(model: PreTrainedModel) -> nn.Module:
    """The model without its output head: a survey needs no logits over the vocabulary."""
    return model.base_model


def first_tensor(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The hidden states among a block's or an attention module's arguments."""
    return kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]


def first_output(output: Any) -> Tensor:
    """The hidden states in what a block or an attention module returns."""
    return output[0] if isinstance(output, tuple) else output


@contextmanager
def removed_on_leaving(handles: Iterable[RemovableHandle]) -> Iterator[None]:
    """While open, the registered hooks stay; on leaving they are removed, also by an exception."""
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _block_of(model: nn.Module, name: str) -> tuple[nn.ModuleList, int]:
    """The outermost list that holds the module of that name, and the number of its member that does.

    A block may itself be a list of sub-layers (T5), so the innermost one will not do.
    """
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        parent = model.get_submodule(".".join(parts[: end - 1]))
        if isinstance(parent, nn.ModuleList):
            return parent, int(parts[end - 1])
    raise UsageError(f"{type(model).__name__}: attention module {name} is not inside a list of blocks")
