"""Directions of tags and of positional bases are decided with their sampling error; oracle: simulated contexts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch

from tests.report.synthetic import leading_in_groups, make_run, make_survey
from theodolite.accumulate.means import decomposed_means
from theodolite.comparison import compare
from theodolite.comparison.parts import A_HALF, ALONG, directions_kept, overlap, overlap_bias
from theodolite.comparison.survival import decided
from theodolite.measure.position import DIRECTIONS, grouped_basis, ranks
from theodolite.passes.run import Run
from theodolite.theory.unbiased import Jackknifed

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
    cosine = directions_kept(*(torch.from_numpy(sums) for sums in by_group))
    # Each tag is a family of its own.
    families = [Jackknifed(cosine.value[[n]], cosine.without[:, [n]]) for n in range(TRIALS)]
    kept, lost, _ = np.mean([decided(ALONG, one) for one in families], axis=0)[:, 0]
    return float(kept), float(lost)


@pytest.mark.parametrize(("noise", "shared"), [(0.05, 1.0), (0.2, 0.0), (0.5, 0.7), (1.0, 0.0)])
def test_a_tag_just_below_the_limit_is_hardly_ever_kept_nor_one_just_above_turned(noise, shared):
    """And one that is clearly kept or turned, where the noise lets it be seen, is said to be."""
    assert answers(0.69, noise, shared)[0] <= 0.05
    assert answers(0.72, noise, shared)[1] <= 0.05
    if noise <= 0.2:
        assert answers(0.95, 0.2, shared)[0] > 0.95
        assert answers(0.4, 0.2, shared)[1] > 0.95


@pytest.mark.parametrize(
    ("error", "status"), [(0.001, "survived"), (0.3, "undecided"), (np.nan, "undecided")]
)
def test_a_basis_whose_directions_sampling_moves_is_not_decided(error, status):
    """A third of the directions of every layer are others: two thirds are left."""
    first = make_survey()
    rank, basis = first.layers["rank"].to_numpy(), first.arrays["positional_basis"].double()
    turned = basis.clone()
    for layer, k in enumerate(rank):
        u, s, v = torch.linalg.svd(basis[layer, 1:], full_matrices=True)
        s[:k], s[k:] = torch.linspace(1.001, 1, k), s[k:] / s[k] / 2  # all leading ones have as much energy
        basis[layer, 1:] = u[:, : len(s)] * s @ v[: len(s)]
        order = np.arange(len(v))
        order[: k // 3], order[k : k + k // 3] = np.arange(k, k + k // 3), np.arange(k // 3)
        turned[layer, 1:] = u[:, : len(s)] * s @ v[order][: len(s)]
    runs = []
    for of in (basis, turned):
        without = leading_in_groups(of).double()
        if of is turned:  # longer and shorter ones: overlaps that differ by so much
            without *= 1 + torch.tensor([1.0, -1] * 4)[:, None, None, None] * error / 2 / 7**0.5
        runs.append(
            replace(
                first,
                arrays=first.arrays | {"positional_basis": of, "positional_directions.without": without},
            )
        )
    table = compare(*runs).part("positional basis").table
    assert table["overlap"].to_numpy() == pytest.approx(1 - rank // 3 / rank, rel=2e-3)
    assert (table["status"] == status).all()


def bases(true: float, noise: float, shared: float, seed: int) -> tuple[Run, Run]:
    """Two models' means of positions by group, of bases whose two directions overlap so much; and their errors."""
    generator = np.random.default_rng(seed)
    positions, width, rank = 40, 24, 2
    waves = np.cos(np.pi / positions * (np.arange(positions)[:, None] + 0.5) * np.arange(1, rank + 1))
    old = np.eye(width)[:rank]
    new = true**0.5 * old + (1 - true) ** 0.5 * np.eye(width)[rank : 2 * rank]
    one, two = generator.normal(size=(2, 8, positions, width)) * noise * 8**0.5
    runs = []
    for directions, own in ((old, one), (new, shared * one + (1 - shared**2) ** 0.5 * two)):
        means = {
            "position_sum": torch.from_numpy(8 * (waves @ directions / 20**0.5 + own))[None],
            "readers": torch.full((1, 8, positions), 8.0, dtype=torch.float64),
            "contexts": torch.full((1, 8), 8.0, dtype=torch.float64),
            "context_mean": torch.zeros(1, 2, 4, width, dtype=torch.float64),
            "context_tokens": torch.full((1, 2, 4), positions // 4 - 1.0, dtype=torch.float64),
        }
        pos = decomposed_means(means)[1]
        arrays = {DIRECTIONS: ranks(grouped_basis(means, 0, 1))[1][:, None]}
        layers = pd.DataFrame({"rank": [float(rank)]})
        runs.append(replace(make_run(), layers=layers, arrays=arrays | {"positional_basis": pos.float()}))
    return runs[0], runs[1]


def kept(true: float, noise: float, shared: float, trials: int = 20) -> tuple[float, float]:
    """How often directions that overlap so much are said to be kept, and to be lost."""
    found = []
    for seed in range(trials):
        runs = bases(true, noise, shared, seed)
        found.append(decided(A_HALF, overlap(*runs, by_energy=True), bias=overlap_bias(*runs))[:2])
    is_kept, is_lost = np.mean(found, axis=0, dtype=float)[:, 0]
    return float(is_kept), float(is_lost)


@pytest.mark.parametrize(("noise", "shared"), [(0.005, 0.0), (0.05, 1.0), (0.2, 0.9)])
def test_a_basis_just_below_the_limit_is_hardly_ever_kept_nor_one_just_above_lost(noise, shared):
    assert kept(0.45, noise, shared)[0] <= 0.05
    assert kept(0.55, noise, shared)[1] <= 0.05
    if shared == 0.9:
        assert kept(0.9, 0.02, shared)[0] > 0.95
        assert kept(0.1, 0.02, shared)[1] > 0.95
