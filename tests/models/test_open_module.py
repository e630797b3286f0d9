"""Modules of one's own, opened, surveyed and trained; what `open_module` is told. Oracle: their own arithmetic."""

from __future__ import annotations

import copy
import inspect

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
    entropy,
    gpt_of,
    named_weights,
    seeded,
    token_ids,
    traces,
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


class _Length:
    def __len__(self) -> int:
        return VOCABULARY


def _broken(module: nn.Module, ids: Tensor) -> Tensor:
    raise ZeroDivisionError("division by zero")


@pytest.mark.parametrize(
    ("wrong", "line"),
    [
        ({"vocabulary": None}, "say how many token ids there are, vocabulary=…"),
        ({"vocabulary": 0}, "vocabulary is 0: give a whole number of tokens, 1 or more"),
        ({"vocabulary": "50"}, "vocabulary is '50': give a whole number"),
        ({"longest": -1}, "longest is -1: give a whole number"),
        ({"forward": 3}, "forward is 3: give a function"),
        ({"forward": _broken}, "GPT cannot run on contexts of 3 tokens: ZeroDivisionError: division by zero"),
        ({"tokenizer": _Length()}, "the tokenizer, _Length, cannot be called"),
        ({"image": (3, 4, 4)}, "a module reads tokens or images"),
        ({"blocks": 3}, "blocks is int: give the name of their list"),
        ({"blocks": nn.ModuleList()}, "blocks is ModuleList: give the name of their list"),
        ({"blocks": []}, "blocks is list: give the name of their list"),
        ({"blocks": "no"}, "GPT has no module for blocks=['no']"),
        (
            {"attention": "self_attn"},
            "GPT: nothing that attends is called attention='self_attn'; its attention modules are called attention",
        ),
        ({"module": nn.Linear(3, 3)}, "Linear cannot run on contexts of 3 tokens: RuntimeError: "),
        ({"module": nn.Embedding(VOCABULARY, 3)}, "Embedding computes no attention that could be read"),
    ],
)
def test_what_cannot_be_opened_is_said_in_a_line(wrong, line):
    with pytest.raises(UsageError) as raised:
        # Where the tests check types, they would refuse some of these first.
        inspect.unwrap(open_module)(**{"module": GPT(), "vocabulary": VOCABULARY, **wrong})
    assert str(raised.value).startswith(line)
    assert "\n" not in str(raised.value)


def test_what_is_no_model_of_transformers_or_holds_no_numbers_is_refused():
    with pytest.raises(UsageError, match=r"^GPT"):
        open_model(GPT())
    with pytest.raises(UsageError, match=r"^GPT is a module of its own, and this needs a model of"):
        _ = open_module(GPT(), vocabulary=VOCABULARY).hf
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
