"""Oracle: curves whose shape is known: a constant, the indicator of an interval, and keys beyond a window."""

from __future__ import annotations

import math

import pytest
import torch

from theodolite.theory import curve_centre, curve_spread, curve_width

THETA = torch.linspace(0, 1, 401, dtype=torch.float64)


def test_shapes_of_curves_that_are_known():
    """Oracle: a constant, and the indicator of an interval."""
    flat = torch.full((401,), 0.3, dtype=torch.float64)
    step = ((THETA > 0.5) & (THETA <= 0.75)).double()
    assert float(curve_width(flat)) == pytest.approx(1)
    assert float(curve_spread(flat)) == pytest.approx(0, abs=1e-12)
    assert float(curve_centre(flat, THETA)) == pytest.approx(0.5)
    assert float(curve_width(step)) == pytest.approx(0.25, abs=0.005)
    assert float(curve_spread(step)) == 1
    assert float(curve_centre(step, THETA)) == pytest.approx(0.625, abs=0.005)
    unseen = torch.tensor([[1.0, 1.0, 0.0, 0.0, math.nan], [0.2, 0.2, 0.2, 0.2, math.nan]])
    torch.testing.assert_close(curve_width(unseen), torch.tensor([0.5, 1.0]))
    assert curve_width(torch.tensor([[math.nan] * 3, [0.0] * 3])).isnan().all()
