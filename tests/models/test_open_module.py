"""Modules of one's own, opened, surveyed and trained. Oracle: their own arithmetic, written out beside them."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests import checkpoints
from theodolite import Corpus, find_outliers, open_model, open_module, survey, trace_sinks
from theodolite.corpus.transformed_images import TransformedImages
from theodolite.errors import UsageError, WorkError
from theodolite.evaluate.perplexity import next_token_losses
from theodolite.models import image_reader
from theodolite.models.head_weights import NotAffine
from theodolite.train.locater import Locater
from theodolite.train.monitor import GeometryMonitor
from tools import small_models

VOCABULARY, WIDTH, HEADS, LAYERS, LONGEST = 50, 24, 3, 2, 32
CONTEXTS, LENGTH = 6, 20


class Attention(nn.Module):
    """Of a GPT, by PyTorch's function or by hand."""

    def __init__(self, by_hand: bool, causal: bool = True) -> None:
        super().__init__()
        self.qkv, self.out, self.by_hand, self.causal = (
            nn.Linear(WIDTH, 3 * WIDTH),
            nn.Linear(WIDTH, WIDTH),
            by_hand,
            causal,
        )

    def weights(self, x: Tensor) -> Tensor:
        """The attention, by the definition."""
        q, k, _ = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        logits = q @ k.mT / (WIDTH // HEADS) ** 0.5
        if self.causal:
            logits = logits.masked_fill(torch.ones_like(logits).triu(1).bool(), -torch.inf)
        return logits.softmax(-1)

    def forward(self, x: Tensor) -> Tensor:
        """Attend."""
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        if self.by_hand:
            y = self.weights(x) @ v
        else:
            y = functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Norm, attention, norm, linear map."""

    def __init__(self, by_hand: bool, causal: bool = True) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), Attention(by_hand, causal)
        self.mlp = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Add both to the stream."""
        x = x + self.attention(self.norm(x))
        return x + self.mlp(x)


class GPT(nn.Module):
    """Logits of all positions, and a loss that is None, as many return."""

    def __init__(self, by_hand: bool = False) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LONGEST, WIDTH)
        self.transformer = nn.ModuleDict({"h": nn.ModuleList(Block(by_hand) for _ in range(LAYERS))})
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def embedded(self, ids: Tensor) -> Tensor:
        """What enters the first block."""
        return self.tokens(ids) + self.places(torch.arange(ids.shape[1]))

    def forward(self, ids: Tensor) -> tuple[Tensor, None]:
        """Logits."""
        x = self.embedded(ids)
        for block in self.transformer["h"]:
            x = block(x)
        return self.head(self.norm(x)), None


class Pairs(nn.Module):
    """Blocks that are no modules that run: pairs of an attention, with its norm inside, and a linear map."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(
            nn.ModuleList([Attention(True), nn.Linear(WIDTH, WIDTH)]) for _ in range(LAYERS)
        )

    def forward(self, ids: Tensor) -> Tensor:
        """The last hidden states."""
        x = self.tokens(ids)
        for attention, linear in self.layers:  # type: ignore[misc]
            x = x + attention(x)
            x = x + linear(x)
        return x


class ViT(nn.Module):
    """Patches behind a class token; returns logits of classes."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.first = nn.Conv2d(3, WIDTH, 4, 4), nn.Parameter(torch.randn(1, 1, WIDTH))
        self.places = nn.Parameter(torch.randn(1, 13, WIDTH))
        self.blocks = nn.Sequential(*(Block(False, causal=False) for _ in range(LAYERS)))
        self.head = nn.Linear(WIDTH, 7)

    def embedded(self, pixels: Tensor) -> Tensor:
        """What enters the first block."""
        patches = self.patches(pixels).flatten(2).mT
        return torch.cat([self.first.expand(len(pixels), -1, -1), patches], 1) + self.places

    def forward(self, pixels: Tensor) -> Tensor:
        """Classes."""
        return self.head(self.blocks(self.embedded(pixels))[:, 0])


def _seeded(model: nn.Module) -> nn.Module:
    """Weights large enough that attention is not uniform."""
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.4 if parameter.ndim >= 2 else 0.1, generator=generator)
    return model


def _ids() -> Tensor:
    return torch.randint(VOCABULARY, (CONTEXTS, LENGTH), generator=torch.Generator().manual_seed(1))


