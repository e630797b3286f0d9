"""The processor: torch's threads and what they share, half precision, and memory that is kept for the next tensor."""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Generic, TypeVar

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")
Value = TypeVar("Value")

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # parameters of glibc's `mallopt`


def keep_pages() -> None:
    """Keep freed memory for the next tensor, in the whole process: up to a quarter of a survey's time (with glibc)."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return
    mallopt(M_MMAP_MAX, 0)
    mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def multiplies_halves(device: str | torch.device = "cpu") -> bool:
    """Tell whether products in bfloat16 are about as fast as in float32 (without AVX-512, 5 to 80 times slower)."""
    if torch.device(device).type != "cpu" or platform.machine().lower() not in ("x86_64", "amd64"):
        return True
    return "AVX512" in torch.backends.cpu.get_cpu_capability()


def multiplies_bfloat16_faster() -> bool:
    """Tell whether the processor has instructions for products in bfloat16: at least twice as fast as in float32."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def say_if_slow(dtype: torch.dtype, device: str | torch.device, say: Callable[[str], None]) -> None:
    """Say what to do where products in a model's dtype are slow on this device."""
    if dtype in (torch.bfloat16, torch.float16) and not multiplies_halves(device):
        name = str(dtype).removeprefix("torch.")
        say(
            f"this processor has no instructions for {name}, and takes 5 to 80 times as long as for float32: "
            "--dtype float32 reads the same weights, in twice the memory"
        )


@contextmanager
def using_threads(count: int) -> Iterator[None]:
    """Use `count` threads: how sums are split over threads changes their last bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def parallel_map(work: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """Call `work`, which accumulates no sums, on each item; as many at a time as torch has threads, each on one."""
    threads = torch.get_num_threads()
    if min(threads, len(items)) < 2:
        return [work(item) for item in items]
    inference, grad = torch.is_inference_mode_enabled(), torch.is_grad_enabled()

    def alone(item: Item) -> Result:
        torch.set_num_threads(1)
        with torch.inference_mode(inference), torch.set_grad_enabled(grad):
            return work(item)

    try:
        return list(_workers(threads, os.getpid()).map(alone, items))
    finally:
        torch.set_num_threads(threads)  # new threads inherit the last value set by any thread


class once(Generic[Value]):
    """A property that is computed once; `functools.cached_property` locks all objects of a class (Python 3.11)."""

    def __init__(self, function: Callable[[Any], Value]) -> None:
        self._function, self.__doc__ = function, function.__doc__

    def __get__(self, instance: Any, owner: type) -> Value:
        value = instance.__dict__[self._function.__name__] = self._function(instance)
        return value


@functools.cache
def _workers(threads: int, process: int) -> ThreadPoolExecutor:
    """Return a persistent pool, so that threads keep their allocations. A forked process needs its own."""
    return ThreadPoolExecutor(threads, thread_name_prefix=f"statistics-{process}")


class Shared:
    """A context manager that many threads share: the first user opens what `make` gives, the last one closes it."""

    def __init__(self, make: Callable[[], AbstractContextManager[object]]) -> None:
        self._make = make
        self._lock = threading.RLock()
        self._users = 0
        self._undo = ExitStack()

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Use the context: it is open until the last user has left."""
        with self._lock:
            if not self._users:
                self._undo.enter_context(self._make())
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if not self._users:
                    self._undo.close()
