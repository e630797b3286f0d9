"""The attention summary on a CUDA device, by two Triton kernels.

The first walks over keys for a block of queries with an online softmax, and keeps Σ p (x − max) beside Σ p, for the
entropy. The second walks over queries for a block of keys, now that the normalisers are known. Without Triton nothing
here is used.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor

from theodolite.attention.inputs import AttentionInputs

try:
    from theodolite.attention import kernels
except ImportError:  # builds of torch for a CPU come without Triton
    kernels = None  # type: ignore[assignment]

Result = TypeVar("Result")

_failed: list[str] = []


def can_do(inputs: AttentionInputs) -> bool:
    """Tell whether the kernels can take these inputs: on CUDA, of a usual dtype, not too wide, without gradients."""
    if kernels is None or _failed or torch.is_grad_enabled() or not on_gpu(inputs.query):
        return False
    same = inputs.query.dtype == inputs.key.dtype == inputs.value.dtype
    width = max(inputs.query.shape[-1], inputs.value.shape[-1])
    usual = inputs.query.dtype in (torch.float16, torch.bfloat16, torch.float32)
    # Wider vectors do not fit beside their products in a block's memory (228 KiB of an H100).
    return same and usual and width * inputs.query.element_size() <= 512


def on_gpu(tensor: Tensor) -> bool:
    """Tell whether Triton runs on the tensor's device."""
    return tensor.is_cuda


def tried(work: Callable[[], Result]) -> Result | None:
    """Return what `work` returns; None, with one warning and no second try, where Triton cannot run."""
    try:
        return work()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever compilers and drivers raise
        _failed.append(str(error))
        line = f"Triton cannot run here ({error}): attention is summarised by slower torch operations"
        warnings.warn(line, stacklevel=2)
        return None


def summarise(inputs: AttentionInputs) -> tuple[Tensor, ...]:
    """Compute output, entropy, log-sum-exp and largest logit of every query, without a learned sink column."""
    query, value = inputs.query, inputs.value
    batch, heads, queries, _ = query.shape
    output = value.new_empty(batch, queries, heads, value.shape[-1])
    rows = [query.new_empty(batch, heads, queries, dtype=torch.float32) for _ in range(3)]
    first, last = _ranges(inputs, by_query=True)
    with _current_device(query):
        kernels.attention_rows[(batch * heads, len(first))](
            *_operands(inputs),
            value,
            *value.stride(),
            output,
            *rows,
            first,
            last,
            **_constants(inputs),
            value_width=value.shape[-1],
            value_padded=_padded(value.shape[-1]),
        )
    return output, *rows


def mass(
    inputs: AttentionInputs, log_sum_exp: Float[Tensor, "batch heads queries"]
) -> Float64[Tensor, "batch heads keys"]:
    """Compute the attention that each key receives, summed over queries."""
    batch, heads = inputs.query.shape[:2]
    received = inputs.query.new_empty(batch, heads, inputs.key.shape[2], dtype=torch.float64)
    first, last = _ranges(inputs, by_query=False)
    with _current_device(inputs.query):
        kernels.attention_mass[(batch * heads, len(first))](
            *_operands(inputs), log_sum_exp.contiguous(), received, first, last, **_constants(inputs)
        )
    return received


def _current_device(tensor: Tensor) -> AbstractContextManager[object]:
    """Make the tensor's device current, since Triton launches on the current one and its stream."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def _operands(inputs: AttentionInputs) -> tuple[object, ...]:
    """List queries, keys, mask and bias, each with its strides; 0 along what is broadcast."""
    shape = (*inputs.query.shape[:3], inputs.key.shape[2])
    mask, bias = (inputs.query if t is None else t.expand(shape) for t in (inputs.mask, inputs.bias))
    operands: list[object] = []
    for tensor in (inputs.query, inputs.key, mask, bias):
        operands += [tensor, *tensor.stride()]
    return (*operands, float(inputs.scaling), float(inputs.softcap or 0.0))


def _constants(inputs: AttentionInputs) -> dict[str, int]:
    """Return the sizes of the operands, and which of mask, bias and cap there are."""
    heads, queries, width = inputs.query.shape[1:]
    return {
        "heads": heads,
        "group": heads // inputs.key.shape[1],
        "queries": queries,
        "keys": inputs.key.shape[2],
        "width": width,
        "padded": _padded(width),
        "tile": _tile(inputs),
        "is_causal": inputs.causal and inputs.mask is None,
        "has_mask": inputs.mask is not None,
        "has_bias": inputs.bias is not None,
        "has_cap": inputs.softcap is not None,
    }


def _padded(width: int) -> int:
    """Round a tile's width up to a power of two, 16 or more."""
    return max(16, 1 << (width - 1).bit_length())


def _tile(inputs: AttentionInputs) -> int:
    """Count the queries and keys of a tile: 64 in half precision, 32 in float32, so that its operands fit."""
    return 128 // max(2, inputs.query.element_size())


def _ranges(inputs: AttentionInputs, by_query: bool) -> tuple[Int[Tensor, " tiles"], Int[Tensor, " tiles"]]:
    """Find the first and last key that the queries of each tile see; or the first and last query that sees its keys."""
    tile, length, others = _tile(inputs), inputs.query.shape[2], inputs.key.shape[2]
    length, others = (length, others) if by_query else (others, length)
    starts = torch.arange(0, length, tile, device=inputs.query.device, dtype=torch.int32)
    if inputs.mask is None:
        whole = torch.full_like(starts, others)
        if not inputs.causal:
            return torch.zeros_like(starts), whole
        return (torch.zeros_like(starts), (starts + tile).clamp_max(others)) if by_query else (starts, whole)
    visible = inputs.mask.flatten(0, 1)
    visible = visible[0] if len(visible) == 1 else visible.any(dim=0)
    visible = visible if by_query else visible.T
    first, last = [], []
    for rows in visible.split(tile):
        any_ = rows.any(dim=0).byte()
        first.append(any_.argmax())
        last.append(others - any_.flip(0).argmax())
    return torch.stack(first).int(), torch.stack(last).int()
