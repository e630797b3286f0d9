"""What a program may have set elsewhere: states of a process or of a thread, each as a context, and how to see them."""

from __future__ import annotations

import asyncio
import gc
import inspect
import logging
import os
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from theodolite.models import OpenModel

State = Callable[[OpenModel], AbstractContextManager[Any]]


@contextmanager
def training(model: OpenModel) -> Iterator[None]:
    model.hf.train()
    model.structure.blocks[1].eval()  # frozen on purpose
    yield
    model.hf.eval()


@contextmanager
def set_to(read: Callable[[], Any], write: Callable[[Any], object], value: Any) -> Iterator[None]:
    before = read()
    write(value)
    try:
        yield
    finally:
        write(before)


@contextmanager
def default_device(model: OpenModel) -> Iterator[None]:
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)  # "cpu" would be a mode that stays


@contextmanager
def event_loop(model: OpenModel) -> Iterator[None]:
    """As in a notebook, whose cells run while an event loop does."""
    loop = asyncio.new_event_loop()
    asyncio.events._set_running_loop(loop)
    try:
        yield
    finally:
        asyncio.events._set_running_loop(None)
        loop.close()


@contextmanager
def little_stack(model: OpenModel) -> Iterator[None]:
    """Room for some hundred calls above those that are open, which is enough for the libraries underneath."""
    limit = len(inspect.stack(0)) + 300
    with set_to(sys.getrecursionlimit, sys.setrecursionlimit, limit):
        yield


class _Passing(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class _PassingFunctions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@contextmanager
def seeds(model: OpenModel) -> Iterator[None]:
    """Generators of random numbers elsewhere than where they began; `seen` says whether they have been used."""
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(7)
    yield


def _to(read: Callable[[], Any], write: Callable[[Any], object], value: Any) -> State:
    return lambda model: set_to(read, write, value)


def _umask() -> int:
    now = os.umask(0)
    os.umask(now)
    return now


REDUCED = (torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction")


def _flushes() -> bool:
    return bool((torch.tensor([1e-310], dtype=torch.float64, device="cpu") * 1.0 == 0).item())


STATES: dict[str, State] = {
    "autocast": lambda model: torch.autocast("cpu", torch.bfloat16),
    "training": training,
    "bfloat16": _to(torch.get_default_dtype, torch.set_default_dtype, torch.bfloat16),
    "float64": _to(torch.get_default_dtype, torch.set_default_dtype, torch.float64),
    "meta": default_device,
    "with meta": lambda model: torch.device("meta"),
    "inference": lambda model: torch.inference_mode(),
    "no gradients": lambda model: torch.no_grad(),
    "gradients": lambda model: torch.enable_grad(),
    "rounded products": _to(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "medium"),
    "numpy": _to(np.geterr, lambda value: np.seterr(**value), dict.fromkeys(np.geterr(), "raise")),
    "plain attention": lambda model: sdpa_kernel(SDPBackend.MATH),
    "no attention": lambda model: sdpa_kernel(SDPBackend.CUDNN_ATTENTION),
}
"""What the tests of the guard set, too."""

# Folders, streams, umask, locale and warnings are set for a whole command, in states.py.
OTHERS: dict[str, State] = {
    "deterministic": _to(
        torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True
    ),
    "anomalies": lambda model: torch.autograd.set_detect_anomaly(True),
    "threads": _to(torch.get_num_threads, torch.set_num_threads, 3),
    "no denormals": _to(_flushes, torch.set_flush_denormal, True),
    "seeds": seeds,
    "no collection": _to(gc.isenabled, lambda on: gc.enable() if on else gc.disable(), False),
    "little stack": little_stack,
    "dispatch": lambda model: _Passing(),
    "functions": lambda model: _PassingFunctions(),
    "event loop": event_loop,
    "reduced bfloat16": _to(partial(getattr, *REDUCED), partial(setattr, *REDUCED), False),
    "cudnn": lambda model: torch.backends.cudnn.flags(enabled=False, benchmark=True, deterministic=True),
    "no oneDNN": _to(torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled, False),
    "pandas": lambda model: pd.option_context("display.max_rows", 1, "display.precision", 1),
    "printing": lambda model: np.printoptions(precision=1, threshold=1),
    "logging": _to(lambda: logging.root.level, logging.root.setLevel, logging.DEBUG),
    "hooks for gradients": lambda model: torch.autograd.graph.save_on_cpu(),
}

TOLERANCES = {
    # torch splits sums over threads and rounds them differently; z-scores and fits of a tiny model make more of that.
    "threads": 1e-2,
    # What is flushed is below 1e-37, but sums of such numbers with others are rounded otherwise.
    "no denormals": 1e-5,
    # Another library's products are rounded otherwise, too; whoever switches this one off has a reason to.
    "no oneDNN": 1e-2,
    # A mode sees operations in parts that are fused without it.
    "dispatch": 1e-6,
}
"""States that may change digits, by how much of the largest number of a column; all others may change no bit."""


def seen(model: OpenModel | None = None) -> dict[str, Any]:
    """All that a call could leave changed."""
    now: dict[str, Any] = {
        "autocast": torch.is_autocast_enabled("cpu"),
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "inference": torch.is_inference_mode_enabled(),
        "gradients": torch.is_grad_enabled(),
        "numpy": np.geterr(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "anomalies": torch.is_anomaly_enabled(),
        "threads": torch.get_num_threads(),
        "torch's generator": torch.get_rng_state().sum().item() if not _meta() else None,
        "numpy's generator": repr(np.random.get_state()),
        # beartype, where it checks types, draws from it which items of a list it looks at.
        "python's generator": None if "beartype" in sys.modules else hash(random.getstate()),
        "collection": gc.isenabled(),
        "recursion": sys.getrecursionlimit(),
        "excepthook": sys.excepthook,
        "streams": (sys.stdout, sys.stderr),
        "environment": dict(os.environ),
        "warnings": list(warnings.filters),
        "attention": [
            getattr(torch.backends.cuda, f"{kind}_sdp_enabled")()
            for kind in ("flash", "math", "mem_efficient", "cudnn")
        ],
        "backends": (torch.backends.mkldnn.enabled, torch.backends.cudnn.enabled),
        "printing": repr(np.get_printoptions()),
        "level": logging.root.level,
    }
    try:
        now["products"] = torch.get_float32_matmul_precision()
        now["folder"] = os.getcwd()
    except (RuntimeError, OSError) as error:
        now["error"] = str(error)
    if model is not None:
        modules = list(model.hf.modules())
        now["training"] = [module.training for module in modules]
        now["hooks"] = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in modules]
        now["trained"] = [parameter.requires_grad for parameter in model.hf.parameters()]
    return now


def _meta() -> bool:
    return torch.get_default_device().type == "meta"
