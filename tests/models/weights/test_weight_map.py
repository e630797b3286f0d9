"""Which parameters hold W_q, W_k and W_v. Oracles: modules whose rows are put where a test knows, and autograd."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from tests import checkpoints
from tests.models.modules import HEADS, VOCABULARY, WIDTH, Attention, gpt_of
from theodolite import open_module
from theodolite.errors import UsageError
from theodolite.models import OpenModel, open_model
from theodolite.models.weights import weight_map
from theodolite.models.weights.weight_map import Projections, find_projections
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
    ("attention", "factors"),
    [(ByHead, lambda module: (module.w_q, module.w_k.mT)), (_normed, _of_normed)],
)
def test_tensors_of_three_dimensions_and_computed_weights_are_penalised(attention, factors):
    """Oracle: the penalty's formula of the module's own tensors, and its gradient by autograd."""
    gpt = gpt_of(attention)
    locater = Locater(open_module(gpt, vocabulary=VOCABULARY), SCALE, MEAN)
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


def test_products_of_two_matrices_are_refused():
    model = open_module(gpt_of(lambda: ByHead(low_rank=True)), vocabulary=VOCABULARY)
    with pytest.raises(UsageError, match=r"queries and keys of .* are not its input times one weight matrix"):
        Locater(model, SCALE, MEAN)


def test_what_is_replaced_is_no_longer_held():
    gpt = gpt_of(_normed)
    locater = Locater(open_module(gpt, vocabulary=VOCABULARY), SCALE, MEAN)
    gpt.transformer["h"][1].attention.qkv = nn.Linear(WIDTH, 3 * WIDTH)
    with pytest.raises(UsageError, match=r"h\.1\.attention\.qkv\.weight is no longer the weight"):
        locater()


class Shuffled(Attention):
    """Features of queries, keys and values in any rows of a matrix of thousands, and twice as large."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 2500)
        self.order = torch.randperm(2500)[: 3 * WIDTH].view(3, HEADS, -1)

    def split(self, x: Tensor) -> list[Tensor]:
        return [2 * self.qkv(x)[..., rows].transpose(1, 2) for rows in self.order]


def test_rows_are_found_wherever_they_are():
    """Oracle: the order in which the module takes them; its matrix and bias."""
    gpt = gpt_of(Shuffled)
    model = open_module(gpt, vocabulary=VOCABULARY)
    (layer,) = _projections(model, [1])
    module, weights = gpt.transformer["h"][1].attention, model.head_weights(1)
    for part, found in enumerate((layer.query, layer.key, layer.value)):
        assert torch.equal(found.rows.rows, module.order[part])
        torch.testing.assert_close(found.rows.factor, torch.full((HEADS, HEAD_WIDTH), 2.0).double())
    expected = 2 * module.qkv.weight.detach().double()[module.order[1]].mT
    torch.testing.assert_close(weights.w_k, expected, rtol=1e-13, atol=0)
    torch.testing.assert_close(weights.b_v, 2 * module.qkv.bias.detach().double()[module.order[2]])


def _projections(model: OpenModel, layers: list[int]) -> list[Projections]:
    with torch.no_grad():
        return find_projections(model.root, model.structure, model.calls, layers)


class Swapping(Conv1D):
    """Queries and keys one for the other, in layers that say so: of the same kind as those that do not."""

    def forward(self, x: Tensor) -> Tensor:
        first, second, value = super().forward(x).split(32, dim=-1)
        return torch.cat([second, first, value] if self.swaps else [first, second, value], dim=-1)


def test_layers_alike_are_found_by_the_first_and_others_by_themselves(monkeypatch):
    """Oracle: the search in every layer by itself."""
    hf = checkpoints.build("gpt2")
    for block in hf.transformer.h:
        block.attn.c_attn.__class__, block.attn.c_attn.swaps = Swapping, False
    model, searched = open_model(hf), []
    layer_of = {block.attn: layer for layer, block in enumerate(hf.transformer.h)}

    def searching(attention, *rest):
        searched.append(layer_of[attention])
        return search(attention, *rest)

    def factors(layers):
        searched.clear()
        return [w.detach() for layer in _projections(model, layers) for w in layer.factors()]

    search = weight_map._search
    monkeypatch.setattr(weight_map, "_search", searching)
    for swapped, expected in (([], [0]), ([1], [0, 1, 2]), ([2], [0, 2])):
        for layer, block in enumerate(hf.transformer.h):
            block.attn.c_attn.swaps = layer in swapped
        alone = [w for layer in range(3) for w in factors([layer])]
        together = factors([0, 1, 2])
        assert searched == expected  # the last search of a kind is what the next layer of it is tried with
        assert all(torch.equal(a, b) for a, b in zip(together, alone, strict=True))
