"""Print the ratios that the budgets are of: `python -m benchmarks [NAME …] [--device cuda] [--out FOLDER]`.

`make bench` runs all of them on the CPU. `make bench-gpu` runs them on a GPU and writes them down, for the site's page
on large models: `MINUTES` at most, what has not begun by then is said to be left out. A benchmark that fails is
recorded with its error, and the others go on.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from benchmarks import (
    locater,
    long_context,
    monitor,
    oats,
    propagation,
    pruning,
    spectra,
    start,
    survey,
)
from benchmarks.timing import Ratio, where
from theodolite.errors import first_line

MINUTES = 25
"""On a GPU, after so many no further benchmark begins; none takes five."""

Benchmark = Callable[[str], Iterable[Ratio]]

BENCHMARKS: dict[str, Benchmark] = {
    "spectra": spectra.measure,
    "long_context": long_context.measure,
    "start": start.measure,
    "survey": survey.measure,
    "locater": locater.measure,
    "monitor": monitor.measure,
    "oats": oats.measure,
    "propagation": propagation.measure,
    "pruning": pruning.measure,
}
"""The shortest ones first."""


def measured(
    benchmarks: dict[str, Benchmark], device: str, minutes: float = float("inf")
) -> Iterator[dict[str, Any]]:
    """Run benchmarks, and yield each one's ratios and seconds, or why there are none."""
    began = time.monotonic()
    for name, benchmark in benchmarks.items():
        result: dict[str, Any] = {"name": name, "ratios": [], "error": ""}
        if time.monotonic() - began > 60 * minutes:
            result["error"] = f"left out after {minutes} minutes"
            yield result
            continue
        print(f"\n{name}", flush=True)
        started = time.monotonic()
        try:
            for ratio in benchmark(device):
                print(ratio, flush=True)
                result["ratios"].append(asdict(ratio))
        except Exception as error:  # whatever a driver or a library raises; the others are still worth having
            result["error"] = f"{type(error).__name__}: {first_line(error)}"
            print(result["error"], file=sys.stderr)
        result["seconds"] = round(time.monotonic() - started, 1)
        yield result


def about(device: str) -> dict[str, Any]:
    """Describe the device, the day, and the versions."""
    packages = ("torch", "triton", "transformers", "theodolite")
    return {
        "device": torch.cuda.get_device_name(device),
        "memory_gib": round(torch.cuda.get_device_properties(device).total_memory / 2**30),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "versions": {
            "CUDA": torch.version.cuda,
            "Python": platform.python_version(),
            **{name: version(name) for name in packages},
        },
    }


def main(names: list[str], device: str = "cpu", out: Path | None = None) -> None:
    """Measure, print, and with a folder write down."""
    chosen = {name: BENCHMARKS[name] for name in names or BENCHMARKS}
    if not device.startswith("cuda"):
        print(where(device))
        failed = [result["name"] for result in measured(chosen, device) if result["error"]]
        raise SystemExit(f"failed: {', '.join(failed)}" if failed else 0)
    if not torch.cuda.is_available():
        raise SystemExit(
            "make bench-gpu needs a CUDA device, and PyTorch sees none; `make bench` measures the CPU"
        )
    result: dict[str, Any] = about(device) | {"benchmarks": []}
    for benchmark in measured(chosen, device, MINUTES):
        result["benchmarks"].append(benchmark)
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
            slug = re.sub(r"[^a-z0-9]+", "-", result["device"].lower()).strip("-")
            text = json.dumps(result, indent=1, ensure_ascii=False)
            (out / f"{slug}.json").write_text(text + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "names", nargs="*", choices=[*BENCHMARKS, []], metavar="NAME", help=" ".join(BENCHMARKS)
    )
    parser.add_argument("--device", default="cpu", help="cpu, cuda, …")
    parser.add_argument("--out", type=Path, help="a folder, to write down what a GPU gave")
    main(**vars(parser.parse_args()))
