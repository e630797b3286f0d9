"""The door to models of `transformers`: a registered attention function, which each layer calls with its inputs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import eager_mask, sdpa_mask

from theodolite.attention.inputs import AttentionInputs
from theodolite.errors import UsageError
from theodolite.models.doors.answers import answered

IMPLEMENTATION = "theodolite"

WITH_MASKS = "theodolite_with_masks"
"""The same, with the masks of eager attention: modules that say that they are not causal, or nothing, would have none,
and a model may read its mask elsewhere (NLLB's router)."""


def _tapped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    indices: Tensor | None = None,
    block_indices: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Answer the attention interface; `s_aux` are a learned sink's logits, `indices` chosen keys."""
    if block_indices is not None:
        raise UsageError(
            f"{type(module).__name__} attends to blocks of keys that it chooses, which cannot be read"
        )
    scaling = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    own_scaling = getattr(module, "scaling", None)
    if scaling == 1.0 and isinstance(own_scaling, float) and own_scaling != 1.0:
        # OPT multiplies its queries by the scaling before it hands them over. Undone here, so that W_q and λ
        # mean the same in every family.
        query, scaling = query / own_scaling, own_scaling
    if attention_mask is not None and attention_mask.dtype != torch.bool:
        # An additive mask: `AttentionInputs` tells what it hides from what else it adds.
        position_bias = attention_mask if position_bias is None else position_bias + attention_mask
        attention_mask, is_causal = None, False
    if indices is not None:  # of the keys that each query has chosen (batch, queries, chosen): DeepSeek 3.2
        others = query.new_full((len(indices), 1, query.shape[2], key.shape[2]), -torch.inf)
        others.scatter_(-1, indices.long().unsqueeze(1), 0)
        position_bias = others if position_bias is None else position_bias + others
    if is_causal is None:
        is_causal = bool(getattr(module, "is_causal", True))
    causal = is_causal and attention_mask is None and query.shape[2] > 1
    inputs = AttentionInputs(
        query, key, value, scaling, causal, attention_mask, softcap, position_bias, s_aux
    )
    return answered(module, inputs), None


AttentionInterface.register(IMPLEMENTATION, _tapped_attention)
AttentionInterface.register(WITH_MASKS, _tapped_attention)
AttentionMaskInterface.register(IMPLEMENTATION, sdpa_mask)
AttentionMaskInterface.register(WITH_MASKS, eager_mask)


@contextmanager
def interface_door(model: nn.Module) -> Iterator[None]:
    """Open the door: set the registered attention function on the parts that are `on_interface`."""
    before = [(config, config._attn_implementation) for config in _configs(model)]
    try:
        for part in on_interface(model):
            is_causal = {getattr(module, "is_causal", True) for module in part.modules()}
            by_masks = False in is_causal or not part._supports_sdpa
            part.set_attn_implementation(WITH_MASKS if by_masks else IMPLEMENTATION)
        yield
    finally:
        for config, implementation in before:
            config._attn_implementation = implementation  # and of all its parts, which come later


def on_interface(model: nn.Module) -> list[PreTrainedModel]:
    """Return the parts that use the attention interface: the model, else parts inside it (GOT-OCR 2's text side)."""
    parts = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    able = [part for part in parts if part._can_set_attn_implementation()]
    return able[:1] if able[:1] == [model] else able


def _configs(model: nn.Module) -> list[PreTrainedConfig]:
    """List the configs of a model and of the models in it (text, vision); a part comes after its whole."""
    configs: dict[int, PreTrainedConfig] = {}
    waiting = [m.config for m in model.modules() if isinstance(m, PreTrainedModel)]
    while waiting:
        config = waiting.pop(0)
        configs[id(config)] = config
        parts = (getattr(config, name, None) for name in config.sub_configs)
        waiting += [part for part in parts if part is not None and id(part) not in configs]
    return list(configs.values())
