"""Time work in turns, and give the ratios of the times."""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

Work = Callable[[], object]


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
        """Summarise one value a round."""
        return cls(what, statistics.median(values), min(values), max(values), budget)

    def __str__(self) -> str:
        bound = "" if self.budget is None else f"   budget {self.budget:g}"
        return f"{self.what:80} {self.median:9.4g} ({self.low:.4g} to {self.high:.4g}){bound}"


class Seconds(NamedTuple):
    """The seconds of a call: on the clock, and of this process, which other processes disturb less."""

    wall: float
    processor: float


def seconds(work: Work, device: str = "cpu") -> Seconds:
    """Time one call; on a GPU, from an idle device until all is done."""
    _finish(device)
    wall, processor = time.perf_counter(), time.process_time()
    work()
    _finish(device)
    return Seconds(time.perf_counter() - wall, time.process_time() - processor)


def in_turns(works: Mapping[str, Work], rounds: int, device: str = "cpu") -> dict[str, list[Seconds]]:
    """Time each work once a round; the first round, which loads and compiles, is not counted."""
    times: dict[str, list[Seconds]] = {name: [] for name in works}
    for turn in range(rounds + 1):
        for name, work in works.items():
            taken = seconds(work, device)
            if turn:
                times[name].append(taken)
    return times


def over(these: Sequence[Seconds], those: Sequence[Seconds], clock: int = 0) -> list[float]:
    """Divide the times of each round, by the wall's clock (0) or the processor's (1)."""
    return [a[clock] / b[clock] for a, b in zip(these, those, strict=True)]


def in_process(module: str, *arguments: object) -> Any:
    """Run `python -m benchmarks.MODULE ARGUMENTS` in a process of its own, and read its last line as JSON."""
    command = [sys.executable, "-m", f"benchmarks.{module}", *map(str, arguments)]
    # Libraries print there, too: DeepSpeed, where it is installed, as accelerate imports it.
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout.splitlines()[-1])


def peak_memory(device: str = "cpu") -> int:
    """Give the most bytes that this process has held, or a GPU for it.

    Linux says it of the program itself; `getrusage` also counts what its parent held as it was started.
    """
    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated()
    status = Path("/proc/self/status")
    if status.exists():
        return 1024 * int(status.read_text().split("VmHWM:")[1].split()[0])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _finish(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def where(device: str) -> str:
    """Name the device, for a heading."""
    name = torch.cuda.get_device_name(device) if device.startswith("cuda") else "CPU"
    return f"{name}, {torch.get_num_threads()} threads"
