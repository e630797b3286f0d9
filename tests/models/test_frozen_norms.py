"""Norms are frozen as constituents need them (tests of which compare them with the norms' own formulas)."""

from __future__ import annotations

import torch
from torch import nn

from theodolite.models.frozen_norms import FrozenNorm


def test_a_vector_of_zeros_has_no_direction():
    given, norm = torch.zeros(1, 2, 9, dtype=torch.float64), nn.LayerNorm(9).double().requires_grad_(False)
    nn.init.normal_(norm.bias)
    torch.testing.assert_close(FrozenNorm(norm, given)(given), norm(given))
