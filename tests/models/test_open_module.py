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
    opened,
    seeded,
    surveyed,
    token_ids,
    traces,
)
from theodolite import Corpus, constituents, find_outliers, open_model, open_module, survey, trace_sinks
from theodolite.corpus.images import TransformedImages
from theodolite.errors import UsageError, WorkError
from theodolite.evaluate.perplexity import next_token_losses
from theodolite.models import image_reader
from theodolite.train.locater import Locater
from theodolite.train.monitor import GeometryMonitor


@pytest.mark.parametrize("by_hand", [False, True])
def test_a_gpt_of_ones_own(by_hand):
    gpt = seeded(GPT(by_hand)).train()
    model, corpus = opened(gpt, longest=LONGEST), Corpus.from_ids(token_ids())
    assert repr(model) == "OpenModel(GPT: GPT, 2 blocks × 3 heads × width 24, float32 on cpu)"
    assert (model.causal, model.longest, model.vocabulary, model.tokenizer) == (
        True,
        LONGEST,
        VOCABULARY,
        None,
    )
    run = survey(model, corpus)
    assert gpt.training
    assert not any(parameter.grad is not None for parameter in gpt.parameters())
    check_heads(run, gpt.blocks, gpt.embedded(token_ids()))
    described = run.provenance["model"]
    assert (described["weights"], described["architecture"], described["id"]) == ("in memory", "GPT", "GPT")
    with torch.no_grad():
        own = gpt.head.bias.clone()
        gpt.head.bias += 1.0
        assert model.weights().sha256 != described["sha256"]
        gpt.head.bias.copy_(own)
        assert model.weights().sha256 == described["sha256"]
        losses = next_token_losses(gpt(token_ids())[0], token_ids())
    assert set(run.heads["spectrum_of"]) == {"projection"}
    assert run.provenance["constituents_refused"] == {}
    weights, attention = model.head_weights(1), gpt.blocks[1].attention
    torch.testing.assert_close([weights.w_q, weights.w_k, weights.w_v], named_weights(attention))
    output = attention.out.weight.detach().double().T
    torch.testing.assert_close(model.output_weights(1).flatten(0, 1), output)
    torch.testing.assert_close(next_token_losses(model.logits(token_ids()), token_ids()), losses)
    assert set(trace_sinks(model, corpus).heads["layer"]) <= set(range(LAYERS))
    assert len(find_outliers(model, corpus).layers) == LAYERS + 1


def test_a_copy_of_an_opened_model_is_a_model_of_its_own(checkpoint):
    """Oracle: what each computes with its own weights."""
    for model in (opened(seeded(GPT())), open_model(), open_model(checkpoint("bart"))):
        copied = copy.deepcopy(model)
        for parameter in copied.root.parameters():
            parameter.data.mul_(1.5)
        assert copied.source.attention == model.source.attention
        corpus = Corpus.from_ids(token_ids() % model.vocabulary)
        runs = [survey(of, corpus).heads["entropy"] for of in (model, copied)]
        assert (runs[0] - runs[1]).abs().max() > 1e-3


class Pair(nn.ModuleList):
    """No module that runs: an attention and a linear map."""

    def __call__(self, x: Tensor) -> Tensor:
        x = x + self[0](x)
        return x + self[1](x)


def test_blocks_that_are_pairs_of_modules_are_refused():
    pairs = (Pair([Attention(True), nn.Linear(WIDTH, WIDTH)]) for _ in range(LAYERS))
    module = seeded(nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), *pairs))
    with pytest.raises(UsageError, match="attends outside of blocks that are modules"):
        opened(module)


