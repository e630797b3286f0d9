"""Modules of one's own, opened, surveyed and trained. Oracle: their own arithmetic, written out beside them."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests import checkpoints
from tests.models.modules import (
    CONTEXTS,
    GPT,
    HEADS,
    LAYERS,
    LONGEST,
    VOCABULARY,
    WIDTH,
    Attention,
    Block,
    ViT,
    check_heads,
    gpt_of,
    named_weights,
    seeded,
    token_ids,
)
from theodolite import Corpus, find_outliers, open_model, open_module, survey, trace_sinks
from theodolite.corpus.images import TransformedImages
from theodolite.errors import UsageError, WorkError
from theodolite.evaluate.perplexity import next_token_losses
from theodolite.models import image_reader
from theodolite.models.weights.copies import NotAffine
from theodolite.train.locater import Locater
from theodolite.train.monitor import GeometryMonitor
from tools import small_models


class Pair(nn.ModuleList):
    """No module that runs: an attention, with its norm inside, and a linear map."""

    norm = nn.Identity()

    @property
    def attention(self) -> nn.Module:
        return self[0]

    def __call__(self, x: Tensor) -> Tensor:
        x = x + self[0](x)
        return x + self[1](x)


class Pairs(nn.Module):
    """Blocks that are pairs of modules."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Pair([Attention(True), nn.Linear(WIDTH, WIDTH)]) for _ in range(LAYERS))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for pair in self.layers:
            x = pair(x)
        return x


@pytest.mark.parametrize("by_hand", [False, True])
def test_a_gpt_of_ones_own(by_hand):
    gpt = seeded(GPT(by_hand)).train()
    model = open_module(gpt, vocabulary=VOCABULARY, longest=LONGEST)
    assert repr(model) == "OpenModel(GPT: GPT, 2 layers × 3 heads × width 24, float32 on cpu)"
    assert (model.causal, model.longest, model.vocabulary, model.tokenizer) == (
        True,
        LONGEST,
        VOCABULARY,
        None,
    )
    corpus = Corpus.from_ids(token_ids())
    run = survey(model, corpus)
    assert gpt.training
    assert not any(parameter.grad is not None for parameter in gpt.parameters())
    with torch.no_grad():
        check_heads(run, gpt.transformer["h"], gpt.embedded(token_ids()))
    described = run.provenance["model"]
    assert (described["weights"], described["architecture"], described["id"]) == ("in memory", "GPT", "GPT")
    with torch.no_grad():
        own = gpt.head.bias.clone()
        gpt.head.bias += 1.0
        assert model.weights().sha256 != described["sha256"]
        gpt.head.bias.copy_(own)
        assert model.weights().sha256 == described["sha256"]
    assert set(run.heads["spectrum_of"]) == {"projection"}
    assert run.provenance["constituents_refused"] == {}
    weights, attention = model.head_weights(1), gpt.transformer["h"][1].attention
    for read, own in zip((weights.w_q, weights.w_k, weights.w_v), named_weights(attention), strict=True):
        torch.testing.assert_close(read, own)
    torch.testing.assert_close(
        model.output_weights(1).flatten(0, 1), attention.out.weight.detach().double().T
    )
    with torch.no_grad():
        own = next_token_losses(gpt(token_ids())[0], token_ids())
    torch.testing.assert_close(next_token_losses(model.logits(token_ids()), token_ids()), own)
    assert set(trace_sinks(model, corpus).heads["layer"]) <= set(range(LAYERS))
    assert len(find_outliers(model, corpus).layers) == LAYERS + 1


def test_a_copy_of_an_opened_model_is_a_model_of_its_own(tmp_path):
    """Oracle: what each computes with its own weights."""
    gpt = seeded(GPT())
    small_models.build(next(case for case in small_models.cases() if case.name == "bart")).save_pretrained(
        tmp_path
    )
    for model in (open_module(gpt, vocabulary=VOCABULARY), open_model(), open_model(tmp_path)):
        copied = copy.deepcopy(model)
        for parameter in copied.root.parameters():
            parameter.data.mul_(1.5)
        assert copied.source.attention == model.source.attention
        ids = token_ids() % model.vocabulary
        runs = [survey(opened, Corpus.from_ids(ids)).heads["entropy"] for opened in (model, copied)]
        assert (runs[0] - runs[1]).abs().max() > 1e-3


