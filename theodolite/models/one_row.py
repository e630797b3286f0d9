"""Contexts packed into one row of tokens, (tokens, width) or (1, tokens, width): where each is, and its attention.

Whoever runs the model says how many contexts a row holds (`reading`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace

from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from theodolite.attention.inputs import AttentionInputs
from theodolite.errors import UsageError

Batch = tuple[int, int]
"""Contexts, and positions in each."""

_read: ContextVar[Batch | None] = ContextVar("theodolite_batch_read", default=None)

IN_ONE_ROW = (
    "give open_module a forward that hands all contexts over at once, in one row with positions from 0 in each and a "
    "mask that keeps them apart"
)


@contextmanager
def reading(batch: Batch | None) -> Iterator[None]:
    """Set how many contexts of how many positions the model reads while open; None: unknown."""
    token = _read.set(batch)
    try:
        yield
    finally:
        _read.reset(token)


def batch_read() -> Batch | None:
    """Return the numbers of contexts and positions set by `reading`."""
    return _read.get()


def unrolled(tensor: Tensor, dim: int) -> Tensor:
    """Split a dimension of all tokens into contexts and positions; `UsageError` where they are not the batch's."""
    batch = _read.get()
    if batch is None or tensor.shape[dim] != batch[0] * batch[1]:
        expected = "contexts" if batch is None else f"{batch[0]} contexts of {batch[1]}"
        raise UsageError(
            f"blocks read a row of {tensor.shape[dim]} tokens, which is not {expected}: {IN_ONE_ROW}"
        )
    return tensor.unflatten(dim, batch)


def in_one_row(inputs: AttentionInputs) -> bool:
    """Tell whether this attention has several contexts in one row."""
    batch, (contexts, _, queries, _) = _read.get(), inputs.query.shape
    if batch is None or batch[0] == 1 or contexts != 1:
        return False
    return queries == inputs.key.shape[2] == batch[0] * batch[1]


def split_by_context(inputs: AttentionInputs, name: str) -> AttentionInputs:
    """Split the attention of a row by context; `UsageError` where tokens see those of other contexts."""
    bias, mask = inputs.bias, None if inputs.mask is None else _on_diagonal(inputs.mask)
    if inputs.mask is None or mask is None or mask.sum() != inputs.mask.sum():
        raise UsageError(
            f"{name} reads its contexts in one row, and tokens attend to those of other contexts: {IN_ONE_ROW}"
        )
    if bias is not None:
        bias = _of_keys(bias) if bias.shape[2] == 1 else _on_diagonal(bias)
    query, key, value = (_of_keys(tensor.mT).mT for tensor in (inputs.query, inputs.key, inputs.value))
    return replace(inputs, query=query, key=key, value=value, mask=mask, bias=bias)


def repeated_mask(mask: BlockMask, tokens: int, contexts: int) -> BlockMask:
    """Repeat a mask of so many tokens for a row of so many such contexts."""
    rows, device = contexts * tokens, mask.kv_num_blocks.device
    # PyTorch counts its arguments, which whoever wraps functions to check types hides: no wrapper reaches a lambda.
    seen = lambda batch, head, query, key: (  # noqa: E731
        (query // tokens == key // tokens) & mask.mask_mod(batch, head, query % tokens, key % tokens)
    )
    return create_block_mask(seen, None, None, rows, rows, device, mask.BLOCK_SIZE)


def _of_keys(tensor: Tensor) -> Tensor:
    """Reshape (1, heads, any, tokens) to (contexts, heads, any, positions)."""
    return unrolled(tensor[0], 2).movedim(2, 0)


def _on_diagonal(tensor: Tensor) -> Tensor:
    """Take the diagonal of (1, heads, tokens, tokens) within contexts, (contexts, heads, positions, positions)."""
    return unrolled(unrolled(tensor[0], 2), 1).diagonal(dim1=1, dim2=3).movedim(-1, 0)
