"""BLOOM's attention, which does not go through the attention interface of `transformers`.

Its logits carry ALiBi, a bias per head that grows with the key's position. This forward computes the same as
BLOOM's own, but calls the interface like any other family does. Inference only: no cache, no dropout.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


def bloom_attention_forward(
    self: nn.Module,
    hidden_states: Tensor,
    residual: Tensor,
    alibi: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Stand in for `BloomAttention.forward`; `alibi` is (batch · heads, 1, keys)."""
    module: Any = self
    batch, length, width = hidden_states.shape
    query, key, value = module._reshape(module.query_key_value(hidden_states))
    output, _ = ALL_ATTENTION_FUNCTIONS["theodolite"](
        module,
        query,
        key,
        value,
        attention_mask,
        scaling=module.inv_norm_factor,
        position_bias=alibi.view(-1, module.num_heads, *alibi.shape[1:]),
    )
    return module.dense(output.reshape(batch, length, width)) + residual, None
