"""A whole exact curve ρ_1 … ρ_T of one head: every eigenvalue at every position over our bins and nodes.

For several kinds of spectrum at d = T = 4096, on one thread. The plain route is the same inversion with all 2d
weights; it is timed on a few positions, spread over the context, and its time per position multiplied by T.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from benchmarks.timing import Ratio, in_turns, over
from theodolite.theory import probability_between, propagation_exact
from theodolite.theory.propagation import walk_moments

WIDTH, LENGTH = 4096, 4096
PLAIN_POSITIONS = 8
ROUNDS = 3
BUDGET = 1.0
"""Seconds of one core for a curve."""


def measure(device: str) -> Iterator[Ratio]:
    torch.set_num_threads(1)
    clock = 0 if device.startswith("cuda") else 1
    positions = torch.linspace(1, LENGTH, PLAIN_POSITIONS, dtype=torch.float64).round().to(device)
    for name, values in spectra(device).items():
        works = {
            "ours": lambda values=values: propagation_exact(values, LENGTH, 1.0),
            "plain": lambda values=values: every_term(values, positions),
        }
        times = in_turns(works, ROUNDS, device)
        ratios = [LENGTH / PLAIN_POSITIONS * r for r in over(times["plain"], times["ours"], clock)]
        yield Ratio.of(f"an exact curve ρ, {name}: plain / ours", ratios)
        yield Ratio.of(f"an exact curve ρ, {name}: seconds", [t[clock] for t in times["ours"]], BUDGET)
        curve = propagation_exact(values, LENGTH, 1.0)[positions.long() - 1]
        difference = (curve - every_term(values, positions)).abs().max().item()
        yield Ratio.of("their difference", [difference], 1e-9)


def spectra(device: str) -> dict[str, Tensor]:
    """List kinds of spectra that take either contour, and few or many nodes along the context."""
    noise = torch.randn(WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    one = torch.ones(1, dtype=torch.float64)
    kinds = {
        "Gaussian": noise / 8,
        "Gaussian around a mean": (0.02 * noise + 0.02) / 8,
        "one eigenvalue": one,
        "power law": torch.arange(1, WIDTH + 1, dtype=torch.float64) ** -1.0,
        "one above 127 of 1e-3": torch.cat([one, 1e-3 * noise[:127]]),
        "one above 4095 of 1e-3": torch.cat([one, 1e-3 * noise[1:]]),
    }
    return {name: values.to(device) for name, values in kinds.items()}


def every_term(values: Tensor, positions: Tensor) -> Tensor:
    """Compute ρ_i at these positions from all 2d weights."""
    cross, own = walk_moments(positions, LENGTH)
    halves = torch.stack([cross + own.sqrt(), cross - own.sqrt()], dim=-1) / 2
    weights = (halves[..., None] * values).flatten(1)
    low = torch.full_like(positions, -1 / LENGTH)
    return probability_between(weights, torch.ones_like(weights[0]), low, low + 1)
