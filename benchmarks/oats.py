"""OATS against the same alternation with a full SVD in every iteration, as it is published.

`python -m benchmarks.oats` decomposes random weights (noise around a low-rank part, a few large entries, inputs of
different size) both ways in turns, in the same process and with the same thresholding, and prints the ratio of the
times and of the errors ‖(W − Ŵ) D‖ / ‖W D‖. Processor time of this process is printed beside wall time, since other
processes disturb it less. Rounding alone moves an error: the last column is what the full SVDs give for weights that
differ by 1e-6.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.ratios import Ratio, finish, where
from theodolite.prune import oats
from theodolite.prune.patterns import largest

SHAPES = ((768, 768), (3072, 768), (768, 3072))
SPARSITY, RANK_RATIO = 0.5, 0.25


def main(iterations: int = 80, rounds: int = 3, device: str = "cpu") -> list[Ratio]:
    print(
        f"sparsity {SPARSITY}, rank ratio {RANK_RATIO}, {iterations} iterations, float32, "
        f"{where(device)}, {rounds} rounds in turns"
    )
    print(
        "outputs × inputs | full SVDs / ours: wall, processor (budget 8) | error ours / full SVDs | by rounding"
    )
    measured = []
    for outputs, inputs in SHAPES:
        weight, second_moment = weights(outputs, inputs).to(device), moments(inputs).to(device)
        ratios: list[tuple[float, float]] = []
        errors = [0.0, 0.0]
        oats(weight, second_moment, SPARSITY, iterations=1)
        for _ in range(rounds):

            def ours(weight: Tensor = weight, second_moment: Tensor = second_moment) -> float:
                return oats(weight, second_moment, SPARSITY, RANK_RATIO, iterations).error

            def full(weight: Tensor = weight, second_moment: Tensor = second_moment) -> float:
                return full_svds(weight, second_moment, iterations)

            (error, *fast), (exact, *slow) = timed(ours, device), timed(full, device)
            errors = [error, exact]
            ratios.append((slow[0] / fast[0], slow[1] / fast[1]))
        noise = 1 + 1e-6 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(2)).to(device)
        moved = full_svds(weight * noise, second_moment, iterations)
        wall, processor = (spread([ratio[clock] for ratio in ratios]) for clock in (0, 1))
        print(
            f"{outputs:4} × {inputs:4} | {wall}, {processor} | {errors[0] / errors[1]:.4f} "
            f"({errors[0]:.5f}, {errors[1]:.5f}) | {moved / errors[1]:.4f}",
            flush=True,
        )
        what = f"OATS, {outputs} × {inputs}, {iterations} iterations: full SVDs / ours"
        measured.append(Ratio.of(what, [ratio[0] for ratio in ratios], 8))
        measured.append(Ratio.of(f"{what}, error ours / full SVDs", [errors[0] / errors[1]]))
    return measured


def weights(outputs: int, inputs: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    left, right = torch.randn(outputs, 32, generator=generator), torch.randn(32, inputs, generator=generator)
    noise = torch.randn(outputs, inputs, generator=generator)
    return 0.02 * (noise + left @ right / 16 + 0.1 * noise**3)


def moments(inputs: int) -> Tensor:
    return torch.randn(inputs, generator=torch.Generator().manual_seed(1)).exp()


def full_svds(weight: Tensor, second_moment: Tensor, iterations: int) -> float:
    """The error that full SVDs end in."""
    outputs, inputs = weight.shape
    rank = int(RANK_RATIO * (1 - SPARSITY) * outputs * inputs / (outputs + inputs))
    entries = inputs - int(inputs * (1 - (1 - RANK_RATIO) * (1 - SPARSITY)))
    scaled = weight * second_moment.sqrt()
    sparse = torch.zeros_like(scaled)
    for _ in range(iterations):
        left, values, right = torch.linalg.svd(scaled - sparse, full_matrices=False)
        residual = scaled - (left[:, :rank] * values[:rank]) @ right[:rank]
        sparse = residual * largest(residual.abs(), entries)
    return float(torch.linalg.vector_norm(residual - sparse) / torch.linalg.vector_norm(scaled))


def timed(work: Callable[[], float], device: str) -> tuple[float, float, float]:
    """What it gives, and its wall and processor seconds."""
    finish(device)
    wall, processor = time.perf_counter(), time.process_time()
    result = work()
    finish(device)
    return result, time.perf_counter() - wall, time.process_time() - processor


def spread(ratios: list[float]) -> str:
    return f"{statistics.median(ratios):.1f} ({min(ratios):.1f} to {max(ratios):.1f})"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iterations", type=int, default=80)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cpu", help="cpu, cuda, …")
    arguments = parser.parse_args()
    main(arguments.iterations, arguments.rounds, arguments.device)
