"""The entropy bound against its own extremum, against random logits, and at the ends of the number line."""

from __future__ import annotations

import math

import pytest
import scipy.stats
import torch

from theodolite.theory import entropy_lower_bound


def plain_bound(nu: float, length: int) -> float:
    """Zhai et al. 2023, theorem 3.1, as written there."""
    beta = math.exp(-nu * math.sqrt(length / (length - 1)))
    rest = 1 + (length - 1) * beta
    return math.log(rest) + nu * math.sqrt(length * (length - 1)) * beta / rest


@pytest.mark.parametrize("length", [2, 3, 64, 1000])
def test_bound_is_the_printed_theorem(length: int) -> None:
    for nu in (0.0, 0.3, 4.0, 30.0):
        assert entropy_lower_bound(nu, length).item() == pytest.approx(plain_bound(nu, length), rel=1e-12)


@pytest.mark.parametrize("nu", [0.5, 4.0, 12.0])
def test_bound_is_attained_by_one_logit_against_the_rest(nu: float) -> None:
    """Logits of norm ν and mean zero, one high and T−1 equal; entropy by scipy."""
    length = 50
    logits = torch.full((length,), -1.0, dtype=torch.float64)
    logits[0] = length - 1
    logits *= nu / logits.norm()
    attained = scipy.stats.entropy(logits.softmax(0).numpy())
    assert entropy_lower_bound(nu, length).item() == pytest.approx(attained, rel=1e-12)


def test_extremes_neither_overflow_nor_cancel() -> None:
    nu = torch.tensor([0.0, 1e-300, 1e-12, 1e3, 1e308, math.inf], dtype=torch.float64)
    bound = entropy_lower_bound(nu, 131072)
    torch.testing.assert_close(bound[:3], torch.full((3,), math.log(131072), dtype=torch.float64))
    assert bound.isfinite().all()
    assert bound[3] == pytest.approx(0, abs=1e-300)
    assert (bound[4:] == 0).all()
    assert entropy_lower_bound(nu, 64, variant="published").isfinite().all()
    assert entropy_lower_bound(math.nan, 64).isnan()


def test_lengths_broadcast_and_one_key_has_no_entropy() -> None:
    bound = entropy_lower_bound(torch.tensor([[0.0], [2.0]]), torch.tensor([1, 2, 8]))
    assert bound.shape == (2, 3)
    assert (bound[:, 0] == 0).all()
    assert bound[1, 2].item() == pytest.approx(plain_bound(2.0, 8))
    nu = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(entropy_lower_bound(nu, torch.tensor([1, 8])).sum(), nu)
    assert gradient.isfinite()


def test_asymptotic_form_is_written_for_many_keys() -> None:
    """Oracle: the formula itself."""
    for nu in (0.0, 0.5, 4.0, 9.0):
        plain = math.log(1 + 64 * math.exp(-nu)) + nu * math.exp(-nu) / (1 / 64 + math.exp(-nu))
        assert entropy_lower_bound(nu, 64, variant="asymptotic").item() == pytest.approx(plain, rel=1e-12)
    assert entropy_lower_bound(torch.tensor([1e3, math.inf]), 64, variant="asymptotic").max().item() < 1e-300


def test_bound_is_differentiable() -> None:
    """Oracle: finite differences."""
    nu = torch.tensor([0.1, 3.0, 9.0], dtype=torch.float64, requires_grad=True)
    for variant in ("corrected", "asymptotic"):
        assert torch.autograd.gradcheck(lambda v, form=variant: entropy_lower_bound(v, 12, form), (nu,))
