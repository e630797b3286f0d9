"""What the benchmarks share: seconds on any device, and ratios that `benchmarks.gpu` can write down."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Ratio:
    """A measured ratio: its median and range over the rounds; `budget` is the bound that it is to keep, if any."""

    what: str
    median: float
    low: float
    high: float
    budget: float | None = None

    @classmethod
    def of(cls, what: str, values: Sequence[float], budget: float | None = None) -> Ratio:
        """Of one value a round."""
        return cls(what, statistics.median(values), min(values), max(values), budget)


def seconds(work: Callable[[], object], device: str = "cpu") -> float:
    """Of one call; on a GPU, from an idle device until all is done."""
    finish(device)
    started = time.perf_counter()
    work()
    finish(device)
    return time.perf_counter() - started


def finish(device: str) -> None:
    """Wait until a GPU has nothing left to do."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def where(device: str) -> str:
    """The device in words, for a heading."""
    name = torch.cuda.get_device_name(device) if device.startswith("cuda") else "CPU"
    return f"{name}, {torch.get_num_threads()} threads"
