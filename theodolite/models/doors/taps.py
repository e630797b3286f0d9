"""The tap: every layer's queries, keys and values, taken where the model itself computes its attention with them.

One forward pass both runs the model and is measured: a tap gets what decides a layer's logits, and returns the
attention output. A model comes through one of two doors: the attention interface of `transformers`, or the functions
of PyTorch that it attends with. Interventions are applied there too, whoever taps the model.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from theodolite.models.doors.answers import Intervention, Tap, intervening, listening
from theodolite.models.doors.pytorch import attention_not_followed as attention_not_followed
from theodolite.models.doors.pytorch import turned_to_functions
from theodolite.models.doors.transformers import on_interface, turned_to_interface
from theodolite.models.training.shards import of_all_heads
from theodolite.system.shared import Shared

_open: dict[nn.Module, Shared] = {}
"""Models that go through the tap: those who have one open share the door."""

_by_functions: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def listen_to_functions(model: nn.Module) -> bool:
    """From now on, tap a model by PyTorch's functions, though it uses the interface; whether this is new.

    The text side of GIT attends by hand, its vision side through the interface.
    """
    new = model not in _by_functions
    _by_functions.add(model)
    return new


@contextmanager
def tapped(model: nn.Module, tap: Tap, *, own_heads: bool = False) -> Iterator[None]:
    """While open, every attention layer of `model` calls `tap`; the model is restored on leaving.

    Where ranks have some of the heads each, it gets all of them, and all ranks must run the model; or `own_heads`.
    """
    with _opened(model) as modules, listening(modules, tap if own_heads else of_all_heads(model, tap)):
        yield


@contextmanager
def overheard(model: nn.Module, tap: Tap) -> Iterator[None]:
    """While open, `tap` is told of the attention that `model` computes; what it returns is not used.

    Only of what PyTorch's own functions and products compute, and of nothing that runs compiled. The numbers of the
    pass, their gradients and random numbers are as without it.
    """
    with (
        turned_to_functions(model, eager=False),
        listening(frozenset(model.modules()), of_all_heads(model, tap), overhears=True),
    ):
        yield


@contextmanager
def intervened(
    model: nn.Module,
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
    with _opened(model) as modules, intervening(modules, module, intervene, of_inputs, whole_cache):
        yield


@contextmanager
def _opened(model: nn.Module) -> Iterator[frozenset[nn.Module]]:
    """While open, the attention layers of `model` go through the tap; yields all of its modules."""
    with _open.setdefault(model, Shared(lambda: _through_its_door(model))).entered():
        yield frozenset(model.modules())


@contextmanager
def _through_its_door(model: nn.Module) -> Iterator[None]:
    by_interface = model not in _by_functions and on_interface(model)
    try:
        with (turned_to_interface if by_interface else turned_to_functions)(model):
            yield
    finally:
        del _open[model]
