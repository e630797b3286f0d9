"""W_q, W_k, W_v and W_O where they are hard to read, and which parameters hold them; families: `test_every_family.py`.

Oracles: the parameters by name; modules whose rows are put where a test knows; autograd; norms that are modules.
"""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from tests import checkpoints
from tests.models.modules import (
    GPT,
    HEADS,
    WIDTH,
    Attention,
    Block,
    gpt_of,
    named_weights,
    opened,
    seeded,
    surveyed,
    token_ids,
)
from tests.models.test_every_family import output_module
from theodolite import constituents
from theodolite.errors import UsageError, WorkError
from theodolite.models import OpenModel, open_model
from theodolite.models.weights import weight_map
from theodolite.models.weights.norms import FrozenNorm
from theodolite.models.weights.weight_map import Projections, find_projections
from theodolite.train.locater import Locater

HEAD_WIDTH = WIDTH // HEADS
SCALE, MEAN = 1e-3, 1e-2


def _by_head(linear: nn.Linear, heads: int, repeated: int = 1) -> Tensor:
    """(heads, in, head_width) in float64."""
    return linear.weight.detach().double().unflatten(0, (heads, -1)).mT.repeat_interleave(repeated, dim=0)


class _Grouped(nn.Module):
    """Normalises queries and keys, and repeats grouped keys itself, as LitGPT does."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(16, 16), nn.Linear(16, 8), nn.Linear(16, 8)
        self.q_norm, self.k_norm = nn.RMSNorm(4), nn.RMSNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (linear(x).unflatten(-1, (-1, 4)).transpose(1, 2) for linear in (self.q, self.k, self.v))
        k, v = (tensor.repeat_interleave(2, dim=1) for tensor in (self.k_norm(k), v))
        y = functional.scaled_dot_product_attention(self.q_norm(q), k, v, is_causal=True)
        return x + y.transpose(1, 2).flatten(2)


def test_norms_before_repeated_keys_are_found():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Embedding(20, 16), *(_Grouped() for _ in range(2)))
    weights, block = opened(module, vocabulary=20).head_weights(1), module[2]
    assert weights.projection == "projection before norm"
    expected = [_by_head(block.q, 4), _by_head(block.k, 2, 2), _by_head(block.v, 2, 2)]
    torch.testing.assert_close([weights.w_q, weights.w_k, weights.w_v], expected, rtol=0, atol=1e-12)


def test_a_mask_that_float64_overflows():
    """XGLM's, of the lowest number of its dtype in the default dtype."""
    model = open_model(transformers.XGLMForCausalLM(checkpoints.build("xglm").config).eval())
    weights, attention = model.head_weights(1), model.hf.model.layers[1].self_attn
    assert weights.projection == "projection"
    expected = [_by_head(attention.q_proj, 4), _by_head(attention.k_proj, 4)]
    torch.testing.assert_close([weights.w_q, weights.w_k], expected, rtol=0, atol=1e-7)


def test_attention_that_takes_no_single_token():
    """DINOv3 rotates its patches, and splits them off the tokens before them."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    config = transformers.DINOv3ViTConfig(**sizes, image_size=16, patch_size=8, num_register_tokens=2)
    hf = transformers.DINOv3ViTModel(config).eval()
    for parameter in hf.parameters():
        nn.init.normal_(parameter, std=0.2, generator=torch.Generator().manual_seed(0))
    model = open_model(hf)
    for layer in range(2):
        weight = model.structure.attention_at(layer).o_proj.weight.detach().double()
        torch.testing.assert_close(model.output_weights(layer), weight.T.reshape(4, -1, 32))


@pytest.mark.parametrize("family", ["xglm", "ibert"])
def test_an_output_that_takes_no_other_heads_is_named(family):
    """XGLM's mask overflows in float64; I-BERT's modules return pairs."""
    with pytest.raises(WorkError, match="layer 1: its W_O cannot be read: "):
        open_model(checkpoints.build(family)).output_weights(1)


def test_weights_are_kept_until_the_parameters_change(anew):
    """Oracle: the parameters by name, before and after an optimizer's kind of step."""
    model = anew("bert")
    first = model.output_weights(1)
    assert model.output_weights(1) is first
    with torch.no_grad():
        output_module("bert", model.hf, 1).weight.mul_(2)
    assert torch.equal(model.output_weights(1), 2 * first)
    tripled = {name: 3 * value for name, value in model.hf.state_dict().items()}
    model.hf.load_state_dict(tripled, assign=True)
    torch.testing.assert_close(model.output_weights(1), 6 * first, rtol=1e-6, atol=0)


