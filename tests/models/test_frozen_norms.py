"""Frozen norms against the norms' own formulas, and what cannot be frozen."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from theodolite.models.frozen_norms import FrozenNorm, relative_error

WIDTH = 9  # odd: no vector of signs has mean zero


def _random(norm: nn.Module) -> nn.Module:
    with torch.no_grad():
        for number, parameter in enumerate(norm.parameters()):
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
            parameter.copy_(1 + 0.5 * noise)
    return norm.double().requires_grad_(False)


def _given(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    return 3 * torch.randn(*shape, WIDTH, generator=generator, dtype=torch.float64) + 1


NORMS = {
    "layer norm": (nn.LayerNorm(WIDTH, eps=1e-2), (2, 4)),
    "layer norm without bias": (nn.LayerNorm(WIDTH, bias=False), (2, 4)),
    "rms": (LlamaRMSNorm(WIDTH, eps=1e-2), (2, 4)),
    "rms of torch": (nn.RMSNorm(WIDTH), (2, 4)),
    "rms with 1 + weight": (Gemma3RMSNorm(WIDTH), (2, 3, 4)),
    "one gain a head": (CohereLayerNorm((3, WIDTH), eps=1e-2), (2, 4, 3)),
}


@pytest.mark.parametrize("name", NORMS)
def test_a_frozen_norm_is_the_norm_and_is_affine(name):
    """Oracle: the norm itself at the vectors given; the definition of affine elsewhere."""
    norm, shape = NORMS[name]
    norm, given = _random(norm), _given(*shape)
    frozen = FrozenNorm(norm, given)
    assert relative_error(frozen(given), norm(given)) < 1e-7  # some compute in float32
    one, other = 0.3 * given, 0.7 * given.flip(-1)
    torch.testing.assert_close(
        frozen(one) + frozen(other) - frozen.bias, frozen(one + other), rtol=1e-9, atol=1e-9
    )


def test_rms_norm_is_not_centred():
    """Oracle: γ x / √(mean x² + ε), written out."""
    norm, given = _random(LlamaRMSNorm(WIDTH, eps=0.5)), _given(2, 4)
    frozen = FrozenNorm(norm, given)
    part = _given(2, 4).flip(0)
    expected = norm.weight * part * (given.square().mean(-1, keepdim=True) + 0.5).rsqrt()
    torch.testing.assert_close(frozen(part), expected, rtol=1e-6, atol=1e-6)
    assert not frozen.centred


def test_a_vector_of_zeros_has_no_direction():
    given = torch.zeros(1, 2, WIDTH, dtype=torch.float64)
    norm = _random(nn.LayerNorm(WIDTH))
    torch.testing.assert_close(FrozenNorm(norm, given)(given), norm(given))
