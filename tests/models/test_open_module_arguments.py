"""What `open_module` is told, and what a module says of itself. Oracle: the modules' own arithmetic, in plain code."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import Tensor, nn

from tests.models.modules import (
    GPT,
    HEADS,
    LONGEST,
    VOCABULARY,
    WIDTH,
    Attention,
    ViT,
    entropy,
    gpt_of,
    seeded,
    token_ids,
    traces,
)
from theodolite import Corpus, open_module, survey
from theodolite.errors import UsageError
from theodolite.train.locater import Locater
from theodolite.train.monitor import GeometryMonitor


class NamedBlocks(GPT):
    """Blocks that are in no list."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = self.transformer["h"]
        del self.transformer

    def forward(self, ids: Tensor) -> tuple[Tensor, None]:
        return self.head(self.norm(self.second(self.first(self.embedded(ids))))), None


def test_blocks_that_are_named_are_known_to_all():
    """Oracle of the penalty: tr W_q W_kᵀ and its norm from the parameters."""
    gpt = seeded(NamedBlocks())
    model = open_module(gpt, vocabulary=VOCABULARY, blocks=["first", "second"])
    monitored = GeometryMonitor(model, token_ids(), every=1)(0)
    run = survey(model, Corpus.from_ids(token_ids()))
    assert monitored["entropy_mean"] == pytest.approx(run.heads["entropy"].mean(), rel=1e-5)
    expected = traces(gpt.first.attention) + traces(gpt.second.attention)
    assert Locater(model, 1e-3, 1e-2).table()["trace"].tolist() == pytest.approx(expected, rel=1e-4)