class _Gated(nn.Sequential):
    def forward(self, heads: Tensor) -> Tensor:
        return super().forward(heads * torch.sigmoid(heads))


def _gate_of_the_hidden_states(attention: nn.Module) -> None:
    """Affine in the heads for each hidden state, but with another matrix for each."""
    attention.register_forward_hook(
        lambda module, args, kwargs, output: (output[0] * (1 + kwargs["hidden_states"].tanh()), output[1]),
        with_kwargs=True,
    )


@pytest.mark.parametrize(
    "gated",
    [lambda attention: setattr(attention, "o_proj", _Gated(attention.o_proj)), _gate_of_the_hidden_states],
)
def test_a_gate_is_refused_by_name_and_no_matrix_is_the_identity(gated, anew):
    """A pre-norm block whose attention returns its heads as they are has an identity, for nothing takes it on."""
    model = anew("llama2")
    gated(model.hf.model.layers[1].self_attn)
    model.hf.model.layers[0].self_attn.o_proj = nn.Identity()
    assert torch.equal(model.output_weights(0).flatten(0, 1), torch.eye(32, dtype=torch.float64))
    said = r"layer 1: what leaves model\.layers\.1\.self_attn is no fixed affine .*a gate or a norm"
    with pytest.raises(WorkError, match=said):
        model.output_weights(1)


