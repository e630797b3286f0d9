"""Measures of averaging models; oracles: numbers by hand, and the moments of uniform directions."""

from __future__ import annotations

import pytest
import torch

from theodolite_papers.catch_tag_release.averaging_models import error_of_ratio, random_directions


def test_the_error_of_a_ratio_is_that_of_resampled_sequences():
    """Oracle: the spread of the ratio over 400 draws of as many sequences; each estimate of it is good to 10 %."""
    generator = torch.Generator().manual_seed(0)
    wholes = torch.rand(400, 300, generator=generator) + 0.5
    parts = 0.3 * wholes + 0.2 * torch.randn(400, 300, generator=generator) * wholes
    ratios = parts.sum(-1) / wholes.sum(-1)
    assert float(error_of_ratio(parts, wholes).mean()) == pytest.approx(float(ratios.std()), rel=0.1)
    assert error_of_ratio(0.3 * wholes, wholes).max() < 1e-7


def test_random_directions_are_uniform_in_what_is_written() -> None:
    """Oracle: E v vᵀ is the projection on the span of what was written over its dimension, 4 standard errors."""
    generator = torch.Generator().manual_seed(3)
    basis = torch.linalg.qr(torch.randn(16, 3, generator=generator)).Q
    sizes = torch.tensor([100.0, 1.0, 0.1])  # the size of what is written does not matter, only where
    written = (torch.randn(1, 50, 20, 3, generator=generator) * sizes) @ basis.T
    directions = random_directions(written, 4000, 0)[:, 0]
    torch.testing.assert_close(directions.norm(dim=-1), torch.ones(4000), atol=1e-5, rtol=0)
    mean = directions.T @ directions / 4000
    assert float((mean - basis @ basis.T / 3).norm()) < 4 * 4000**-0.5
    assert torch.equal(directions, random_directions(written, 4000, 0)[:, 0])