class Pooled(ViT):
    """A query attends to the patches behind the blocks, as in SigLIP."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, pixels: Tensor) -> Tensor:
        hidden = self.blocks(self.embedded(pixels))
        pooled, _ = self.pool(self.first.expand(len(hidden), -1, -1), hidden, hidden)
        return self.head(pooled[:, 0])


def test_attention_outside_of_named_blocks_is_left_out():
    vit = seeded(Pooled())
    model = open_module(vit, image=(3, 12, 16), blocks="blocks")
    assert model.structure.attention == tuple(block.attention for block in vit.blocks)
    pixels = torch.randn(4, 3, 12, 16, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(model.forward(pixels), vit(pixels), rtol=1e-4, atol=1e-4)
    with pytest.raises(
        UsageError, match=r'pool is not inside a list of blocks: say where they are, blocks="blocks"'
    ):
        open_module(vit, image=(3, 12, 16))
    with pytest.raises(UsageError, match=r"nothing attends in blocks=\['patches'\]: name those"):
        open_module(vit, image=(3, 12, 16), blocks=["patches"])


class Decoder(nn.Module):
    """PyTorch's own decoder: its layers attend to themselves and to a memory."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerDecoderLayer(WIDTH, HEADS, 2 * WIDTH, dropout=0.0, batch_first=True)
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.decoder = nn.TransformerDecoder(layer, 2)

    def forward(self, ids: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        return self.decoder(self.tokens(ids), self.tokens(ids.flip(1)), tgt_mask=mask, tgt_is_causal=True)


@pytest.mark.parametrize("kind", ["self_attn", "multihead_attn"])
def test_one_of_two_attentions_is_chosen(kind):
    """Oracle: the weights that PyTorch's own attention gives for what enters it."""
    decoder = seeded(Decoder()).eval()
    with pytest.raises(UsageError, match=r"attends twice \(decoder\.layers\.0\.self_attn, then .*multihead"):
        open_module(decoder, vocabulary=VOCABULARY)
    given = []
    layer = getattr(decoder.decoder.layers[0], kind)
    hook = layer.register_forward_pre_hook(
        lambda _, args, kwargs: given.append((args, kwargs)), with_kwargs=True
    )
    with torch.no_grad():
        decoder(token_ids())
    hook.remove()
    ((args, kwargs),) = given
    with torch.no_grad():
        weights = layer(*args, **{**kwargs, "need_weights": True, "average_attn_weights": False})[1]
    model = open_module(decoder, vocabulary=VOCABULARY, attention=kind)
    heads = survey(model, Corpus.from_ids(token_ids())).heads
    assert heads[heads["layer"] == 0]["entropy"].tolist() == pytest.approx(
        entropy(weights).tolist(), rel=1e-5
    )
    assert set(heads["spectrum_of"]) == {"projection" if kind == "self_attn" else "none"}


def test_wrong_arguments_are_said_in_a_line():
    gpt = GPT()

    def broken(module: nn.Module, ids: Tensor) -> Tensor:
        raise ZeroDivisionError("division by zero")

    class Length:
        def __len__(self) -> int:
            return VOCABULARY

    for wrong, line in (
        ({"vocabulary": 0}, "vocabulary is 0: give a whole number of tokens, 1 or more"),
        ({"vocabulary": "50"}, "vocabulary is '50': give a whole number"),
        ({"longest": -1}, "longest is -1: give a whole number"),
        ({"forward": 3}, "forward is 3: give a function"),
        ({"forward": broken}, "GPT cannot run on contexts of 3 tokens: ZeroDivisionError: division by zero"),
        ({"tokenizer": Length()}, "the tokenizer, Length, cannot be called"),
        ({"blocks": 3}, "blocks is int: give the name of their list"),
        ({"blocks": gpt.transformer["h"]}, "blocks is ModuleList: give the name of their list"),
        ({"blocks": []}, "blocks is list: give the name of their list"),
        (
            {"attention": "self_attn"},
            "GPT: nothing that attends is called attention='self_attn'; its attention modules are called attention",
        ),
    ):
        with pytest.raises(UsageError) as raised:
            # Where the tests check types, they would refuse some of these first.
            inspect.unwrap(open_module)(gpt, **{"vocabulary": VOCABULARY, **wrong})
        assert str(raised.value).startswith(line)
        assert "\n" not in str(raised.value)


def test_contexts_longer_than_the_positions_are_refused_in_a_line():
    ids = torch.randint(VOCABULARY, (4, LONGEST + 8), generator=torch.Generator().manual_seed(0))
    with pytest.raises(UsageError, match=f"GPT cannot run on contexts of {LONGEST + 8} tokens: IndexError"):
        survey(open_module(GPT(), vocabulary=VOCABULARY), Corpus.from_ids(ids))


def test_an_error_of_what_measures_is_not_laid_on_the_module(monkeypatch):
    from theodolite.accumulate import attention

    def fails(*args, **kwargs):
        raise LookupError("a defect")

    model = open_module(GPT(), vocabulary=VOCABULARY)
    monkeypatch.setattr(attention.AttentionStatistics, "update", fails)
    with pytest.raises(LookupError, match="a defect"):
        survey(model, Corpus.from_ids(token_ids()))


class Head(nn.Module):
    """One of several, each a module."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH // HEADS)

    def weights(self, x: Tensor) -> Tensor:
        """The attention, by the definition."""
        q, k, _ = self.qkv(x).chunk(3, -1)
        logits = q @ k.mT * k.shape[-1] ** -0.5
        return logits.masked_fill(torch.ones_like(logits).triu(1).bool(), -torch.inf).softmax(-1)

    def forward(self, x: Tensor) -> Tensor:
        return self.weights(x) @ self.qkv(x).chunk(3, -1)[2]


class ByHeads(nn.Module):
    """All heads beside one another."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.out = nn.ModuleList(Head() for _ in range(HEADS)), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.cat([head(x) for head in self.heads], -1))


def test_heads_that_are_modules_are_looked_at_one_by_one():
    """Oracle: each head's own attention."""
    gpt = gpt_of(ByHeads)
    gpt.transformer["h"] = nn.Sequential(*gpt.transformer["h"])
    with pytest.raises(UsageError, match=r"heads are modules of their own, side by side .* attention=\"0\""):
        open_module(gpt, vocabulary=VOCABULARY)
    for head in ("0", "heads.2"):
        run = survey(open_module(gpt, vocabulary=VOCABULARY, attention=head), Corpus.from_ids(token_ids()))
        stream, entropies = gpt.embedded(token_ids()), []
        with torch.no_grad():
            for block in gpt.transformer["h"]:
                weights = block.attention.heads[int(head[-1])].weights(block.norm(stream))
                entropies.append(float(entropy(weights[:, None])))
                stream = block(stream)
        assert list(run.heads["entropy"]) == pytest.approx(entropies, rel=1e-5)


class Told(Attention):
    """Beside its weights, what has the names or types of a quantiser's."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("attn_weight_mask", torch.ones(LONGEST, LONGEST).tril().bool())
        self.steps = nn.Parameter(torch.tensor([[3]]), requires_grad=False)
        self.weight, self.weight_scale = nn.Parameter(torch.eye(WIDTH)), nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) @ (self.weight * self.weight_scale)


def _spectral() -> nn.Module:
    attention = Attention()
    nn.utils.parametrizations.spectral_norm(attention.qkv)
    return attention


@pytest.mark.parametrize("kind", [Told, _spectral])
def test_weights_are_read_whatever_stands_beside_them(kind):
    """Oracle: tr W_q W_kᵀ from the layer's own matrix."""
    gpt = gpt_of(kind).eval()
    run = survey(open_module(gpt, vocabulary=VOCABULARY), Corpus.from_ids(token_ids()))
    heads = run.heads[run.heads["layer"] == 0]
    expected = traces(gpt.transformer["h"][0].attention)
    assert heads["trace"].tolist() == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert heads.filter(like="share_").notna().all(axis=None)


def test_a_penalty_is_computed_under_another_default_device():
    """Oracle: the same under the CPU."""
    penalty = Locater(open_module(seeded(GPT()), vocabulary=VOCABULARY), 1e-3, 1e-2)
    with torch.device("meta"):
        value = penalty()
    assert value.item() == Locater(open_module(seeded(GPT()), vocabulary=VOCABULARY), 1e-3, 1e-2)().item()
