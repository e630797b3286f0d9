"""The two-way decomposition: its algebra as properties, its values against numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from theodolite.errors import UsageError
from theodolite.theory import decompose


@st.composite
def hidden_states(draw: st.DrawFn) -> Tensor:
    shape = [draw(st.integers(1, 6)) for _ in range(3)]
    scale = 10.0 ** draw(st.integers(-3, 4))
    seed = draw(st.integers(0, 2**31))
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


PROPERTY = settings(max_examples=20, deadline=None, derandomize=True)


@PROPERTY
@given(hidden_states())
def test_parts_sum_to_the_whole(h: Tensor) -> None:
    parts = decompose(h)
    tolerance = {"rtol": 0, "atol": 1e-12 * h.abs().max().item()}
    whole = parts.mean + parts.pos + parts.ctx[:, None] + parts.resid
    torch.testing.assert_close(whole, h, **tolerance)
    torch.testing.assert_close(parts.mean + parts.pos + parts.cvec, h, **tolerance)


def test_values_are_numpys_and_survive_float32_input() -> None:
    """1e4 beside 1e-2, as residual streams hold: sums in float32 would lose the small part."""
    generator = np.random.default_rng(0)
    h = (1e4 + 1e-2 * generator.normal(size=(7, 5, 3))).astype(np.float32)
    exact = h.astype(np.float64)
    parts = decompose(torch.from_numpy(h))
    np.testing.assert_allclose(parts.mean, exact.mean((0, 1)), rtol=1e-14)
    np.testing.assert_allclose(parts.pos, exact.mean(0) - exact.mean((0, 1)), atol=1e-10)
    np.testing.assert_allclose(parts.ctx, exact.mean(1) - exact.mean((0, 1)), atol=1e-10)


@pytest.mark.parametrize("shape", [(3, 4), (2, 0, 4), (1, 2, 3, 4)])
def test_wrong_shape_is_named(shape: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match=str(shape).replace("(", r"\(").replace(")", r"\)")):
        decompose(torch.zeros(shape))
