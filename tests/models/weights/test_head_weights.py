"""Probed weights of every family against the parameters read by name, and against tapped q, k, v."""

from __future__ import annotations

import torch
import transformers
from torch import nn
from torch.nn import functional
from transformers import XGLMConfig, XGLMForCausalLM
from transformers.pytorch_utils import Conv1D

import theodolite.models.weights.projections
from tests import checkpoints
from theodolite.models import open_model, open_module
from theodolite.models.calls import capture_calls
from theodolite.models.source import Source
from theodolite.models.structure_search import find_structure
from theodolite.models.weights.projections import find_projections


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


def found(model: transformers.PreTrainedModel, layers: list[int]):
    inputs = {"input_ids": torch.tensor([[7]]), "use_cache": False}
    with torch.no_grad():
        structure = find_structure(Source.of_transformers(model))
        calls = capture_calls(model, structure, lambda: model.base_model(**inputs))
        return find_projections(model, structure, calls, layers)


class Swapping(Conv1D):
    """Queries and keys one for the other, in layers that say so: of the same kind as those that do not."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second, value = super().forward(x).split(32, dim=-1)
        return torch.cat([second, first, value] if self.swaps else [first, second, value], dim=-1)


def test_layers_alike_are_found_by_the_first_and_others_by_themselves(monkeypatch):
    """Oracle: the search in every layer by itself."""
    model = checkpoints.build("gpt2")
    for block in model.transformer.h:
        block.attn.c_attn.__class__, block.attn.c_attn.swaps = Swapping, False
    searched: list[int] = []

    def searching(structure, layer, *rest):
        searched.append(layer)
        return search(structure, layer, *rest)

    def factors(layers):
        searched.clear()
        return [w.detach() for layer in found(model, layers) for w in layer.factors()]

    search = theodolite.models.weights.projections._find
    monkeypatch.setattr(theodolite.models.weights.projections, "_find", searching)
    for swapped, expected in (([], [0]), ([1], [0, 1, 2]), ([2], [0, 2])):
        for layer, block in enumerate(model.transformer.h):
            block.attn.c_attn.swaps = layer in swapped
        alone = [w for layer in range(3) for w in factors([layer])]
        together = factors([0, 1, 2])
        assert searched == expected  # the last search of a kind is what the next layer of it is tried with
        assert all(torch.equal(a, b) for a, b in zip(together, alone, strict=True))
