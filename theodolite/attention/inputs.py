"""Attention from queries and keys, a block of queries at a time, so that no T×T matrix is kept.

This module knows every additive or multiplicative thing that a transformer does to its logits (scaling,
soft-capping, ALiBi, masks, sliding windows, a learned sink column) and nothing about models or statistics.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from theodolite.system.processor import parallel_map

MASKED = -1e30
"""Logit of an invisible key. Finite, so that `exp(x) * x` is 0 and not NaN; `exp` of it is exactly 0."""

BLOCK = 64
"""Queries at a time: 12 heads × 64 × 512 float32 logits fill 1.5 MB, which a core's cache holds."""

BLOCK_ENTRIES = 1 << 20
"""Logits at a time: of long contexts a few heads only, of 16,384 tokens one."""


@dataclass(frozen=True)
class AttentionInputs:
    """Queries, keys, values and everything else that decides a layer's attention, after RoPE, before the softmax.

    The logit of query i and key j is `cap(scaling · q_i·k_j) + bias_ij` where `mask` (or causality) lets i see j;
    `cap(x) = softcap · tanh(x / softcap)`. With grouped heads, key head g serves the query heads `g·G … (g+1)·G − 1`,
    `G = heads / key_heads`. A mask or bias with one batch entry is that of all contexts, with one head that of all
    heads, a bias with one query that of all queries.

    What a bias hides (`hidden_in`) is taken out of it and is in `mask`, in place of `causal`; a bias of zeros is None.
    """

    query: Float[Tensor, "batch heads queries width"]
    key: Float[Tensor, "batch key_heads keys width"]
    value: Float[Tensor, "batch key_heads keys value_width"]
    scaling: float
    causal: bool
    mask: Bool[Tensor, "mask_batch mask_heads queries keys"] | None = None
    softcap: float | None = None
    bias: Float[Tensor, "bias_batch bias_heads bias_queries keys"] | None = None
    sink: Float[Tensor, " heads"] | None = None

    def __post_init__(self) -> None:
        if self.bias is None:
            return
        hidden = hidden_in(self.bias)
        bias = self.bias if hidden is None else self.bias.masked_fill(hidden, 0)
        # The class is frozen for all that comes after.
        object.__setattr__(self, "bias", bias if bias.any() else None)
        if hidden is None:
            return
        if bool((hidden == hidden[:, :1]).all()):
            hidden = hidden[:, :1]
        mask, queries = ~hidden, self.query.shape[2]
        if self.mask is not None:
            mask = mask & self.mask
        elif self.causal:
            mask = mask & mask.new_ones(queries, self.key.shape[2]).tril_()
        object.__setattr__(self, "mask", mask.expand(-1, -1, queries, -1))
        object.__setattr__(self, "causal", False)

    def blocks(self, size: int = BLOCK) -> Iterator[LogitBlock]:
        """Yield the masked logits of `size` queries after another, over the keys that any of them can see."""
        query, key = self._factors()
        length = query.shape[2]
        for start in range(0, length, size):
            stop = min(start + size, length)
            first, last = self._key_range(start, stop)
            logits = self._logits(query[:, :, start:stop], key[..., first:last], start, first)
            yield LogitBlock(start, stop, first, last, logits)

    def head_parts(self) -> Iterator[slice]:
        """Yield query heads whose blocks are computed at once: whole groups that share a key head."""
        batch, heads, queries, _ = self.query.shape
        key_heads, keys = self.key.shape[1:3]
        group = heads // key_heads
        entries = batch * group * min(BLOCK, queries) * keys
        step = group * max(1, min(key_heads, BLOCK_ENTRIES // max(entries, 1)))
        for start in range(0, heads, step):
            yield slice(start, min(start + step, heads))

    def logits(self) -> Float[Tensor, "batch heads queries keys"]:
        """Compute the masked logits of all queries over all keys: a T×T matrix, so for few of either."""
        return self._logits(*self._factors(), 0, 0)

    def at_pairs(
        self, query: Int[Tensor, " pairs"], key: Int[Tensor, " pairs"]
    ) -> Float[Tensor, "batch heads pairs"]:
        """Compute the masked logits of some queries over one key each, both by position."""
        dtype = torch.promote_types(self.key.dtype, torch.float32)
        group = self.query.shape[1] // self.key.shape[1]
        keys = self.key[:, :, key].to(dtype).repeat_interleave(group, dim=1)
        logits = torch.linalg.vecdot(self.query[:, :, query].to(dtype) * self.scaling, keys)
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        if self.bias is not None:
            logits = logits + self.bias[:, :, query if self.bias.shape[2] > 1 else 0, key]
        seen = self.mask[:, :, query, key] if self.mask is not None else key <= query if self.causal else None
        return logits if seen is None else logits.masked_fill(~seen, MASKED)

    def of_queries(
        self, chosen: slice | Int[Tensor, " chosen"], keys: slice | Int[Tensor, " keys"] = slice(None)
    ) -> AttentionInputs:
        """Return the inputs of some queries over some keys, by position; each query sees those that it saw before."""
        mask, bias = self.mask, self.bias
        if mask is not None:
            mask = mask[:, :, chosen][..., keys]
        elif self.causal:
            position = torch.arange(self.key.shape[2], device=self.key.device)
            mask = (position[keys] <= position[chosen, None])[None, None]
        if bias is not None:
            bias = (bias[:, :, chosen] if bias.shape[2] > 1 else bias)[..., keys]
        query, key, value = self.query[:, :, chosen], self.key[:, :, keys], self.value[:, :, keys]
        return replace(self, query=query, key=key, value=value, mask=mask, bias=bias, causal=False)

    def of_heads(self, part: slice | list[int]) -> AttentionInputs:
        """Return the inputs of whole groups of query heads that share a key head, or of some, with a key head each."""
        group = self.query.shape[1] // self.key.shape[1]
        if isinstance(part, slice):
            shared: slice | list[int] = slice(part.start // group, part.stop // group)
        else:
            shared = [head // group for head in part]
        query, key, value = self.query[:, part], self.key[:, shared], self.value[:, shared]
        mask, bias = (_part(tensor, 1, part) for tensor in (self.mask, self.bias))
        sink = None if self.sink is None else self.sink[part]
        return replace(self, query=query, key=key, value=value, mask=mask, bias=bias, sink=sink)

    def of_contexts(self, part: slice) -> AttentionInputs:
        """Return the inputs of some contexts of the batch."""
        query, key, value = self.query[part], self.key[part], self.value[part]
        mask, bias = (_part(tensor, 0, part) for tensor in (self.mask, self.bias))
        return replace(self, query=query, key=key, value=value, mask=mask, bias=bias)

    def visible_queries(self) -> Float[Tensor, "batch_or_1 heads_or_1 keys"]:
        """Count the queries that can see each key."""
        if self.mask is not None:
            return self.mask.sum(dim=-2).double()
        earlier = torch.arange(self.key.shape[2], dtype=torch.float64, device=self.key.device)[None, None]
        return self.query.shape[2] - self.causal * earlier

    def visible_keys(self) -> Float[Tensor, "batch_or_1 heads_or_1 queries"]:
        """Count the keys that each query can see."""
        if self.mask is not None:
            return self.mask.sum(dim=-1).double()
        later = torch.arange(self.query.shape[2], dtype=torch.float64, device=self.key.device)[None, None]
        return self.key.shape[2] - self.causal * later.flip(-1)

    def _factors(self) -> tuple[Tensor, Tensor]:
        """Return the scaled queries and the transposed keys, in float32 or better."""
        key = self.key.to(torch.promote_types(self.key.dtype, torch.float32)).transpose(-1, -2)
        return self.query.to(key.dtype) * self.scaling, key

    def _key_range(self, start: int, stop: int) -> tuple[int, int]:
        if self.mask is not None:
            seen = self.mask[..., start:stop, :].flatten(0, -2).any(dim=0).nonzero()
            return (int(seen[0]), int(seen[-1]) + 1) if len(seen) else (0, 1)
        return 0, stop if self.causal else self.key.shape[2]

    def _logits(self, query: Tensor, key: Tensor, start: int, first: int) -> Tensor:
        batch, heads, rows, width = query.shape
        key_heads, last = key.shape[1], first + key.shape[-1]
        grouped = query.reshape(batch, key_heads, heads // key_heads * rows, width)
        return self.finished((grouped @ key).view(batch, heads, rows, last - first), start, first)

    def finished(
        self, logits: Float[Tensor, "batch heads rows columns"], start: int, first: int
    ) -> Float[Tensor, "batch heads rows columns"]:
        """Cap products of queries from `start` and keys from `first`, add the bias, and mask them, in place."""
        rows, columns = logits.shape[2:]
        stop, last = start + rows, first + columns
        if self.softcap is not None:
            logits = torch.tanh(logits.div_(self.softcap)).mul_(self.softcap)
        if self.bias is not None:
            bias = self.bias[:, :, start:stop] if self.bias.shape[2] > 1 else self.bias
            logits += bias[..., first:last]
        if self.mask is not None:
            logits.masked_fill_(~self.mask[:, :, start:stop, first:last], MASKED)
        elif self.causal:
            # Only the square on the diagonal holds keys after their query.
            later = torch.ones(rows, rows, dtype=torch.bool, device=logits.device).triu_(1)
            logits[..., start - first :].masked_fill_(later, MASKED)
        return logits


@dataclass(frozen=True)
class LogitBlock:
    """Logits of queries `start … stop−1` over keys `first … last−1`; invisible pairs hold `MASKED`."""

    start: int
    stop: int
    first: int
    last: int
    logits: Float[Tensor, "batch heads rows columns"]


LEAST_BIAS = -1e6
"""No bias of positions is as low; what is added by hand to hide a key is mostly −10⁹."""

LEAST_OF_SEVERAL = -9e3
"""Nor is this a bias where all that is as low is one number: `(1 − mask) · −10⁴`, which bfloat16 rounds to −9984."""


def hidden_below(dtype: torch.dtype, otherwise: float = LEAST_BIAS) -> float:
    """Return the largest bias that hides a key: half of the lowest of its dtype, or `otherwise` where that is more."""
    return max(torch.finfo(dtype).min / 2, otherwise)


def hidden_in(bias: Float[Tensor, "*lead queries keys"]) -> Bool[Tensor, "*lead queries keys"] | None:
    """Return the keys that a bias hides; None where it hides none."""
    if not bias.numel() or bias.amin() > LEAST_OF_SEVERAL:
        return None
    hidden = bias <= hidden_below(bias.dtype)
    low = (bias <= LEAST_OF_SEVERAL) & ~hidden
    values = bias[low]
    if values.numel() and values.amin() == values.amax():
        hidden = hidden | low
    return hidden if hidden.any() else None


def softmax(logits: Float[Tensor, "batch heads rows keys"], sink: Float[Tensor, " heads"] | None) -> Tensor:
    """Compute attention weights, without that of a learned sink column; a row whose keys are all masked is 0."""
    if sink is not None:
        column = sink.to(logits.dtype).view(1, -1, 1, 1).expand(*logits.shape[:3], 1)
        return torch.cat([logits, column], dim=-1).softmax(dim=-1)[..., :-1]
    weights = logits.softmax(dim=-1)
    # Nearly all masks show a block's first key: it is looked at before the rest.
    if (logits[..., 0] <= MASKED / 2).any():
        weights.masked_fill_((logits.amax(dim=-1) <= MASKED / 2).unsqueeze(-1), 0)
    return weights


def weigh(weights: Tensor, value: Float[Tensor, "batch key_heads keys value_width"]) -> Tensor:
    """Sum the values by weights (batch, heads, rows, keys): (batch, heads, rows, value_width)."""
    batch, heads, rows, keys = weights.shape
    key_heads = value.shape[1]
    grouped = weights.reshape(batch, key_heads, heads // key_heads * rows, keys)
    return (grouped @ value.to(weights.dtype)).view(batch, heads, rows, value.shape[-1])


def attend(inputs: AttentionInputs) -> Float[Tensor, "batch queries heads value_width"]:
    """Compute the attention output in float32 or better, in the value's dtype; 0 where no key is seen."""
    query, value = inputs.query, inputs.value
    output = value.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[-1])

    def work(part: slice) -> None:
        own = inputs.of_heads(part)
        for block in own.blocks():
            summed = weigh(softmax(block.logits, own.sink), own.value[:, :, block.first : block.last])
            output[:, block.start : block.stop, part] = summed.transpose(1, 2)

    parallel_map(work, list(inputs.head_parts()))
    return output


def _part(tensor: Tensor | None, dim: int, part: slice | list[int]) -> Tensor | None:
    """Take part of a mask or bias along the batch or the heads, where it has more than one for all."""
    return tensor if tensor is None or tensor.shape[dim] == 1 else tensor[(slice(None),) * dim + (part,)]


def mask_keys(
    inputs: AttentionInputs, masked: Bool[Tensor, "masked_contexts keys"], heads: list[int], sink_column: bool
) -> AttentionInputs:
    """Add a bias to the masked keys that is just low enough for their weights to be exactly 0.

    It is no lower, so that a query which sees masked keys only has its own weights, up to the rounding of that bias;
    where there is a learned sink column that is not masked, it pays that column all.
    """
    dtype = torch.promote_types(inputs.key.dtype, torch.float32)
    all_heads, sink = inputs.query.shape[1], inputs.sink
    norms = [torch.linalg.vector_norm(t, dim=-1, dtype=dtype).max() for t in (inputs.query, inputs.key)]
    spread = 2 * abs(inputs.scaling) * norms[0] * norms[1]  # |logit| ≤ scaling ‖q‖ ‖k‖
    if inputs.softcap is not None:
        spread = spread.clamp(max=2 * inputs.softcap)
    if inputs.bias is not None:
        spread = spread + inputs.bias.max() - inputs.bias.min()
    if sink is not None:
        spread = spread + sink.to(dtype).abs().max()
        if sink_column:
            sink = sink.to(dtype).clone()
            sink[heads] = MASKED
    below = spread - 2 * math.log(torch.finfo(dtype).tiny)
    bias = torch.zeros(len(masked), all_heads, 1, masked.shape[1], dtype=dtype, device=masked.device)
    bias[:, heads] = masked[:, None, None].to(dtype) * -below.to(dtype)
    bias = bias if inputs.bias is None else bias + inputs.bias
    return replace(inputs, bias=bias, sink=sink)
