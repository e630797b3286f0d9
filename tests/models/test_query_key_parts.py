"""Constituents against the logits of transformers' own eager attention, and against splits written by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests import checkpoints
from tests.models.test_every_family import check_constituents
from theodolite.errors import UsageError, WorkError
from theodolite.logits.constituents import constituents
from theodolite.models import open_model
from theodolite.models.calls import copy_in_dtype
from theodolite.theory.decomposition import Decomposition, decompose

LENGTH = 20


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    return torch.randint(checkpoints.VOCABULARY, (3, LENGTH), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("kind", ["olmo2", "deepseek_v3", "gemma3_text", "cohere"])
def test_norms_inside_attention_are_frozen(kind):
    """Oracle: the softmax's arguments. Norms over the whole width, between projections, a head, one gain a head."""
    changes = {"cohere": {"use_qk_norm": True}, "deepseek_v3": {"first_k_dense_replace": 4}}.get(kind, {})
    check_constituents(kind, open_model(checkpoints.build(kind, **changes)))


def test_half_precision_keeps_its_own_logits(checkpoint, ids):
    """The parts sum to the very queries and keys of a bfloat16 model; its rounding is said and is in resid."""
    model = open_model(checkpoint("qwen3"), dtype="bfloat16")
    split = constituents(model, ids, 1)
    own = split.inputs.query.double() @ split.inputs.key.double().repeat_interleave(2, 1).transpose(-1, -2)
    torch.testing.assert_close(split.logits.sum((2, 3)), own * split.inputs.scaling)
    assert 1e-4 < split.rounding < 3e-2


def _parts(hidden: torch.Tensor) -> dict[str, torch.Tensor]:
    """mean, pos, ctx, resid of hidden states, position 0 apart, as the survey's means are."""
    mean = hidden[:, 1:].mean((0, 1))
    pos = hidden.mean(0) - mean
    ctx = (hidden - mean - pos)[:, 1:].mean(1)[:, None]
    named = {"mean": mean.expand_as(hidden), "pos": pos.expand_as(hidden), "ctx": ctx.expand_as(hidden)}
    return named | {"resid": hidden - mean - pos - ctx}


def _rotated(x: torch.Tensor) -> torch.Tensor:
    """RoPE on (C, heads, T, width), base 10000, halves paired."""
    half = x.shape[-1] // 2
    frequency = 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = torch.arange(LENGTH, dtype=torch.float64)[:, None] * frequency
    turned = torch.cat([-x[..., half:], x[..., :half]], dim=-1)
    return x * angle.cos().repeat(1, 2) + turned * angle.sin().repeat(1, 2)


@pytest.mark.parametrize("family", ["llama2", "qwen3"])
def test_each_part_of_rotary_families(family, checkpoint, ids):
    """Oracle: RMSNorm, projection, (Qwen 3) the norm of each head, and rotation, written out."""
    model = open_model(checkpoint(family), dtype="float64")
    layer = 2
    with torch.no_grad():
        hidden = model.hf(input_ids=ids, output_hidden_states=True).hidden_states[layer]
    state = model.hf.state_dict()
    prefix = f"model.layers.{layer}."
    gain = state[prefix + "input_layernorm.weight"]
    # input_layernorm has no bias, and neither have the projections of these: the part "bias" is zero.
    normed = {
        name: gain * part * (hidden.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
        for name, part in _parts(hidden).items()
    }
    normed["bias"] = torch.zeros_like(hidden)
    sides = []
    for side in ("q", "k"):
        weight = state[f"{prefix}self_attn.{side}_proj.weight"]
        width = model.head_width
        image = {n: (x @ weight.T).unflatten(-1, (-1, width)).transpose(1, 2) for n, x in normed.items()}
        if family == "qwen3":
            whole = sum(image.values())
            scale = (whole.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
            own = state[f"{prefix}self_attn.{side}_norm.weight"]
            image = {name: own * x * scale for name, x in image.items()}
        sides.append({name: _rotated(x) for name, x in image.items()})
    split = constituents(model, ids, layer)
    # Norms and rotation of these families compute in float32: that is the rounding, and it is all in resid.
    for a, name in enumerate(split.names):
        key = sides[1][name].repeat_interleave(4 // sides[1][name].shape[1], 1)
        torch.testing.assert_close(split.query[a], sides[0][name], rtol=1e-5, atol=2e-6)
        torch.testing.assert_close(split.key[a], key, rtol=1e-5, atol=2e-6)


def test_one_context_leads_with_heads(opened, ids):
    model = opened("llama3")
    whole = constituents(model, ids, 1)
    zeros = decompose(torch.zeros(2, LENGTH, 32))
    given = Decomposition(zeros.mean, zeros.pos, zeros.ctx, zeros.resid)
    one, also = (constituents(model, x, 1, decomposition=given) for x in (ids[0], ids[:1]))
    assert whole.logits.shape == (3, 4, 5, 5, LENGTH, LENGTH)
    assert one.logits.shape == (4, 5, 5, LENGTH, LENGTH)
    assert one.logits_of(2).shape == (5, 5, LENGTH, LENGTH)
    assert one.total.shape == one.additive.shape == one.attention.shape == (4, LENGTH, LENGTH)
    assert torch.equal(one.logits, also.logits)
    torch.testing.assert_close(one.total, whole.total[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(one.logits_of(3), one.logits[3])


def test_rotations_by_complex_numbers_are_kept():
    """A buffer of them: the code of Llama's authors, and of torchtitan."""
    module = nn.Linear(2, 2)
    module.register_buffer("rotation", torch.polar(torch.ones(4), torch.arange(4.0)))
    copied = copy_in_dtype(module, torch.float64)
    assert torch.equal(copied.rotation, module.rotation)
    assert copied.weight.dtype == torch.float64


class _Squashed(nn.Module):
    """No norm: it bends."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.norm(x))


def test_what_is_not_affine_is_refused_by_the_layers_name(anew, ids):
    model = anew("gpt2")
    model.hf.transformer.h[1].ln_1 = _Squashed(model.hf.transformer.h[1].ln_1)
    constituents(model, ids, 0)
    words = r"layer 1 \(transformer.h.1.attn\): its logits cannot be split: _Squashed"
    with pytest.raises(WorkError, match=words):
        constituents(model, ids, 1)
    model.hf.transformer.h[2].attn.c_attn = nn.Sequential(model.hf.transformer.h[2].attn.c_attn, nn.Tanh())
    with pytest.raises(WorkError, match=r"layer 2 .* no affine function of its residual stream"):
        constituents(model, ids, 2)


@pytest.mark.parametrize(
    ("family", "ids", "layer", "message"),
    [
        ("vit", torch.full((2, 5), 0), 0, "reads pixel_values"),
        ("gpt2", torch.full((2, 5), 0), 3, "layers 0 to 2"),
        ("gpt2", torch.full((5,), 0), 0, "one context cannot be decomposed by itself"),
        ("gpt2", torch.full((2, 2, 5), 0), 0, "give whole numbers"),
        ("gpt2", torch.full((2, 5), 300), 0, "token id 300 .*does not fit the 300 tokens"),
        ("gpt2", torch.full((2, 200), 0), 0, "more than the 128"),
    ],
)
def test_calls_that_cannot_be_answered(opened, family, ids, layer, message):
    with pytest.raises(UsageError, match=message):
        constituents(opened(family), ids, layer)