class RMS(nn.Module):
    """As a module, by hand."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def rotated(x: Tensor) -> Tensor:
    """By an angle a position, in one plane of each pair."""
    first, second = x.chunk(2, -1)
    angle = torch.arange(x.shape[-2], dtype=x.dtype)[:, None] / torch.arange(1, HEAD_WIDTH // 2 + 1)
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], -1)


class NormalisedAttention(Attention):
    """Whose queries and keys are normalised and then rotated."""

    def __init__(self, by_module: bool = False) -> None:
        super().__init__()
        self.by_module = by_module
        self.query_norm, self.key_norm = RMS(), nn.RMSNorm(HEAD_WIDTH, 1e-6)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.by_module:
            q, k = self.query_norm(q), self.key_norm(k)
        else:
            q = functional.rms_norm(q, (HEAD_WIDTH,), eps=1e-6)
            k = functional.rms_norm(k, (HEAD_WIDTH,), self.key_norm.weight, 1e-6)
        return super().attend(rotated(q), rotated(k), v)


class NormalisedBlock(Block):
    """With norms of the stream in the same way."""

    def __init__(self, by_module: bool) -> None:
        super().__init__()
        self.attention = NormalisedAttention(by_module)
        self.norm = RMS() if by_module else nn.Identity()
        self.by_module = by_module

    def forward(self, x: Tensor) -> Tensor:
        entering = self.norm(x) if self.by_module else functional.rms_norm(x, (WIDTH,), eps=1e-6)
        x = x + self.attention(entering)
        return x + self.mlp(x)


def test_norms_that_are_functions_are_norms():
    """Oracle: the same model with norms that are modules, and its weights by name."""
    functions, modules = (
        opened(seeded(GPT(block=lambda by=by_module: NormalisedBlock(by)))) for by_module in (False, True)
    )
    functions.root.load_state_dict(modules.root.state_dict())
    run, expected = surveyed(functions), surveyed(modules)
    assert run.provenance["constituents_refused"] == {}
    assert set(run.heads["spectrum_of"]) == {"projection before norm"}
    for column in expected.heads.select_dtypes("number"):
        own, other = (torch.tensor(of.heads[column].to_numpy(float)) for of in (run, expected))
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-5, equal_nan=True, msg=column)
    w_q = named_weights(functions.root.blocks[1].attention)[0]
    torch.testing.assert_close(functions.head_weights(1).w_q, w_q)
    parts = [constituents(model, token_ids(), 1).logits for model in (functions, modules)]
    torch.testing.assert_close(*parts, rtol=1e-4, atol=1e-4)
    assert not any("function_norm" in name for name, _ in functions.root.named_modules())


@pytest.mark.parametrize("function", ["normalize", "layer_norm"])
def test_other_functions(function):
    """And W_q of a weight that is normalised by such a function is the normalised one."""

    class Other(NormalisedAttention):
        def split(self, x):
            qkv = functional.linear(x, functional.normalize(self.qkv.weight, dim=0), self.qkv.bias)
            return [t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in qkv.chunk(3, -1)]

        def attend(self, q, k, v):
            if function == "normalize":
                q, k = 3.0 * functional.normalize(q, dim=-1), functional.normalize(k, dim=-1)
            else:
                q, k = (functional.layer_norm(t, (HEAD_WIDTH,), self.key_norm.weight) for t in (q, k))
            return Attention.attend(self, q, k, v)

    model = opened(gpt_of(Other))
    own = functional.normalize(model.root.blocks[0].attention.qkv.weight.detach().double(), dim=0)
    weights = model.head_weights(0)
    assert weights.projection == "projection before norm"
    torch.testing.assert_close(weights.w_k, own.chunk(3)[1].unflatten(0, (HEADS, -1)).mT)
    parts = constituents(model, token_ids(), 0)
    torch.testing.assert_close(parts.logits.sum((2, 3)), parts.total, rtol=1e-4, atol=1e-4)


def test_a_vector_of_zeros_has_no_direction():
    given, norm = torch.zeros(1, 2, 9, dtype=torch.float64), nn.LayerNorm(9).double().requires_grad_(False)
    nn.init.normal_(norm.bias)
    torch.testing.assert_close(FrozenNorm(norm, given, norm(given), "LayerNorm")(given), norm(given))


class ByHead(nn.Module):
    """Weights of three dimensions; keys that all heads share, the other way around; or queries of two products."""

    def __init__(self, low_rank: bool = False) -> None:
        super().__init__()
        self.w_q = nn.Parameter(torch.randn(HEADS, WIDTH, HEAD_WIDTH))
        self.w_k = nn.Parameter(torch.randn(1, HEAD_WIDTH, WIDTH))
        self.w_v, self.low_rank = nn.Linear(WIDTH, WIDTH), low_rank

    def forward(self, x: Tensor) -> Tensor:
        q, k = torch.einsum("btd,hdw->bhtw", x, self.w_q), torch.einsum("btd,hwd->bhtw", x, self.w_k)
        v = self.w_v(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        q = q @ self.w_k[0, :, :HEAD_WIDTH] if self.low_rank else q
        y = functional.scaled_dot_product_attention(q, k.expand_as(q), v, is_causal=True)
        return y.transpose(1, 2).flatten(2)

    def factors(self) -> tuple[Tensor, Tensor]:
        return self.w_q, self.w_k.mT


class Fused(Attention):
    def factors(self) -> list[Tensor]:
        w_q, w_k, _ = self.qkv.weight.split(WIDTH)
        return [w_q.unflatten(0, (HEADS, -1)).mT, w_k.unflatten(0, (HEADS, -1)).mT]


def _normed() -> nn.Module:
    attention = Fused()
    nn.utils.parametrizations.weight_norm(attention.qkv)
    return attention


def _penalty(blocks: nn.ModuleList) -> Tensor:
    total = torch.zeros(())
    for block in blocks:
        w_q, w_k = block.attention.factors()
        for query, key in zip(w_q, w_k.expand_as(w_q), strict=True):
            matrix = query @ key.T
            total = total + SCALE * matrix.square().sum() + MEAN * (matrix.trace() - 1) ** 2
    return total


@pytest.mark.parametrize("attention", [Fused, ByHead])
def test_fused_tensors_and_those_of_three_dimensions_are_penalised(attention):
    """Oracle: the penalty's formula of the module's own tensors, and its gradient by autograd."""
    gpt = gpt_of(attention)
    locater = Locater(opened(gpt), SCALE, MEAN)
    other = copy.deepcopy(gpt)
    for parameter in (*gpt.parameters(), *other.parameters()):
        parameter.data.mul_(1.1)  # what is trained afterwards counts
    expected = _penalty(other.blocks)
    assert locater().item() == pytest.approx(expected.item(), rel=1e-5)
    locater().backward()
    expected.backward()
    for mine, theirs in zip(gpt.parameters(), other.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None)
        if mine.grad is not None:
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-6)
    assert {id(p) for p in locater.parameters} == {id(p) for p in gpt.parameters() if p.grad is not None}


@pytest.mark.parametrize("attention", [lambda: ByHead(low_rank=True), _normed])
def test_products_of_two_matrices_and_computed_weights_are_refused(attention):
    model = opened(gpt_of(attention))
    with pytest.raises(UsageError, match="its queries and keys are not its input times one weight matrix"):
        Locater(model, SCALE, MEAN)


class Shuffled(Attention):
    """Features of queries, keys and values in any rows of a matrix of thousands, and twice as large."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 2500)
        self.order = torch.randperm(2500)[: 3 * WIDTH].view(3, HEADS, -1)

    def split(self, x: Tensor) -> list[Tensor]:
        return [2 * self.qkv(x)[..., rows].transpose(1, 2) for rows in self.order]


