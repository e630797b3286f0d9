"""What a model reads: its tokens, how many positions it has and what they are, and a small input of that kind."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from theodolite.errors import UsageError
from theodolite.models.head_weights import Call
from theodolite.models.loading import device_of


def longest_of(model: PreTrainedModel) -> int | None:
    """Tokens that the model has positions for, or None where it sets no limit."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and "position" in name and module.padding_idx is not None:
            return module.num_embeddings - module.padding_idx - 1  # RoBERTa counts from its padding index
    limit = getattr(model.config, "max_position_embeddings", None)
    return int(limit) if isinstance(limit, int) and limit > 0 else None


def embedded_tokens(model: PreTrainedModel) -> int:
    """Rows of a model's token embedding."""
    return len(model.get_input_embeddings().weight)  # type: ignore[arg-type]


def small_input(model: PreTrainedModel, length: int) -> dict[str, Any]:
    """A small valid input: `length` seeded token ids, (1, length), or an image of noise, (1, channels, height, width).

    Fewer ids where the model has positions for fewer.

    Raises:
        UsageError: the model reads something else.
    """
    generator = torch.Generator().manual_seed(0)
    if model.main_input_name == "pixel_values":
        size, channels = model.config.image_size, model.config.num_channels
        height, width = (size, size) if isinstance(size, int) else size
        noise = torch.randn(1, channels, height, width, generator=generator)
        return {"pixel_values": noise.to(device_of(model), model.dtype)}
    if model.main_input_name != "input_ids":
        raise UsageError(
            f"{type(model).__name__} reads {model.main_input_name}, which theodolite cannot make"
        )
    vocabulary = embedded_tokens(model)
    ids = torch.randint(vocabulary, (1, min(length, longest_of(model) or length)), generator=generator)
    return {"input_ids": ids.to(device_of(model)), "use_cache": False}


def positions_of(model: nn.Module, call: Call, bias: str) -> str:
    """How the model encodes positions: "rotary", "alibi", "relative bias", "learned" or "other"."""
    if call[1].get("position_embeddings") is not None:
        return "rotary"
    if bias != "none":
        return bias
    learned = any(
        "pos" in name.rsplit(".", 1)[-1] or name.endswith("wpe") for name, _ in model.named_modules()
    )
    return (
        "learned" if learned or any("position_embed" in n for n, _ in model.named_parameters()) else "other"
    )
