"""Probed weights of every family against the parameters read by name, and against tapped q, k, v."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import XGLMConfig, XGLMForCausalLM

from tests import checkpoints
from theodolite.attention.inputs import attend
from theodolite.models import open_model, open_module
from theodolite.models.hooks import Hooks, hooked
from theodolite.models.taps import tapped

HEADS = 4


def _heads(weight: torch.Tensor) -> torch.Tensor:
    """(out, in) of a Linear → (heads, in, head_width), each key head repeated for its query heads."""
    width = 12 if weight.shape[0] in (24, 48) else 8
    heads = weight.reshape(-1, width, weight.shape[1]).transpose(1, 2)
    return heads.repeat_interleave(HEADS // heads.shape[0], dim=0)


def _named(family: str, state: dict[str, torch.Tensor], layer: int) -> list[torch.Tensor]:
    """W_q, W_k, W_v of one layer, read by parameter name: the oracle."""
    if family == "gpt2":
        return [_heads(w.T) for w in state[f"transformer.h.{layer}.attn.c_attn.weight"].chunk(3, dim=1)]
    if family == "bert":
        prefix = f"bert.encoder.layer.{layer}.attention.self."
        return [_heads(state[prefix + name + ".weight"]) for name in ("query", "key", "value")]
    if family == "bloom":
        fused = state[f"transformer.h.{layer}.self_attention.query_key_value.weight"].view(HEADS, 3, 8, 32)
        return [fused[:, part].transpose(1, 2) for part in range(3)]
    if family == "gpt_neox":
        fused = state[f"gpt_neox.layers.{layer}.attention.query_key_value.weight"].view(HEADS, 3, 8, 32)
        return [fused[:, part].transpose(1, 2) for part in range(3)]
    if family == "phi3":
        return [
            _heads(w) for w in state[f"model.layers.{layer}.self_attn.qkv_proj.weight"].split([32, 16, 16])
        ]
    prefix = {
        "opt": f"model.decoder.layers.{layer}.self_attn.",
        "vit": f"vit.layers.{layer}.attention.",
    }.get(family, f"model.layers.{layer}.self_attn.")
    return [_heads(state[f"{prefix}{name}_proj.weight"]) for name in "qkv"]


@pytest.mark.parametrize("family", checkpoints.FAMILIES)
def test_probed_weights_are_the_parameters(family, opened):
    model = opened(family)
    state = {name: value.double() for name, value in model.hf.state_dict().items()}
    for layer in range(model.layers):
        weights = model.head_weights(layer)
        w_q, w_k, w_v = _named(family, state, layer)
        if family == "gpt_oss":
            # YaRN multiplies cosines and sines, and so queries and keys, by 0.1 ln(factor) + 1.
            w_q, w_k = (w * (0.1 * math.log(32.0) + 1) for w in (w_q, w_k))
        atol = 1e-7 if family in ("gpt_oss", "cohere") else 1e-12  # these two rotate in float32
        for got, expected in zip((weights.w_q, weights.w_k, weights.w_v), (w_q, w_k, w_v), strict=True):
            torch.testing.assert_close(got, expected, rtol=0, atol=atol)
        normed = family == "qwen3"
        assert weights.projection == ("projection before norm" if normed else "projection")


@pytest.mark.parametrize("family", [f for f in checkpoints.FAMILIES if f != "qwen3"])
def test_probed_weights_reproduce_tapped_queries_keys_and_values(family, opened):
    """x W + b of what entered the attention module, against the tap, for tokens at position 0 (no rotation)."""
    model = opened(family)
    entered: dict[int, torch.Tensor] = {}
    tapped_inputs = {}

    class Seen(Hooks):
        def attention_input(self, layer, hidden):
            entered[layer] = hidden.double()

        def attention(self, layer, inputs):
            tapped_inputs[layer] = inputs
            return attend(inputs)

    generator = torch.Generator().manual_seed(2)
    if family == "vit":
        sample = {"pixel_values": torch.randn(3, 3, 16, 16, generator=generator)}
    else:
        sample = {"input_ids": torch.randint(checkpoints.VOCABULARY, (9, 1), generator=generator)}
    with torch.no_grad(), hooked(model, Seen()):
        model.hf.base_model(**sample)
    for layer, inputs in tapped_inputs.items():
        weights = model.head_weights(layer)
        assert inputs.scaling == weights.scaling
        for got, w, b in (
            (inputs.query, weights.w_q, weights.b_q),
            (inputs.key, weights.w_k, weights.b_k),
            (inputs.value, weights.w_v, weights.b_v),
        ):
            expected = torch.einsum("btd,hdw->bhtw", entered[layer], w) + b[None, :, None]
            repeated = got.repeat_interleave(HEADS // got.shape[1], dim=1).double()
            torch.testing.assert_close(repeated, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


def test_probing_leaves_the_model_as_it_was(opened):
    for family in ("gpt2", "qwen3", "bloom"):
        model = opened(family)
        before = {name: value.clone() for name, value in model.hf.state_dict().items()}
        modules = [id(module) for module in model.hf.modules()]
        model.head_weights(1)
        assert all(torch.equal(value, before[name]) for name, value in model.hf.state_dict().items())
        assert [id(module) for module in model.hf.modules()] == modules


def test_half_precision_weights_are_read_exactly(tmp_path):
    """A bfloat16 module is probed in float64, so that subtracting the bias costs no digit."""
    model = open_model(checkpoints.write("gpt2", tmp_path, dtype=torch.bfloat16))
    assert model.hf.dtype == torch.bfloat16
    state = {name: value.double() for name, value in model.hf.state_dict().items()}
    weights = model.head_weights(2)
    for got, expected in zip((weights.w_q, weights.w_k, weights.w_v), _named("gpt2", state, 2), strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-14)


def test_scaling_is_that_of_the_family(opened):
    expected = {"gpt2": 8**-0.5, "opt": 8**-0.5, "gemma2": 20**-0.5, "qwen3": 12**-0.5, "bloom": 8**-0.5}
    for family, scaling in expected.items():
        assert opened(family).head_weights(0).scaling == pytest.approx(scaling, rel=1e-12)


def test_tapped_scaling_of_opt_is_not_folded_into_the_query(opened):
    """OPT scales its queries before the interface; the tap undoes it, so that λ is λ in every family."""
    model = opened("opt")
    scalings = []

    def tap(module, inputs):
        scalings.append(inputs.scaling)
        return attend(inputs)

    with torch.no_grad(), tapped(model.hf, tap):
        model.hf.base_model(input_ids=torch.zeros(1, 4, dtype=torch.int64))
    assert scalings == [8**-0.5] * 3


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