def _check_heads(run, blocks, stream) -> None:
    """Entropies and norms of the streams, by the definition."""
    entropies, norms = [], [stream.norm(dim=-1)[:, 1:].mean()]
    with torch.no_grad():
        for block in blocks:
            weights = block.attention.weights(block.norm(stream)).double()
            entropies.append(-torch.special.xlogy(weights, weights).sum(-1).mean((0, 2)))
            stream = block(stream)
            norms.append(stream.norm(dim=-1)[:, 1:].mean())
    np.testing.assert_allclose(run.heads["entropy"], torch.cat(entropies), rtol=1e-5)
    np.testing.assert_allclose(run.layers["norm"], torch.stack(norms), rtol=1e-5)


@pytest.mark.parametrize("by_hand", [False, True])
def test_a_gpt_of_ones_own(by_hand):
    gpt = _seeded(GPT(by_hand)).train()
    model = open_module(gpt, vocabulary=VOCABULARY, longest=LONGEST)
    assert repr(model) == "OpenModel(GPT: GPT, 2 layers × 3 heads × width 24, float32 on cpu)"
    assert (model.causal, model.longest, model.vocabulary, model.tokenizer) == (
        True,
        LONGEST,
        VOCABULARY,
        None,
    )
    corpus = Corpus.from_ids(_ids())
    run = survey(model, corpus)
    assert gpt.training
    assert not any(parameter.grad is not None for parameter in gpt.parameters())
    with torch.no_grad():
        _check_heads(run, gpt.transformer["h"], gpt.embedded(_ids()))
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
    weights = model.head_weights(1)
    attention = gpt.transformer["h"][1].attention
    for number, read in enumerate((weights.w_q, weights.w_k, weights.w_v)):
        own = attention.qkv.weight.detach().double().chunk(3)[number].unflatten(0, (HEADS, -1)).mT
        torch.testing.assert_close(read, own)
    torch.testing.assert_close(
        model.output_weights(1).flatten(0, 1), attention.out.weight.detach().double().T
    )
    with torch.no_grad():
        own = next_token_losses(gpt(_ids())[0], _ids())
    torch.testing.assert_close(next_token_losses(model.logits(_ids()), _ids()), own)
    assert set(trace_sinks(model, corpus).heads["layer"]) <= set(range(LAYERS))
    assert len(find_outliers(model, corpus).layers) == LAYERS + 1


def test_a_copy_of_an_opened_model_is_a_model_of_its_own(tmp_path):
    """Oracle: what each computes with its own weights."""
    gpt = _seeded(GPT())
    small_models.build(next(case for case in small_models.cases() if case.name == "bart")).save_pretrained(
        tmp_path
    )
    for model in (open_module(gpt, vocabulary=VOCABULARY), open_model(), open_model(tmp_path)):
        copied = copy.deepcopy(model)
        for parameter in copied.root.parameters():
            parameter.data.mul_(1.5)
        assert copied.source.attention == model.source.attention
        ids = _ids() % model.vocabulary
        runs = [survey(opened, Corpus.from_ids(ids)).heads["entropy"] for opened in (model, copied)]
        assert (runs[0] - runs[1]).abs().max() > 1e-3


def test_training_a_module_of_ones_own(tmp_path):
    """Oracle: LocAteR's terms from the weights by name; the monitor's entropy is the survey's."""
    gpt = _seeded(GPT())
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
    numbers = GeometryMonitor(model, _ids())(0)
    entropy = survey(model, Corpus.from_ids(_ids())).heads["entropy"].mean()
    assert numbers["entropy_mean"] == pytest.approx(entropy, rel=1e-5)
    with pytest.raises(UsageError, match=r"GPT holds no model of transformers: give open_module\(model"):
        Locater(gpt, 0.5, 0.25)


def test_blocks_that_are_pairs_of_modules():
    pairs = _seeded(Pairs())
    model = open_module(pairs, vocabulary=VOCABULARY)
    run = survey(model, Corpus.from_ids(_ids()))
    stream, entropies, norms = pairs.tokens(_ids()), [], []
    with torch.no_grad():
        for attention, linear in pairs.layers:
            norms.append(stream.norm(dim=-1)[:, 1:].mean())
            weights = attention.weights(stream).double()
            entropies.append(-torch.special.xlogy(weights, weights).sum(-1).mean((0, 2)))
            stream = stream + attention(stream)
            stream = stream + linear(stream)
    norms.append(stream.norm(dim=-1)[:, 1:].mean())
    np.testing.assert_allclose(run.heads["entropy"], torch.cat(entropies), rtol=1e-5)
    np.testing.assert_allclose(run.layers["norm"], torch.stack(norms).detach(), rtol=1e-5)
    with pytest.raises(UsageError, match="its blocks are no modules that run"):
        open_module(pairs, vocabulary=VOCABULARY, forward=lambda module, ids: module(ids).mean(-1))


