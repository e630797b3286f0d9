"""Where a model keeps its attention modules and its blocks, found in one forward pass.

No family is named here. The attention modules are those that call the tap, in the order in which they call it;
a block is the member of a `ModuleList` that holds one. What does not fit this picture is refused by name.
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
from theodolite.errors import UsageError
from theodolite.models.doors.transformers import tapped


@dataclass(frozen=True)
class Structure:
    """The attention modules of a model in the order of its layers, their names, and the block around each."""

    attention: tuple[nn.Module, ...]
    names: tuple[str, ...]
    blocks: tuple[nn.Module, ...]
    heads: int
    head_width: int

    @functools.cached_property
    def _layers(self) -> dict[nn.Module, int]:
        return {module: layer for layer, module in enumerate(self.attention)}

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
    modules: list[nn.Module] = []
    shapes: list[tuple[int, int]] = []

    def record(module: nn.Module, inputs: AttentionInputs) -> Tensor:
        modules.append(module)
        shapes.append((inputs.query.shape[1], inputs.query.shape[-1]))
        return attend(inputs)

    with tapped(model, record), torch.inference_mode():
        backbone(model)(**sample)
    if not modules:
        raise UsageError(
            f"{family} has no attention that goes through the attention interface of transformers; "
            "theodolite does not support this family yet"
        )
    if len(set(map(id, modules))) < len(modules):
        raise UsageError(
            f"{family} calls an attention module more than once a pass; theodolite needs one a layer"
        )
    if len(set(shapes)) > 1:
        raise UsageError(
            f"{family} has layers with different numbers or widths of heads: {sorted(set(shapes))}"
        )
    name_of = {id(module): name for name, module in model.named_modules()}
    names = [name_of[id(module)] for module in modules]
    places = [_block_of(model, name) for name in names]
    blocks = [stack[number] for stack, number in places]
    if len(set(map(id, blocks))) < len(blocks):
        raise UsageError(f"{family} has a block with two attention modules; theodolite needs one a block")
    if len(blocks) < sum(len(stack) for stack in {id(stack): stack for stack, _ in places}.values()):
        raise UsageError(
            f"{family} has blocks without attention; theodolite needs one attention module a block"
        )
    return Structure(tuple(modules), tuple(names), tuple(blocks), *shapes[0])


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
