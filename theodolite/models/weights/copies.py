"""Copies of an attention module, and what arrives at their tap for other hidden states.

A copy must be run while `tapped(…, stop_at_tap)` is open: it stops as soon as the tap has queries, keys and values.
"""

from __future__ import annotations

import functools
from contextlib import ExitStack
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from theodolite.attention.inputs import AttentionInputs
from theodolite.errors import WorkError
from theodolite.models.calls import Call
from theodolite.models.source import device_of, dtype_of
from theodolite.models.stored.dequantised import dequantised, quantised_layers
from theodolite.models.training.shards import gathered, is_part, of_own_heads, whole_copy

AFFINE_TOLERANCE = 32 * torch.finfo(torch.float32).eps
"""Relative error of an affine map in float64. Some families rotate in float32 whatever their dtype (Cohere, ModernBERT,
DeepSeek 2), so that even a float64 copy is exact to float32 only; what is not affine is off by a share of order one."""


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
        reason = str(error).partition("\n")[0]
        raise NotAffine(
            f"{type(module).__name__} takes no hidden states but the model's own: {reason}"
        ) from error
    raise WorkError(f"{type(module).__name__} did not reach its attention function")


def as_sequences(rows: Float[Tensor, "rows width"], module: nn.Module) -> Float[Tensor, "rows 1 width"]:
    """Make each row a sequence of one token, where the module's parameters are and in their dtype."""
    return rows.to(device_of(module), dtype_of(module)).unsqueeze(1)


def hooked_by_accelerate(module: nn.Module) -> list[nn.Module]:
    """List the parts of a module whose weights accelerate brings when they run; here they may be on the meta device."""
    return [child for child in module.modules() if hasattr(child, "_hf_hook")]


def copy_in_dtype(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Copy a module with its floating-point tensors in `dtype`; return the module itself where they are on meta.

    A parameter that has this dtype shares its memory with the copy's. Offloaded weights are brought here, without
    accelerate's hooks; those spread over ranks are gathered; quantised layers become plain ones, or raise `WorkError`.
    """
    quantised = list(quantised_layers(module, type(module).__name__))
    plain = {id(layer): dequantised(name, layer).to(dtype) for name, layer in quantised}
    not_copied = {id(tensor) for _, layer in quantised for tensor in (*layer.parameters(), *layer.buffers())}
    hooked = hooked_by_accelerate(module)
    with ExitStack() as weights_present:
        if hooked:
            from accelerate.utils import align_module_device

            for child in hooked:
                weights_present.enter_context(align_module_device(child))
        if any(p.is_meta for p in module.parameters()):
            return module
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
