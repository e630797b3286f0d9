"""Find the attention modules and the blocks of a model in one forward pass. No family is named here."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from theodolite.attention.inputs import AttentionInputs, attend
from theodolite.errors import UsageError
from theodolite.models.doors.pytorch import attention_not_followed
from theodolite.models.doors.taps import tap_by_door, tap_functions_of, tapped
from theodolite.models.one_row import IN_ONE_ROW, Batch, batch_read
from theodolite.models.source import Source
from theodolite.models.structure import Layout, Run, Structure, first_output, first_tensor, removed_on_leaving


@dataclass
class _BlockRun:
    """One run of a block: shapes of hidden states, and its attention module with its inputs."""

    block: nn.Module
    shape: tuple[int, ...]
    left: tuple[int, ...] = ()
    entered: tuple[int, ...] = ()
    attention: nn.Module | None = None
    inputs: AttentionInputs | None = None


OR_A_DOOR = "or give it a door: docs/modules.md#a-family"

SEVERAL = 3
"""Tokens of the pass in which the structure is found: their dimension is told from that of one context."""


def find_structure(source: Source) -> Structure:
    """Find the modules that call the tap, and their blocks, in a small forward pass; `UsageError` if unsupported."""
    model, blocks, run = source.root, source.blocks, source.probe(SEVERAL)
    family = type(model).__name__
    attention: set[nn.Module] = set()
    callers: set[nn.Module] = set()
    batches: set[Batch | None] = set()

    def record(module: nn.Module, inputs: AttentionInputs) -> Tensor:
        callers.add(module)
        batches.add(batch_read())
        if source.attends(module, inputs):
            attention.add(module)
        return attend(inputs)

    attention_not_followed()
    with tapped(model, record), torch.no_grad():
        run()
    where, missed = attention_not_followed() or (None, None)
    if not callers and tap_functions_of(model):
        try:
            return find_structure(source)
        except BaseException:
            tap_by_door(model)  # it may be changed, or be given a door, and opened again
            raise
    if callers and not attention:
        raise _no_such_attention(source, callers)
    if not attention and missed is not None and missed.weights:
        raise _not_followed(family, missed.operation)
    if not attention:
        between = f": {missed.operation} between its products is not followed" if missed is not None else ""
        raise UsageError(
            f"{family} computes no attention that could be read{between}; it goes neither through the attention "
            "interface of transformers nor through PyTorch's functions, and is no softmax between two products: write "
            f"it with softmax, {OR_A_DOOR}"
        )
    name_of = {module: name for name, module in model.named_modules()}
    members = _named_blocks(model, blocks) if blocks else _blocks_around(model, attention, name_of)
    of_blocks = {module for block in members for module in block.modules()}
    if missed is not None and missed.weights and where in of_blocks:
        raise _not_followed(family, missed.operation)
    layers = _layers_in_order(source, members, attention, run)
    inputs = [layer.inputs for layer in layers if layer.inputs is not None]
    contexts, _, positions, _ = inputs[0].query.shape
    streams = {shape for layer in layers for shape in (layer.shape, layer.left or layer.shape)}
    entered = {layer.entered for layer in layers if layer.inputs is not None}
    layouts = {Layout.of(shape, contexts, positions) for shape in streams}
    attention_layouts = {Layout.of(shape, contexts, positions) for shape in entered}
    layout, attention_layout = next(iter(layouts)), next(iter(attention_layouts))
    if any(batch is not None and batch[0] != contexts for batch in batches):
        raise UsageError(
            f"{family} attends to {contexts} of the contexts that it is given at once, its blocks read hidden states "
            f"of shapes {sorted(streams)}: {IN_ONE_ROW}"
        )
    one = len(streams) == len(attention_layouts) == 1 and all(len(shape) <= 3 for shape in entered)
    if not one or layout is None or attention_layout is None:
        raise UsageError(
            f"{family} has no one residual stream: its blocks read hidden states of shapes {sorted(streams)}, its "
            f"attention of {sorted(entered)}"
        )
    return Structure(
        attention=tuple(layer.attention for layer in layers),
        names=tuple(name_of[layer.attention or layer.block] for layer in layers),
        blocks=tuple(layer.block for layer in layers),
        heads_of=tuple(0 if layer.inputs is None else layer.inputs.query.shape[1] for layer in layers),
        head_width=max(of_layer.query.shape[-1] for of_layer in inputs),
        value_widths=tuple(0 if layer.inputs is None else layer.inputs.value.shape[-1] for layer in layers),
        width=math.prod(layers[0].shape) // (contexts * positions),
        attention_width=math.prod(next(iter(entered))) // (contexts * positions),
        layout=layout,
        attention_layout=attention_layout,
        cross=any(of_layer.key.shape[2] != of_layer.query.shape[2] for of_layer in inputs),
    )


def _no_such_attention(source: Source, callers: set[nn.Module]) -> UsageError:
    if isinstance(source.root, PreTrainedModel):
        return UsageError(
            f"{source.name} has no such attention (the default of an encoder-decoder is its decoder's self-attention): "
            "choose another with attention="
        )
    names = sorted({name.rpartition(".")[2] for name, of in source.root.named_modules() if of in callers})
    return UsageError(
        f"{source.name}: nothing that attends is called attention={source.attention!r}; its attention modules are "
        f"called {', '.join(names)}"
    )


def _not_followed(family: str, operation: str) -> UsageError:
    return UsageError(
        f"{family} does to the logits or weights of an attention what cannot be followed: {operation}; followed are "
        "numbers that multiply them, biases, masks, a cap by tanh and a softmax over keys: write it with these, "
        f"{OR_A_DOOR}"
    )


def _layers_in_order(
    source: Source, blocks: set[nn.Module], attention: set[nn.Module], run: Run
) -> list[_BlockRun]:
    """List the blocks that run, in the order in which they do; one that runs several times is a layer each time.

    Where blocks are named, what attends outside of them is left out.
    """
    model, named = source.root, bool(source.blocks)
    layers: list[_BlockRun] = []
    running: list[nn.Module] = []
    outputs: list[Tensor] = []  # of the block that ran last
    no_blocks = UsageError(
        f"{source.name} attends outside of blocks that are modules and run one after the other, so it has no residual "
        "stream that can be read"
    )

    def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
        hidden = first_tensor(args, kwargs)
        shape = tuple(hidden.shape)
        if module in blocks:
            # A block may itself be what attends; but a list of attention modules (XLM's) is none of blocks.
            if module in attention and outputs and outputs[-1] is not hidden:
                raise no_blocks
            running.append(module)
            layers.append(_BlockRun(module, shape))
        if module in attention and layers and (running or not named):
            layers[-1].entered = shape

    def record(module: nn.Module, inputs: AttentionInputs) -> Tensor:
        if module not in attention or (named and not running):
            return attend(inputs)
        if not layers:
            raise no_blocks
        before = layers[-1].inputs
        if layers[-1].attention is module and before is not None and before.query is inputs.query:
            return attend(inputs)  # the same attention to other values (DiffLlama)
        if layers[-1].attention is not None:
            raise _attends_twice(source, layers[-1], module)
        layers[-1].attention, layers[-1].inputs = module, inputs
        return attend(inputs)

    def leave(module: nn.Module, _args: Any, output: Any) -> None:
        if module in running:
            running.remove(module)
        if layers and layers[-1].block is module:
            outputs[:] = [first_output(output)]
            layers[-1].left = tuple(outputs[0].shape)

    hooks = [module.register_forward_pre_hook(enter, with_kwargs=True) for module in blocks | attention]
    hooks += [module.register_forward_hook(leave) for module in blocks]
    with removed_on_leaving(hooks), tapped(model, record), torch.no_grad():
        run()
    if named and not layers:
        raise no_blocks
    if all(layer.attention is None for layer in layers):
        raise UsageError(
            f"{type(model).__name__}: nothing attends in blocks={list(source.blocks or ())}: name those that hold "
            "the attention"
        )
    return layers


def _attends_twice(source: Source, layer: _BlockRun, module: nn.Module) -> UsageError:
    name_of = {of_model: name for name, of_model in source.root.named_modules()}
    first, second = name_of[layer.attention or module], name_of[module]
    line = (
        f"{source.name} has a block that attends twice ({first}, then {second}); theodolite needs one attention a "
        "block, with all of its heads"
    )
    if isinstance(source.root, PreTrainedModel) or first == second:
        return UsageError(line)
    place = first.rpartition(".")[2]
    return UsageError(f'{line}: say which, attention="{place}", or in which blocks, blocks=…')


def _named_blocks(model: nn.Module, names: Sequence[str]) -> set[nn.Module]:
    """Find the blocks by name, or those of the one list that is named."""
    try:
        named = [model.get_submodule(name) for name in names]
    except AttributeError as error:
        raise UsageError(f"{type(model).__name__} has no module for blocks={list(names)}: {error}") from error
    if len(named) == 1 and isinstance(named[0], LISTS):
        return set(named[0].children())
    return set(named)


def _blocks_around(
    model: nn.Module, attention: set[nn.Module], name_of: dict[nn.Module, str]
) -> set[nn.Module]:
    """Find the members of the lists that hold the attention modules; of no `ModuleList`, those like one that does."""
    around = {module: _list_around(model, name_of[module]) for module in attention}
    lists = sorted({name_of[pair[0]] for pair in around.values() if pair is not None})
    blocks: set[nn.Module] = set()
    for module, pair in around.items():
        if pair is None:
            say = f': say where they are, blocks="{lists[0] if lists else "transformer.h"}"'
            raise UsageError(
                f"{type(model).__name__}: attention module {name_of[module]} is not inside a list of blocks"
                + ("" if isinstance(model, PreTrainedModel) else say)
            )
        holding, block = pair
        alike = isinstance(holding, nn.ModuleList)
        blocks |= {member for member in holding.children() if alike or type(member) is type(block)}
    return blocks


LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def _list_around(model: nn.Module, name: str) -> tuple[nn.Module, nn.Module] | None:
    """Find the outermost `ModuleList` that holds the module of that name, and the member in which it is.

    A block may itself be a list of sub-layers (T5), so the innermost one will not do. Where there is no such list, the
    innermost of another kind.
    """
    parts = name.split(".")
    inside = [model.get_submodule(".".join(parts[:end])) for end in range(len(parts) + 1)]
    pairs = list(itertools.pairwise(inside))
    lists = [pair for pair in pairs if isinstance(pair[0], nn.ModuleList)]
    others = [pair for pair in pairs if isinstance(pair[0], LISTS)]
    return lists[0] if lists else others[-1] if others else None
