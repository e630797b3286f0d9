"""Taps and interventions: a function that gets every layer's queries, keys and values, and returns the output."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from torch import nn

from theodolite.models.doors.answers import Intervention, OpenTap, Tap, open_interventions, open_taps
from theodolite.models.doors.pytorch import functions_door
from theodolite.models.doors.transformers import interface_door, on_interface
from theodolite.models.training.shards import of_all_heads
from theodolite.system.processor import Shared

Fits = Callable[[nn.Module], object]
Door = Callable[[nn.Module], AbstractContextManager[None]]

_by_functions: weakref.WeakSet[nn.Module] = weakref.WeakSet()

DOORS: list[tuple[Fits, Door]] = [
    (lambda model: model not in _by_functions and on_interface(model), interface_door)
]
"""Which models go through which door: the first that fits; all others through PyTorch's functions."""


def add_door(fits: Fits, door: Door) -> None:
    """Tap models through a door of your own, for a kernel that no other door intercepts.

    Args:
        fits: whether a model goes through it; it is asked before the other doors.
        door: the context manager of a model. While it is open, each attention module of the model calls
            `answered(module, inputs)` in place of its attention.
    """
    DOORS.insert(0, (fits, door))


_open: dict[nn.Module, Shared] = {}
"""Models that go through the tap: those who have one open share the door."""


def tap_functions_of(model: nn.Module) -> bool:
    """Tap a model by PyTorch's functions from now on, whatever interface it has (GIT); True if this is new."""
    new = model not in _by_functions
    _by_functions.add(model)
    return new


@contextmanager
def tapped(model: nn.Module, tap: Tap, *, own_heads: bool = False) -> Iterator[OpenTap]:
    """Call `tap` from every attention layer of `model` while open; with `own_heads` from those of this rank alone."""
    with _opened(model) as modules:
        opened = OpenTap(modules, tap if own_heads else of_all_heads(model, tap))
        open_taps.set((*open_taps.get(), opened))
        try:
            yield opened
        finally:
            # By identity, and not by what was there before: they may be left in any order.
            open_taps.set(tuple(other for other in open_taps.get() if other is not opened))


@contextmanager
def intervened(model: nn.Module, module: nn.Module, intervene: Intervention) -> Iterator[None]:
    """Apply `intervene` while open whenever `model` calls the attention module `module`, tapped or not.

    The one opened first is nearest to the attention itself. A tap gets the changed inputs; what it returns is changed.
    Copies of the module are left alone.
    """
    with _opened(model) as modules:
        intervention = modules, module, intervene
        open_interventions.append(intervention)
        try:
            yield
        finally:
            open_interventions.remove(intervention)


@contextmanager
def _opened(model: nn.Module) -> Iterator[frozenset[nn.Module]]:
    """Open the model's door, or share it; yields all of its modules."""
    with _open.setdefault(model, Shared(lambda: _through_its_door(model))).entered():
        yield frozenset(model.modules())


@contextmanager
def _through_its_door(model: nn.Module) -> Iterator[None]:
    door = next((door for fits, door in DOORS if fits(model)), functions_door)
    try:
        with door(model):
            yield
    finally:
        _open.pop(model, None)
