"""What a program may have set elsewhere: states of a process or of a thread, each as a context, and how to see them."""

from __future__ import annotations

import os
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

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


def _to(read: Callable[[], Any], write: Callable[[Any], object], value: Any) -> State:
    return lambda model: set_to(read, write, value)


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
    "deterministic": _to(
        torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True
    ),
}


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
        "threads": torch.get_num_threads(),
        "torch's generator": torch.get_rng_state().sum().item() if not _meta() else None,
        "numpy's generator": repr(np.random.get_state()),
        # beartype, where it checks types, draws from it which items of a list it looks at.
        "python's generator": None if "beartype" in sys.modules else hash(random.getstate()),
        "excepthook": sys.excepthook,
        "streams": (sys.stdout, sys.stderr),
        "environment": dict(os.environ),
        "warnings": list(warnings.filters),
        "attention": [
            getattr(torch.backends.cuda, f"{kind}_sdp_enabled")()
            for kind in ("flash", "math", "mem_efficient", "cudnn")
        ],
        "backends": (torch.backends.mkldnn.enabled, torch.backends.cudnn.enabled),
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
