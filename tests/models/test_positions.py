"""How modules of one's own encode positions. Oracle: how each is written."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.models import modules
from tests.models.modules import GPT, HEADS, WIDTH, gpt_of, opened


def _rotated(x: Tensor) -> Tensor:
    angles = torch.arange(x.shape[-2])[:, None] * 100.0 ** -torch.linspace(0, 1, x.shape[-1] // 2)
    even, odd = x[..., ::2], x[..., 1::2]
    return torch.stack(
        [even * angles.cos() - odd * angles.sin(), even * angles.sin() + odd * angles.cos()], -1
    ).flatten(-2)


class Attention(modules.Attention):
    """Each kind of positions, but those of the stream."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.out = kind, nn.LayerNorm(WIDTH)
        self.post_attention_norm = self.out  # "pos" is in its name
        self.table = nn.Parameter(torch.randn(HEADS, 64))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        length = q.shape[-2]
        hidden = torch.ones(length, length).triu(1).bool()
        distance = torch.arange(length)[:, None] - torch.arange(length)
        if self.kind == "rotary":
            q, k = _rotated(q), _rotated(k)
        if self.kind == "unknown":
            q = q * torch.arange(1, length + 1).view(-1, 1)
        if self.kind == "by hand":  # what is taken from a whole row changes nothing
            logits = (q @ k.mT).masked_fill(hidden, -torch.inf)
            return (logits - logits.amax(-1, keepdim=True)).softmax(-1) @ v
        bias = torch.zeros(HEADS, length, length)
        if self.kind == "alibi":
            bias = -(2.0 ** -torch.arange(1, HEADS + 1)).view(-1, 1, 1) * distance
        if self.kind == "relative bias":
            bias = self.table[:, distance.clamp(0)]
        bias = bias.masked_fill(hidden, -torch.inf)[None]
        return functional.scaled_dot_product_attention(q.to(v), k.to(v), v, bias.to(v))


def _gpt(kind: str) -> GPT:
    """Without positions in the stream, unless they are to be absolute."""
    gpt = gpt_of(lambda: Attention(kind))
    if kind != "absolute":
        nn.init.zeros_(gpt.places.weight)
    return gpt


@pytest.mark.parametrize("kind", ["rotary", "alibi", "relative bias", "absolute", "none", "unknown"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_positions_are_told_by_what_changes_with_them(kind, dtype):
    """What is taken from a whole row, by hand, is no position."""
    assert opened(_gpt(kind).to(dtype)).positions == kind
    if kind == "none":
        assert opened(_gpt("by hand")).positions == kind
