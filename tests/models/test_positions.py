"""How modules of one's own encode positions. Oracle: how each is written."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.models.test_open_module import GPT, HEADS, VOCABULARY, WIDTH, _seeded
from theodolite import open_module


def _rotated(x: Tensor) -> Tensor:
    angles = torch.arange(x.shape[-2])[:, None] * 100.0 ** -torch.linspace(0, 1, x.shape[-1] // 2)
    even, odd = x[..., ::2], x[..., 1::2]
    return torch.stack(
        [even * angles.cos() - odd * angles.sin(), even * angles.sin() + odd * angles.cos()], -1
    ).flatten(-2)


def _slopes(length: int) -> Tensor:
    return -(2.0 ** -torch.arange(1, HEADS + 1)).view(-1, 1, 1) * (
        torch.arange(length)[:, None] - torch.arange(length)
    )


class Attention(nn.Module):
    """Each kind of positions, but those of the stream."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.qkv, self.kind = nn.Linear(WIDTH, 3 * WIDTH), kind
        self.post_attention_norm = nn.LayerNorm(WIDTH)  # "pos" is in its name
        self.table = nn.Parameter(torch.randn(HEADS, 64))

    def forward(self, x: Tensor) -> Tensor:
        """Attend."""
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        length = x.shape[1]
        hidden = torch.ones(length, length).triu(1).bool()
        if self.kind == "rotary":
            q, k = _rotated(q), _rotated(k)
        if self.kind == "unknown":
            q = q * torch.arange(1, length + 1).view(-1, 1)
        if self.kind == "by hand":  # what is taken from a whole row changes nothing
            logits = (q @ k.mT).masked_fill(hidden, -torch.inf)
            y = (logits - logits.amax(-1, keepdim=True)).softmax(-1) @ v
            return self.post_attention_norm(y.transpose(1, 2).flatten(2))
        bias = torch.zeros(HEADS, length, length)
        if self.kind == "alibi":
            bias = _slopes(length)
        if self.kind == "relative bias":
            bias = self.table[:, (torch.arange(length)[:, None] - torch.arange(length)).clamp(0)]
        bias = bias.masked_fill(hidden, -torch.inf)[None]
        y = functional.scaled_dot_product_attention(q.to(v), k.to(v), v, bias.to(v))
        return self.post_attention_norm(y.transpose(1, 2).flatten(2))


class Model(GPT):
    """Without positions in the stream, unless they are to be absolute."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        for block in self.transformer["h"]:
            block.attention = Attention(kind)
        if kind != "absolute":
            nn.init.zeros_(self.places.weight)


@pytest.mark.parametrize("kind", ["rotary", "alibi", "relative bias", "absolute", "none", "unknown"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_positions_are_told_by_what_changes_with_them(kind, dtype):
    model = _seeded(Model(kind))
    if kind != "absolute":
        nn.init.zeros_(model.places.weight)
    assert open_module(model.to(dtype), vocabulary=VOCABULARY).positions == kind


def test_what_a_row_has_in_common_is_no_position():
    model = _seeded(Model("by hand"))
    nn.init.zeros_(model.places.weight)
    assert open_module(model, vocabulary=VOCABULARY).positions == "none"
