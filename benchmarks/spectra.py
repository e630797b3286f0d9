"""Eigenvalues of every head of a GPT-2-sized model: the dense d×d matrix over our d_h×d_h one.

`python -m benchmarks.spectra` prints the median ratio of times and the largest relative difference of the
eigenvalues. Weights are random Gaussians of GPT-2's initial scale, since no time here depends on their values.
Our route is timed on all heads, a layer at a time as a survey takes them. One dense head takes longer than all
of ours together, so the dense route is timed on a few heads and its time per head multiplied by their number.
"""

from __future__ import annotations

import argparse
import statistics
from functools import partial

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from benchmarks.ratios import Ratio, seconds, where
from theodolite.theory import qk_eigenvalues

LAYERS, HEADS, WIDTH, HEAD_WIDTH = 12, 12, 768, 64
DENSE_HEADS = 3
ROUNDS = 5


def main(device: str) -> list[Ratio]:
    w_q, w_k = (factor.to(device) for factor in gpt2_sized_weights())
    qk_eigenvalues(w_q[0], w_k[0])  # the first call pays for LAPACK's set-up
    ratios, ours, dense = [], [], []
    for _ in range(ROUNDS):
        ours.append(seconds(lambda: [qk_eigenvalues(*layer) for layer in zip(w_q, w_k, strict=True)], device))
        each = [seconds(partial(dense_eigenvalues, w_q, w_k, head), device) for head in range(DENSE_HEADS)]
        dense.append(statistics.mean(each) * LAYERS * HEADS)
        ratios.append(dense[-1] / ours[-1])
    difference = max(
        relative_difference(qk_eigenvalues(w_q[0, head], w_k[0, head]), dense_eigenvalues(w_q, w_k, head))
        for head in range(DENSE_HEADS)
    )
    print(f"{LAYERS}×{HEADS} heads, d = {WIDTH}, d_h = {HEAD_WIDTH}, {where(device)}, float64")
    print(f"ours, all heads               {statistics.median(ours):8.3f} s (median of {ROUNDS})")
    print(
        f"dense, all heads              {statistics.median(dense):8.3f} s (scaled from {DENSE_HEADS} heads)"
    )
    print(
        f"dense / ours                  {statistics.median(ratios):8.0f} × (median, from {min(ratios):.0f} to"
        f" {max(ratios):.0f})"
    )
    print(f"largest relative difference   {difference:8.1e} (budget 1e-6)")
    return [Ratio.of("all heads' QK spectra: dense / ours", ratios)]


def gpt2_sized_weights() -> tuple[Tensor, Tensor]:
    """Query and key factors (layers, heads, d, d_h) in float32, as a checkpoint has them."""
    generator = torch.Generator().manual_seed(0)
    w_q, w_k = (0.02 * torch.randn(LAYERS, HEADS, WIDTH, HEAD_WIDTH, generator=generator) for _ in range(2))
    return w_q, w_k


def dense_eigenvalues(w_q: Tensor, w_k: Tensor, head: int) -> Tensor:
    """All d eigenvalues of one head of the first layer, from the d×d matrix."""
    return torch.linalg.eigvals(w_q[0, head].double() @ w_k[0, head].double().mT)


def relative_difference(ours: Tensor, dense: Tensor) -> float:
    """Largest |a − b|/|b| over the pairs of the best matching of our eigenvalues with the d_h largest dense
    ones. Complex eigenvalues have no order that rounding respects, hence a matching and not two sorted lists.
    """
    largest = dense[dense.abs().argsort(descending=True)[: len(ours)]]
    distances = (ours[:, None] - largest).abs()
    rows, columns = linear_sum_assignment(distances.cpu().numpy())
    return (distances[rows, columns] / largest[columns].abs()).max().item()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", help="cpu, cuda, …")
    main(parser.parse_args().device)
