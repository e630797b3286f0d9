"""A whole exact curve ρ_1 … ρ_T of one head: every eigenvalue at every position over our bins and nodes.

`python -m benchmarks.propagation` prints, for several kinds of spectrum at d = T = 4096, the time of a curve, the
median ratio of times and the largest difference. The plain route is the same inversion with all 2d weights; it
is timed on a few positions, spread over the context, and its time per position multiplied by T.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from benchmarks import ratios as timing
from benchmarks.ratios import Ratio, where
from theodolite.theory import probability_between, propagation_exact, propagation_exact_head
from theodolite.theory.propagation import walk_moments

WIDTH, LENGTH, HEAD_WIDTH = 4096, 4096, 64
PLAIN_POSITIONS = 8
ROUNDS = 3
BUDGET = 1.0
"""Seconds of one core for a curve."""


def main(device: str) -> list[Ratio]:
    torch.set_num_threads(1)
    positions = torch.linspace(1, LENGTH, PLAIN_POSITIONS, dtype=torch.float64).round().to(device)
    print(f"d = T = {LENGTH}, {where(device)}, float64; plain times scaled from {PLAIN_POSITIONS} positions")
    measured = []
    for name, values in spectra().items():
        values = values.to(device)
        propagation_exact(values, LENGTH, 1.0)
        ours, ratios = [], []
        for _ in range(ROUNDS):
            ours.append(seconds(partial(propagation_exact, values, LENGTH, 1.0), device))
            each = seconds(partial(every_term, values, positions), device) / PLAIN_POSITIONS
            ratios.append(each * LENGTH / ours[-1])
        curve = propagation_exact(values, LENGTH, 1.0)[positions.long() - 1]
        difference = (curve - every_term(values, positions)).abs().max().item()
        print(
            f"{name:28} {statistics.median(ours):7.3f} s (budget {BUDGET:g})"
            f"   plain / ours {statistics.median(ratios):7.0f} ×   difference {difference:7.1e} (budget 1e-9)"
        )
        measured.append(Ratio.of(f"an exact curve ρ, {name}: plain / ours", ratios))
    generator = torch.Generator().manual_seed(1)
    w_q, w_k = 0.05 * torch.randn(2, 768, HEAD_WIDTH, generator=generator).to(device)
    times = [seconds(partial(propagation_exact_head, w_q, w_k, LENGTH), device) for _ in range(ROUNDS)]
    print(f"{f'asymmetric, d_h = {HEAD_WIDTH}':28} {statistics.median(times):7.3f} s (budget {BUDGET:g})")
    return measured


def spectra() -> dict[str, Tensor]:
    """Kinds that take the two contours and few or many nodes along the context."""
    noise = torch.randn(WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    one = torch.ones(1, dtype=torch.float64)
    return {
        "Gaussian": noise / 8,
        "Gaussian around a mean": (0.02 * noise + 0.02) / 8,
        "one eigenvalue": one,
        "power law": torch.arange(1, WIDTH + 1, dtype=torch.float64) ** -1.0,
        "one above 127 of 1e-3": torch.cat([one, 1e-3 * noise[:127]]),
        "one above 4095 of 1e-3": torch.cat([one, 1e-3 * noise[1:]]),
    }


def every_term(values: Tensor, positions: Tensor) -> Tensor:
    """ρ_i at these positions from all 2d weights."""
    cross, own = walk_moments(positions, LENGTH)
    halves = torch.stack([cross + own.sqrt(), cross - own.sqrt()], dim=-1) / 2
    weights = (halves[..., None] * values).flatten(1)
    low = torch.full_like(positions, -1 / LENGTH)
    return probability_between(weights, torch.ones_like(weights[0]), low, low + 1)


def seconds(work: Callable[[], object], device: str) -> float:
    """On a CPU, seconds of this process, which other processes on a busy machine do not lengthen."""
    if device.startswith("cuda"):
        return timing.seconds(work, device)
    start = time.process_time()
    work()
    return time.process_time() - start


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", help="cpu, cuda, …")
    main(parser.parse_args().device)