def test_an_encoder_of_images_of_ones_own(tmp_path):
    Image = pytest.importorskip("PIL.Image")
    generator = np.random.default_rng(0)
    for number in range(CONTEXTS):
        pixels = generator.integers(0, 255, (12, 16, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{number}.png")
    vit = seeded(ViT())
    model = open_module(vit, image=(3, 12, 16))

    def corpus_of(patch: int) -> Corpus:
        def read(image):
            return torch.from_numpy(np.array(image)).movedim(-1, 0) / 255

        return Corpus.from_path(tmp_path, TransformedImages(read, (patch, patch)), None)

    corpus = corpus_of(4)
    run = survey(model, corpus)
    check_heads(run, vit.blocks, vit.embedded(corpus.inputs(slice(0, CONTEXTS))))
    assert run.provenance["corpus"]["grid"] == {"rows": 3, "columns": 4, "before": ["[CLS]"]}
    words = r"ViT is a module of its own, .*give TransformedImages\(transform, patch"
    with pytest.raises(UsageError, match=words):
        image_reader(model)
    words = "makes 13 tokens of an image of 12 × 16 pixels, not the 3 of its grid"
    with pytest.raises(UsageError, match=words):
        survey(model, corpus_of(8))


def test_blocks_and_a_forward_can_be_said():
    gpt = seeded(GPT())
    for blocks in ("transformer.h", ["transformer.h.0", "transformer.h.1"]):
        assert opened(gpt, blocks=blocks).structure.blocks == tuple(gpt.blocks)
    by_forward = opened(gpt, forward=lambda module, ids: module(ids)[0][:, -1:])
    with pytest.raises(UsageError, match="GPT gives no logits"):
        by_forward.logits(token_ids())
    surveyed(by_forward)


def _broken(module: nn.Module, ids: Tensor) -> Tensor:
    raise ValueError("give a mask, too")


class MoreKeys(nn.Module):
    """Attends to a bias besides."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, add_bias_kv=True, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(x, x, x, need_weights=False)[0]


CALLED = (
    "GPT: nothing that attends is called attention='self_attn'; its attention modules are called attention"
)


@pytest.mark.parametrize(
    ("wrong", "line"),
    [
        ({"vocabulary": None}, "say how many token ids there are, vocabulary=…"),
        ({"vocabulary": 0}, "GPT cannot run on a few tokens: "),
        ({"forward": _broken}, "GPT cannot run on a few tokens: give a mask, too"),
        ({"image": (3, 4, 4)}, "a module reads tokens or images"),
        ({"blocks": "no"}, "GPT has no module for blocks=['no']"),
        ({"attention": "self_attn"}, CALLED),
        ({"module": nn.Linear(3, 3)}, "Linear cannot run on contexts of 3 tokens: RuntimeError: "),
        ({"module": nn.Embedding(VOCABULARY, 3)}, "Embedding computes no attention that could be read"),
        ({"module": GPT(block=MoreKeys).eval()}, "GPT has more or fewer queries than keys"),
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
        _ = opened(GPT()).hf
    broken = GPT()
    broken.head.weight.data[0, 0] = torch.nan
    with pytest.raises(WorkError, match=r"tensor head\.weight holds NaN"):
        opened(broken)


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
    model = opened(gpt)
    survey(model, Corpus.random_tokens(VOCABULARY, 16, 4))
    for length in (20, 40):
        words = rf"layer 0 .*: to {length} tokens it attends otherwise than to a few"
        with pytest.raises(WorkError, match=words):
            survey(model, Corpus.random_tokens(VOCABULARY, length, 4))


def test_a_model_of_transformers_in_memory_is_the_one_on_disk(checkpoint):
    """Oracle: the same checkpoint opened from its folder."""
    hf, corpus = checkpoints.build("llama3"), Corpus.random_tokens(checkpoints.VOCABULARY, 16, 8)
    memory = survey(open_model(hf, tokenizer=checkpoints.byte_tokenizer()), corpus)
    disk = survey(open_model(checkpoint("llama3")), corpus)
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


def _compiled_inside() -> GPT:
    model = GPT()
    model.blocks[0].compile()
    model.blocks[1].attention = torch.compile(model.blocks[1].attention)
    return model


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the compiler's own
@pytest.mark.parametrize("made", [lambda: gpt_of(ByCore), lambda: GPT(block=ItselfAttends), _compiled_inside])
def test_wherever_a_block_attends(made):
    """Oracle: the same weights in a model whose blocks have an attention module."""
    torch.manual_seed(3)
    model, plain = made().eval(), GPT().eval()
    plain.load_state_dict({name.replace("_orig_mod.", ""): of for name, of in model.state_dict().items()})
    run, expected = surveyed(model), surveyed(plain)
    columns = ["entropy", "sink_first", "previous_token"]
    if not isinstance(model.blocks[0], ItselfAttends):  # whose norm is between the stream and its queries
        columns.append("frobenius_squared")
        np.testing.assert_allclose(run.heads["share_position"], expected.heads["share_position"], rtol=1e-4)
    np.testing.assert_allclose(run.heads[columns], expected.heads[columns], rtol=1e-6)
    np.testing.assert_allclose(run.layers["norm"], expected.layers["norm"], rtol=1e-6)


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
    for blocks, words in (
        (None, 'pool is not inside a list of blocks: say where they are, blocks="blocks"'),
        (["patches"], r"nothing attends in blocks=\['patches'\]: name those"),
    ):
        with pytest.raises(UsageError, match=words):
            open_module(vit, image=(3, 12, 16), blocks=blocks)


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
    """Oracle: the weights that PyTorch's own attention gives for what enters it. Keys of a memory have no W_k."""
    decoder = seeded(Decoder()).eval()
    with pytest.raises(UsageError, match=r"attends twice \(decoder\.layers\.0\.self_attn, then .*multihead"):
        opened(decoder)
    given, layer = [], getattr(decoder.decoder.layers[0], kind)
    hook = layer.register_forward_pre_hook(lambda _, *call: given.append(call), with_kwargs=True)
    with torch.no_grad():
        decoder(token_ids())
        hook.remove()
        ((args, kwargs),) = given
        weights = layer(*args, **{**kwargs, "need_weights": True, "average_attn_weights": False})[1]
    heads = surveyed(decoder, attention=kind).heads
    first = heads[heads["layer"] == 0]["entropy"].tolist()
    assert first == pytest.approx(entropy(weights).tolist(), rel=1e-5)
    assert set(heads["spectrum_of"]) == {"projection" if kind == "self_attn" else "none"}


def test_contexts_longer_than_the_positions_are_refused_in_a_line():
    ids = torch.randint(VOCABULARY, (4, LONGEST + 8), generator=torch.Generator().manual_seed(0))
    with pytest.raises(UsageError, match=f"GPT cannot run on contexts of {LONGEST + 8} tokens: IndexError"):
        survey(opened(GPT()), Corpus.from_ids(ids))


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
    heads = surveyed(gpt).heads.query("layer == 0")
    assert heads["trace"].tolist() == pytest.approx(traces(gpt.blocks[0].attention), rel=1e-4, abs=1e-5)
    assert heads.filter(like="share_").notna().all(axis=None)


def test_a_penalty_is_computed_under_another_default_device():
    """Oracle: the same under the CPU."""
    penalty = Locater(opened(seeded(GPT())), 1e-3, 1e-2)
    expected = penalty()
    with torch.device("meta"):
        assert penalty().item() == expected.item()


class MixedGPT(GPT):
    """Attends in bfloat16; its stream is in float32."""

    def forward(self, ids: Tensor) -> tuple[Tensor, None]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().forward(ids)


def _entering(model: nn.Module, module: nn.Module) -> Tensor:
    given: list[Tensor] = []
    hook = module.register_forward_pre_hook(lambda _, args: given.append(args[0].detach().double()))
    with torch.no_grad():
        model(token_ids())
    hook.remove()
    return given[0]


@pytest.mark.parametrize("by_hand", [False, True])
def test_what_measures_is_not_cast_where_a_module_switches_autocast_on(by_hand):
    """Oracle: sums over what its modules are given, in plain float64."""
    gpt = seeded(MixedGPT(by_hand)).eval()
    block = gpt.blocks[0]
    rows, stream = _entering(gpt, block.attention)[:, 1:].flatten(0, 1), _entering(gpt, block)
    model = opened(gpt)
    run = surveyed(model)
    covariance = (rows - rows.mean(0)).T @ (rows - rows.mean(0)) / len(rows)
    w_q, w_k, _ = named_weights(block.attention)
    trace = (w_q @ w_k.mT @ covariance).diagonal(0, -2, -1).sum(-1)
    assert run.heads.query("layer == 0")["trace_data"].tolist() == pytest.approx(trace.tolist(), rel=1e-5)
    norm = stream[:, 1:].norm(dim=-1).mean().item()
    assert run.layers["norm"][0] == pytest.approx(norm, rel=1e-6)
    monitored = GeometryMonitor(model, token_ids(), every=1)(0)
    assert monitored["entropy_mean"] == pytest.approx(run.heads["entropy"].mean(), rel=1e-5)


def test_a_module_that_switches_autocast_on_attends_as_it_is_written():
    """Logits of parts, in float64, sum to those of the queries and keys that it has in bfloat16."""
    gpt = seeded(MixedGPT()).eval()
    attention = gpt.blocks[0].attention
    read = _entering(gpt, attention).float()
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        q, k, _ = attention.qkv(read).chunk(3, -1)
    assert q.dtype == torch.bfloat16
    q, k = (t.double().unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in (q, k))
    expected = q @ k.mT / (WIDTH // HEADS) ** 0.5
    seen = torch.ones(expected.shape[-2:]).tril().bool()
    error = (constituents(opened(gpt), token_ids(), 0).total - expected)[..., seen].abs().max()
    assert (error <= 1e-6 * expected.abs().max()).item()
