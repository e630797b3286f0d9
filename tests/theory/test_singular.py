"""ScreeNOT against the reference package, singular values against torch.linalg."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from screenot.ScreeNOT import adaptiveHardThresholding
from torch import Tensor

from theodolite.errors import UsageError
from theodolite.theory import largest_singular_value, screenot


def noisy(rows: int, columns: int, rank: int, correlation: float, seed: int) -> np.ndarray:
    """A rank-r signal with singular values 2…8 in noise that follows an AR(1) process along its rows."""
    generator = np.random.default_rng(seed)
    lags = np.abs(np.subtract.outer(np.arange(columns), np.arange(columns)))
    root = np.linalg.cholesky(correlation**lags + 1e-12 * np.eye(columns))
    noise = generator.normal(size=(rows, columns)) @ root.T / np.sqrt(max(rows, columns))
    left = np.linalg.qr(generator.normal(size=(rows, rank)))[0]
    right = np.linalg.qr(generator.normal(size=(columns, rank)))[0]
    return noise + left * np.linspace(8, 2, rank) @ right.T


@pytest.mark.parametrize(
    ("rows", "columns", "k"), [(60, 60, 20), (120, 50, 20), (30, 100, 5), (45, 44, 0), (9, 8, 3)]
)
def test_rank_and_threshold_are_those_of_the_reference(rows: int, columns: int, k: int) -> None:
    """The reference bisects the threshold to 1e-5, which is what the two may differ by."""
    for seed in range(3):
        matrix = noisy(rows, columns, rank=min(3 * seed, k), correlation=[0.0, 0.5, 0.9][seed], seed=seed)
        _, threshold, rank = adaptiveHardThresholding(matrix, k)
        got = screenot(torch.from_numpy(matrix), k)
        assert got.rank.item() == rank
        assert got.threshold.item() == pytest.approx(threshold, abs=1.1e-5)


def test_batches_give_what_single_matrices_give() -> None:
    batch = torch.stack([torch.from_numpy(noisy(50, 70, 3, 0.5, seed)) for seed in range(4)]).reshape(
        2, 2, 50, 70
    )
    got = screenot(batch, k=10)
    assert got.singular_values.shape == (2, 2, 50)
    single = screenot(batch[1, 0], k=10)
    assert got.rank[1, 0] == single.rank
    torch.testing.assert_close(got.threshold[1, 0], single.threshold)
    torch.testing.assert_close(got.singular_values, torch.linalg.svdvals(batch))


def test_exact_low_rank_and_zero_matrices() -> None:
    generator = torch.Generator().manual_seed(0)
    low = torch.randn(60, 3, generator=generator) @ torch.randn(3, 50, generator=generator)
    low = low.double()
    exact = low[:, :3] @ torch.linalg.pinv(low[:, :3]) @ low
    assert screenot(exact).rank == 3
    assert adaptiveHardThresholding(exact.numpy(), 20)[2] == 3
    zero = screenot(torch.zeros(50, 60))
    assert zero.rank == 0
    assert zero.threshold == 0
    assert adaptiveHardThresholding(np.zeros((50, 60)), 20)[2] == 0


@pytest.mark.parametrize("k", [-1, 20, 40, 100])
def test_bound_on_the_rank_that_does_not_fit_is_refused(k: int) -> None:
    with pytest.raises(UsageError, match=r"for a 41×90 matrix: give k between 0 and 19"):
        screenot(torch.ones(41, 90), k)
    if k > 0:
        with pytest.raises(ValueError, match="k too large"):
            adaptiveHardThresholding(np.ones((41, 90)), k)


def spectral_norm(x: Tensor) -> Tensor:
    return torch.linalg.matrix_norm(x.double(), ord=2)


@pytest.mark.parametrize(
    ("shape", "decay"),
    [((2, 40, 64), 0.0), ((3, 70, 20), 0.5), ((1, 5), 1.5), ((5, 1), 0.0), ((2, 2, 6, 6), 1.5)],
)
def test_largest_singular_value_is_that_of_the_svd(shape: tuple[int, ...], decay: float) -> None:
    generator = torch.Generator().manual_seed(0)
    scale = torch.arange(1, shape[-1] + 1, dtype=torch.float64) ** -decay
    x = torch.randn(shape, generator=generator, dtype=torch.float64) * scale
    torch.testing.assert_close(largest_singular_value(x), spectral_norm(x), rtol=1e-9, atol=0)
    single = largest_singular_value(x.float())
    torch.testing.assert_close(single, spectral_norm(x.float()), rtol=2e-6, atol=0)
    assert single.dtype == torch.float64


def test_start_finds_the_first_direction_where_the_mean_row_does_not_lean_to_it() -> None:
    """The mean row is zero, or exactly the second singular direction."""
    rows = torch.randn(20, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    mirrored = torch.cat([rows, -rows])
    misleading = torch.zeros(40, 12, dtype=torch.float64)
    misleading[:, 0] = 1
    misleading[:20, 1], misleading[20:, 1] = 3, -3
    x = torch.stack([mirrored, misleading])
    torch.testing.assert_close(largest_singular_value(x), spectral_norm(x), rtol=1e-9, atol=0)


def test_degenerate_matrices() -> None:
    assert (largest_singular_value(torch.zeros(2, 4, 5)) == 0).all()
    assert largest_singular_value(torch.ones(6, 6)).item() == pytest.approx(6)
    assert largest_singular_value(torch.eye(9)).item() == pytest.approx(1)
    broken = torch.ones(2, 4, 5)
    broken[1, 2, 3] = torch.nan
    got = largest_singular_value(broken)
    assert got[0].item() == pytest.approx(np.sqrt(20))
    assert got[1].isnan()
    assert largest_singular_value(torch.zeros(0, 4, 5)).shape == (0,)
    half = largest_singular_value(torch.ones(3, 3, dtype=torch.bfloat16, requires_grad=True))
    assert half.item() == pytest.approx(3)