def _projections(model: OpenModel, layers: list[int]) -> list[Projections]:
    with torch.no_grad():
        return find_projections(model.root, model.structure, model.calls, layers)


def test_rows_are_found_wherever_they_are():
    """Oracle: the order in which the module takes them; its matrix and bias."""
    model = opened(gpt_of(Shuffled))
    (layer,), weights = _projections(model, [1]), model.head_weights(1)
    module = model.root.blocks[1].attention
    for part, found in enumerate((layer.query, layer.key, layer.value)):
        assert torch.equal(found.rows.rows, module.order[part])
        torch.testing.assert_close(found.rows.factor, torch.full((HEADS, HEAD_WIDTH), 2.0).double())
    weight, bias = (2 * parameter.detach().double() for parameter in module.qkv.parameters())
    torch.testing.assert_close(weights.w_k, weight[module.order[1]].mT, rtol=1e-13, atol=0)
    torch.testing.assert_close(weights.b_v, bias[module.order[2]])


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
    model, searched, search = open_model(hf), [], weight_map._search
    layer_of = {block.attn: layer for layer, block in enumerate(hf.transformer.h)}

    def searching(attention, *rest):
        searched.append(layer_of[attention])
        return search(attention, *rest)

    def factors(layers):
        searched.clear()
        return [w.detach() for layer in _projections(model, layers) for w in layer.factors()]

    monkeypatch.setattr(weight_map, "_search", searching)
    for swapped, expected in (([], [0]), ([1], [0, 1, 2]), ([2], [0, 2])):
        for layer, block in enumerate(hf.transformer.h):
            block.attn.c_attn.swaps = layer in swapped
        alone = [w for layer in range(3) for w in factors([layer])]
        together = factors([0, 1, 2])
        assert searched == expected  # the last search of a kind is what the next layer of it is tried with
        assert all(map(torch.equal, together, alone))
