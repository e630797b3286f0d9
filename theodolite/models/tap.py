"""The tap: every layer's queries, keys and values, taken where `transformers` itself hands them over.

`transformers` lets one register an attention function by name; each layer of each family that uses this
interface then calls it with q, k, v (after RoPE), scaling, mask and whatever else decides its logits. The tap
is such a function. It passes what it gets to a listener and returns the attention output, so that one forward
pass both runs the model and is measured. Families outside the interface get one small file each
(`OUTSIDE_INTERFACE`). The tap computes no statistic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from theodolite.errors import UsageError
from theodolite.models.bloom import bloom_attention_forward
from theodolite.theory.attention import AttentionInputs, attend

IMPLEMENTATION = "theodolite"

OUTSIDE_INTERFACE: dict[str, Callable[..., Any]] = {"BloomAttention": bloom_attention_forward}
"""Attention classes that do not call the interface, and the forward that makes them do so."""

Listener = Callable[[nn.Module, AttentionInputs], Tensor]
"""Gets the attention module and its inputs; returns the output, (batch, queries, heads, value_width)."""

_listener: ContextVar[Listener | None] = ContextVar("theodolite_listener", default=None)


def attention_inputs(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
) -> AttentionInputs:
    """Read the arguments of the attention interface as `AttentionInputs`."""
    scaling = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    own_scaling = getattr(module, "scaling", None)
    if scaling == 1.0 and isinstance(own_scaling, float) and own_scaling != 1.0:
        # OPT multiplies its queries by the scaling before it hands them over. Undone here, so that W_q and λ
        # mean the same in every family.
        query, scaling = query / own_scaling, own_scaling
    if attention_mask is not None and attention_mask.dtype != torch.bool:
        # An additive mask: hugely negative where a key is hidden. What else it adds is a bias.
        additive, attention_mask = attention_mask, attention_mask > torch.finfo(attention_mask.dtype).min / 2
        added = additive.masked_fill(~attention_mask, 0)
        if added.any():
            position_bias = added if position_bias is None else position_bias + added
    if is_causal is None:
        is_causal = bool(getattr(module, "is_causal", True))
    return AttentionInputs(
        query=query,
        key=key,
        value=value,
        scaling=scaling,
        causal=is_causal and attention_mask is None and query.shape[2] > 1,
        mask=attention_mask,
        softcap=softcap,
        bias=position_bias,
        sink=s_aux,
    )


def _tapped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    known = {name: kwargs.get(name) for name in ("softcap", "s_aux", "is_causal", "position_bias")}
    inputs = attention_inputs(module, query, key, value, attention_mask, scaling, **known)
    listener = _listener.get()
    return (attend(inputs) if listener is None else listener(module, inputs)), None


AttentionInterface.register(IMPLEMENTATION, _tapped_attention)
AttentionMaskInterface.register(IMPLEMENTATION, sdpa_mask)


@contextmanager
def tapped(model: PreTrainedModel, listener: Listener) -> Iterator[None]:
    """While open, every attention layer of `model` calls `listener`; the model is restored on leaving."""
    before = model.config._attn_implementation
    with ExitStack() as undo:
        outside = [m for m in model.modules() if type(m).__name__ in OUTSIDE_INTERFACE]
        for module in outside:
            own_forward = module.forward
            module.forward = OUTSIDE_INTERFACE[type(module).__name__].__get__(module)
            undo.callback(_restore_forward, module, own_forward)
        if outside:
            model.config._attn_implementation = (
                IMPLEMENTATION  # lets the model make the mask that the tap reads
            )
            undo.callback(setattr, model.config, "_attn_implementation", before)
        else:
            if not model._can_set_attn_implementation():
                raise UsageError(
                    f"{type(model).__name__} does not use the attention interface of transformers, so its "
                    "queries and keys cannot be read; theodolite does not support this family yet"
                )
            model.set_attn_implementation(IMPLEMENTATION)
            undo.callback(model.set_attn_implementation, before)
        token = _listener.set(listener)
        undo.callback(_listener.reset, token)
        yield


def _restore_forward(module: nn.Module, forward: Callable[..., Any]) -> None:
    del module.forward
    if module.forward != forward:  # it had been replaced by someone else before (an offloading hook, say)
        module.forward = forward
