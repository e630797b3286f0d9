"""Describe how a model encodes positions.

A model of `transformers` is told by what it hands to its attention and by the names of its parameters. Any other module
reads one token over and over, so that only positions differ, and each of its attention modules one hidden state.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from theodolite.attention.inputs import MASKED, AttentionInputs
from theodolite.errors import WorkError
from theodolite.models.calls import Call, capture_calls, run_until_tap, stop_at_tap
from theodolite.models.doors.answers import without_interventions
from theodolite.models.doors.taps import tapped
from theodolite.models.source import Source
from theodolite.models.structure import Structure
from theodolite.models.verification import VERIFIED_LENGTH

UNKNOWN = "unknown"


def positions_of(source: Source, structure: Structure, call: Call, bias: str) -> str:
    """Describe how the model encodes positions.

    Returns:
        "rotary", "alibi", "relative bias" or "learned"; of `transformers` "other" where its names say nothing. Of any
        other module "absolute" where positions are added to the stream (learned or fixed), "none" where nothing
        depends on them, and "unknown" where something does in another way.
    """
    if not isinstance(source.root, PreTrainedModel):
        return _seen(source, structure)
    if call.kwargs.get("position_embeddings") is not None:
        return "rotary"
    if bias != "none":
        return bias
    modules = [name.rpartition(".")[2] for name, _ in source.root.named_modules()]
    learned = any("pos" in name or name.endswith("wpe") for name in modules)
    learned = learned or any("position_embed" in name for name, _ in source.root.named_parameters())
    return "learned" if learned else "other"


def _seen(source: Source, structure: Structure) -> str:
    sample = source.sample(VERIFIED_LENGTH)
    same = torch.zeros_like(sample) if sample.is_floating_point() else sample[:, :1].expand_as(sample)
    with without_interventions(), torch.no_grad():
        calls = capture_calls(source.root, structure, lambda: source.run(same))
        with tapped(source.root, stop_at_tap):
            for layer in structure.attending:
                hidden = calls[layer].hidden
                alike = hidden[:, hidden.shape[1] // 2].unsqueeze(1).expand_as(hidden)
                try:
                    inputs = run_until_tap(structure.attention_at(layer), calls[layer], alike)
                except WorkError:
                    return UNKNOWN
                kind = _of_attention(inputs)
                if kind is not None:
                    return kind
    return "absolute" if _varies(calls[structure.attending[0]].hidden) else "none"


def _of_attention(inputs: AttentionInputs) -> str | None:
    """Describe how queries, keys or logits depend on positions of equal hidden states; None: they do not."""
    heads = [tensor.transpose(1, 2) for tensor in (inputs.query, inputs.key)]
    if any(map(_varies, heads)):
        lengths = [torch.linalg.vector_norm(tensor, dim=-1, keepdim=True) for tensor in heads]
        return UNKNOWN if any(map(_varies, lengths)) else "rotary"
    # The bias of the last query over the keys that it sees: what they have in common decides no weight.
    of_last = replace(inputs, query=torch.zeros_like(inputs.query)).of_queries(slice(-1, None)).logits()
    bias = of_last[..., (of_last > MASKED / 2).all(dim=(0, 1, 2))].double()
    if inputs.bias is None or not bias.diff().any():
        return None
    rounding = max(1e-3, 4 * torch.finfo(inputs.bias.dtype).eps) * (bias - bias[..., -1:]).abs().max()
    return "alibi" if bool((bias.diff(n=2).abs() <= rounding).all()) else "relative bias"


def _varies(hidden: Tensor) -> bool:
    """Tell whether what stands at positions (dimension 1), those at both ends left out, depends on them."""
    length, of = hidden.shape[1], torch.finfo(hidden.dtype).eps
    middle = hidden[:, length // 4 : -(length // 4) or None].double()
    return bool((middle - middle[:, :1]).abs().max() > min(256 * of, 0.05) * middle.abs().max())
