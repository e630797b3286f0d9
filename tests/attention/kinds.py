"""Attention of every kind on planted inputs, and what it is by definition, with T×T matrices."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from theodolite.attention.inputs import AttentionInputs

BATCH, HEADS, LENGTH, WIDTH = 3, 4, 150, 8
KINDS = ("causal", "bidirectional", "window", "padded", "grouped", "capped", "alibi", "sink")


def make(kind: str, dtype: torch.dtype = torch.float64, strength: float = 2.0) -> AttentionInputs:
    generator = torch.Generator().manual_seed(3)

    def normal(heads: int) -> torch.Tensor:
        return torch.randn(BATCH, heads, LENGTH, WIDTH, generator=generator, dtype=torch.float64)

    key_heads = 2 if kind == "grouped" else HEADS
    query, key, value = normal(HEADS), normal(key_heads), normal(key_heads)
    query[..., 0] += strength  # what all queries share, two keys answer: planted sinks
    key[:, 0, 0, 0] += 9.0
    key[1:, 1, 40, 0] += 9.0
    position = torch.arange(LENGTH)
    causal = position <= position[:, None]
    mask = {
        "window": causal & (position > position[:, None] - 9),
        "padded": causal & (position >= 70),
    }.get(kind)
    if mask is not None:
        mask = mask[None, None].clone()
    bias = None
    if kind == "alibi":
        bias = (torch.arange(1, HEADS + 1).view(1, -1, 1, 1) * position * 0.05).double()
    return AttentionInputs(
        query.to(dtype),
        key.to(dtype),
        value.to(dtype),
        WIDTH**-0.5,
        causal=kind not in ("bidirectional", "window", "padded"),
        mask=mask,
        softcap=1.5 if kind == "capped" else None,
        bias=bias,
        sink=torch.linspace(-1, 2, HEADS, dtype=torch.float64) if kind == "sink" else None,
    )


def _repeated(inputs: AttentionInputs, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double().repeat_interleave(inputs.query.shape[1] // tensor.shape[1], dim=1)


def dense_logits(inputs: AttentionInputs, products: torch.Tensor | None = None) -> torch.Tensor:
    """(B, H, T, T) in float64, −∞ where a query does not see the key; of other `products` of queries with keys."""
    logits = products
    if logits is None:
        logits = inputs.query.double() @ _repeated(inputs, inputs.key).mT * inputs.scaling
    if inputs.softcap:
        logits = inputs.softcap * torch.tanh(logits / inputs.softcap)
    if inputs.bias is not None:
        logits = logits + inputs.bias
    if inputs.mask is not None:
        return logits.masked_fill(~inputs.mask, -math.inf)
    if inputs.causal:
        later = torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1)
        return logits.masked_fill(later, -math.inf)
    return logits


def dense_weights(inputs: AttentionInputs, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights (B, H, T, T) of such logits, and weight of the learned column."""
    if inputs.sink is not None:
        column = inputs.sink.double().view(1, -1, 1, 1).expand(*logits.shape[:3], 1)
        full = torch.cat([logits, column], dim=-1).softmax(-1)
        return full[..., :-1], full[..., -1]
    weights = logits.softmax(-1).nan_to_num(0.0)  # a fully hidden row has no softmax, and pays nothing
    return weights, torch.zeros_like(weights[..., 0])


def dense(inputs, extra=0.0):
    """Weights, output (B, T, H, w) and weight of the learned column; `extra` is added to the logits."""
    weights, learned = dense_weights(inputs, dense_logits(inputs) + extra)
    return weights, (weights @ _repeated(inputs, inputs.value)).transpose(1, 2), learned


def masked_by_bias(inputs: AttentionInputs, lowest: float) -> AttentionInputs:
    """The same attention, with its mask or causality written into its bias."""
    seen = dense_logits(inputs).isfinite()
    bias = torch.zeros(seen.shape) if inputs.bias is None else inputs.bias.expand(seen.shape)
    bias = bias.masked_fill(~seen, lowest)
    return replace(inputs, mask=None, causal=False, bias=bias)
