"""Positional columns of heads and layers against dense numpy and scipy.fft."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.fft
import torch
from torch import Tensor

from theodolite.errors import UsageError
from theodolite.measure.positional import (
    argmax_property,
    positional_heads,
    qk_low_frequency,
)


def sample(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def spiral(length: int, width: int) -> Tensor:
    """Positional vectors of a few slow waves and a little noise, position 0 an outlier; they sum to 0 after it."""
    t = torch.arange(length, dtype=torch.float64)[:, None]
    slow = torch.cos(t * torch.arange(1, 5) / length + torch.arange(4)) @ sample(0, 4, width)
    pos = slow + 0.05 * sample(1, length, width)
    pos = pos - pos[1:].mean(0)
    pos[0] = 1000
    return pos


def dense_argmax(rows: np.ndarray, w: np.ndarray) -> float:
    matrix = rows @ w @ rows.T
    return float(np.mean([np.argmax(matrix[t, : t + 1]) == t for t in range(len(rows))]))


def ratios(matrix: np.ndarray) -> list[float]:
    energy = scipy.fft.dctn(matrix, type=2, norm="ortho") ** 2
    return [energy[:k, :k].sum() / energy.sum() for k in (1, 3, 5, 10)]


@pytest.mark.parametrize("length", [2, 40, 150])
def test_columns_are_those_of_dense_matrices(length: int) -> None:
    """Oracles: numpy's argmax over rows of P̃WP̃ᵀ and scipy's transform of PWPᵀ, without position 0."""
    pos, mean = spiral(length, 12), 2 * sample(2, 12)
    w_q, w_k = sample(3, 5, 12, 4), sample(4, 5, 12, 4)
    w_k[0] = w_q[0]
    normed = torch.nn.functional.layer_norm(pos + mean, (12,))
    got = positional_heads(pos, mean, w_q, w_k, normed)
    w = (w_q @ w_k.mT).numpy()
    p = pos[1:].numpy()
    for head in range(5):
        assert got["argmax_property"][head] == dense_argmax(p + mean.numpy(), w[head])
        assert got["argmax_property_normed"][head] == dense_argmax(normed[1:].numpy(), w[head])
        expected = ratios(p @ w[head] @ p.T) if length > 2 else None
        for index, k in enumerate((1, 3, 5, 10)):
            if expected is not None:
                assert got[f"pwp_low_frequency_{k}"][head] == pytest.approx(expected[index], rel=1e-8)
    if length > 2:
        assert len(set(got["argmax_property"])) > 1


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
