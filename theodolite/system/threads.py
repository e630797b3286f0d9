"""How many of torch's threads work, and a parallel map over threads with one of them each."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")


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
    """`work` of each item, in order; as many at a time as torch has threads, each on one of them.

    Operations on one context are too short to be split over threads efficiently. `work` must not accumulate sums: the
    order of the calls is not deterministic.
    """
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


@functools.cache
def _workers(threads: int, process: int) -> ThreadPoolExecutor:
    """A persistent pool, so that threads keep their allocations. A forked process needs its own."""
    return ThreadPoolExecutor(threads, thread_name_prefix=f"statistics-{process}")
