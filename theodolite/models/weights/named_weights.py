"""W_q and W_k of modules of one's own by the names of what holds them: where `projections.py` finds no matrix.

For tensors of three dimensions (heads, width, head_width), in any order, and for weights that are computed from others
(`torch.nn.utils.parametrizations`). A name is believed where the tap says so: with random weights in a copy of the
attention module, queries and keys must be its input times entries of the named tensor, each taken once and in steps.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.utils import parametrize

from theodolite.errors import UsageError, WorkError
from theodolite.models.calls import Calls
from theodolite.models.structure import Structure
from theodolite.models.training.adapters import refuse_replaced_weights
from theodolite.models.training.shards import Place
from theodolite.models.weights.head_weights import copy_in_dtype, read_head_weights

TOLERANCE = 1e-10
"""Of entries, relative to the largest: those of the copy are in float64, and no two random ones are as near."""


@dataclass(frozen=True)
class NamedWeight:
    """W of all heads as a view of a tensor, which is looked up, or computed, at every reading.

    Attributes:
        module, name: the submodule, and the attribute that holds the tensor.
        shape, steps, first: of the view: (heads, width, head_width), how far apart entries lie, and where it begins.
    """

    module: nn.Module
    name: str
    shape: tuple[int, ...]
    steps: tuple[int, ...]
    first: int

    @property
    def is_there(self) -> bool:
        """Whether the module still has parameters under this name."""
        return bool(self.places)

    @property
    def places(self) -> list[Place]:
        """Of what the tensor is, or what it is computed from."""
        if self.name in self.module._parameters:
            return [(self.module, self.name)]
        if not parametrize.is_parametrized(self.module, self.name):
            return []
        parametrizations: Any = self.module.parametrizations
        parts = parametrizations[self.name].modules()
        return [(part, name) for part in parts for name, p in part._parameters.items() if p is not None]

    def of(self, tensor: Tensor) -> Float[Tensor, "heads width head_width"]:
        """W of every head, from the tensor."""
        return tensor.reshape(-1).as_strided(self.shape, self.steps, self.first)


@dataclass(frozen=True)
class NamedWeights:
    """Those of one layer, for what takes `Projections`."""

    layer: int
    query: NamedWeight
    key: NamedWeight

    def factors(
        self,
    ) -> tuple[Float[Tensor, "heads width head_width"], Float[Tensor, "key_heads width head_width"]]:
        """W_q and W_k, differentiable; of one tensor, which is computed once, where both are in it."""
        query = getattr(self.query.module, self.query.name)
        fused = (self.query.module, self.query.name) == (self.key.module, self.key.name)
        key = query if fused else getattr(self.key.module, self.key.name)
        return self.query.of(query), self.key.of(key)

    @property
    def places(self) -> list[Place]:
        """Of what holds them."""
        return list(dict.fromkeys([*self.query.places, *self.key.places]))


def find_named_weights(
    model: nn.Module, structure: Structure, calls: Calls, layers: list[int], names: str | Sequence[str]
) -> list[NamedWeights]:
    """Find W_q and W_k of some layers in the tensors of these names. Call it without gradients.

    Args:
        model, structure: the model; `calls` is what `capture_calls` gave.
        layers: which.
        names: inside each attention module, of queries and keys (what follows is not looked at), or of one tensor
            that holds both: "qkv.weight".

    Raises:
        UsageError: there are no such parameters, or queries and keys are not the input times their entries.
    """
    refuse_replaced_weights(model, "penalised")
    listed = [names] if isinstance(names, str) else list(names)
    if not listed or not all(isinstance(name, str) for name in listed):
        raise UsageError(
            f'qkv is {names!r}: give names inside the attention module, ["q.weight", "k.weight"]'
        )
    return [_find(model, structure, layer, calls, listed[0], (listed * 2)[1]) for layer in layers]


def _find(
    model: nn.Module, structure: Structure, layer: int, calls: Calls, query: str, key: str
) -> NamedWeights:
    attention, where = structure.attention_at(layer), f"layer {layer} ({structure.names[layer]})"
    copied = copy_in_dtype(attention, torch.float64).eval()
    generator = torch.Generator().manual_seed(layer)
    for parameter in copied.parameters():
        if parameter.is_floating_point():
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    modules = tuple(copied if n == layer else module for n, module in enumerate(structure.attention))
    try:
        read = read_head_weights(model, replace(structure, attention=modules), layer, calls[layer])
    except WorkError as error:
        raise UsageError(f"{error}, so qkv={[query, key]} cannot be their weights") from error
    weights = []
    for name, expected, what in ((query, read.w_q, "queries"), (key, read.w_k, "keys")):
        try:
            tensor = operator.attrgetter(name)(copied)
            module = attention.get_submodule(name.rpartition(".")[0])
        except AttributeError as error:
            raise UsageError(f"{where} has no {name}, which qkv= names") from error
        view = _view(tensor, expected) if isinstance(tensor, Tensor) and read.exact else None
        weight = None if view is None else NamedWeight(module, name.rpartition(".")[2], *view)
        if weight is None or not weight.is_there:
            raise UsageError(
                f"{where}: its {what} are not its input times entries of {name}, which qkv= names: leave it out by "
                "layers=[…], or name what is multiplied last"
            )
        weights.append(weight)
    return NamedWeights(layer, *weights)


def _view(
    tensor: Tensor, expected: Float[Tensor, "heads width head_width"]
) -> tuple[tuple[int, ...], tuple[int, ...], int] | None:
    """Shape, steps and beginning of the view of a tensor that is the matrices expected, grouped ones once each."""
    expected = torch.unique_consecutive(expected, dim=0)
    values, order = tensor.detach().double().cpu().flatten().sort()
    right = torch.searchsorted(values, expected.contiguous()).clamp(1, len(values) - 1)
    nearest = torch.where(expected - values[right - 1] < values[right] - expected, right - 1, right)
    places = order[nearest]
    first, steps = int(places[0, 0, 0]), []
    for dimension, size in enumerate(places.shape):
        step = int(places.select(dimension, min(1, size - 1))[0, 0]) - first
        steps.append(step)
    grids = torch.meshgrid(*(torch.arange(size) for size in places.shape), indexing="ij")
    in_steps = sum(step * grid for step, grid in zip(steps, grids, strict=True)) + first
    near = (expected - values[nearest]).abs().max() <= TOLERANCE * values.abs().max()
    if not (near and torch.equal(places, torch.as_tensor(in_steps)) and min(steps) >= 0):
        return None
    return tuple(places.shape), tuple(steps), first
