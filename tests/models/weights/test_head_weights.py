"""W_q, W_k, W_v and W_O where they are hard to read, against parameters; families are in `test_every_family.py`."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional
from transformers import XGLMConfig, XGLMForCausalLM

from tests import checkpoints
from tests.models.test_every_family import output_module
from theodolite.errors import WorkError
from theodolite.models import open_model, open_module

HEADS = 4


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


def test_attention_that_takes_no_single_token():
    """DINOv3 rotates its patches, and splits them off the tokens before them."""
    config = transformers.DINOv3ViTConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        intermediate_size=48,
        image_size=16,
        patch_size=8,
        num_register_tokens=2,
    )
    torch.manual_seed(0)
    hf = transformers.DINOv3ViTModel(config).eval()
    for parameter in hf.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model = open_model(hf)
    for layer in range(2):
        weight = model.structure.attention_at(layer).o_proj.weight.detach().double()
        torch.testing.assert_close(model.output_weights(layer), weight.T.reshape(HEADS, -1, 32))


def test_weights_are_kept_until_the_parameters_change(tmp_path):
    """Oracle: the parameters by name, before and after an optimizer's kind of step."""
    model = open_model(checkpoints.write("bert", tmp_path))
    first = model.output_weights(1)
    assert model.output_weights(1) is first
    with torch.no_grad():
        output_module("bert", model.hf, 1).weight.mul_(2)
    assert torch.equal(model.output_weights(1), 2 * first)
    hf = model.hf
    hf.load_state_dict({name: 3 * value for name, value in hf.state_dict().items()}, assign=True)
    torch.testing.assert_close(model.output_weights(1), 6 * first, rtol=1e-6, atol=0)


class _Gated(torch.nn.Sequential):
    def forward(self, heads: torch.Tensor) -> torch.Tensor:
        return super().forward(heads * torch.sigmoid(heads))


def _gate_of_the_hidden_states(attention: torch.nn.Module) -> None:
    """Affine in the heads for each hidden state, but with another matrix for each."""
    attention.register_forward_hook(
        lambda module, args, kwargs, output: (output[0] * (1 + kwargs["hidden_states"].tanh()), output[1]),
        with_kwargs=True,
    )


@pytest.mark.parametrize(
    "gated",
    [lambda attention: setattr(attention, "o_proj", _Gated(attention.o_proj)), _gate_of_the_hidden_states],
)
def test_a_gate_is_refused_by_name(gated):
    model = open_model(checkpoints.build("llama2"))
    gated(model.hf.model.layers[1].self_attn)
    model.output_weights(0)
    said = r"layer 1: what leaves model\.layers\.1\.self_attn is no fixed affine .*a gate or a norm"
    with pytest.raises(WorkError, match=said):
        model.output_weights(1)


def test_a_model_whose_heads_are_the_output_has_the_identity(tmp_path):
    """A pre-norm block whose attention returns its heads as they are: W_O is the identity, and nothing takes it on."""
    model = open_model(checkpoints.write("llama2", tmp_path))
    model.hf.model.layers[0].self_attn.o_proj = torch.nn.Identity()
    assert torch.equal(model.output_weights(0).flatten(0, 1), torch.eye(32, dtype=torch.float64))
