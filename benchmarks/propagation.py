"""A whole exact curve ρ_1 … ρ_T of one head: every eigenvalue at every position over our bins and nodes.

`python -m benchmarks.propagation` prints, for several kinds of spectrum at d = T = 4096, the time of a curve, the
median ratio of times and the largest difference. The plain route is the same inversion with all 2d weights; it
is timed on a few positions, spread over the context, and its time per position multiplied by T.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from theodolite.theory import probability_between, propagation_exact, propagation_exact_head
from theodolite.theory.propagation import walk_moments

WIDTH, LENGTH, HEAD_WIDTH = 4096, 4096, 64
PLAIN_POSITIONS = 8
ROUNDS = 3
BUDGET = 1.0
"""Seconds of one core for a curve."""


def main() -> None:
    torch.set_num_threads(1)
    positions = torch.linspace(1, LENGTH, PLAIN_POSITIONS, dtype=torch.float64).round()
    print(f"d = T = {LENGTH}, 1 thread, float64; plain times scaled from {PLAIN_POSITIONS} positions")
    for name, values in spectra().items():
        propagation_exact(values, LENGTH, 1.0)
        ours, ratios = [], []
        for _ in range(ROUNDS):
            ours.append(seconds(partial(propagation_exact, values, LENGTH, 1.0)))
            each = seconds(partial(every_term, values, positions)) / PLAIN_POSITIONS
            ratios.append(each * LENGTH / ours[-1])
        curve = propagation_exact(values, LENGTH, 1.0)[positions.long() - 1]
        difference = (curve - every_term(values, positions)).abs().max().item()
        print(
            f"{name:28} {statistics.median(ours):7.3f} s (budget {BUDGET:g})"
            f"   plain / ours {statistics.median(ratios):7.0f} ×   difference {difference:7.1e} (budget 1e-9)"
        )
    generator = torch.Generator().manual_seed(1)
    w_q, w_k = 0.05 * torch.randn(2, 768, HEAD_WIDTH, generator=generator)
    times = [seconds(partial(propagation_exact_head, w_q, w_k, LENGTH)) for _ in range(ROUNDS)]
    print(f"{f'asymmetric, d_h = {HEAD_WIDTH}':28} {statistics.median(times):7.3f} s (budget {BUDGET:g})")


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


def seconds(work: Callable[[], object]) -> float:
    """Seconds of this process, which other processes on a busy machine do not lengthen."""
    start = time.process_time()
    work()
    return time.process_time() - start


if __name__ == "__main__":
    main()
