"""Norms that are called as functions. Oracle: the same model with norms that are modules, and its weights by name."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.models.modules import (
    GPT,
    HEADS,
    LAYERS,
    VOCABULARY,
    WIDTH,
    Attention,
    Block,
    gpt_of,
    named_weights,
    seeded,
    token_ids,
)
from theodolite import Corpus, constituents, open_module, survey
from theodolite.models.weights.norms import FrozenNorm

HEAD_WIDTH = WIDTH // HEADS


class RMS(nn.Module):
    """As a module, by hand."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


class NormalisedAttention(Attention):
    """Whose queries and keys are normalised and then rotated."""

    def __init__(self, by_module: bool = False) -> None:
        super().__init__()
        self.by_module = by_module
        self.query_norm, self.key_norm = RMS(), nn.RMSNorm(HEAD_WIDTH, 1e-6)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.by_module:
            q, k = self.query_norm(q), self.key_norm(k)
        else:
            q = functional.rms_norm(q, (HEAD_WIDTH,), eps=1e-6)
            k = functional.rms_norm(k, (HEAD_WIDTH,), self.key_norm.weight, 1e-6)
        return super().attend(rotated(q), rotated(k), v)


def rotated(x: Tensor) -> Tensor:
    """By an angle a position, in one plane of each pair."""
    first, second = x.chunk(2, -1)
    angle = torch.arange(x.shape[-2], dtype=x.dtype)[:, None] / torch.arange(1, HEAD_WIDTH // 2 + 1)
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], -1)


class NormalisedBlock(Block):
    """With norms of the stream in the same way."""

    def __init__(self, by_module: bool) -> None:
        super().__init__()
        self.attention = NormalisedAttention(by_module)
        self.norm = RMS() if by_module else nn.Identity()
        self.by_module = by_module

    def forward(self, x: Tensor) -> Tensor:
        entering = self.norm(x) if self.by_module else functional.rms_norm(x, (WIDTH,), eps=1e-6)
        x = x + self.attention(entering)
        return x + self.mlp(x)


def _gpt(by_module: bool) -> nn.Module:
    gpt = GPT()
    gpt.transformer["h"] = nn.ModuleList(NormalisedBlock(by_module) for _ in range(LAYERS))
    return seeded(gpt)


def test_norms_that_are_functions_are_norms():
    functions, modules = (open_module(_gpt(by_module), vocabulary=VOCABULARY) for by_module in (False, True))
    functions.root.load_state_dict(modules.root.state_dict())
    runs = [survey(model, Corpus.from_ids(token_ids())) for model in (functions, modules)]
    assert runs[0].provenance["constituents_refused"] == {}
    assert set(runs[0].heads["spectrum_of"]) == {"projection before norm"}
    for column in runs[1].heads.select_dtypes("number"):
        own, other = (torch.tensor(run.heads[column].to_numpy(float)) for run in runs)
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-5, equal_nan=True, msg=column)
    weights, attention = functions.head_weights(1), functions.root.transformer["h"][1].attention
    torch.testing.assert_close(weights.w_q, named_weights(attention)[0])
    parts = [constituents(model, token_ids(), 1) for model in (functions, modules)]
    torch.testing.assert_close(parts[0].logits, parts[1].logits, rtol=1e-4, atol=1e-4)
    assert not any("function_norm" in name for name, _ in functions.root.named_modules())


@pytest.mark.parametrize("function", ["normalize", "layer_norm"])
def test_other_functions(function):
    """Oracle: the weights by name; and W_q of a weight that is normalised by such a function is the normalised one."""

    class Other(NormalisedAttention):
        def split(self, x):
            qkv = functional.linear(x, functional.normalize(self.qkv.weight, dim=0), self.qkv.bias)
            return [t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in qkv.chunk(3, -1)]

        def attend(self, q, k, v):
            if function == "normalize":
                q, k = 3.0 * functional.normalize(q, dim=-1), functional.normalize(k, dim=-1)
            else:
                q, k = (functional.layer_norm(t, (HEAD_WIDTH,), self.key_norm.weight) for t in (q, k))
            return Attention.attend(self, q, k, v)

    gpt = gpt_of(Other)
    model = open_module(gpt, vocabulary=VOCABULARY)
    attention = gpt.transformer["h"][0].attention
    weights, own = model.head_weights(0), functional.normalize(attention.qkv.weight.detach().double(), dim=0)
    assert weights.projection == "projection before norm"
    torch.testing.assert_close(weights.w_k, own.chunk(3)[1].unflatten(0, (HEADS, -1)).mT)
    parts = constituents(model, token_ids(), 0)
    torch.testing.assert_close(parts.logits.sum((2, 3)), parts.total, rtol=1e-4, atol=1e-4)


def test_a_vector_of_zeros_has_no_direction():
    given, norm = torch.zeros(1, 2, 9, dtype=torch.float64), nn.LayerNorm(9).double().requires_grad_(False)
    nn.init.normal_(norm.bias)
    torch.testing.assert_close(FrozenNorm(norm, given)(given), norm(given))
