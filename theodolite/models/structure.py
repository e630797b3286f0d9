"""Where a model keeps its attention modules and its blocks, found in one forward pass.

No family is named here. The attention modules are those that call the tap; a block is a member of a `ModuleList` that
holds one, in the order in which blocks run. A block that holds none (a convolution, a state space) is a layer as well,
with a stream and no heads; one that runs several times (ALBERT) is a layer each time. What does not fit this picture is
refused by name.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from theodolite.attention.inputs import AttentionInputs, attend
from theodolite.errors import UsageError, WorkError
from theodolite.models.taps import tapped


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
        head_width: of a query, where it is widest.
        value_widths: of each layer's values, 0 where it does not attend.
    """

    attention: tuple[nn.Module | None, ...]
    names: tuple[str, ...]
    blocks: tuple[nn.Module, ...]
    heads_of: tuple[int, ...]
    head_width: int
    value_widths: tuple[int, ...]

    @property
    def heads(self) -> int:
        """Query heads of the layer that has most."""
        return max(self.heads_of)

    @property
    def value_width(self) -> int:
        """Width of a value, where it is widest."""
        return max(self.value_widths)

    @property
    def alike(self) -> bool:
        """Whether all layers that attend have as many heads, and as wide ones."""
        return len({(self.heads_of[layer], self.value_widths[layer]) for layer in self.attending}) == 1

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

    @property
    def shared(self) -> bool:
        """Whether several layers run one and the same block or attention module."""
        attention = [self.attention_at(layer) for layer in self.attending]
        return len(set(attention)) < len(attention) or len(set(self.blocks)) < len(self.blocks)


class Turns:
    """Which layer a call of a module is of: of one that several layers share, by how often it was called in this pass.

    Args:
        modules: those of the layers, in order; None where a layer has none.
    """

    def __init__(self, modules: Iterable[nn.Module | None]) -> None:
        self._layers: dict[nn.Module, list[int]] = {}
        for layer, module in enumerate(modules):
            if module is not None:
                self._layers.setdefault(module, []).append(layer)
        self._turn: dict[nn.Module, int] = {}

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self._layers)

    def __contains__(self, module: nn.Module) -> bool:
        return module in self._layers

    def begin_pass(self) -> None:
        """A forward pass begins; the one before may have been broken off."""
        self._turn.clear()

    def take(self, module: nn.Module) -> int:
        """The layer of this call."""
        turn = self._turn.get(module, 0)
        self._turn[module] = turn + 1
        return self._layers[module][turn % len(self._layers[module])]


@dataclass
class _Ran:
    """A block that runs, and how it attends, if it does."""

    block: nn.Module
    attention: nn.Module | None = None
    inputs: AttentionInputs | None = None


Run = Callable[[], object]
"""A forward pass on a small input."""


def find_structure(model: nn.Module, run: Run, blocks: Sequence[str] | None = None) -> Structure:
    """See in a forward pass who calls the tap, and which blocks run.

    Args:
        model: the model.
        run: a forward pass of it.
        blocks: names of its blocks, or of the one list that holds them; None: they are found.

    Raises:
        UsageError: nothing calls it, a block attends twice, or there is no one residual stream.
    """
    family = type(model).__name__
    attention: set[nn.Module] = set()

    def record(module: nn.Module, inputs: AttentionInputs) -> Tensor:
        attention.add(module)
        return attend(inputs)

    with tapped(model, record), torch.inference_mode():
        run()
    if not attention:
        raise UsageError(
            f"{family} has no attention that goes through the attention interface of transformers; "
            "theodolite does not support this family yet"
        )
    name_of = {module: name for name, module in model.named_modules()}
    found = _named_blocks(model, blocks) if blocks else _blocks_around(model, attention, name_of)
    layers = _layers_in_order(model, found, attention, run)
    inputs = [layer.inputs for layer in layers if layer.inputs is not None]
    return Structure(
        attention=tuple(layer.attention for layer in layers),
        names=tuple(name_of[layer.attention or layer.block] for layer in layers),
        blocks=tuple(layer.block for layer in layers),
        heads_of=tuple(0 if layer.inputs is None else layer.inputs.query.shape[1] for layer in layers),
        head_width=max(of_layer.query.shape[-1] for of_layer in inputs),
        value_widths=tuple(0 if layer.inputs is None else layer.inputs.value.shape[-1] for layer in layers),
    )


