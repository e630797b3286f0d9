"""Calls of a model's attention modules, to be repeated with other hidden states or in another dtype."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from transformers import Cache

from theodolite.attention.inputs import attend
from theodolite.models.doors.answers import without_interventions
from theodolite.models.doors.taps import tapped
from theodolite.models.one_row import Batch, batch_read, reading, repeated_mask
from theodolite.models.structure import (
    Layout,
    Run,
    Structure,
    Turns,
    first_output,
    first_tensor,
    removed_on_leaving,
)


@dataclass(frozen=True)
class Call:
    """The arguments with which a model calls an attention module, and how hidden states lie in them.

    `batch` are the contexts and positions that the model read then, where they are in one row.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    layout: Layout
    batch: Batch | None = field(default_factory=batch_read)

    @property
    def entered(self) -> Tensor:
        """The hidden states among the arguments, as they lie there."""
        return first_tensor(self.args, self.kwargs)

    @property
    def hidden(self) -> Float[Tensor, "batch positions width"]:
        """The hidden states."""
        with reading(self.batch):
            return self.layout.ordered(self.entered)

    @property
    def width(self) -> int:
        """The width of the hidden states."""
        return self.hidden.shape[-1]

    def with_hidden(self, hidden: Float[Tensor, "batch positions width"]) -> Call:
        """Replace the hidden states; all else goes to their device and dtype."""
        entered, placed, (contexts, positions, _) = self.entered, self.layout.placed(hidden), hidden.shape
        grows = self.layout.is_row and self.batch is not None and self.batch[0] != contexts

        def changed(value: Any) -> Any:
            if value is entered:  # by identity: CTRL hands the same one over for values, keys and queries
                return placed
            return _to_dtype(self._of_row(value, contexts) if grows else value, hidden)

        return replace(self._mapped(changed), batch=(contexts, positions))

    def output(self, module: nn.Module, hidden: Float[Tensor, "batch positions width"]) -> Tensor:
        """Run the module on other hidden states, (batch, positions, width).

        What does not broadcast over contexts is repeated: BLOOM's bias has a row for each context and head.
        """
        times = len(hidden) // len(self.hidden)
        try:
            return self.with_hidden(hidden).run(module)
        except (RuntimeError, ValueError, AssertionError):
            if times < 2:
                raise
        return self._repeated(times).with_hidden(hidden).run(module)

    def run(self, module: nn.Module) -> Tensor:
        """Run the module: (batch, positions, width)."""
        with reading(self.batch):
            return self.layout.ordered(first_output(module(*self.args, **self.kwargs)))

    def with_own_memory(self) -> Call:
        """Let a cross-attention read its own hidden states in place of the encoder's, so that a row reaches all."""
        entered = self.entered

        def is_memory(value: Any) -> bool:
            if not isinstance(value, Tensor) or value is entered or value.ndim != 3:
                return False
            return value.is_floating_point() and value.shape[::2] == entered.shape[::2]

        return self._mapped(lambda value: entered if is_memory(value) else value)

    def with_others_changed(self) -> Call:
        """Change the numbers in all other tensors of the shape of its hidden states, to see what depends on them."""
        entered = self.entered

        def changed(value: Any) -> Any:
            alike = isinstance(value, Tensor) and value is not entered and value.shape == entered.shape
            return 2 * value + 1 if alike and value.is_floating_point() else value

        return self._mapped(changed)

    def without_cache(self) -> Call:
        """Drop the keys of earlier calls, to which each call would add."""
        return self._mapped(lambda value: None if isinstance(value, Cache) else value)

    def _repeated(self, times: int) -> Call:
        """Repeat all but the hidden states for so many times the contexts."""
        entered = self.entered

        def repeated(value: Any) -> Any:
            if not isinstance(value, Tensor) or value is entered or value.ndim <= self.layout.contexts:
                return value
            sizes = [1] * value.ndim
            sizes[self.layout.contexts] = times
            return value.repeat(sizes)

        return self._mapped(repeated)

    def _of_row(self, value: Any, contexts: int) -> Any:
        """Spread the argument of one context over a row of several: repeat values by token, make a mask anew."""
        tokens = self.entered.shape[self.layout.contexts]
        if isinstance(value, dict):
            return {name: self._of_row(of_one, contexts) for name, of_one in value.items()}
        if isinstance(value, BlockMask):
            return repeated_mask(value, tokens, contexts)
        if not isinstance(value, Tensor) or not value.ndim:
            return value
        dim = min(self.layout.contexts, value.ndim - 1)
        return torch.cat([value] * contexts, dim) if value.shape[dim] == tokens else value

    def _mapped(self, change: Callable[[Any], Any]) -> Call:
        args = tuple(map(change, self.args))
        return replace(self, args=args, kwargs={name: change(value) for name, value in self.kwargs.items()})


Calls = dict[int, Call]
"""Those of each layer that attends."""


def capture_calls(model: nn.Module, structure: Structure, run: Run) -> Calls:
    """Capture how the model calls each layer's attention module in `run` (one token at position 0) under the tap."""
    with tapped(model, lambda _, inputs: attend(inputs)):
        return capture_current_calls(structure, run)


def capture_current_calls(structure: Structure, run: Run) -> Calls:
    """Capture the calls by the attention implementation that the model has now."""
    calls: Calls = {}
    turns = Turns(structure.attention)

    def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
        call = Call(args, kwargs, structure.attention_layout).without_cache()
        calls.setdefault(turns.take(module), call.with_own_memory() if structure.cross else call)

    hooks = [module.register_forward_pre_hook(enter, with_kwargs=True) for module in turns]
    with removed_on_leaving(hooks), without_interventions(), torch.no_grad():
        run()
    return calls


def _to_dtype(value: Any, like: Tensor) -> Any:
    if isinstance(value, Tensor):
        if value.dtype == like.dtype or not value.is_floating_point():
            return value.to(like.device)
        # The lowest number of a dtype is how an additive mask hides a key: it stays the lowest.
        lowest = value <= torch.finfo(value.dtype).min / 2
        return value.to(like.device, like.dtype).masked_fill(
            lowest.to(like.device), torch.finfo(like.dtype).min
        )
    return tuple(_to_dtype(v, like) for v in value) if isinstance(value, tuple) else value
