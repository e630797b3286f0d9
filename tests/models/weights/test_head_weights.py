"""Head weights behind norms, and behind masks that overflow; `test_every_family.py` has those of families."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional
from transformers import XGLMConfig, XGLMForCausalLM

from theodolite.models import open_model, open_module


class _Grouped(nn.Module):
    """Normalises queries and keys, and repeats grouped keys itself, as LitGPT does."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(16, 16), nn.Linear(16, 8), nn.Linear(16, 8)
        self.q_norm, self.k_norm = nn.RMSNorm(4), nn.RMSNorm(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (linear(x).unflatten(-1, (-1, 4)).transpose(1, 2) for linear in (self.q, self.k, self.v))
        k, v = (tensor.repeat_interleave(2, dim=1) for tensor in (self.k_norm(k), v))
        y = functional.scaled_dot_product_attention(self.q_norm(q), k, v, is_causal=True)
        return x + y.transpose(1, 2).flatten(2)


def test_norms_before_repeated_keys_are_found():
    """Oracle: the parameters."""
    torch.manual_seed(0)
    blocks = nn.ModuleList(_Grouped() for _ in range(2))
    module = nn.Sequential(nn.Embedding(20, 16), *blocks)
    weights, linears = (
        open_module(module, vocabulary=20).head_weights(1),
        (blocks[1].q, blocks[1].k, blocks[1].v),
    )
    assert weights.projection == "projection before norm"
    for got, linear in zip((weights.w_q, weights.w_k, weights.w_v), linears, strict=True):
        heads = linear.weight.double().T.unflatten(1, (-1, 4)).transpose(0, 1)
        torch.testing.assert_close(got, heads.repeat_interleave(4 // len(heads), dim=0), rtol=0, atol=1e-12)


def test_a_mask_that_float64_overflows():
    """XGLM's, of the lowest number of its dtype in the default dtype. Oracle: the parameters."""
    sizes = {"d_model": 16, "num_layers": 2, "attention_heads": 2, "ffn_dim": 32, "vocab_size": 20}
    hf = XGLMForCausalLM(XGLMConfig(**sizes, max_position_embeddings=32)).eval()
    weights, attention = open_model(hf).head_weights(1), hf.model.layers[1].self_attn
    assert weights.projection == "projection"
    for got, linear in ((weights.w_q, attention.q_proj), (weights.w_k, attention.k_proj)):
        expected = linear.weight.double().T.unflatten(1, (2, 8)).transpose(0, 1)
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-7)
