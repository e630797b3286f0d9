"""Modules whose contexts are one row of tokens, with a mask of texts. Oracle: contexts apart, by the definition."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from tests.models.modules import (
    GPT,
    HEADS,
    LAYERS,
    LONGEST,
    WIDTH,
    Attention,
    Block,
    check_heads,
    entropy,
    named_weights,
    opened,
    seeded,
    token_ids,
)
from theodolite import Corpus, constituents, survey, trace_sinks
from theodolite.errors import UsageError
from theodolite.models import one_row
from theodolite.sinks.interventions import attention_knockout
from theodolite.train.locater import Locater
from theodolite.train.monitor import GeometryMonitor
from theodolite.train.qk_clip import QKClip


def block_mask(positions: Tensor, texts_apart: bool = True) -> BlockMask:
    """Causal, within texts: one begins where positions do."""
    texts = (positions == 0).cumsum(0)

    def seen(batch, head, query, key):
        own = texts[query] == texts[key] if texts_apart else True
        return (query >= key) & own

    return create_block_mask(seen, None, None, len(positions), len(positions), device="cpu")


class InRow(Attention):
    """The same attention on (tokens, width), or (1, tokens, width), in one of several ways."""

    def __init__(self, way: str) -> None:
        super().__init__(by_hand=True)
        self.way = way

    def forward(self, x: Tensor, positions: Tensor, masks: dict[str, BlockMask]) -> Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(-2, -3) for t in self.qkv(x).chunk(3, -1))
        texts = (positions == 0).cumsum(0)
        seen = (texts[:, None] == texts) & (positions[:, None] >= positions)
        if self.way == "by hand":
            logits = q @ k.mT / (WIDTH // HEADS) ** 0.5
            y = logits.masked_fill(~seen, -torch.inf).softmax(-1) @ v
        elif self.way == "sdpa":
            y = functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        else:
            of_one = (t.reshape(1, *t.shape[-3:]) for t in (q, k, v))
            y = flex_attention(*of_one, block_mask=masks["texts"]).view_as(v)
        return self.out(y.transpose(-2, -3).flatten(-2))


class RowBlock(Block):
    """Whose attention is told of positions and masks."""

    def __init__(self, way: str) -> None:
        super().__init__(by_hand=True)
        self.attention = InRow(way)

    def forward(self, x: Tensor, positions: Tensor, masks: dict[str, BlockMask]) -> Tensor:  # type: ignore[override]
        x = x + self.attention(self.norm(x), positions, masks)
        return x + self.mlp(x)


class Rows(GPT):
    """A GPT of a row of tokens, (tokens), or of (1, tokens)."""

    def __init__(self, way: str) -> None:
        super().__init__(block=lambda: RowBlock(way))

    def forward(self, ids: Tensor, positions: Tensor, mask: BlockMask) -> Tensor:  # type: ignore[override]
        x = self.tokens(ids) + self.places(positions)
        for block in self.blocks:
            x = block(x, positions, {"texts": mask})
        return self.head(self.norm(x))


def in_a_row(model: nn.Module, ids: Tensor) -> Tensor:
    """All contexts one after another."""
    positions = torch.arange(ids.shape[1]).repeat(len(ids))
    return model(ids.flatten(), positions, block_mask(positions))


def in_a_batch_of_one(model: nn.Module, ids: Tensor) -> Tensor:
    return in_a_row(lambda row, *where: model(row[None], *where), ids)


def _both(way, forward):
    """A module of rows, and one of contexts with the same weights."""
    rows, gpt = seeded(Rows(way)), seeded(GPT(by_hand=True))
    gpt.load_state_dict(rows.state_dict())
    return opened(rows, longest=LONGEST, forward=forward), gpt


@pytest.mark.parametrize(
    ("way", "forward"),
    [("flex", in_a_row), ("flex", in_a_batch_of_one), ("sdpa", in_a_batch_of_one), ("by hand", in_a_row)],
)
def test_contexts_in_one_row_are_read_as_contexts(way, forward):
    model, gpt = _both(way, forward)
    assert model.structure.layout.is_row
    assert model.causal
    with torch.no_grad():
        stream, entropies = gpt.embedded(token_ids()), []
        for block in gpt.blocks:
            entropies.append(entropy(block.attention.weights(block.norm(stream))))
            stream = block(stream)
        logits = gpt(token_ids())[0]
    looked_at = GeometryMonitor(model, token_ids())(0)
    assert looked_at["entropy_mean"] == pytest.approx(float(torch.stack(entropies).mean()), rel=1e-5)
    torch.testing.assert_close(model.logits(token_ids()), logits)
    weights = model.head_weights(1)
    torch.testing.assert_close([weights.w_q, weights.w_k], named_weights(gpt.blocks[1].attention)[:2])


def test_all_that_reads_a_model_reads_one_of_rows():
    """Oracle: entropies and norms by the definition; else the same of contexts apart, which have tests of their own."""
    model, gpt = _both("flex", in_a_row)
    plain, corpus = opened(gpt, longest=LONGEST), Corpus.from_ids(token_ids())
    run = survey(model, corpus, batch=4)
    check_heads(run, gpt.blocks, gpt.embedded(token_ids()))
    assert run.provenance["constituents_refused"] == {}
    assert set(run.heads["spectrum_of"]) == {"projection"}
    torch.testing.assert_close(model.output_weights(1), plain.output_weights(1))
    own, other = (constituents(of, token_ids(), 1).logits for of in (model, plain))
    torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(Locater(model, 0.5, 0.25)(), Locater(plain, 0.5, 0.25)())
    changed = []
    for of in (model, plain):
        with attention_knockout(of, 0, 1, [0, 3]):
            changed.append(of.logits(token_ids()))
    torch.testing.assert_close(*changed)
    assert (changed[0] - model.logits(token_ids())).abs().max() > 1e-3
    sinks = [trace_sinks(of, corpus).heads["after"] for of in (model, plain)]
    np.testing.assert_allclose(*sinks, rtol=1e-4)
    for of in (model, plain):
        QKClip(of, 1.0)(torch.tensor([[2.0, 0.5, 4.0]] * LAYERS))
    torch.testing.assert_close(model.root.state_dict(), plain.root.state_dict())


def first_only(model, ids):
    return in_a_row(model, ids[:1])


def one_by_one(model, ids):
    return torch.cat([in_a_row(model, context[None]) for context in ids])


def together(model, ids):
    positions = torch.arange(ids.shape[1]).repeat(len(ids))
    return model(ids.flatten(), positions, block_mask(positions, texts_apart=False))


@pytest.mark.parametrize(
    ("forward", "line"),
    [
        (first_only, r"Rows attends to 1 of the contexts that .* at once, .*: give open_module a forward"),
        (one_by_one, r"Rows attends to 1 of the contexts that it is given at once"),
        (together, "InRow reads its contexts in one row, and tokens attend to those of other contexts: give"),
    ],
)
def test_rows_that_cannot_be_told_apart_are_refused_in_a_line(forward, line):
    with pytest.raises(UsageError, match=line):
        opened(seeded(Rows("flex")), forward=forward)


def test_rows_are_not_known_without_their_contexts():
    with pytest.raises(UsageError, match="blocks read a row of 5 tokens, which is not contexts"):
        one_row.unrolled(torch.zeros(5, 2), 0)
    with one_row.reading((2, 3)), pytest.raises(UsageError, match="which is not 2 contexts of 3"):
        one_row.unrolled(torch.zeros(5, 2), 0)