def test_an_encoder_of_images_of_ones_own(tmp_path):
    Image = pytest.importorskip("PIL.Image")
    generator = np.random.default_rng(0)
    for number in range(CONTEXTS):
        Image.fromarray(generator.integers(0, 255, (12, 16, 3), dtype=np.uint8)).save(
            tmp_path / f"{number}.png"
        )
    vit = _seeded(ViT())
    model = open_module(vit, image=(3, 12, 16))
    reader = TransformedImages(lambda image: torch.from_numpy(np.array(image)).movedim(-1, 0) / 255, (4, 4))
    corpus = Corpus.from_path(tmp_path, reader, None)
    run = survey(model, corpus)
    with torch.no_grad():
        _check_heads(run, vit.blocks, vit.embedded(corpus.inputs(slice(0, CONTEXTS))))
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
    gpt = _seeded(GPT())
    named = open_module(gpt, vocabulary=VOCABULARY, blocks="transformer.h")
    assert named.structure.blocks == tuple(gpt.transformer["h"])
    one = open_module(gpt, vocabulary=VOCABULARY, blocks=["transformer.h.0", "transformer.h.1"])
    assert one.structure.blocks == named.structure.blocks
    by_forward = open_module(gpt, vocabulary=VOCABULARY, forward=lambda module, ids: module(ids)[0][:, -1:])
    with pytest.raises(UsageError, match="GPT gives no logits"):
        by_forward.logits(_ids())
    survey(by_forward, Corpus.from_ids(_ids()))


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

    gpt = _seeded(GPT())
    gpt.places = nn.Embedding(64, WIDTH)
    for block in gpt.transformer["h"]:
        block.attention = ByBlocks(by_hand=True)
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
            q = self.qkv(x).chunk(3, -1)[0].unflatten(-1, (HEADS, -1)).transpose(1, 2)
            k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(memory).chunk(3, -1)[1:])
            return self.out(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    gpt = GPT()
    gpt.transformer["h"] = nn.ModuleList(BlockWithMemory(True) for _ in range(LAYERS))
    for block in gpt.transformer["h"]:
        block.attention = Memory(True)
    model = open_module(_seeded(gpt), vocabulary=VOCABULARY)
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
        """Of contexts, positions and width, as it gets them."""
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in (query, key, value))
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


class ByCore(Attention):
    """Projects, and lets another module attend."""

    def __init__(self) -> None:
        super().__init__(False)
        self.core = Core()

    def forward(self, x: Tensor) -> Tensor:
        """Attend."""
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.out(self.core(query=q, key=k, value=v))


class ItselfAttends(Block):
    """Has no module for its attention."""

    def forward(self, x: Tensor) -> Tensor:
        """Add both to the stream."""
        q, k, v = (
            t.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for t in self.attention.qkv(self.norm(x)).chunk(3, -1)
        )
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + functional.linear(y, self.attention.out.weight, self.attention.out.bias)
        return x + self.mlp(x)


def _with_core() -> GPT:
    model = GPT()
    for block in model.transformer["h"]:
        own, block.attention = block.attention, ByCore()
        block.attention.load_state_dict(own.state_dict())
    return model.eval()


def _attending_itself() -> GPT:
    model = GPT()
    model.transformer["h"] = nn.ModuleList(ItselfAttends(False) for _ in range(LAYERS))
    return model.eval()


def _compiled_inside() -> GPT:
    model = GPT().eval()
    model.transformer["h"][0].compile()
    model.transformer["h"][1].attention = torch.compile(model.transformer["h"][1].attention)
    return model


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the compiler's own
@pytest.mark.parametrize("made", [_with_core, _attending_itself, _compiled_inside])
def test_wherever_a_block_attends(made):
    """Oracle: the same weights in a model whose blocks have an attention module."""
    torch.manual_seed(3)
    model, plain = made(), GPT()
    names = {name.replace("_orig_mod.", ""): value for name, value in model.state_dict().items()}
    plain.load_state_dict(names)
    ids = torch.randint(VOCABULARY, (CONTEXTS, LENGTH), generator=torch.Generator().manual_seed(2))
    corpus = Corpus.from_ids(ids)
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