def test_training_a_module_of_ones_own(tmp_path):
    """Oracle: LocAteR's terms from the weights by name; the monitor's entropy is the survey's."""
    gpt = seeded(GPT())
    model = open_module(gpt, vocabulary=VOCABULARY)
    locater = Locater(model, scale=0.5, mean=0.25)
    expected = 0.0
    for block in gpt.transformer["h"]:
        q, k, _ = block.attention.qkv.weight.chunk(3)
        for head in range(HEADS):
            rows = slice(head * WIDTH // HEADS, (head + 1) * WIDTH // HEADS)
            product = q[rows].T @ k[rows]
            expected = expected + 0.5 * product.square().sum() + 0.25 * (product.trace() - 1) ** 2
    torch.testing.assert_close(locater(), expected)
    mine, own = (
        torch.autograd.grad(loss, gpt.transformer["h"][0].attention.qkv.weight)[0]
        for loss in (locater(), expected)
    )
    torch.testing.assert_close(mine, own)
    numbers = GeometryMonitor(model, token_ids())(0)
    entropy = survey(model, Corpus.from_ids(token_ids())).heads["entropy"].mean()
    assert numbers["entropy_mean"] == pytest.approx(entropy, rel=1e-5)
    with pytest.raises(UsageError, match=r"GPT holds no model of transformers: give open_module\(model"):
        Locater(gpt, 0.5, 0.25)


def test_blocks_that_are_pairs_of_modules():
    pairs = seeded(Pairs())
    model = open_module(pairs, vocabulary=VOCABULARY)
    run = survey(model, Corpus.from_ids(token_ids()))
    check_heads(run, pairs.layers, pairs.tokens(token_ids()).detach())
    with pytest.raises(UsageError, match="its blocks are no modules that run"):
        open_module(pairs, vocabulary=VOCABULARY, forward=lambda module, ids: module(ids).mean(-1))


def test_an_encoder_of_images_of_ones_own(tmp_path):
    Image = pytest.importorskip("PIL.Image")
    generator = np.random.default_rng(0)
    for number in range(CONTEXTS):
        Image.fromarray(generator.integers(0, 255, (12, 16, 3), dtype=np.uint8)).save(
            tmp_path / f"{number}.png"
        )
    vit = seeded(ViT())
    model = open_module(vit, image=(3, 12, 16))
    reader = TransformedImages(lambda image: torch.from_numpy(np.array(image)).movedim(-1, 0) / 255, (4, 4))
    corpus = Corpus.from_path(tmp_path, reader, None)
    run = survey(model, corpus)
    with torch.no_grad():
        check_heads(run, vit.blocks, vit.embedded(corpus.inputs(slice(0, CONTEXTS))))
    assert run.provenance["corpus"]["grid"] == {"rows": 3, "columns": 4, "before": ["[CLS]"]}
    with pytest.raises(
        UsageError, match=r"ViT is a module of its own, .*give TransformedImages\(transform, patch"
    ):
        image_reader(model)
    wrong = TransformedImages(lambda image: torch.from_numpy(np.array(image)).movedim(-1, 0) / 255, (8, 8))
    with pytest.raises(
        UsageError, match="makes 13 tokens of an image of 12 × 16 pixels, not the 3 of its grid"
    ):
        survey(model, Corpus.from_path(tmp_path, wrong, None))


def test_blocks_and_a_forward_can_be_said():
    gpt = seeded(GPT())
    named = open_module(gpt, vocabulary=VOCABULARY, blocks="transformer.h")
    assert named.structure.blocks == tuple(gpt.transformer["h"])
    one = open_module(gpt, vocabulary=VOCABULARY, blocks=["transformer.h.0", "transformer.h.1"])
    assert one.structure.blocks == named.structure.blocks
    by_forward = open_module(gpt, vocabulary=VOCABULARY, forward=lambda module, ids: module(ids)[0][:, -1:])
    with pytest.raises(UsageError, match="GPT gives no logits"):
        by_forward.logits(token_ids())
    survey(by_forward, Corpus.from_ids(token_ids()))


def test_what_cannot_be_opened_is_said_in_a_line():
    gpt = GPT()
    for call, line in (
        (lambda: open_module(gpt), "say how many token ids there are, vocabulary=…"),
        (
            lambda: open_module(nn.Linear(3, 3), vocabulary=5),
            "Linear cannot run on contexts of 3 tokens: RuntimeError: ",
        ),
        (
            lambda: open_module(nn.Embedding(5, 3), vocabulary=5),
            "Embedding computes no attention that could be read",
        ),
        (lambda: open_module(gpt, vocabulary=VOCABULARY, blocks="no"), "GPT has no module for blocks=['no']"),
        (lambda: open_module(gpt, vocabulary=5, image=(3, 4, 4)), "a module reads tokens or images"),
        (lambda: open_model(gpt), "GPT"),
        (
            lambda: open_module(gpt, vocabulary=VOCABULARY).hf,
            "GPT is a module of its own, and this needs a model of",
        ),
    ):
        with pytest.raises(UsageError) as raised:
            call()
        assert str(raised.value).startswith(line)
        assert "\n" not in str(raised.value)
    broken = GPT()
    broken.head.weight.data[0, 0] = torch.nan
    with pytest.raises(WorkError, match=r"tensor head\.weight holds NaN"):
        open_module(broken, vocabulary=VOCABULARY)


def test_attention_that_changes_with_the_length_is_named():
    """Opened on a few tokens, it attends to blocks of ten of more; and to nothing of more than thirty."""

    class ByBlocks(Attention):
        def forward(self, x):
            if x.shape[1] > 30:
                return self.out(x)
            blocks = x.split(10, dim=1) if x.shape[1] > 16 else [x]
            return torch.cat([super(ByBlocks, self).forward(block) for block in blocks], dim=1)

    gpt = gpt_of(lambda: ByBlocks(by_hand=True))
    gpt.places = nn.Embedding(64, WIDTH)
    model = open_module(gpt, vocabulary=VOCABULARY)
    survey(model, Corpus.random_tokens(VOCABULARY, 16, 4))
    for length in (20, 40):
        with pytest.raises(
            WorkError, match=rf"layer 0 .*: to {length} tokens it attends otherwise than to a few"
        ):
            survey(model, Corpus.random_tokens(VOCABULARY, length, 4))


def test_keys_of_another_tensor_have_no_weights_of_zero():
    """Those of a memory do not change with the stream: that is no matrix of zeros."""

    class BlockWithMemory(Block):
        def forward(self, x):
            query = self.norm(x)
            memory = torch.randn(x.shape, generator=torch.Generator().manual_seed(0))
            return x + self.attention(query, memory)

    class Memory(Attention):
        def forward(self, x, memory):
            (q, _, _), (_, k, v) = self.split(x), self.split(memory)
            return self.out(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    gpt = GPT()
    gpt.transformer["h"] = nn.ModuleList(BlockWithMemory() for _ in range(LAYERS))
    for block in gpt.transformer["h"]:
        block.attention = Memory()
    model = open_module(seeded(gpt), vocabulary=VOCABULARY)
    with pytest.raises(NotAffine):
        model.head_weights(0)


def test_a_model_of_transformers_in_memory_is_the_one_on_disk(tmp_path):
    """Oracle: the same checkpoint opened from its folder."""
    hf = checkpoints.build("llama3")
    hf.save_pretrained(tmp_path)
    corpus = Corpus.random_tokens(checkpoints.VOCABULARY, 16, 8)
    memory, disk = (survey(open_model(place), corpus) for place in (hf, tmp_path))
    assert memory.heads.equals(disk.heads)
    assert memory.layers.equals(disk.layers)
    with pytest.raises(UsageError, match="is in memory: move or convert it before"):
        open_model(hf, dtype="float64")


class Core(nn.Module):
    """Attends with what it is given, and has no weights."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in (query, key, value))
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


class ByCore(Attention):
    """Projects, and lets another module attend."""

    def __init__(self) -> None:
        super().__init__()
        self.core = Core()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.out(self.core(query=q, key=k, value=v))


class ItselfAttends(Block):
    """Has no module for its attention."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.attention.attend(*self.attention.split(self.norm(x))).transpose(1, 2).flatten(2)
        x = x + functional.linear(y, self.attention.out.weight, self.attention.out.bias)
        return x + self.mlp(x)


def _attending_itself() -> GPT:
    model = GPT()
    model.transformer["h"] = nn.ModuleList(ItselfAttends() for _ in range(LAYERS))
    return model.eval()


def _compiled_inside() -> GPT:
    model = GPT().eval()
    model.transformer["h"][0].compile()
    model.transformer["h"][1].attention = torch.compile(model.transformer["h"][1].attention)
    return model


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the compiler's own
@pytest.mark.parametrize("made", [lambda: gpt_of(ByCore).eval(), _attending_itself, _compiled_inside])
def test_wherever_a_block_attends(made):
    """Oracle: the same weights in a model whose blocks have an attention module."""
    torch.manual_seed(3)
    model, plain = made(), GPT()
    names = {name.replace("_orig_mod.", ""): value for name, value in model.state_dict().items()}
    plain.load_state_dict(names)
    corpus = Corpus.from_ids(token_ids())
    run, expected = (survey(open_module(of, vocabulary=VOCABULARY), corpus) for of in (model, plain.eval()))
    for name in ("entropy", "sink_first", "previous_token"):
        np.testing.assert_allclose(run.heads[name], expected.heads[name], rtol=1e-6)
    np.testing.assert_allclose(run.layers["norm"], expected.layers["norm"], rtol=1e-6)
    if made is not _attending_itself:  # whose norm is between the stream and its queries
        np.testing.assert_allclose(
            run.heads["frobenius_squared"], expected.heads["frobenius_squared"], rtol=1e-6
        )
        np.testing.assert_allclose(run.heads["share_position"], expected.heads["share_position"], rtol=1e-4)


def test_other_keys_than_those_of_the_tokens_are_refused():
    class WithMemory(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(WIDTH, HEADS, add_bias_kv=True, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.attention(x, x, x, need_weights=False)[0]

    model = GPT()
    model.transformer["h"] = nn.ModuleList(WithMemory() for _ in range(LAYERS))
    with pytest.raises(UsageError, match="its queries are not as many as its keys"):
        open_module(model.eval(), vocabulary=VOCABULARY)
