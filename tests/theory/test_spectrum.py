"""Spectra of query-key matrices against the dense d×d matrix, formed here with torch.linalg."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from theodolite.theory import qk_eigenvalues, qk_moments, qk_singular_values, qk_spectral_norm
from theodolite.theory.spectrum import scale_bound, trace_bound


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


DOUBLE = torch.float64


def heads(*shape: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Random factors and an anisotropic covariance."""
    covariance = covariance_of(shape[-2], seed) + 0.1 * torch.eye(shape[-2], dtype=DOUBLE)
    return *factors(*shape, seed=seed), covariance


def test_sides_are_the_norms_of_the_full_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: torch.linalg on W_QK, W_QK Σ and Σ⁻¹; the entries are summed in blocks of a few rows."""
    monkeypatch.setattr("theodolite.theory.spectrum._ELEMENTS", 6 * 9 * 2)
    w_q, w_k, covariance = heads(2, 3, 9, 4)
    matrix = w_q @ w_k.mT
    product = matrix @ covariance
    trace = product.diagonal(dim1=-2, dim2=-1).sum(-1).abs()
    largest = torch.linalg.matrix_norm(covariance, 2)
    seven = trace_bound(w_q, w_k, covariance)
    torch.testing.assert_close(seven.trace_by_root, trace / 3 / largest)
    torch.testing.assert_close(seven.trace_by_width, trace / 9 / largest)
    torch.testing.assert_close(seven.spectral, torch.linalg.matrix_norm(matrix, 2))
    torch.testing.assert_close(seven.frobenius, torch.linalg.matrix_norm(matrix))
    torch.testing.assert_close(seven.entry_sum, matrix.abs().sum((-2, -1)))
    torch.testing.assert_close(seven.column_sum, torch.linalg.matrix_norm(matrix, 1))

    ten = scale_bound(w_q, w_k, covariance)
    inverse = torch.linalg.inv(covariance)
    torch.testing.assert_close(ten.by_norm, inverse.norm() * torch.linalg.matrix_norm(product))
    square = (product @ product).diagonal(dim1=-2, dim2=-1).sum(-1)
    expected = torch.where(square >= 0, inverse.norm() * square.clamp_min(0).sqrt(), torch.nan)
    torch.testing.assert_close(ten.by_trace, expected, equal_nan=True)
    root = symmetric_root(covariance)
    form = torch.linalg.matrix_norm(root @ matrix @ root)
    torch.testing.assert_close(ten.by_form, torch.linalg.matrix_norm(inverse, 2) * form)
    torch.testing.assert_close(ten.frobenius, seven.frobenius)
    torch.testing.assert_close(ten.spectral, seven.spectral)


def test_corrected_links_hold_for_every_head_and_covariance() -> None:
    """80 random heads, some symmetric, some with large traces, some of rank one."""
    for seed in range(8):
        w_q, w_k, covariance = heads(10, 8, 1 + seed % 8, seed=seed)
        w_k = w_k + (seed % 3) * w_q
        for sigma in (None, covariance):
            assert trace_bound(w_q, w_k, sigma).corrected.all()
            assert scale_bound(w_q, w_k, sigma).corrected.all()


def test_identity_attains_the_corrected_sides_and_breaks_the_printed_one() -> None:
    """W_QK = Σ = I, d = 64: closed forms; |tr W|/(√d ‖Σ‖₂) = 8 exceeds ‖W_QK‖₂ = 1, and ‖W_QK‖_F = 8 attains it."""
    eye = torch.eye(64, dtype=DOUBLE)
    seven = trace_bound(eye, eye, eye)
    sides = seven.trace_by_root, seven.trace_by_width, seven.spectral, seven.frobenius
    assert [round(side.item(), 12) for side in sides] == [8, 1, 1, 8]
    assert (seven.entry_sum.item(), seven.column_sum.item()) == (64, 1)
    assert seven.printed.tolist() == [False, True, True]
    assert seven.corrected.all()


def test_rotation_has_no_printed_scale() -> None:
    """tr W² = −2 and ‖W‖_F² = 2; the symmetric diag(1, −1) has both equal, and the chain holds."""
    eye = torch.eye(2, dtype=DOUBLE)
    ten = scale_bound(torch.tensor([[0.0, -1.0], [1.0, 0.0]], dtype=DOUBLE), eye)
    assert ten.by_trace.isnan()
    assert ten.printed.tolist() == [False, True, True]
    assert scale_bound(torch.diag(torch.tensor([1.0, -1.0], dtype=DOUBLE)), eye).printed.all()


def test_singular_covariance_leaves_no_upper_bound() -> None:
    w_q, w_k, _ = heads(4, 2)
    flat = torch.diag(torch.tensor([1.0, 1.0, 1.0, 0.0], dtype=DOUBLE))
    ten = scale_bound(w_q, w_k, flat)
    assert ten.by_norm.isinf()
    assert ten.corrected.all()


def test_sides_are_differentiable() -> None:
    """Oracle: finite differences, at generic factors."""
    w_q, w_k, covariance = heads(1, 4, 2)
    w_k = w_k + w_q  # keeps tr W² away from 0
    w_q.requires_grad_()
    w_k.requires_grad_()

    def sides(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        seven, ten = trace_bound(a, b, covariance), scale_bound(a, b, covariance)
        return seven.trace_by_root, seven.spectral, seven.entry_sum, ten.by_trace, ten.by_norm, ten.by_form

    assert torch.autograd.gradcheck(sides, (w_q, w_k))


def test_zero_weights_hold_with_a_singular_covariance() -> None:
    """Oracle: 0 ≥ 0 for W_QK = 0; for W_QK ≠ 0 whose W is 0, the left side is the infinite ‖Σ⁻¹‖."""
    flat, zero = torch.diag(torch.tensor([1.0, 0.0], dtype=DOUBLE)), torch.zeros(2, 1, dtype=DOUBLE)
    ten = scale_bound(zero, zero, flat)
    assert ten.corrected.all()
    assert ten.printed.all()
    assert (ten.by_norm, ten.by_form, ten.by_trace) == (0, 0, 0)
    unseen = torch.tensor([[0.0], [1.0]], dtype=DOUBLE)
    ten = scale_bound(unseen, unseen, flat)
    assert ten.corrected.all()
    assert ten.by_norm == torch.inf
    for bound in (trace_bound, scale_bound):
        assert bound(unseen, unseen, 0 * flat).corrected.all()
