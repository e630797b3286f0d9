"""Attention statistics of long contexts: time over PyTorch's own attention, and memory over q, k and v.

`python -m benchmarks.long_context [--longest 16384] [--device cuda]`. A process for each length, so that the operating
system's count of its peak memory is that length's own. 12 heads of 64 in float32 (bfloat16 on a GPU), one context.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys

import torch
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.ratios import Ratio, seconds
from theodolite.attention.summary import attention_summary

HEADS, WIDTH = 12, 64
SHORTEST = 1024
PAIRS = 3
MEBI = 2**20


def peak(device: str) -> int:
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@torch.no_grad()
def measure(length: int, device: str) -> list[Ratio]:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    query, key, value = torch.randn(3, 1, HEADS, length, WIDTH, device=device, dtype=dtype).unbind()
    short = slice(0, 256)
    attention_summary(query[:, :, short], key[:, :, short], value[:, :, short])  # loads what is loaded once
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    before = peak(device)
    attention_summary(query, key, value)
    more = peak(device) - before
    ratios = []
    for _ in range(PAIRS):
        own = seconds(lambda: scaled_dot_product_attention(query, key, value, is_causal=True), device)
        ratios.append(seconds(lambda: attention_summary(query, key, value), device) / own)
    matrices = HEADS * length**2 * query.element_size()
    print(
        f"{length:>7} tokens: {statistics.median(ratios):.2f} ({min(ratios):.2f}–{max(ratios):.2f}) times the "
        f"attention alone; {more / MEBI:.0f} MiB over q, k, v, T×T matrices would take {matrices / MEBI:.0f} MiB",
        flush=True,
    )
    memory = more / (query.numel() * query.element_size() * 3)
    return [
        Ratio.of(f"attention statistics / attention alone, {length:,} tokens", ratios, 1.4),
        Ratio.of(f"their memory / that of q, k and v, {length:,} tokens", [memory]),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--longest", type=int, default=16384)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only:
        measure(options.only, options.device)
        return
    length = SHORTEST
    while length <= options.longest:
        command = [
            sys.executable,
            "-m",
            "benchmarks.long_context",
            "--device",
            options.device,
            "--only",
            str(length),
        ]
        subprocess.run(command, check=True)
        length *= 2


if __name__ == "__main__":
    main()
