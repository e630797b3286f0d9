"""Cosine transforms and Gram matrices against scipy.fft and numpy."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.fft
import torch

from theodolite.errors import UsageError
from theodolite.theory import dct2, low_frequency_ratio, normalised_gram


def sample(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize("shape", [(1, 1), (2, 8, 8), (3, 2, 7, 12)])
def test_transform_is_scipys(shape: tuple[int, ...]) -> None:
    gram = sample(*shape)
    expected = scipy.fft.dctn(gram.numpy(), type=2, norm="ortho", axes=(-2, -1))
    np.testing.assert_allclose(dct2(gram), expected, atol=1e-12)
    np.testing.assert_allclose(dct2(gram, 5), expected[..., :5, :5], atol=1e-12)


def test_ratio_is_the_share_of_energy_of_the_whole_transform() -> None:
    gram = sample(2, 30, 30)
    energy = scipy.fft.dctn(gram.numpy(), type=2, norm="ortho", axes=(-2, -1)) ** 2
    expected = [energy[:, :k, :k].sum((-2, -1)) / energy.sum((-2, -1)) for k in (1, 3, 5, 10)]
    np.testing.assert_allclose(low_frequency_ratio(gram), np.stack(expected, -1), rtol=1e-12)


def test_ratio_of_pure_frequencies() -> None:
    """A constant is frequency (0, 0) alone; cos(3π(t+½)/T) on both sides is (3, 3) alone."""
    torch.testing.assert_close(low_frequency_ratio(torch.ones(16, 16)), torch.ones(4, dtype=torch.float64))
    wave = torch.cos(3 * torch.pi * (torch.arange(16, dtype=torch.float64) + 0.5) / 16)
    got = low_frequency_ratio(wave[:, None] * wave, (1, 3, 4))
    torch.testing.assert_close(got, torch.tensor([0, 0, 1], dtype=torch.float64), atol=1e-12, rtol=0)


def test_cutoffs_beyond_the_size_take_everything_and_may_come_in_any_order() -> None:
    got = low_frequency_ratio(sample(4, 4), (10, 2, 4))
    torch.testing.assert_close(got[[0, 2]], torch.ones(2, dtype=torch.float64))
    assert got[1] < 1


def test_zero_matrix_has_no_shares() -> None:
    assert low_frequency_ratio(torch.zeros(5, 5)).isnan().all()


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


def test_wrong_calls_are_named() -> None:
    with pytest.raises(UsageError, match=r"cutoffs are \(0, 3\)"):
        low_frequency_ratio(torch.eye(4), (0, 3))
    with pytest.raises(UsageError, match="give one or more"):
        low_frequency_ratio(torch.eye(4), ())
    with pytest.raises(UsageError, match="frequencies is 0"):
        dct2(torch.eye(4), 0)
