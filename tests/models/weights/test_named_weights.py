"""Weights that are named. Oracle: the penalty's formula of the module's own tensors, and its gradient by autograd."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.models.modules import HEADS, VOCABULARY, WIDTH, Attention, gpt_of
from theodolite import open_module
from theodolite.errors import UsageError
from theodolite.train.locater import Locater

HEAD_WIDTH = WIDTH // HEADS
SCALE, MEAN = 1e-3, 1e-2


class ByHead(nn.Module):
    """Weights of three dimensions; keys that all heads share, the other way around; or queries of two products."""

    def __init__(self, low_rank: bool = False) -> None:
        super().__init__()
        self.w_q, self.w_k = (
            nn.Parameter(torch.randn(HEADS, WIDTH, HEAD_WIDTH)),
            nn.Parameter(torch.randn(1, HEAD_WIDTH, WIDTH)),
        )
        self.w_v, self.low_rank = nn.Linear(WIDTH, WIDTH), low_rank

    def forward(self, x: Tensor) -> Tensor:
        q, k = torch.einsum("btd,hdw->bhtw", x, self.w_q), torch.einsum("btd,hwd->bhtw", x, self.w_k)
        v = self.w_v(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        q = q @ self.w_k[0, :, :HEAD_WIDTH] if self.low_rank else q
        y = functional.scaled_dot_product_attention(q, k.expand_as(q), v, is_causal=True)
        return y.transpose(1, 2).flatten(2)


def _normed() -> nn.Module:
    attention = Attention()
    nn.utils.parametrizations.weight_norm(attention.qkv)
    return attention


def _penalty(factors: list[tuple[Tensor, Tensor]]) -> Tensor:
    total = torch.zeros(())
    for w_q, w_k in factors:
        for query, key in zip(w_q, w_k.expand_as(w_q), strict=True):
            matrix = query @ key.T
            total = total + SCALE * matrix.square().sum() + MEAN * (matrix.trace() - 1) ** 2
    return total


def _of_normed(module: Attention) -> tuple[Tensor, Tensor]:
    w_q, w_k, _ = module.qkv.weight.split(WIDTH)
    return w_q.unflatten(0, (HEADS, -1)).mT, w_k.unflatten(0, (HEADS, -1)).mT


@pytest.mark.parametrize(
    ("attention", "names", "factors"),
    [
        (ByHead, ["w_q", "w_k"], lambda module: (module.w_q, module.w_k.mT)),
        (_normed, "qkv.weight", _of_normed),
    ],
)
def test_named_weights_are_penalised(attention, names, factors):
    gpt = gpt_of(attention)
    model = open_module(gpt, vocabulary=VOCABULARY)
    with pytest.raises(UsageError, match=r"or name what holds them, qkv=\[…\]"):
        Locater(model, SCALE, MEAN)
    locater = Locater(model, SCALE, MEAN, qkv=names)
    other = copy.deepcopy(gpt)
    for both in (gpt, other):
        with torch.no_grad():  # what is trained afterwards counts
            for parameter in both.parameters():
                parameter.mul_(1.1)
    locater().backward()
    expected = _penalty([factors(block.attention) for block in other.transformer["h"]])
    expected.backward()
    assert locater().item() == pytest.approx(expected.item(), rel=1e-5)
    for mine, theirs in zip(gpt.parameters(), other.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None)
        if mine.grad is not None:
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-6)
    assert {id(p) for p in locater.parameters} == {id(p) for p in gpt.parameters() if p.grad is not None}


def test_wrong_names_are_refused_by_name():
    for attention, names, line in (
        (ByHead, ["w_k", "w_k"], r"its queries are not its input times entries of w_k, which qkv= names"),
        (ByHead, ["w_q", "w_q"], r"its keys are not its input times entries of w_q"),
        (ByHead, ["w_q", "no.weight"], r"has no no\.weight, which qkv= names"),
        (ByHead, [], r"qkv is \[\]: give names inside the attention module"),
        (
            lambda: ByHead(low_rank=True),
            ["w_q", "w_k"],
            r"its queries are not its input times entries of w_q",
        ),
    ):
        model = open_module(gpt_of(attention), vocabulary=VOCABULARY)
        with pytest.raises(UsageError, match=line) as raised:
            Locater(model, SCALE, MEAN, qkv=names)
        assert "\n" not in str(raised.value)


def test_what_is_replaced_is_no_longer_held():
    gpt = gpt_of(_normed)
    locater = Locater(open_module(gpt, vocabulary=VOCABULARY), SCALE, MEAN, qkv="qkv.weight")
    gpt.transformer["h"][1].attention.qkv = nn.Linear(WIDTH, 3 * WIDTH)
    with pytest.raises(UsageError, match=r"h\.1\.attention\.qkv\.weight is no longer the weight"):
        locater()
