"""The tap: every layer's queries, keys and values, taken where `transformers` itself hands them over.

`transformers` lets one register an attention function by name; each layer of each family that uses this
interface then calls it with q, k, v (after RoPE), scaling, mask and whatever else decides its logits. The tap
is such a function. It passes what it gets to a tap of the model and returns the attention output, so that one forward
pass both runs the model and is measured. Families outside the interface get one small file each
(`OUTSIDE_INTERFACE`). Interventions are applied here too, whoever taps the model. No statistic is computed here.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from theodolite.attention.inputs import AttentionInputs, attend
from theodolite.errors import UsageError
from theodolite.models.doors.bloom import bloom_attention_forward

IMPLEMENTATION = "theodolite"

OUTSIDE_INTERFACE: dict[str, Callable[..., Any]] = {"BloomAttention": bloom_attention_forward}
"""Attention classes that do not call the interface, and the forward that makes them do so."""

Tap = Callable[[nn.Module, AttentionInputs], Tensor]
"""Gets the attention module and its inputs; returns the output, (batch, queries, heads, value_width)."""

Answer = Callable[[AttentionInputs], Tensor]
"""From attention inputs to the output, (batch, queries, heads, value_width)."""

Intervention = Callable[[AttentionInputs, Answer], Tensor]
"""Stands between a layer and its attention: may hand other inputs on to the answer, and return another output."""


@dataclass(frozen=True)
class _OpenTap:
    """A tap and the modules of the model that it was opened for."""

    modules: frozenset[nn.Module]
    tap: Tap


@dataclass(frozen=True)
class _OpenIntervention:
    """An intervention in one layer's attention, while it is open."""

    modules: frozenset[nn.Module]
    module: nn.Module
    intervene: Intervention
    of_inputs: bool
    whole_cache: bool


_taps: ContextVar[tuple[_OpenTap, ...]] = ContextVar("theodolite_taps", default=())
_suspended: ContextVar[bool] = ContextVar("theodolite_suspended", default=False)

# Of the process and not of a context: they hold whoever calls the model, as changed weights would
# (`generate` with a streamer runs in another thread).
_interventions: list[_OpenIntervention] = []


@dataclass
class _TappedModel:
    """A model that goes through the tap: how many are open on it, and what turns it back."""

    undo: ExitStack
    count: int = 0


_open: dict[PreTrainedModel, _TappedModel] = {}


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
    """Read the arguments of the attention interface as `AttentionInputs`.

    Args:
        module: the attention module that calls.
        query: (batch, heads, queries, head_width).
        key, value: (batch, key_heads, keys, head_width or value_width).
        attention_mask: boolean, true where a query sees a key, or added to the logits; broadcasts to (batch, heads,
            queries, keys).
        scaling: of the logits; None: 1/√head_width.
        softcap: logits are softcap · tanh(logit / softcap).
        s_aux: learned sink logits, (heads).
        is_causal: None: as the module says.
        position_bias: added to the logits, shaped as the mask.
    """
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
    answer = _answer(module)
    for opened in [] if _suspended.get() else sorted(_interventions, key=lambda e: not e.of_inputs):
        if opened.module is module:
            if opened.whole_cache:
                _refuse_dropped_keys(inputs, kwargs.get("sliding_window"))
            answer = _with_intervention(opened.intervene, answer)
    return answer(inputs), None


def _answer(module: nn.Module) -> Answer:
    """Who answers a module: the innermost tap of its model; for a copy of a module, the innermost of all."""
    taps = _taps.get()
    for opened in reversed(taps):
        if module in opened.modules:
            return functools.partial(opened.tap, module)
    if not taps or any(module in opened.modules for opened in _interventions):
        return attend
    return functools.partial(taps[-1].tap, module)


def _with_intervention(intervene: Intervention, answer: Answer) -> Answer:
    return lambda inputs: intervene(inputs, answer)


def _refuse_dropped_keys(inputs: AttentionInputs, window: int | None) -> None:
    queries, keys = inputs.query.shape[2], inputs.key.shape[2]
    if window is not None and queries < keys and keys >= window:
        raise UsageError(
            f"the cache of this layer keeps the last {window} keys only, so that positions cannot be told any more; "
            "call generate with use_cache=False"
        )


AttentionInterface.register(IMPLEMENTATION, _tapped_attention)
AttentionMaskInterface.register(IMPLEMENTATION, sdpa_mask)


@contextmanager
def tapped(model: PreTrainedModel, tap: Tap) -> Iterator[None]:
    """While open, every attention layer of `model` calls `tap`; the model is restored on leaving."""
    with _opened(model) as modules:
        opened = _OpenTap(modules, tap)
        _taps.set((*_taps.get(), opened))
        try:
            yield
        finally:
            # By identity, and not by what was there before: they may be left in any order.
            _taps.set(tuple(other for other in _taps.get() if other is not opened))


