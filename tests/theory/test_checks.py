"""Which Σ is a covariance up to rounding; what it is asked of elsewhere is tested there."""

from __future__ import annotations

import subprocess
import sys

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
def test_what_is_no_covariance_is_refused_also_in_a_batch(scale):
    eye = torch.eye(3, dtype=torch.float64)
    exchange = torch.tensor([[0.0, 1, 0], [1, 0, 0], [0, 0, 0]], dtype=torch.float64)
    for wrong in (-eye, exchange, torch.diag(torch.tensor([1.0, 1.0, -1e-4]))):
        with pytest.raises(UsageError, match="negative eigenvalue"):
            check_covariance(torch.stack([eye, scale * wrong.double()]))
    with pytest.raises(UsageError, match="not symmetric"):
        check_covariance(torch.stack([eye, scale * (eye + 1e-3 * exchange.triu())]))


def test_undefined_numbers_do_not_hide_a_wrong_one_and_pass_by_themselves():
    eye = torch.eye(3)
    for value in (torch.nan, torch.inf):
        check_covariance(eye * value)
        with pytest.raises(UsageError, match="negative eigenvalue"):
            check_covariance(torch.stack([eye * value, -eye]))


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


WRONG_TYPES = """
import torch
from theodolite.errors import UsageError
from theodolite.theory import propagation, propagation_exact, propagation_exact_head, propagation_finite
one, three, heads = torch.ones(()), torch.ones(3), torch.ones(5, 2, 1)
for call in (
    lambda: propagation_exact([0.1, 0.2], 4, 1.0),
    lambda: propagation_exact(three + 0j, 4, 1.0),
    lambda: propagation_exact(one, 4, 1.0),
    lambda: propagation_exact(three, 4.5, 1.0),
    lambda: propagation_exact(three, 4, "a"),
    lambda: propagation_exact(three, 4, None),
    lambda: propagation_exact(three, 4, three),
    lambda: propagation_exact(torch.ones(2, 5), 4, three),
    lambda: propagation_exact_head(heads, heads, 4),
    lambda: propagation_exact_head(heads[0] + 0j, heads[0], 4),
    lambda: propagation_exact_head(heads[0], heads[0], 4, torch.ones(2)),
    lambda: propagation_exact_head(heads[0], heads[0], 4, covariance=torch.ones(2, 3)),
    lambda: propagation_finite(one, one, one, 4.5, 1.0),
    lambda: propagation_finite(one * 1j, one, one, 3, 1.0),
    lambda: propagation(three, one * 1j, one),
):
    try:
        print(call())
    except UsageError as error:
        print(error)
"""
SAID = """\
eigenvalues is a list: give a tensor
eigenvalues is complex: an asymmetric W has its curve from propagation_exact_head
eigenvalues has shape (): give (..., d), one row for each head
length is 4.5: give a whole number of tokens
temperature is 'a': give a positive number
temperature is None: give a positive number
temperature has shape (3,): give a number, or a shape that broadcasts to the heads' ()
temperature has shape (3,): give a number, or a shape that broadcasts to the heads' (2,)
w_q has shape (5, 2, 1): give one head at a time, (d, d_h)
w_q is complex: give real numbers
temperature has shape (2,): give one number for one head
w_q, w_k and covariance have shapes [(2, 1), (2, 1), (2, 3)]: give (d, d_h) twice, and (d, d)
length is 4.5: give a whole number of tokens
trace is complex: give real numbers
xi is complex: give real numbers
"""


def test_wrong_types_and_shapes_are_named_where_annotations_are_not_checked():
    """In a process of its own: under pytest, jaxtyping refuses them first."""
    ran = subprocess.run([sys.executable, "-W", "error", "-c", WRONG_TYPES], capture_output=True, text=True)
    assert (ran.stdout, ran.returncode) == (SAID, 0), ran.stderr
