"""Oracles: the bases and weights that noise was added to, by the plain formulas."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.papers.hidden_geometry.planted import grouped
from theodolite.estimates import Estimates
from theodolite.judging import HOLDS, judge
from theodolite.theory.smoothness import low_frequency_ratio
from theodolite_papers.hidden_geometry import criteria
from theodolite_papers.hidden_geometry.resampling import (
    GroupedBasis,
    gram_shares,
    noise_bases,
    norms_beyond_noise,
    product_shares,
)
from theodolite_papers.hidden_geometry.smoothness import measures, measures_without_noise

CUTOFFS = (1, 10)
ALL = torch.ones(8, dtype=torch.float64)


def of_noise(size: float, width: int = 48, layers: int = 2) -> tuple[GroupedBasis, torch.Tensor]:
    """A smooth basis of every layer in eight noisy groups, and as it is without noise."""
    generator = torch.Generator().manual_seed(0)
    turn = torch.arange(64, dtype=torch.float64)[:, None] * torch.tensor([1.0, 2.0]) * torch.pi / 64
    curve = torch.cat([turn.cos(), turn.sin()], dim=1)
    smooth = torch.stack([curve @ torch.randn(4, width, generator=generator).double() for _ in range(layers)])
    noise = size * torch.randn(layers, 8, 64, width, generator=generator).double()
    return grouped(smooth, noise), grouped(smooth).of(ALL)


@pytest.mark.parametrize(("size", "tolerance"), [(0.0, 1e-9), (4.0, 0.03)])
def test_shares_are_those_of_the_bases_that_noise_was_added_to(size, tolerance):
    noisy, exact = of_noise(size)
    truth = low_frequency_ratio(exact @ exact.mT, CUTOFFS).numpy()
    seen = noisy.of(ALL)
    assert (truth[:, 1] - low_frequency_ratio(seen @ seen.mT, CUTOFFS).numpy()[:, 1] > 0.1).all() == (
        size > 0
    )
    np.testing.assert_allclose(gram_shares(noisy, CUTOFFS), truth, atol=tolerance)


def test_products_with_the_weights_of_a_model(opened):
    """Oracle: P W_q W_kᵀ Pᵀ of every head, formed as one matrix."""
    model = opened("gpt2")
    noisy, exact = of_noise(0.0, model.width, model.layers + 1)
    truth = []
    for layer in range(model.layers):
        weights = model.head_weights(layer)
        for w_q, w_k in zip(weights.w_q.double(), weights.w_k.double(), strict=True):
            matrix = exact[layer] @ w_q @ w_k.mT @ exact[layer].mT
            truth.append(low_frequency_ratio(matrix, CUTOFFS).tolist())
    np.testing.assert_allclose(product_shares(noisy, model, CUTOFFS), truth, atol=1e-7)


def test_the_measures_of_figure_7_without_noise():
    """Oracle: those of the bases themselves, for which the noise is large enough to hide the truth."""
    noisy, exact = of_noise(2.0, width=512)
    spike, directions, share = measures(exact).mean(axis=1)
    seen = measures(noisy.of(ALL)).mean(axis=1)
    found = measures_without_noise(noisy)
    assert seen[0] > 10 * spike
    assert abs(found["spike"] - spike) < 0.05 * (seen[0] - spike)
    assert abs(found["low_frequency_10"] - share) < 0.02
    assert directions <= found["directions"] < seen[1]


def test_noise_alone_is_as_large_as_in_the_basis_and_has_no_position():
    """Oracle: noise of variance 16 a group, hence 2 in the mean of eight, whatever the position."""
    noisy, _ = of_noise(4.0)
    assert torch.allclose(noise_bases(noisy).square().mean(), torch.tensor(2.0).double(), rtol=0.05)
    assert noise_bases(of_noise(0.0)[0]).abs().max() < 1e-9


@pytest.mark.parametrize(("size", "holds"), [(0.0, False), (0.5, True)])
def test_noise_of_few_contexts_is_no_significant_position(size, holds):
    """Oracle: noise has a relative norm of 1/√32 = 0.18 of itself, above the limit, though there is no position."""
    smooth = size * of_noise(0.0)[1]
    noise = 2 * torch.randn(2, 8, 64, 48, generator=torch.Generator().manual_seed(2)).double()
    basis = grouped(smooth, noise)
    seen = torch.linalg.matrix_norm(basis.of(ALL), ord=2).numpy()
    norms = Estimates(0.18 * seen / seen.min(), np.full(2, 0.015), 8, "groups of contexts")
    assert judge("", "", norms, criteria.SIGNIFICANT).answer == HOLDS
    left = norms_beyond_noise(norms, basis)
    assert (judge("", "", left, criteria.SIGNIFICANT).answer == HOLDS) == holds
