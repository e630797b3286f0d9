"""OATS against the same alternation with a full SVD in every iteration, as it is published.

Random weights (noise around a low-rank part, a few large entries, inputs of different size) are decomposed both ways,
with the same thresholding: the ratio of the times and of the errors ‖(W − Ŵ) D‖ / ‖W D‖. Rounding alone moves an
error: the last ratio is what the full SVDs give for weights that differ by 1e-6.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from benchmarks.pruning import RANK_RATIO, SPARSITY
from benchmarks.pruning import oats as released
from benchmarks.timing import Ratio, in_turns, over
from theodolite.prune import oats

SHAPES = ((768, 768), (3072, 768), (768, 3072))
ROUNDS = 2


def measure(device: str) -> Iterator[Ratio]:
    # Full SVDs of 3072 × 768 take a second each on a GPU too: 20 of OATS's 80 iterations there.
    iterations = 20 if device.startswith("cuda") else 80
    for outputs, inputs in SHAPES:
        weight, second_moment = weights(outputs, inputs).to(device), moments(inputs).to(device)
        errors: dict[str, float] = {}

        def ours(weight: Tensor = weight, moments: Tensor = second_moment, errors: dict = errors) -> None:
            errors["ours"] = oats(weight, moments, SPARSITY, RANK_RATIO, iterations).error

        def full(weight: Tensor = weight, moments: Tensor = second_moment, errors: dict = errors) -> None:
            errors["full"] = full_svds(weight, moments, iterations)

        times = in_turns({"ours": ours, "full": full}, ROUNDS, device)
        what = f"OATS, {outputs} × {inputs}, {iterations} iterations: full SVDs / ours"
        yield Ratio.of(what, over(times["full"], times["ours"]), 8)
        yield Ratio.of(f"{what}, processor time", over(times["full"], times["ours"], 1))
        yield Ratio.of(f"{what}, error ours / full SVDs", [errors["ours"] / errors["full"]])
        noise = 1 + 1e-6 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(2)).to(device)
        moved = full_svds(weight * noise, second_moment, iterations)
        yield Ratio.of(f"{what}, error by rounding", [moved / errors["full"]])


def weights(outputs: int, inputs: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    left, right = torch.randn(outputs, 32, generator=generator), torch.randn(32, inputs, generator=generator)
    noise = torch.randn(outputs, inputs, generator=generator)
    return 0.02 * (noise + left @ right / 16 + 0.1 * noise**3)


def moments(inputs: int) -> Tensor:
    return torch.randn(inputs, generator=torch.Generator().manual_seed(1)).exp()


def full_svds(weight: Tensor, second_moment: Tensor, iterations: int) -> float:
    """Compute the error of the same alternation by full SVDs."""
    pruned, scale = weight.clone(), second_moment.sqrt()
    released(pruned, second_moment, iterations)
    return float(((weight - pruned) * scale).norm() / (weight * scale).norm())
