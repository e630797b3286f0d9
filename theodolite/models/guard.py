"""A pass has its model to itself, and computes as if nothing had been set elsewhere.

Other threads wait: hooks and interventions hold for whoever calls the model.
"""

from __future__ import annotations

import functools
import inspect
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from theodolite.models.stored.dequantised import kept_as_quantised
from theodolite.system.processor import Shared

Given = ParamSpec("Given")
Result = TypeVar("Result")

MAKING = threading.RLock()
"""Held while a model is made: transformers then changes its classes, for all threads (no ties, no first weights)."""


def measures(which: str) -> Callable[[Callable[Given, Result]], Callable[Given, Result]]:
    """Decorate a function that measures a model: the model is `guarded` while the function runs.

    The function must run no other model that a second thread may have: two such could wait for each other.

    Args:
        which: the opened model, as the function calls it: `"model"` for its argument of that name, `"self"`,
            `"self.model"`. Where it is no opened model (the function itself refuses it), only the state is a known one.
    """
    name, _, attribute = which.partition(".")

    def decorate(function: Callable[Given, Result]) -> Callable[Given, Result]:
        place = list(inspect.signature(function).parameters).index(name)

        @functools.wraps(function)
        def measuring(*args: Given.args, **kwargs: Given.kwargs) -> Result:
            opened = args[place] if place < len(args) else kwargs.get(name)
            root = getattr(getattr(opened, attribute) if attribute else opened, "root", None)
            with guarded(root) if isinstance(root, nn.Module) else known_state():
                return function(*args, **kwargs)

        return measuring

    return decorate


@contextmanager
def guarded(model: nn.Module) -> Iterator[None]:
    """Let this thread alone measure `model` while open, in evaluation mode and the `known_state`.

    To be left by the same thread: never by a generator.
    """
    held = _held(model)
    with held.lock:
        held.depth += 1
        try:
            first = held.depth == 1
            with known_state(leave_inference=first), _evaluating(model) if first else nullcontext():
                yield
        finally:
            held.depth -= 1
            if not held.depth:
                held.known.clear()


@contextmanager
def between_passes(model: nn.Module) -> Iterator[None]:
    """Let no other thread measure `model` while open, so that it can be changed. Nothing else is set."""
    with _held(model).lock:
        yield


def once_a_pass(model: nn.Module, name: str, work: Callable[[], Result]) -> Result:
    """Return the result of `work`, computed once for each name while the model is `guarded`."""
    held = _held(model)
    with held.lock:
        if name in held.known:
            return held.known[name]
        result = work()
        if held.depth:
            held.known[name] = result
        return result


@contextmanager
def without_autocast() -> Iterator[None]:
    """Keep autocast off while open: for what measures inside a forward pass that has switched it on by itself."""
    with ExitStack() as undo:
        for device in ("cpu", "cuda", "xpu", "mps"):  # those that autocast knows
            if torch.is_autocast_enabled(device):
                undo.enter_context(torch.autocast(device, enabled=False))
        yield


@contextmanager
def known_state(*, leave_inference: bool = True) -> Iterator[None]:
    """Let PyTorch and NumPy compute while open as they do at the start of a process, without gradients.

    Autocast is off, nothing runs compiled, what is made is float32 on the CPU unless something else is asked for,
    products are not rounded, and every kernel of attention may be chosen. With `leave_inference`, what is made may be
    changed outside of the `torch.inference_mode` that is open now.
    """
    with ExitStack() as undo:
        if leave_inference and torch.is_inference_mode_enabled():
            undo.enter_context(torch.inference_mode(False))
        undo.enter_context(torch.no_grad())
        undo.enter_context(eagerly())
        undo.enter_context(without_autocast())
        if torch.get_default_device().type != "cpu":
            undo.enter_context(torch.device("cpu"))
        undo.enter_context(np.errstate(divide="warn", over="warn", under="ignore", invalid="warn"))
        undo.enter_context(_OF_THE_PROCESS.entered())
        yield


eagerly = Shared(lambda: torch.compiler.set_stance("force_eager")).entered
"""Run nothing compiled while open, in any thread."""


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Set evaluation mode; on leaving, only modules that were in training mode go back to it."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        with kept_as_quantised(model):
            yield
    finally:
        for module in training:
            module.training = True


@dataclass
class _Held:
    """The lock of one model, how often it was entered, and results kept until it is left."""

    lock: threading.RLock = field(default_factory=threading.RLock)
    depth: int = 0
    known: dict[str, Any] = field(default_factory=dict)


_models: weakref.WeakKeyDictionary[nn.Module, _Held] = weakref.WeakKeyDictionary()
_models_lock = threading.Lock()


def _held(model: nn.Module) -> _Held:
    with _models_lock:
        return _models.setdefault(model, _Held())


def _as_at_the_start() -> ExitStack:
    """Set process-wide state as it is at the start of a process; return what restores it."""
    backends: Any = torch.backends
    with ExitStack() as undo:
        undo.callback(torch.set_default_dtype, torch.get_default_dtype())
        torch.set_default_dtype(torch.float32)
        # Products and convolutions of float32 are in float32. PyTorch has two ways to say so, and does not answer in
        # one what was said in the other.
        try:
            precision = torch.get_float32_matmul_precision()
        except RuntimeError:
            for backend in (backends.mkldnn.matmul, backends.cuda.matmul):
                _exact_by_backend(backend, undo)
        else:
            if precision != "highest":  # setting it again would keep later words from being heard
                undo.callback(torch.set_float32_matmul_precision, precision)
                torch.set_float32_matmul_precision("highest")
        try:
            rounded = backends.cudnn.allow_tf32
        except RuntimeError:
            _exact_by_backend(backends.cudnn.conv, undo)
        else:
            undo.callback(setattr, backends.cudnn, "allow_tf32", rounded)
            backends.cudnn.allow_tf32 = False
        undo.enter_context(sdpa_kernel([*SDPBackend.__members__.values()]))  # they differ in last bits
        return undo.pop_all()


def _exact_by_backend(backend: Any, undo: ExitStack) -> None:
    before, everywhere = backend.fp32_precision, getattr(torch.backends, "fp32_precision", None)
    inherited_or_own = "none" if before == everywhere else before
    undo.callback(setattr, backend, "fp32_precision", inherited_or_own)
    backend.fp32_precision = "ieee"


_OF_THE_PROCESS = Shared(_as_at_the_start)
