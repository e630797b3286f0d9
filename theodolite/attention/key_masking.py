"""Attention knockout: attention inputs changed so that no query of a head attends to some keys.

A bias per key does it, so that no T×T mask is made. What decides which keys and heads is not known here.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from theodolite.attention.inputs import MASKED, AttentionInputs, attend


def mask_keys(
    inputs: AttentionInputs, masked: Bool[Tensor, "masked_contexts keys"], heads: list[int], sink_column: bool
) -> AttentionInputs:
    """Add a bias to the masked keys that is just low enough for their weights to be exactly 0.

    It is no lower, so that a query which sees masked keys only has its own weights, up to the rounding of that bias.
    """
    dtype = torch.promote_types(inputs.key.dtype, torch.float32)
    all_heads = inputs.query.shape[1]
    norms = [torch.linalg.vector_norm(t, dim=-1, dtype=dtype).max() for t in (inputs.query, inputs.key)]
    spread = 2 * abs(inputs.scaling) * norms[0] * norms[1]  # |logit| ≤ scaling ‖q‖ ‖k‖
    if inputs.softcap is not None:
        spread = spread.clamp(max=2 * inputs.softcap)
    if inputs.bias is not None:
        spread = spread + inputs.bias.max() - inputs.bias.min()
    sink = inputs.sink
    if sink is not None:
        spread = spread + sink.to(dtype).abs().max()
    if sink is not None and sink_column:
        sink = sink.to(dtype).clone()
        sink[heads] = MASKED
    below = spread - 2 * math.log(torch.finfo(dtype).tiny)
    bias = torch.zeros(len(masked), all_heads, 1, masked.shape[1], dtype=dtype, device=masked.device)
    bias[:, heads] = masked[:, None, None].to(dtype) * -below.to(dtype)
    bias = bias if inputs.bias is None else bias + inputs.bias
    mask = inputs.mask
    if mask is not None:  # mask and bias differ between contexts, or neither does
        contexts = max(len(mask), len(bias))
        mask, bias = (each.expand(contexts, -1, -1, -1) for each in (mask, bias))
    return replace(inputs, mask=mask, bias=bias, sink=sink)


def restore_blind_queries(
    inputs: AttentionInputs,
    masked: Bool[Tensor, "masked_contexts keys"],
    heads: list[int],
    output: Float[Tensor, "batch queries heads value_width"],
) -> Float[Tensor, "batch queries heads value_width"]:
    """Replace the output of queries that see masked keys only by that of the inputs without the mask."""
    blind = _blind(inputs, masked, heads)
    positions = blind.flatten(0, 1).any(dim=0).nonzero().flatten()
    if not len(positions):
        return output
    unmasked = attend(inputs.of_queries(positions))[:, :, heads]
    output = output.clone()
    rows, columns = positions[:, None], torch.tensor(heads, device=positions.device)
    keep = blind[:, :, positions].transpose(1, 2).unsqueeze(-1)
    output[:, rows, columns] = torch.where(keep, unmasked, output[:, rows, columns])
    return output


def _blind(
    inputs: AttentionInputs, masked: Bool[Tensor, "masked_contexts keys"], heads: list[int]
) -> Bool[Tensor, "blind_contexts blind_heads queries"]:
    """Mark the queries that see no key but masked ones; 1 for contexts or heads where they do not differ."""
    shown = ~masked[:, None]
    if inputs.mask is not None:
        mask = inputs.mask if inputs.mask.shape[1] == 1 else inputs.mask[:, heads]
        return ~torch.cat([(rows & shown.unsqueeze(2)).any(-1) for rows in mask.split(64, dim=2)], dim=2)
    if inputs.causal:
        return shown.cumsum(-1) == 0
    return ~shown.any(-1, keepdim=True).expand(-1, -1, inputs.query.shape[2])
