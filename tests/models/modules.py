"""Toy modules of one's own that attend, and their arithmetic in plain code: the oracle of the tests that open them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from theodolite import Corpus, OpenModel, open_module, survey
from theodolite.passes.run import Run

VOCABULARY, WIDTH, HEADS, LAYERS, LONGEST = 50, 24, 3, 2, 32
CONTEXTS, LENGTH = 6, 20


class Attention(nn.Module):
    """Of a GPT, by PyTorch's function or by hand."""

    def __init__(self, by_hand: bool = False, causal: bool = True) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.by_hand, self.causal = by_hand, causal

    def split(self, x: Tensor) -> list[Tensor]:
        """Queries, keys and values."""
        return [t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1)]

    def weights(self, x: Tensor) -> Tensor:
        """The attention, by the definition."""
        q, k, _ = self.split(x)
        logits = q @ k.mT / (WIDTH // HEADS) ** 0.5
        if self.causal:
            logits = logits.masked_fill(torch.ones_like(logits).triu(1).bool(), -torch.inf)
        return logits.softmax(-1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        y = self.weights(x) @ v if self.by_hand else self.attend(q, k, v)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Norm, attention, norm, linear map."""

    def __init__(self, by_hand: bool = False, causal: bool = True) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), Attention(by_hand, causal)
        self.mlp = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.mlp(x)


class GPT(nn.Module):
    """Logits of all positions, and a loss that is None, as many return."""

    def __init__(self, by_hand: bool = False, block: Callable[[], nn.Module] | None = None) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LONGEST, WIDTH)
        blocks = nn.ModuleList(block() if block else Block(by_hand) for _ in range(LAYERS))
        self.transformer = nn.ModuleDict({"h": blocks})
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def embedded(self, ids: Tensor) -> Tensor:
        """What enters the first block."""
        return self.tokens(ids) + self.places(torch.arange(ids.shape[1]))

    @property
    def blocks(self) -> nn.ModuleList:
        return self.transformer["h"]

    def forward(self, ids: Tensor) -> tuple[Tensor, None]:
        x = self.embedded(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)), None


class ViT(nn.Module):
    """Patches behind a class token; returns logits of classes."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.first = nn.Conv2d(3, WIDTH, 4, 4), nn.Parameter(torch.randn(1, 1, WIDTH))
        self.places = nn.Parameter(torch.randn(1, 13, WIDTH))
        self.blocks = nn.Sequential(*(Block(causal=False) for _ in range(LAYERS)))
        self.head = nn.Linear(WIDTH, 7)

    def embedded(self, pixels: Tensor) -> Tensor:
        """What enters the first block."""
        patches = self.patches(pixels).flatten(2).mT
        return torch.cat([self.first.expand(len(pixels), -1, -1), patches], 1) + self.places

    def forward(self, pixels: Tensor) -> Tensor:
        return self.head(self.blocks(self.embedded(pixels))[:, 0])


def seeded(model: nn.Module) -> nn.Module:
    """Weights large enough that attention is not uniform."""
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.is_floating_point():
            nn.init.normal_(parameter, std=0.4 if parameter.ndim >= 2 else 0.1, generator=generator)
    return model


def gpt_of(attention: Callable[[], nn.Module]) -> GPT:
    """A GPT with another attention in each block."""
    gpt = GPT()
    for block in gpt.blocks:
        block.attention = attention()
    return seeded(gpt)


def opened(module: nn.Module, **options: object) -> OpenModel:
    return open_module(module, **{"vocabulary": VOCABULARY} | options)


def surveyed(module: nn.Module | OpenModel, **options: object) -> Run:
    """Of a module that `open_module` opens so, or one that is opened."""
    model = module if isinstance(module, OpenModel) else opened(module, **options)
    return survey(model, Corpus.from_ids(token_ids()))


def token_ids() -> Tensor:
    return torch.randint(VOCABULARY, (CONTEXTS, LENGTH), generator=torch.Generator().manual_seed(1))


def named_weights(attention: Attention) -> list[Tensor]:
    """W_q, W_k, W_v of (heads, width, head width), from the parameter, in float64."""
    parts = attention.qkv.weight.detach().double().chunk(3)
    return [part.unflatten(0, (HEADS, -1)).mT for part in parts]


def traces(attention: Attention) -> list[float]:
    """tr W_q W_kᵀ of each head."""
    w_q, w_k, _ = named_weights(attention)
    return (w_q * w_k).sum((1, 2)).tolist()


def entropy(weights: Tensor) -> Tensor:
    """Of each head, over contexts and queries."""
    return -torch.special.xlogy(weights.double(), weights.double()).sum(-1).mean((0, 2))


@torch.no_grad()
def check_heads(run, blocks, stream: Tensor) -> None:
    """Entropies and norms of the streams of a survey, by the definition."""
    entropies, norms = [], [stream.norm(dim=-1)[:, 1:].mean()]
    for block in blocks:
        entropies.append(entropy(block.attention.weights(block.norm(stream))))
        stream = block(stream)
        norms.append(stream.norm(dim=-1)[:, 1:].mean())
    np.testing.assert_allclose(run.heads["entropy"], torch.cat(entropies), rtol=1e-5)
    np.testing.assert_allclose(run.layers["norm"], torch.stack(norms), rtol=1e-5)
