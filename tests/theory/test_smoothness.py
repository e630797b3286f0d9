"""Cosine transforms, Gram matrices, Theorem 1's bound and sinusoids against scipy.fft and dense numpy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.fft import dctn

from theodolite.theory import (
    dct2,
    low_frequency_ratio,
    normalised_gram,
    product_low_frequency_ratio,
    sinusoidal,
    smoothness_bound,
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


def test_ratio_is_differentiable() -> None:
    """Oracle: finite differences."""
    assert torch.autograd.gradcheck(
        lambda g: low_frequency_ratio(g, (1, 3)), (sample(5, 5).requires_grad_(),)
    )


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


def waves(size: int) -> np.ndarray:
    """Columns cos(π j (t + ½)/T), j = 0 … T−1, written from the definition."""
    t = np.arange(size)[:, None] + 0.5
    return np.cos(np.pi * np.arange(size) * t / size)


def dense_bound(gram: np.ndarray, k: int, m: int) -> tuple[float, float]:
    """Theorem 1 with the whole reflected 2T×2T matrix, np.roll, and least squares on the waves."""
    size = len(gram)
    reflected = np.block([[gram, gram[:, ::-1]], [gram[::-1], gram[::-1, ::-1]]])
    for _ in range(m):
        shifted = [np.roll(reflected, shift, (0, 1)) for shift in ((1, 0), (0, 1), (1, 1))]
        reflected = size**2 * (reflected - shifted[0] - shifted[1] + shifted[2])
    basis = waves(size)[:, :k]
    projection = basis @ np.linalg.pinv(basis)
    error = np.linalg.norm(gram - projection @ gram @ projection, 2) / size
    return 6 / (8 * k) ** m * np.abs(reflected).max(), error


@pytest.mark.parametrize(("size", "m"), [(1, 1), (3, 5), (8, 2), (9, 3), (2, 11)])
def test_bound_and_error_are_those_of_the_dense_matrix(size: int, m: int) -> None:
    """Oracle: `dense_bound`, also where the difference reaches around the whole reflected matrix."""
    p = sample(2, size, 4)
    gram = p @ p.mT
    ks = sorted({1, (size + 1) // 2, size})
    expected = np.array([[dense_bound(g, k, m) for k in ks] for g in gram.numpy()])
    got = smoothness_bound(gram, ks, m)
    assert got.bound.shape == got.attained.shape == (2, len(ks))
    np.testing.assert_allclose(got.bound, expected[..., 0], rtol=1e-9)
    np.testing.assert_allclose(got.attained, expected[..., 1], atol=1e-12)
    single = smoothness_bound(gram.float()[0], ks[0], m)
    assert single.bound.shape == ()
    np.testing.assert_allclose(single.bound, expected[0, 0, 0], rtol=1e-2)


SIZES = st.tuples(st.integers(3, 24), st.floats(0, 1), st.integers(0, 10**6), st.floats(0, 5))


def drawn(size: int, seed: int, decay: float) -> np.ndarray:
    """Positional vectors of random waves, the j-th of magnitude (j + 1)^−decay."""
    rng = np.random.default_rng(seed)
    scale = np.arange(1, size + 1)[:, None] ** -decay
    return waves(size) @ (rng.standard_normal((size, rng.integers(1, 5))) * scale)


@settings(max_examples=30, deadline=None)
@given(SIZES, st.integers(1, 7))
def test_bound_holds_for_centred_gram_matrices(case: tuple[int, float, int, float], m: int) -> None:
    """Oracle: Theorem 1's own claim, for m ≤ 7, and the sharper ‖H‖_max/(d_1 d_k)^m for every m."""
    size, share, seed, decay = case
    k = 1 + int(share * (size - 2))
    p = drawn(size, seed, decay)
    p -= p.mean(0)
    got = smoothness_bound(torch.tensor(p @ p.T), k, m)
    rounding = 1e-12 * float(np.square(p).sum())
    assert got.attained <= got.bound + rounding
    d_1, d_k = (2 * size * math.sin(math.pi * j / 2 / size) for j in (1, k))
    largest = got.bound * (8 * k) ** m / 6
    assert got.attained <= largest / (d_1 * d_k) ** m * (1 + 1e-9) + rounding


@settings(max_examples=30, deadline=None)
@given(SIZES, st.integers(1, 6), st.booleans())
def test_bound_for_rows_of_norm_one(case: tuple[int, float, int, float], m: int, centred: bool) -> None:
    """Oracle: the inequality that the docstring states for them; the printed bound where it implies it."""
    size, share, seed, decay = case
    k = 1 + int(share * (size - 2))
    p = drawn(size, seed, decay)
    got = smoothness_bound(normalised_gram(torch.tensor(p - p.mean(0) if centred else p)), k, m)
    d_1, d_k = (2 * size * math.sin(math.pi * j / 2 / size) for j in (1, k))
    largest = got.bound * (8 * k) ** m / 6
    assert got.attained <= largest * ((d_1 * d_k) ** -m + d_k**-m / 2) * (1 + 1e-9) + 1e-12
    if m == 1 or (m == 2 and k <= 0.7 * size):
        assert got.attained <= got.bound + 1e-12


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


def test_a_wave_over_columns_is_low_in_the_plane_and_not_in_a_line():
    """A cosine that runs once over 8 columns, the same in 8 rows, is of frequency (0, 1); in a line it repeats."""
    wave = np.cos(np.pi * (np.arange(8) + 0.5) / 8)
    p = torch.from_numpy(np.tile(wave, 8)[:, None])
    assert float(product_low_frequency_ratio(p, p, (3,), (8, 8))) == pytest.approx(1)
    assert float(product_low_frequency_ratio(p, p, (3,))) < 0.01
