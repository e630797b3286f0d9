"""`make bench-gpu`: the ratios of `make bench` on a GPU, printed, and written to benchmarks/results.

One GPU, `MINUTES` at most: what has not begun by then is said to be left out. A benchmark that fails is recorded with
its error, and the others go on. Without a GPU nothing is measured.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from benchmarks import head_weights, locater, long_context, monitor, oats, propagation, spectra, survey
from benchmarks.ratios import Ratio
from theodolite.errors import first_line

MINUTES = 25
"""After so many no further benchmark begins; none takes five."""

LENGTHS = (1024, 2048, 4096, 8192, 16384)

Benchmark = Callable[[str], Sequence[Ratio]]

# The shortest ones first. Full SVDs of 3072 × 768 take a second each on a GPU too: 20 of OATS's 80 iterations.
BENCHMARKS: dict[str, Benchmark] = {
    "spectra": spectra.main,
    "head_weights": head_weights.main,
    "long_context": lambda device: [
        ratio for length in LENGTHS for ratio in long_context.measure(length, device)
    ],
    "survey": lambda device: [*survey.time_ratios(5, 64, device), *survey.gpu_memory_ratio(device)],
    "locater": lambda device: locater.main(device=device),
    "monitor": lambda device: monitor.main(["--device", device]),
    "oats": lambda device: oats.main(iterations=20, rounds=2, device=device),
    "propagation": propagation.main,
}


def measured(benchmarks: dict[str, Benchmark], device: str, minutes: float) -> Iterator[dict[str, Any]]:
    """Every benchmark's ratios and seconds, or why there are none, as soon as it has ended."""
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
            result["ratios"] = [asdict(ratio) for ratio in benchmark(device)]
        except Exception as error:  # whatever a driver or a library raises; the others are still worth having
            result["error"] = f"{type(error).__name__}: {first_line(error)}"
            print(result["error"], file=sys.stderr)
        result["seconds"] = round(time.monotonic() - started, 1)
        yield result


def about(device: str) -> dict[str, Any]:
    """The device, the day, and what it was measured with."""
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


def main(folder: Path) -> None:
    if not torch.cuda.is_available():
        raise SystemExit(
            "make bench-gpu needs a CUDA device, and PyTorch sees none; `make bench` measures the CPU"
        )
    result: dict[str, Any] = about("cuda") | {"benchmarks": []}
    folder.mkdir(parents=True, exist_ok=True)
    slug = re.sub(r"[^a-z0-9]+", "-", result["device"].lower()).strip("-")
    file = folder / f"{slug}.json"
    for benchmark in measured(BENCHMARKS, "cuda", MINUTES):
        result["benchmarks"].append(benchmark)
        file.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    print(f"\nwritten to {file}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.parse_args()
    main(Path(__file__).parent / "results")
