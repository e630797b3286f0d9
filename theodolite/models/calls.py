"""Calls of a model's attention modules, repeated with other hidden states or in copies; what arrives at their tap."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from torch.utils._pytree import tree_leaves
from transformers import Cache

from theodolite.attention.inputs import AttentionInputs, attend
from theodolite.errors import WorkError
from theodolite.models.doors.answers import without_interventions
from theodolite.models.doors.taps import tapped
from theodolite.models.one_row import Batch, batch_read, reading, repeated_mask
from theodolite.models.source import device_of, dtype_of
from theodolite.models.stored.dequantised import dequantised, quantised_layers
from theodolite.models.structure import (
    Layout,
    Run,
    Structure,
    Turns,
    first_output,
    first_tensor,
    removed_on_leaving,
)
from theodolite.models.training.shards import gathered, is_part, of_own_heads, whole_copy

AFFINE_TOLERANCE = 32 * torch.finfo(torch.float32).eps
"""Relative error of an affine map in float64. Some families rotate in float32 whatever their dtype (Cohere, ModernBERT,
DeepSeek 2), so that even a float64 copy is exact to float32 only; what is not affine is off by a share of order one."""


@dataclass(frozen=True)
class Call:
    """The arguments with which a model calls an attention module, how hidden states lie there, and the batch read."""

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
        """Run the module on other hidden states (batch, positions, width); what does not broadcast is repeated."""
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

        def own(value: Tensor) -> Tensor:
            alike = value.ndim == 3 and value.shape[::2] == entered.shape[::2]
            return entered if alike and value.is_floating_point() else value

        return self._with_others(own)

    def with_others_changed(self) -> Call:
        """Change the numbers in all other tensors of the shape of its hidden states, to see what depends on them."""
        shape = self.entered.shape

        def changed(value: Tensor) -> Tensor:
            return 2 * value + 1 if value.shape == shape and value.is_floating_point() else value

        return self._with_others(changed)

    def called_as(self, other: Call) -> bool:
        """Tell whether another call has the same arguments, masks and positions, but for its hidden states."""
        own, others = (
            [of for of in tree_leaves(vars(call)) if isinstance(of, Tensor) and of is not call.entered]
            for call in (self, other)
        )
        return len(own) == len(others) and all(map(torch.equal, own, others))

    def without_cache(self) -> Call:
        """Drop the keys of earlier calls, to which each call would add."""
        return self._mapped(lambda value: None if isinstance(value, Cache) else value)

    def _repeated(self, times: int) -> Call:
        """Repeat all but the hidden states for so many times the contexts."""
        dim = self.layout.contexts

        def repeated(value: Tensor) -> Tensor:
            return torch.cat([value] * times, dim) if value.ndim > dim else value

        return self._with_others(repeated)

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

    def _with_others(self, change: Callable[[Tensor], Tensor]) -> Call:
        """Change every tensor but the hidden states."""
        entered = self.entered
        return self._mapped(lambda it: change(it) if isinstance(it, Tensor) and it is not entered else it)

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
        value = value.to(like.device)
        lowest = value <= torch.finfo(value.dtype).min / 2
        return value.to(like.dtype).masked_fill(lowest, torch.finfo(like.dtype).min)
    return tuple(_to_dtype(v, like) for v in value) if isinstance(value, tuple) else value


class NotAffine(WorkError):
    """A layer's queries or keys are no affine function of its input."""


class _Stopped(Exception):
    def __init__(self, inputs: AttentionInputs) -> None:
        self.inputs = inputs


def stop_at_tap(_: nn.Module, inputs: AttentionInputs) -> Tensor:
    """Stop the attention module at the tap; `run_until_tap` catches it."""
    raise _Stopped(inputs)


def run_until_tap(
    module: nn.Module, call: Call, hidden: Float[Tensor, "batch positions width"] | None = None
) -> AttentionInputs:
    """Return what arrives at the tap for a call, or with other hidden states; `NotAffine` if it takes no others."""
    try:
        if hidden is None:
            call.run(module)
        else:
            call.output(module, hidden)
    except _Stopped as stopped:
        return stopped.inputs
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError, ValueError, LookupError, AssertionError) as error:
        # What else it is called with (embeddings of the tokens, say) fits the model's own hidden states only.
        name, reason = type(module).__name__, str(error).partition("\n")[0]
        raise NotAffine(f"{name} takes no hidden states but the model's own: {reason}") from error
    raise WorkError(f"{type(module).__name__} did not reach its attention function")


def as_sequences(rows: Float[Tensor, "rows width"], module: nn.Module) -> Float[Tensor, "rows 1 width"]:
    """Make each row a sequence of one token, where the module's parameters are and in their dtype."""
    return rows.to(device_of(module), dtype_of(module)).unsqueeze(1)


def copy_in_dtype(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Copy a module with its floating-point tensors in `dtype`.

    A parameter that has this dtype shares its memory with the copy's. Offloaded weights are brought here, those spread
    over ranks are gathered; quantised layers become plain ones, or raise `WorkError`, as weights elsewhere do.
    """
    quantised = list(quantised_layers(module, type(module).__name__))
    plain = {id(layer): dequantised(name, layer).to(dtype) for name, layer in quantised}
    not_copied = {id(tensor) for _, layer in quantised for tensor in (*layer.parameters(), *layer.buffers())}
    hooked = [child for child in module.modules() if hasattr(child, "_hf_hook")]  # of offloaded weights
    with ExitStack() as weights_present:
        if hooked:
            from accelerate.utils import align_module_device

            for child in hooked:
                weights_present.enter_context(align_module_device(child))
        if any(p.is_meta for p in module.parameters()):
            raise WorkError(f"{type(module).__name__}: its weights are not in memory")
        weights_present.enter_context(gathered(module.modules()))
        # A hook knows all offloaded weights of the model: it is not copied with the module.
        memo: dict[int, Any] = {id(child._hf_hook): child._hf_hook for child in hooked} | plain
        for tensor in (*module.parameters(), *module.buffers()):
            if id(tensor) not in not_copied:
                memo[id(tensor)] = _copy_of(tensor, module, dtype)
        copy_of = whole_copy(module, memo)
    for child in copy_of.modules():
        if child.__dict__.pop("_hf_hook", None) is not None:
            del child._old_forward
            if isinstance(child.forward, functools.partial):  # else the tap has put its own there
                del child.forward
    return copy_of


def _copy_of(tensor: Tensor, module: nn.Module, dtype: torch.dtype) -> Tensor:
    """Copy a parameter or buffer. A buffer has memory of its own, for a pass may write to it (a cache of keys)."""
    whole = of_own_heads(tensor.detach(), module)
    # `to` would take the imaginary part of a rotation (torchtitan, Llama's own code).
    in_dtype = whole.to(dtype) if whole.is_floating_point() else whole
    is_parameter = isinstance(tensor, nn.Parameter)
    if in_dtype is whole and (is_part(tensor) or not is_parameter):
        in_dtype = whole.clone()
    return nn.Parameter(in_dtype, requires_grad=tensor.requires_grad) if is_parameter else in_dtype