@contextmanager
def intervened(
    model: PreTrainedModel,
    module: nn.Module,
    intervene: Intervention,
    *,
    of_inputs: bool = False,
    whole_cache: bool = False,
) -> Iterator[None]:
    """While open, `intervene` is applied whenever `model` calls the attention module `module`, tapped or not.

    Those in inputs come first, whatever the order in which they were opened, and within a kind the one opened first
    is nearest to the attention itself. A tap gets the changed inputs; what it returns is changed. Copies of the
    module are left alone.

    Args:
        model: the model; restored on leaving.
        module: one of its attention modules.
        intervene: gets the inputs and who answers them; returns the output, (batch, queries, heads, value_width).
        of_inputs: it changes the inputs, and of the output only what follows from it.
        whole_cache: it needs key j to be the token at position j, so that a cache which drops keys is refused.
    """
    with _opened(model) as modules:
        opened = _OpenIntervention(modules, module, intervene, of_inputs, whole_cache)
        _interventions.append(opened)
        try:
            yield
        finally:
            # By identity: two equal interventions may be open at once.
            del _interventions[next(i for i, other in enumerate(_interventions) if other is opened)]


@contextmanager
def without_interventions() -> Iterator[None]:
    """While open, no intervention is applied: to look at the model itself, on inputs that none was made for."""
    token = _suspended.set(True)
    try:
        yield
    finally:
        _suspended.reset(token)


@contextmanager
def _opened(model: PreTrainedModel) -> Iterator[frozenset[nn.Module]]:
    """While open, the attention layers of `model` go through the tap; yields all of its modules.

    The first one opened turns the model to the tap, the last one left turns it back, whatever their order.
    """
    if model not in _open:
        _open[model] = _TappedModel(_turn_to_tap(model))
    tapped_model = _open[model]
    tapped_model.count += 1
    try:
        yield frozenset(model.modules())
    finally:
        tapped_model.count -= 1
        if not tapped_model.count:
            del _open[model]
            tapped_model.undo.close()


def _turn_to_tap(model: PreTrainedModel) -> ExitStack:
    """Turn a model's attention layers to the tap; what turns them back."""
    before = [(config, config._attn_implementation) for config in _configs(model)]
    with ExitStack() as undo:
        undo.callback(_restore_implementations, before)
        outside = [m for m in model.modules() if type(m).__name__ in OUTSIDE_INTERFACE]
        for module in outside:
            own_forward = module.forward
            module.forward = _outside_forward.__get__(module)
            undo.callback(_restore_forward, module, own_forward)
        if outside:
            # Lets the model make the mask that the tap reads.
            model.config._attn_implementation = IMPLEMENTATION
        else:
            parts = _on_interface(model)
            if not parts:
                raise UsageError(
                    f"{type(model).__name__} does not use the attention interface of transformers, so its "
                    "queries and keys cannot be read; theodolite does not support this family yet"
                )
            for part in parts:
                part.set_attn_implementation(IMPLEMENTATION)
        return undo.pop_all()


def _on_interface(model: PreTrainedModel) -> list[PreTrainedModel]:
    """The model; or, where it does not use the interface, those in it that do: the text side of GOT-OCR 2, say."""
    if model._can_set_attn_implementation():
        return [model]
    inside = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    return [module for module in inside if module._can_set_attn_implementation()]


def _configs(model: PreTrainedModel) -> list[PreTrainedConfig]:
    """The configs of a model and of the models in it, text and vision say; none before one that it is a part of."""
    configs: dict[int, PreTrainedConfig] = {}
    waiting = [m.config for m in model.modules() if isinstance(m, PreTrainedModel)]
    while waiting:
        config = waiting.pop(0)
        configs[id(config)] = config
        parts = (getattr(config, name, None) for name in config.sub_configs)
        waiting += [part for part in parts if part is not None and id(part) not in configs]
    return list(configs.values())


def _restore_implementations(before: list[tuple[PreTrainedConfig, str | None]]) -> None:
    for config, implementation in before:
        config._attn_implementation = implementation  # and that of all of its parts, whose turn comes later


_passed: weakref.WeakKeyDictionary[Any, weakref.WeakSet[nn.Module]] = weakref.WeakKeyDictionary()


def _outside_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The forward of `OUTSIDE_INTERFACE`, which keeps no cache, so that a pass that continues one is refused."""
    cache = kwargs.get("layer_past")
    if cache is not None:
        passed = _passed.setdefault(cache, weakref.WeakSet())
        if self in passed or cache.get_seq_length():
            raise UsageError(
                f"theodolite runs {type(self).__name__} without a cache, so earlier keys would be missing; call "
                "generate with use_cache=False"
            )
        passed.add(self)
    return OUTSIDE_INTERFACE[type(self).__name__](self, *args, **kwargs)


def _restore_forward(module: nn.Module, forward: Callable[..., Any]) -> None:
    del module.forward
    if module.forward != forward:  # it had been replaced by someone else before (an offloading hook, say)
        module.forward = forward
