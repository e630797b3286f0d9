"""Frequencies of positions in a plane, against `scipy.fft.dctn` of the whole transform."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.fft import dctn

from theodolite.theory.smoothness import (
    frequencies_below,
    grid_frequencies,
    lowest_frequencies,
    product_low_frequency_ratio,
)

GRIDS = [(4, 4), (3, 5), (6, 2), (1, 7)]


def rows_of(grid: tuple[int, int], seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=(grid[0] * grid[1], 4)))


@pytest.mark.parametrize("grid", GRIDS)
def test_frequencies_of_a_grid_are_those_of_dctn(grid):
    p = rows_of(grid)
    expected = dctn(p.numpy().reshape(*grid, 4), type=2, norm="ortho", axes=(0, 1))
    np.testing.assert_allclose(grid_frequencies(p, 3, grid), expected[:3, :3], atol=1e-12)


@pytest.mark.parametrize("grid", GRIDS)
def test_the_first_rows_are_the_frequencies_below_each_cutoff(grid):
    p = rows_of(grid)
    spectrum = dctn(p.numpy().reshape(*grid, 4), type=2, norm="ortho", axes=(0, 1))
    low = lowest_frequencies(p, 10, grid)
    for cutoff in range(1, 11):
        below = spectrum[:cutoff, :cutoff].reshape(-1, 4)
        count = frequencies_below(cutoff, len(p), grid)
        assert count == len(below)
        got, expected = (sorted(map(tuple, np.round(rows, 9))) for rows in (low[:count].numpy(), below))
        assert got == expected


@pytest.mark.parametrize("grid", GRIDS)
def test_ratio_of_a_product_is_that_of_the_whole_transform(grid):
    """Oracle: the transform of A Bᵀ as a tensor of rows, columns, rows, columns, by `dctn` over all four."""
    left, right = rows_of(grid), rows_of(grid, 1)
    whole = dctn((left @ right.T).numpy().reshape(*grid, *grid), type=2, norm="ortho")
    got = product_low_frequency_ratio(left, right, (1, 2, 3, 10), grid)
    for ratio, k in zip(got, (1, 2, 3, 10), strict=True):
        expected = np.square(whole[:k, :k, :k, :k]).sum() / np.square(whole).sum()
        assert float(ratio) == pytest.approx(expected, abs=1e-12)


def test_a_wave_over_columns_is_low_in_the_plane_and_not_in_a_line():
    """A cosine that runs once over 8 columns, the same in 8 rows, is of frequency (0, 1); in a line it repeats."""
    wave = np.cos(np.pi * (np.arange(8) + 0.5) / 8)
    p = torch.from_numpy(np.tile(wave, 8)[:, None])
    assert float(product_low_frequency_ratio(p, p, (3,), (8, 8))) == pytest.approx(1)
    assert float(product_low_frequency_ratio(p, p, (3,))) < 0.01
