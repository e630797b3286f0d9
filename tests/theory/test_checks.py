"""Which Σ is a covariance up to rounding; what it is asked of elsewhere is tested there."""

from __future__ import annotations

import pytest
import torch

from theodolite.errors import UsageError
from theodolite.theory import qk_moments
from theodolite.theory.checks import check_covariance


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
def test_singular_covariances_pass_in_every_precision(dtype, scale):
    """Of rank 5 at width 300, computed in float32, so that rounding makes eigenvalues negative."""
    tokens = torch.randn(5, 300, generator=torch.Generator().manual_seed(0))
    sigma = (tokens.T @ tokens * scale).to(dtype)
    assert torch.linalg.eigvalsh(sigma.double())[0] < 0
    check_covariance(sigma)
    check_covariance(torch.stack([sigma, 0 * sigma]))


@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
def test_what_is_not_symmetric_is_refused_also_in_a_batch(scale):
    eye = torch.eye(3, dtype=torch.float64)
    sheared = scale * (eye + 1e-3 * eye.roll(1, 0).triu())
    for beside in (eye, eye * torch.nan, eye * torch.inf):
        check_covariance(beside)
        with pytest.raises(UsageError, match="not symmetric"):
            check_covariance(torch.stack([beside, sheared]))


def test_gradients_and_vmap_pass_through_a_checked_covariance():
    """Oracle: tr(W_q W_kᵀ Σ) is linear in Σ, so its gradient is W_QKᵀ; and one Σ at a time."""
    generator = torch.Generator().manual_seed(0)
    w_q, w_k = torch.randn(2, 4, 2, generator=generator, dtype=torch.float64)
    sigma = torch.eye(4, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(qk_moments(w_q, w_k, sigma).trace, sigma)
    torch.testing.assert_close(slope, (w_q @ w_k.mT).mT)
    many = torch.stack([sigma.detach(), 3 * sigma.detach()])
    got = torch.func.vmap(lambda s: qk_moments(w_q, w_k, s).form_squared)(many)
    torch.testing.assert_close(got, qk_moments(w_q, w_k, many).form_squared)
