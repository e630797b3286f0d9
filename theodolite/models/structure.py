"""A model's attention modules and blocks. No family is named here.

The attention modules are those that call the tap; a block is a member of a `ModuleList` that holds one. A block that
holds none (a convolution, a state space) is a layer as well; one that runs several times (ALBERT) is one each time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from theodolite.errors import WorkError
from theodolite.models.one_row import unrolled

Run = Callable[[], object]
"""A forward pass on a small input."""


class NoAttention(WorkError):
    """A layer's block does not attend, so that it has no heads."""


@dataclass(frozen=True)
class Layout:
    """The dimensions of hidden states that are contexts and positions; the same one for contexts in a row of tokens."""

    contexts: int = 0
    positions: int = 1

    @classmethod
    def of(cls, shape: Sequence[int], contexts: int, positions: int) -> Layout | None:
        """Find the layout of a tensor with so many contexts and positions; None where it has none such."""
        for layout in (cls(0, 1), cls(1, 0), cls(1, 2), cls(0, 2)) if len(shape) >= 3 else ():
            fits = layout.positions < len(shape) and shape[layout.positions] == positions
            if fits and shape[layout.contexts] == contexts:
                return layout
        if tuple(shape[:-1]) in ((contexts * positions,), (1, contexts * positions)):
            return cls(len(shape) - 2, len(shape) - 2)
        return None

    @property
    def is_row(self) -> bool:
        """True if contexts follow one another in a row of tokens, (tokens, width) or (1, tokens, width)."""
        return self.contexts == self.positions

    def ordered(self, hidden: Tensor) -> Float[Tensor, "contexts positions width"]:
        """Put contexts first, then positions; several streams (DeepSeek-V4, Gemma 3n) one behind the other."""
        if self.is_row:
            return unrolled(hidden, self.contexts).flatten(0, self.contexts)
        if (self.contexts, self.positions) != (0, 1):
            hidden = hidden.movedim((self.contexts, self.positions), (0, 1))
        return hidden if hidden.ndim == 3 else hidden.flatten(2)

    def placed(self, hidden: Float[Tensor, "contexts positions width"]) -> Tensor:
        """Lay a tensor out as the model has it, where it has one stream."""
        if self.is_row:
            return hidden.flatten(0, 1)[(None,) * self.contexts]
        return hidden.movedim((0, 1), (self.contexts, self.positions))


@dataclass(frozen=True)
class Structure:
    """The blocks of a model in the order of its layers, and the attention module of each.

    Attributes:
        attention: of each block its attention module, or None where it does not attend.
        names: of the attention modules; of a block that does not attend its own.
        heads_of: query heads of each layer, 0 where it does not attend; so are `value_widths`.
        head_width: of a query, where it is widest.
        width: of the residual stream; several streams count together.
        attention_width: of what attention modules read (Zamba's read the embeddings as well, MobileBERT's a part).
        layout: how the residual stream lies; `attention_layout`: what attention modules read.
        cross: whether keys and values are made of other hidden states than queries: those of an encoder.
    """

    attention: tuple[nn.Module | None, ...]
    names: tuple[str, ...]
    blocks: tuple[nn.Module, ...]
    heads_of: tuple[int, ...]
    head_width: int
    value_widths: tuple[int, ...]
    width: int
    attention_width: int
    layout: Layout
    attention_layout: Layout
    cross: bool

    @property
    def value_width(self) -> int:
        """Width of a value, where it is widest."""
        return max(self.value_widths)

    @property
    def alike(self) -> bool:
        """True if all layers that attend have as many heads, and as wide ones."""
        return len({(self.heads_of[layer], self.value_widths[layer]) for layer in self.attending}) == 1

    @functools.cached_property
    def attending(self) -> tuple[int, ...]:
        """The layers that attend."""
        return tuple(layer for layer, module in enumerate(self.attention) if module is not None)

    def attention_at(self, layer: int) -> nn.Module:
        """Return the attention module of a layer; `NoAttention` where its block does not attend."""
        module = self.attention[layer]
        if module is None:
            raise NoAttention(f"layer {layer} ({self.names[layer]}) does not attend, so it has no heads")
        return module

    @property
    def shared(self) -> bool:
        """True if several layers run one and the same block or attention module."""
        attention = [self.attention_at(layer) for layer in self.attending]
        return len(set(attention)) < len(attention) or len(set(self.blocks)) < len(self.blocks)


class Turns:
    """The layer of each call of a module: of a shared one, by how often it was called in this pass."""

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
        """Begin a forward pass; the one before may have been broken off."""
        self._turn.clear()

    def take(self, module: nn.Module) -> int:
        """Return the layer of this call, and count it."""
        turn = self._turn.get(module, 0)
        self._turn[module] = turn + 1
        return self._layers[module][turn % len(self._layers[module])]


def first_tensor(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Find the hidden states among a block's or an attention module's arguments."""
    if "hidden_states" in kwargs:
        return kwargs["hidden_states"]
    return next(given for given in (*args, *kwargs.values()) if isinstance(given, Tensor))


def first_output(output: Any) -> Tensor:
    """Find the hidden states in what a block or an attention module returns."""
    while isinstance(output, tuple | list | dict):
        output = next(iter(output.values() if isinstance(output, dict) else output))
    return output


@contextmanager
def removed_on_leaving(handles: Iterable[RemovableHandle]) -> Iterator[None]:
    """Remove the registered hooks on leaving, also by an exception."""
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