def _layers_in_order(
    model: nn.Module, blocks: set[nn.Module], attention: set[nn.Module], run: Run
) -> list[_Ran]:
    """The blocks that run, in the order in which they do; one that runs several times is a layer each time.

    Raises:
        UsageError: a block attends twice, or what enters one, or its attention, is not the one residual stream.
    """
    family = type(model).__name__
    layers: list[_Ran] = []
    shapes: dict[bool, set[tuple[int, ...]]] = {True: set(), False: set()}

    def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
        shapes[module in attention].add(tuple(first_tensor(args, kwargs).shape))
        if module not in attention:
            layers.append(_Ran(module))

    def record(module: nn.Module, inputs: AttentionInputs) -> Tensor:
        if not layers:
            raise UsageError(
                f"{family} attends outside of a list of blocks ({type(module).__name__}), so that it has no stream"
            )
        if layers[-1].attention is not None:
            raise UsageError(
                f"{family} has a block that attends twice; theodolite needs one attention a block"
            )
        layers[-1].attention, layers[-1].inputs = module, inputs
        return attend(inputs)

    hooks = [module.register_forward_pre_hook(enter, with_kwargs=True) for module in blocks | attention]
    with removed_on_leaving(hooks), tapped(model, record), torch.inference_mode():
        run()
    if len(shapes[True] | shapes[False]) > 1 or any(len(shape) != 3 for shape in shapes[False]):
        raise UsageError(
            f"{family} has no one residual stream: its blocks read hidden states of shapes "
            f"{sorted(shapes[False])}, its attention of {sorted(shapes[True])}"
        )
    return layers


def first_tensor(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The hidden states among a block's or an attention module's arguments."""
    if "hidden_states" in kwargs:
        return kwargs["hidden_states"]
    return next(given for given in (*args, *kwargs.values()) if isinstance(given, Tensor))


def first_output(output: Any) -> Tensor:
    """The hidden states in what a block or an attention module returns."""
    while isinstance(output, tuple | list):
        output = output[0]
    return output


@contextmanager
def removed_on_leaving(handles: Iterable[RemovableHandle]) -> Iterator[None]:
    """While open, the registered hooks stay; on leaving they are removed, also by an exception."""
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _named_blocks(model: nn.Module, names: Sequence[str]) -> set[nn.Module]:
    """Blocks by name, or those of the one list that is named."""
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
    """The members of the lists that hold the attention modules; of what is no `ModuleList`, those like one that does.

    Raises:
        UsageError: an attention module is in no list.
    """
    blocks: set[nn.Module] = set()
    for module in attention:
        around = _list_around(model, name_of[module])
        if around is None:
            raise UsageError(
                f"{type(model).__name__}: attention module {name_of[module]} is not inside a list of blocks"
                + (
                    ""
                    if isinstance(model, PreTrainedModel)
                    else ': say where they are, blocks="transformer.h"'
                )
            )
        holding, block = around
        alike = isinstance(holding, nn.ModuleList)
        blocks |= {member for member in holding.children() if alike or type(member) is type(block)}
    return blocks


LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def _list_around(model: nn.Module, name: str) -> tuple[nn.Module, nn.Module] | None:
    """The outermost `ModuleList` that holds the module of that name, and the member in which it is.

    A block may itself be a list of sub-layers (T5), so the innermost one will not do. Where there is no such list, the
    innermost of another kind.
    """
    parts = name.split(".")
    inside = [model.get_submodule(".".join(parts[:end])) for end in range(len(parts) + 1)]
    pairs = list(itertools.pairwise(inside))
    lists = [pair for pair in pairs if isinstance(pair[0], nn.ModuleList)]
    others = [pair for pair in pairs if isinstance(pair[0], LISTS)]
    return lists[0] if lists else others[-1] if others else None
