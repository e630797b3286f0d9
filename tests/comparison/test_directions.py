"""Directions of tags and of positional bases are decided with their sampling error; oracle: simulated contexts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch

from tests.report.synthetic import make_survey
from theodolite.comparison import compare
from theodolite.comparison.sinks import kept_directions

TRIALS, WIDTH = 200, 32


def answers(cosine: float, noise: float, shared: float) -> tuple[float, float]:
    """How often a direction at this angle is said to be kept, and to be turned.

    Args:
        noise: standard deviation of a mean direction's length across it and along it, over its own length.
        shared: correlation of the noise of both models, which read the same contexts.
    """
    generator = np.random.default_rng(0)
    old, new = np.eye(WIDTH)[0], cosine * np.eye(WIDTH)[0] + (1 - cosine**2) ** 0.5 * np.eye(WIDTH)[1]
    one, two = generator.normal(size=(2, TRIALS, 8, WIDTH)) * noise * (8 / WIDTH) ** 0.5
    by_group = old + one, new + shared * one + (1 - shared**2) ** 0.5 * two
    whole, turned = [], []
    halves = np.array([[(row >> place) % 2 for place in range(8)] for row in range(256)])
    halves = halves[halves.sum(1) == 4]
    for sums in by_group:
        unit = sums.sum(1) / np.linalg.norm(sums.sum(1), axis=1, keepdims=True)
        of_halves = np.einsum("hg,ngd->nhd", halves, sums)
        of_halves /= np.linalg.norm(of_halves, axis=2, keepdims=True)
        whole.append(unit)
        # All 70 halves: what the 14 balanced ones estimate.
        turned.append(np.sqrt(((of_halves - unit[:, None]) ** 2).sum(2).mean(1)))
    table = pd.DataFrame({"cosine": (whole[0] * whole[1]).sum(1)})
    table["direction_se_before"], table["direction_se_after"] = turned
    kept, lost = kept_directions(table, *(torch.from_numpy(sums) for sums in by_group))[1:]
    return float(kept.mean()), float(lost.mean())


@pytest.mark.parametrize("noise", [0.05, 0.2, 0.5, 1.0])
@pytest.mark.parametrize("shared", [0.0, 0.7, 1.0])
def test_a_tag_just_below_the_limit_is_hardly_ever_kept_nor_one_just_above_turned(noise, shared):
    assert answers(0.69, noise, shared)[0] <= 0.05
    assert answers(0.72, noise, shared)[1] <= 0.05


@pytest.mark.parametrize("shared", [0.0, 0.7, 1.0])
def test_a_tag_that_is_clearly_kept_or_turned_is_said_to_be(shared):
    assert answers(0.95, 0.2, shared)[0] > 0.95
    assert answers(0.4, 0.2, shared)[1] > 0.95


@pytest.mark.parametrize(
    ("error", "status"), [(0.001, "survived"), (0.2, "undecided"), (np.nan, "undecided")]
)
def test_a_basis_whose_directions_sampling_moves_is_not_decided(error, status):
    """A third of the directions of every layer are others: two thirds are left."""
    first = make_survey()
    rank = first.layers["rank"].to_numpy()
    width = first.arrays["positional_basis"].shape[-1]
    basis = first.arrays["positional_basis"].double()
    turned = []
    for layer, k in enumerate(rank):
        u, s, v = torch.linalg.svd(basis[layer, 1:], full_matrices=True)
        order = list(range(width))
        for place in range(k // 3):
            order[place], order[k + place] = k + place, place
        moved = basis[layer].clone()
        moved[1:] = u[:, : len(s)] * s @ v[order][: len(s)]
        turned.append(moved)
    errors = {"subspace_error": torch.full((len(rank), 20), error, dtype=torch.float64)}
    runs = [
        replace(first, arrays=first.arrays | errors | {"positional_basis": each})
        for each in (basis, torch.stack(turned))
    ]
    table = compare(*runs).part("positional basis").table
    assert table["overlap"].to_numpy() == pytest.approx(1 - rank // 3 / rank)
    assert (table["status"] == status).all()
