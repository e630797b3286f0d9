"""Spectra of query-key matrices against the dense d×d matrix, formed here with torch.linalg."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from theodolite.theory import qk_eigenvalues, qk_moments, qk_singular_values, qk_spectral_norm


def factors(*shape: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    w_q = torch.randn(*shape, generator=generator, dtype=torch.float64)
    return w_q, torch.randn(*shape, generator=generator, dtype=torch.float64)


def covariance_of(width: int, seed: int = 1) -> Tensor:
    root = torch.randn(width, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return root @ root.mT / width


def symmetric_root(matrix: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(matrix)
    return vectors * values.clamp_min(0).sqrt() @ vectors.mT


@pytest.mark.parametrize("with_covariance", [False, True])
def test_moments_equal_those_of_the_dense_matrix(with_covariance: bool) -> None:
    w_q, w_k = factors(2, 3, 12, 4)
    sigma = covariance_of(12) if with_covariance else torch.eye(12, dtype=torch.float64)
    got = qk_moments(w_q, w_k, sigma if with_covariance else None, temperature=3.0)
    dense = w_q @ w_k.mT @ sigma
    seen = symmetric_root(sigma) @ w_q @ w_k.mT @ symmetric_root(sigma)
    symmetric = (seen + seen.mT) / 2
    trace = torch.einsum("...ii", dense)
    square = torch.einsum("...ii", dense @ dense)
    symmetric_square = (symmetric @ symmetric).diagonal(dim1=-2, dim2=-1).sum(-1)
    expected = {
        "trace": trace,
        "trace_of_square": square,
        "frobenius_squared": dense.square().sum((-2, -1)),
        "form_squared": seen.square().sum((-2, -1)),
        "mean": trace / 12,
        "variance": square / 12 - (trace / 12) ** 2,
        "xi": trace / square.sqrt(),
        "eta": square.sqrt() / 3,
        "xi_symmetric": trace / symmetric_square.sqrt(),
        "eta_symmetric": symmetric_square.sqrt() / 3,
        "r": trace / 3,
        "core": w_k.mT @ sigma @ w_q,
    }
    assert set(expected) == {field.name for field in dataclasses.fields(got)}
    for name, value in expected.items():
        torch.testing.assert_close(getattr(got, name), value, equal_nan=True, rtol=1e-9, atol=1e-9)


def test_default_temperature_is_the_root_of_the_head_width() -> None:
    w_q, w_k = factors(5, 12, 4)
    torch.testing.assert_close(qk_moments(w_q, w_k).r, qk_moments(w_q, w_k).trace / 2)
    per_head = qk_moments(w_q, w_k, temperature=torch.full((5,), 2.0)).r
    torch.testing.assert_close(per_head, qk_moments(w_q, w_k).r)


def test_zero_head_has_zero_scale_and_no_xi() -> None:
    got = qk_moments(torch.zeros(4, 2), torch.zeros(4, 2))
    assert got.eta == 0
    assert got.eta_symmetric == 0
    assert got.xi.isnan()
    assert qk_moments(factors(4, 2)[0] * torch.nan, factors(4, 2)[1]).trace.isnan().all()


def test_moments_are_differentiable() -> None:
    """Oracle: finite differences, on a head whose tr W² is positive."""
    w_q, _ = factors(5, 2)
    w_k = w_q + 0.1 * factors(5, 2, seed=3)[0]
    inputs = (w_q.requires_grad_(), w_k.detach().requires_grad_(), covariance_of(5).requires_grad_())
    assert torch.autograd.gradcheck(lambda *args: tuple(vars(qk_moments(*args)).values()), inputs)


@pytest.mark.parametrize("with_covariance", [False, True])
def test_eigenvalues_are_the_dense_ones_without_the_zeros(with_covariance: bool) -> None:
    w_q, w_k = factors(3, 20, 5)
    sigma = covariance_of(20) if with_covariance else None
    got = qk_eigenvalues(w_q, w_k, sigma)
    dense = torch.linalg.eigvals(w_q @ w_k.mT @ (torch.eye(20).double() if sigma is None else sigma))
    kept = dense.gather(-1, dense.abs().argsort(-1, descending=True)[:, :5])
    distance = (got[:, :, None] - kept[:, None]).abs()
    assert distance.amin(-1).max() < 1e-10
    assert distance.amin(-2).max() < 1e-10


def test_eigenvalues_are_sorted_by_real_then_imaginary_part() -> None:
    values = qk_eigenvalues(*factors(4, 20, 8))
    keys = [[(-z.real, -z.imag) for z in row] for row in values.tolist()]
    assert all(row == sorted(row) for row in keys)
    assert values.imag.abs().max() > 0


def test_singular_values_and_spectral_norm_are_the_dense_ones() -> None:
    w_q, w_k = factors(2, 20, 5)
    dense = torch.linalg.svdvals(w_q @ w_k.mT)
    torch.testing.assert_close(qk_singular_values(w_q, w_k), dense[:, :5])
    torch.testing.assert_close(qk_spectral_norm(w_q, w_k), dense[:, 0])
