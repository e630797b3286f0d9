"""Cosine transforms, Gram matrices and sinusoids against scipy.fft and dense numpy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.fft import dctn

from theodolite.theory import (
    dct2,
    low_frequency_ratio,
    normalised_gram,
    product_low_frequency_ratio,
    sinusoidal,
)
from theodolite.theory.smoothness import (
    frequencies_below,
    grid_frequencies,
    lowest_frequencies,
)


def sample(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize("shape", [(1, 1), (2, 8, 8), (3, 2, 7, 12)])
def test_transform_is_scipys(shape: tuple[int, ...]) -> None:
    gram = sample(*shape)
    expected = dctn(gram.numpy(), type=2, norm="ortho", axes=(-2, -1))
    np.testing.assert_allclose(dct2(gram), expected, atol=1e-12)
    np.testing.assert_allclose(dct2(gram, 5), expected[..., :5, :5], atol=1e-12)


def test_ratio_is_the_share_of_energy_of_the_whole_transform() -> None:
    gram = sample(2, 30, 30)
    energy = dctn(gram.numpy(), type=2, norm="ortho", axes=(-2, -1)) ** 2
    expected = [energy[:, :k, :k].sum((-2, -1)) / energy.sum((-2, -1)) for k in (1, 3, 5, 10)]
    np.testing.assert_allclose(low_frequency_ratio(gram), np.stack(expected, -1), rtol=1e-12)


def test_gram_holds_cosines_and_zero_rows_stay_zero() -> None:
    p = sample(2, 6, 9) * 100
    p[0, 3] = 0
    gram = normalised_gram(p.float())
    expected = np.corrcoef(np.concatenate([p[1], -p[1]], axis=1))  # centred rows: correlation is cosine
    np.testing.assert_allclose(gram[1], expected, atol=1e-6)
    assert (gram[0, 3] == 0).all()
    assert (gram[0, :, 3] == 0).all()
    assert gram.dtype == torch.float64


def test_ratio_of_a_product_without_energy_is_undefined() -> None:
    assert product_low_frequency_ratio(sample(3, 12, 4), torch.zeros(3, 7, 4)).isnan().all()


def test_sinusoids_are_those_of_the_definition() -> None:
    """Oracle: Vaswani et al. 2017, section 3.5, entry by entry with math.sin and math.cos."""
    got = sinusoidal(40, 12)
    for t in range(40):
        for j in range(12):
            wave, angle = (math.cos if j % 2 else math.sin), t / 10000 ** (j // 2 * 2 / 12)
            assert got[t, j].item() == pytest.approx(wave(angle), abs=1e-13)


GRIDS = [(4, 4), (3, 5), (6, 2), (1, 7)]


def rows_of(grid: tuple[int, int], seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=(grid[0] * grid[1], 4)))


@pytest.mark.parametrize("grid", GRIDS)
def test_the_first_rows_are_the_frequencies_below_each_cutoff(grid):
    p = rows_of(grid)
    spectrum = dctn(p.numpy().reshape(*grid, 4), type=2, norm="ortho", axes=(0, 1))
    np.testing.assert_allclose(grid_frequencies(p, 3, grid), spectrum[:3, :3], atol=1e-12)
    low = lowest_frequencies(p, 10, grid)
    for cutoff in range(1, 11):
        below = spectrum[:cutoff, :cutoff].reshape(-1, 4)
        count = frequencies_below(cutoff, len(p), grid)
        assert count == len(below)
        got, expected = (sorted(map(tuple, np.round(rows, 9))) for rows in (low[:count].numpy(), below))
        assert got == expected


@pytest.mark.parametrize("grid", [*GRIDS, None])
def test_ratio_of_a_product_is_that_of_the_whole_transform(grid):
    """Oracle: `dctn` of A Bᵀ, over rows, columns, rows, columns of a grid; of a line rectangular, and batched."""
    left, right = (rows_of(grid), rows_of(grid, 1)) if grid else (sample(3, 12, 4), sample(3, 7, 4) + 1)
    products = (left @ right.mT).numpy().reshape(-1, *((*grid, *grid) if grid else (12, 7)))
    got = product_low_frequency_ratio(left, right, (3, 1, 2, 10), grid).reshape(len(products), 4)
    for product, ratios in zip(products, got, strict=True):
        energy = np.square(dctn(product, type=2, norm="ortho"))
        low = [energy[(slice(k),) * energy.ndim].sum() for k in (3, 1, 2, 10)]
        np.testing.assert_allclose(ratios, np.array(low) / energy.sum(), rtol=1e-11)
