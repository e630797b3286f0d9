"""Compute a module's attention in its place: by the open tap, with interventions on its inputs and output."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from theodolite.attention.inputs import AttentionInputs, attend
from theodolite.models.guard import without_autocast
from theodolite.models.one_row import in_one_row, split_by_context

Tap = Callable[[nn.Module, AttentionInputs], Tensor]
"""Gets the attention module and its inputs; returns the output, (batch, queries, heads, value_width)."""

Answer = Callable[[AttentionInputs], Tensor]
"""From attention inputs to the output, (batch, queries, heads, value_width)."""

Intervention = Callable[[AttentionInputs, Answer], Tensor]
"""Stands between a layer and its attention: may hand other inputs on to the answer, and return another output."""


@dataclass(frozen=True, eq=False)
class OpenTap:
    """A tap, and the modules of the model that it was opened for."""

    modules: frozenset[nn.Module]
    tap: Tap


open_taps: ContextVar[tuple[OpenTap, ...]] = ContextVar("theodolite_taps", default=())
_suspended: ContextVar[bool] = ContextVar("theodolite_suspended", default=False)

open_interventions: list[tuple[frozenset[nn.Module], nn.Module, Intervention]] = []
"""The modules of a model, the attention module among them, and what intervenes in it.

Of the process and not of a context: they hold whoever calls the model (`generate` with a streamer has a thread)."""


@contextmanager
def without_interventions() -> Iterator[None]:
    """Suspend interventions while open: to look at the model itself, on inputs that none was made for."""
    token = _suspended.set(True)
    try:
        yield
    finally:
        _suspended.reset(token)


def answered(module: nn.Module, inputs: AttentionInputs) -> Tensor:
    """Compute a module's attention as the tap and interventions say: (batch, queries, heads, value_width).

    What a door calls in place of the module's own attention.
    """
    answer, inputs, row = _answer(module), _as_autocast(inputs), in_one_row(inputs)
    if row:
        inputs = split_by_context(inputs, type(module).__name__)
    for _, changed, intervene in [] if _suspended.get() else open_interventions:
        if changed is module:
            answer = functools.partial(_intervened, intervene, answer)
    with without_autocast():
        return answer(inputs).flatten(0, 1).unsqueeze(0) if row else answer(inputs)


def _intervened(intervene: Intervention, answer: Answer, inputs: AttentionInputs) -> Tensor:
    return intervene(inputs, answer)


def _as_autocast(inputs: AttentionInputs) -> AttentionInputs:
    """Cast queries, keys and values as the model's own products would, where it runs under autocast."""
    device = inputs.query.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return inputs
    dtype = torch.get_autocast_dtype(device)
    given = inputs.query, inputs.key, inputs.value
    query, key, value = (of if of.dtype == torch.float64 else of.to(dtype) for of in given)
    return replace(inputs, query=query, key=key, value=value)


def innermost() -> OpenTap | None:
    """Return the tap that was opened last in this context, or None: it is the one that answers."""
    return next(reversed(open_taps.get()), None)


def _answer(module: nn.Module) -> Answer:
    """Find what answers a module: the innermost tap of its model; for a copy of a module, the innermost of all."""
    taps = open_taps.get()
    tapped = [opened for opened in taps if module in opened.modules]
    if not taps or (not tapped and any(module in modules for modules, _, _ in open_interventions)):
        return attend
    return functools.partial((tapped or taps)[-1].tap, module)
