"""Positional columns of heads and layers against dense numpy and scipy.fft."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.fft
import torch
from torch import Tensor

from theodolite.errors import UsageError
from theodolite.measure.positional import argmax_property, positional_heads, qk_low_frequency


def sample(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def ratios(matrix: np.ndarray) -> list[float]:
    energy = scipy.fft.dctn(matrix, type=2, norm="ortho") ** 2
    return [energy[:k, :k].sum() / energy.sum() for k in (1, 3, 5, 10)]


def test_argmax_property_of_known_matrices() -> None:
    """Closed forms: on a circle W = I has its largest entry at the diagonal, −I nowhere but at the start."""
    angle = torch.arange(100, dtype=torch.float64) * 3 / 100
    rows = torch.stack([angle.cos(), angle.sin()], dim=-1)
    eye = torch.eye(2, dtype=torch.float64)
    got = argmax_property(rows, torch.stack([eye, -eye]), torch.stack([eye, eye]))
    assert got.tolist() == [1, 0.01]


def test_queries_and_grouped_keys() -> None:
    """Oracle: scipy's transform of each head's dense QKᵀ, key head g for query heads 2g and 2g + 1."""
    query, key = sample(6, 3, 4, 20, 5) + 1, sample(7, 3, 2, 20, 5) - 1
    got = qk_low_frequency(query.float(), key.float())
    assert got.shape == (3, 4, 4)
    for context in range(3):
        for head in range(4):
            expected = ratios((query[context, head] @ key[context, head // 2].mT).numpy())
            np.testing.assert_allclose(got[context, head], expected, rtol=1e-5)


def test_wrong_calls_are_named() -> None:
    with pytest.raises(UsageError, match="pos has 1 positions"):
        positional_heads(torch.ones(1, 2), torch.ones(2), torch.ones(1, 2, 1), torch.ones(1, 2, 1))
    with pytest.raises(UsageError, match="3 query heads and 2 key heads"):
        qk_low_frequency(torch.ones(3, 4, 2), torch.ones(2, 4, 2))
