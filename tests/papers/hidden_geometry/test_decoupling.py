"""The decomposition of head weights against dense numpy, planted structure and Haar averages."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from theodolite.theory.haar import haar_rotation
from theodolite_papers.hidden_geometry.decoupling import decouple


def sample(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def basis_of(p: Tensor) -> Tensor:
    return torch.tensor(np.linalg.svd(p.numpy(), full_matrices=True)[2].T.copy())


def dense(w: np.ndarray, v: np.ndarray, corners: tuple[int, ...]) -> dict[str, np.ndarray]:
    """As the published notebook does it, with the d×d matrix."""
    diagonal = np.diag(np.diag(w))
    rotated = v.T @ (w - diagonal) @ v
    threshold = np.sqrt(2 * np.log(w.size)) * np.std(rotated)
    survivors = np.where(np.abs(rotated) > threshold, rotated, 0)
    energy = (rotated**2).sum()
    return {
        "threshold": threshold,
        "surviving": np.count_nonzero(survivors),
        "surviving_energy": (survivors**2).sum() / energy,
        "corner_surviving": np.array([(survivors[:k, :k] ** 2).sum() for k in corners])
        / max((survivors**2).sum(), 1e-300),
        "corner_energy": np.array([(rotated[:k, :k] ** 2).sum() for k in corners]) / energy,
    }


def test_every_number_is_that_of_the_dense_matrix() -> None:
    """Oracle: `dense` for the given basis, d = 70 so that the maps are cut at 60."""
    corners = (1, 5, 20, 90)
    p = sample(0, 9, 70)
    v = basis_of(p)
    w_q, w_k = sample(1, 2, 70, 6), sample(2, 2, 70, 6)
    w_q = w_q + 3 * v[:, :1] * torch.ones(6)
    w_k = w_k + 3 * v[:, 1:2] * torch.ones(6)
    got = decouple(w_q.float(), w_k.float(), v, 0.5, corners)
    w = 0.5 * (w_q @ w_k.mT).numpy()
    for head in range(2):
        expected = dense(w[head], v.numpy(), corners)
        assert expected["surviving"] > 0
        for name, value in expected.items():
            np.testing.assert_allclose(getattr(got.aligned, name)[head], value, rtol=1e-5, err_msg=name)
        diagonal = np.diag(w[head])
        assert got.diagonal[head].item() == pytest.approx(
            (diagonal**2).sum() / (w[head] ** 2).sum(), rel=1e-5
        )
        np.testing.assert_allclose(got.diagonal_map[head], np.abs(diagonal[:60]), rtol=1e-4, atol=1e-5)
        rotated = np.abs(v.numpy().T @ (w[head] - np.diag(diagonal)) @ v.numpy())
        survivors = np.where(rotated > expected["threshold"], rotated, 0)[:60, :60]
        np.testing.assert_allclose(got.rotated_map[head], survivors, rtol=1e-4)


def test_planted_structure_is_found_and_random_bases_do_not_find_it() -> None:
    """W = V L Vᵀ + D with L of 3×3: nearly all in the corner and in D; at random K²/d² in the corner."""
    width = 64
    v = basis_of(sample(3, 8, width))
    strong, diagonal = 2 * sample(4, 3, 3), 0.7 * torch.ones(width, dtype=torch.float64)
    w = v[:, :3] @ strong @ v[:, :3].mT + diagonal.diag()
    got = decouple(w[None], torch.eye(width, dtype=torch.float64)[None], v, 1.0, (3, 8))
    assert got.aligned.corner_energy[0, 0] > 0.85
    assert got.aligned.corner_surviving[0, 0] > 0.99
    assert got.random_mean.corner_energy[0, 1] < 10 * (8 / width) ** 2
    expected = (w.diagonal().square().sum() / w.square().sum()).item()
    assert got.diagonal.item() == pytest.approx(expected)


def test_random_baseline_is_the_haar_average() -> None:
    """Closed form for A = W − D: (K e + K(K−1) f)/‖A‖², e = (‖A‖² + tr A²)/(d(d+2)), f from the whole."""
    width, corner, count = 16, 4, 200
    w_q, w_k = sample(7, 1, width, 5), sample(8, 1, width, 5)
    w = (w_q @ w_k.mT)[0].numpy()
    off = w - np.diag(np.diag(w))
    whole = (off**2).sum()
    on_diagonal = (whole + np.trace(off @ off)) / (width * (width + 2))
    elsewhere = (whole - width * on_diagonal) / (width * (width - 1))
    expected = (corner * on_diagonal + corner * (corner - 1) * elsewhere) / whole
    got = decouple(w_q, w_k, torch.eye(width), 1.0, (corner,), rotations=count)
    error = got.random_deviation.corner_energy.item() / math.sqrt(count)
    assert abs(got.random_mean.corner_energy.item() - expected) < 4 * error
    assert expected == pytest.approx((corner / width) ** 2, rel=0.25)


def test_rotations_are_haar() -> None:
    """Moments of the trace of a Haar orthogonal matrix: E tr = 0, E tr² = 1, E tr⁴ = 3 (Diaconis & Shahshahani)."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.stack([haar_rotation(6, generator) for _ in range(1000)])
    torch.testing.assert_close(drawn.mT @ drawn, torch.eye(6, dtype=torch.float64).expand(1000, 6, 6))
    trace = drawn.diagonal(dim1=-2, dim2=-1).sum(-1)
    for power, expected in ((1, 0.0), (2, 1.0), (4, 3.0)):
        moment = trace**power
        assert abs(moment.mean() - expected) < 4 * moment.std() / math.sqrt(1000)
