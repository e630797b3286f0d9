"""Independent pieces of work side by side, a thread of torch's for each. It knows nothing of what is done."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")


def parallel_map(work: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """What `work` gives for each item, in order; as many at a time as torch has threads, each on one of them.

    Operations on one context are so short that threads which share one of them mostly wait for each other. `work`
    must not add to sums: in which order it is called is not known.
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
        torch.set_num_threads(threads)  # a new thread begins with what any thread set last


@functools.cache
def _workers(threads: int, process: int) -> ThreadPoolExecutor:
    """Threads that stay: what is allocated in them stays with them. A forked process needs its own."""
    return ThreadPoolExecutor(threads, thread_name_prefix=f"statistics-{process}")
