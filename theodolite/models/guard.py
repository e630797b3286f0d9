"""A pass has its model to itself, and computes as if nothing had been set elsewhere.

Mixed precision, dropout, defaults of dtype and device, rounded products and kernels of attention that are switched off
decide numbers. While a model is measured, all of these are as PyTorch and NumPy have them at the start of a process;
afterwards they are as they were. Other threads wait: hooks and interventions hold for whoever calls the model. Nothing
is measured here.
"""

from __future__ import annotations

import functools
import inspect
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch
from torch import nn

from theodolite.models.stored.dequantised import not_repacked, without_cast_warnings
from theodolite.system.eager import eagerly

Given = ParamSpec("Given")
Result = TypeVar("Result")


MAKING = threading.RLock()
"""Held while a model is made: transformers then changes its classes, for all threads (no ties, no first weights)."""


def measures(which: str) -> Callable[[Callable[Given, Result]], Callable[Given, Result]]:
    """Decorate a function that measures a model: the model is `guarded` while the function runs.

    Where the argument is no opened model (the function itself refuses it), only the state is a known one. The function
    must run no other model that a second thread may have: two such could wait for each other.

    Args:
        which: the opened model, as the function calls it: `"model"` for its argument of that name, `"self"`,
            `"self.model"`.
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
    """While open, no other thread opens this for `model`, which is in evaluation mode; the state is a known one.

    It may be opened again by the thread that has it. To be opened and left by one thread, never by a generator that
    may be left half read.
    """
    held = _held(model)
    with held.lock, ExitStack() as undo:
        undo.enter_context(held.entered())
        undo.enter_context(known_state(leave_inference=held.depth == 1))
        undo.enter_context(_evaluating(model))
        yield


@contextmanager
def between_passes(model: nn.Module) -> Iterator[None]:
    """While open, no other thread measures `model`: to change it. Nothing else is set."""
    with _held(model).lock:
        yield


def once_a_pass(model: nn.Module, name: str, work: Callable[[], Result]) -> Result:
    """What `work` gives; while the model is `guarded`, what it gave the first time under this name."""
    held = _held(model)
    with held.lock:
        if not held.depth:
            return work()
        if name not in held.known:
            held.known[name] = work()
        result: Result = held.known[name]
        return result


CASTING = ("cpu", "cuda", "xpu", "mps")
"""Devices that autocast knows."""


@contextmanager
def without_autocast() -> Iterator[None]:
    """While open, nothing is cast: for what measures inside a forward pass that has switched autocast on by itself."""
    with ExitStack() as undo:
        for device in CASTING:
            if torch.is_autocast_enabled(device):
                undo.enter_context(torch.autocast(device, enabled=False))
        yield


@contextmanager
def known_state(*, leave_inference: bool = True) -> Iterator[None]:
    """While open, PyTorch and NumPy compute as they do at the start of a process, without gradients.

    Autocast is off, nothing runs compiled, what is made is float32 on the CPU unless something else is asked for,
    products are not rounded, every kernel of attention may be chosen, and NumPy's errors are its own. Dtype, precision
    and kernels are of the whole process; the rest is of this thread.

    Args:
        leave_inference: what is made may be changed later, outside of the `torch.inference_mode` that is open now.
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
        undo.enter_context(_OF_THE_PROCESS.set())
        yield


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """By each module's own flag: some are frozen in evaluation mode on purpose."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        with not_repacked(model), without_cast_warnings():
            yield
    finally:
        for module in training:
            module.training = True


@dataclass
class _Held:
    """Of one model: who has it, how often it was entered, and what is known until it is left."""

    lock: threading.RLock = field(default_factory=threading.RLock)
    depth: int = 0
    known: dict[str, Any] = field(default_factory=dict)

    @contextmanager
    def entered(self) -> Iterator[None]:
        self.depth += 1
        try:
            yield
        finally:
            self.depth -= 1
            if not self.depth:
                self.known.clear()


_models: weakref.WeakKeyDictionary[nn.Module, _Held] = weakref.WeakKeyDictionary()
_models_lock = threading.Lock()


def _held(model: nn.Module) -> _Held:
    with _models_lock:
        return _models.setdefault(model, _Held())


class _OfTheProcess:
    """Settings that all threads share: the first who needs them sets them, the last one puts back what was there."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._undo = ExitStack()

    @contextmanager
    def set(self) -> Iterator[None]:
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._undo.enter_context(_default_dtype())
                self._undo.enter_context(_exact_products())
                self._undo.enter_context(_exact_convolutions())
                self._undo.enter_context(_every_attention_kernel())
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if not self._users:
                    self._undo.close()


_OF_THE_PROCESS = _OfTheProcess()


@contextmanager
def _default_dtype() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def _exact_products() -> Iterator[None]:
    """Products of float32 in float32, as whichever of PyTorch's two ways to say so was used before."""
    try:
        before = torch.get_float32_matmul_precision()
    except RuntimeError:  # it was said by the other one, and both may not be mixed
        backends: Any = torch.backends
        with _exact_by_backend(backends.mkldnn.matmul), _exact_by_backend(backends.cuda.matmul):
            yield
        return
    if before == "highest":  # setting it would be more than nothing: it keeps later words from being heard
        yield
        return
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextmanager
def _exact_convolutions() -> Iterator[None]:
    """The same of convolutions (patches of images), which cuDNN rounds to TF32 unless it is told not to."""
    backend: Any = torch.backends.cudnn
    try:
        before = backend.allow_tf32
    except RuntimeError:
        with _exact_by_backend(backend.conv):
            yield
        return
    backend.allow_tf32 = False
    try:
        yield
    finally:
        backend.allow_tf32 = before


@contextmanager
def _exact_by_backend(backend: Any) -> Iterator[None]:
    before, everywhere = backend.fp32_precision, getattr(torch.backends, "fp32_precision", None)
    backend.fp32_precision = "ieee"
    try:
        yield
    finally:
        backend.fp32_precision = "none" if before == everywhere else before  # then inherited


KERNELS = ("flash", "mem_efficient", "math", "cudnn")
"""Of `scaled_dot_product_attention`; which is chosen decides last bits."""


@contextmanager
def _every_attention_kernel() -> Iterator[None]:
    """None is switched off, as `torch.nn.attention.sdpa_kernel` does on every device, whatever the flags are called."""
    flags: Any = torch.backends.cuda
    switched_off = [kernel for kernel in KERNELS if not getattr(flags, f"{kernel}_sdp_enabled")()]
    for kernel in switched_off:
        getattr(flags, f"enable_{kernel}_sdp")(True)
    try:
        yield
    finally:
        for kernel in switched_off:
            getattr(flags, f"enable_{kernel}_sdp")(False)
