"""Eigenvalues of every head of a GPT-2-sized model: the dense d×d matrix over our d_h×d_h one.

Weights are random Gaussians of GPT-2's initial scale, since no time here depends on their values. Our route is timed
on all heads, a layer at a time as a survey takes them. One dense head takes longer than all of ours together, so the
dense route is timed on one head and its time multiplied by their number.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from benchmarks.timing import Ratio, in_turns, over
from theodolite.theory import qk_eigenvalues

LAYERS, HEADS, WIDTH, HEAD_WIDTH = 12, 12, 768, 64
ROUNDS = 5


def measure(device: str) -> Iterator[Ratio]:
    generator = torch.Generator().manual_seed(0)
    w_q, w_k = (
        0.02 * torch.randn(LAYERS, HEADS, WIDTH, HEAD_WIDTH, generator=generator).to(device) for _ in range(2)
    )
    works = {
        "ours": lambda: [qk_eigenvalues(*layer) for layer in zip(w_q, w_k, strict=True)],
        "dense": lambda: dense_eigenvalues(w_q[0, 0], w_k[0, 0]),
    }
    times = in_turns(works, ROUNDS, device)
    ratios = [LAYERS * HEADS * ratio for ratio in over(times["dense"], times["ours"])]
    yield Ratio.of("all heads' QK spectra: dense / ours", ratios)
    yield Ratio.of("all heads' QK spectra: seconds", [time.wall for time in times["ours"]])
    ours, dense = qk_eigenvalues(w_q[0, 0], w_k[0, 0]), dense_eigenvalues(w_q[0, 0], w_k[0, 0])
    yield Ratio.of("their largest relative difference", [relative_difference(ours, dense)], 1e-6)


def dense_eigenvalues(w_q: Tensor, w_k: Tensor) -> Tensor:
    """Compute all d eigenvalues of one head from the d×d matrix."""
    return torch.linalg.eigvals(w_q.double() @ w_k.double().mT)


def relative_difference(ours: Tensor, dense: Tensor) -> float:
    """Compute the largest |a − b|/|b| over the best matching of our eigenvalues with the d_h largest dense
    ones. Complex eigenvalues have no order that rounding respects, hence a matching and not two sorted lists.
    """
    largest = dense[dense.abs().argsort(descending=True)[: len(ours)]]
    distances = (ours[:, None] - largest).abs()
    rows, columns = linear_sum_assignment(distances.cpu().numpy())
    return (distances[rows, columns] / largest[columns].abs()).max().item()
