"""Attention statistics of long contexts: time over PyTorch's own attention, and memory over q, k and v.

A process for each length, so that the operating system's count of its peak memory is that length's own. 12 heads of 64
in float32 (bfloat16 on a GPU), one context.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict

import torch
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.timing import Ratio, in_process, in_turns, over, peak_memory
from theodolite.attention.summary import attention_summary

HEADS, WIDTH = 12, 64
LENGTHS = (1024, 2048, 4096, 8192, 16384)
ROUNDS = 3


def measure(device: str) -> Iterator[Ratio]:
    for length in LENGTHS:
        yield from (Ratio(**row) for row in in_process("long_context", length, device))


@torch.no_grad()
def of_length(length: int, device: str) -> list[Ratio]:
    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    query, key, value = torch.randn(3, 1, HEADS, length, WIDTH, device=device, dtype=dtype).unbind()
    short = slice(0, 256)
    attention_summary(query[:, :, short], key[:, :, short], value[:, :, short])  # loads what is loaded once
    if device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats()
    before = peak_memory(device)
    attention_summary(query, key, value)
    more = peak_memory(device) - before
    works = {
        "attention": lambda: scaled_dot_product_attention(query, key, value, is_causal=True),
        "summary": lambda: attention_summary(query, key, value),
    }
    times = in_turns(works, ROUNDS, device)
    ratios, memory = over(times["summary"], times["attention"]), query.numel() * query.element_size() * 3
    return [
        Ratio.of(f"attention statistics / attention alone, {length:,} tokens", ratios, 1.4),
        Ratio.of(f"their memory / that of q, k and v, {length:,} tokens", [more / memory]),
    ]


if __name__ == "__main__":
    print(json.dumps([asdict(ratio) for ratio in of_length(int(sys.argv[1]), sys.argv[2])]))
