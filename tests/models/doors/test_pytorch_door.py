"""Modules that attend through PyTorch's functions or by hand: what is heard is what they compute.

Oracle: each module's own attention weights, which it computes beside its output by the definition.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from theodolite.attention.inputs import AttentionInputs, attend, softmax
from theodolite.errors import UsageError
from theodolite.models.doors.pytorch import attention_not_followed
from theodolite.models.doors.taps import intervened, tapped

BATCH, HEADS, KEY_HEADS, LENGTH, HEAD_WIDTH = 3, 4, 2, 10, 8
WIDTH = HEADS * HEAD_WIDTH
LATER = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
SLOPES = -torch.tensor([0.5, 0.25, 0.125, 0.0625]).view(HEADS, 1, 1)
DISTANCE = (torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)).float()

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def _repeated(tensor: Tensor) -> Tensor:
    return tensor.repeat_interleave(HEADS // tensor.shape[1], dim=1)


DEFAULT = HEAD_WIDTH**-0.5
PADDED = torch.zeros(BATCH, 1, 1, LENGTH, dtype=torch.bool).index_fill_(3, torch.tensor([LENGTH - 1]), True)


def _folded(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """As BLOOM does: contexts and heads in one dimension, and the bias in the product."""
    query, key, value = (t.reshape(-1, LENGTH, HEAD_WIDTH) for t in (query, _repeated(key), _repeated(value)))
    bias = (SLOPES * DISTANCE).repeat(BATCH, 1, 1)
    logits = bias.baddbmm(batch1=query, batch2=key.transpose(1, 2), beta=1.0, alpha=DEFAULT)
    logits = logits.view(BATCH, HEADS, LENGTH, LENGTH) + torch.zeros(1).masked_fill(LATER, -1e9)
    weights = functional.dropout(functional.softmax(logits, dim=-1, dtype=torch.float32), 0.5, False)
    return torch.bmm(weights.view(-1, LENGTH, LENGTH), value).view(BATCH, HEADS, LENGTH, HEAD_WIDTH)


def _grouped(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """One product for the query heads that share a key head."""
    query = query.view(BATCH, KEY_HEADS, HEADS // KEY_HEADS, LENGTH, HEAD_WIDTH)
    logits = query @ key.unsqueeze(2).mT
    logits = logits.div(2.0).masked_fill(LATER, -torch.inf)
    return (logits.softmax(-1) @ value.unsqueeze(2)).view(BATCH, HEADS, LENGTH, HEAD_WIDTH)


def _by_einsum(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    query, key, value = (t.transpose(1, 2) for t in (query, _repeated(key), _repeated(value)))
    logits = torch.einsum("bqhd,bkhd->bhqk", query, key) * DEFAULT
    logits = logits - 1e30 * LATER.float()
    return torch.einsum("bhqk, bkhd -> bqhd", logits.softmax(dim=-1), value).transpose(1, 2)


def _in_place(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    logits = query @ _repeated(key).transpose(-2, -1)
    logits /= 2.0
    logits += SLOPES * DISTANCE
    logits.masked_fill_(LATER, float("-inf"))
    return nn.Softmax(dim=-1)(logits) @ _repeated(value)


def _multi_query(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    logits = (query * DEFAULT) @ key[:, :1].mT
    return torch.matmul(logits.masked_fill(LATER, -1e9).softmax(-1), value[:, :1])


def _heads_and_contexts_in_one(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """As fairseq does: never apart on the way, and the largest logit is taken off."""
    query, key, value = (
        t.permute(2, 0, 1, 3).reshape(LENGTH, BATCH * HEADS, HEAD_WIDTH).transpose(0, 1)
        for t in (DEFAULT**0.5 * query, _repeated(key) / DEFAULT**-0.5, _repeated(value))
    )
    logits = torch.bmm(query, key.transpose(1, 2)) + torch.zeros(1).masked_fill(LATER, -1e9)
    weights = (logits - logits.amax(-1, keepdim=True)).softmax(-1)
    return torch.bmm(weights, value).view(BATCH, HEADS, LENGTH, HEAD_WIDTH)


def _by_einsum_of_any(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    logits = torch.einsum("...qd,...kd->...qk", query, _repeated(key)) * DEFAULT
    logits = logits.masked_fill(LATER, -torch.inf)
    return torch.einsum("...qk,...kd->...qd", logits.softmax(dim=-1), _repeated(value))


def _of_five(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    query, key, value = (t.unflatten(1, (KEY_HEADS, -1)) for t in (query, _repeated(key), _repeated(value)))
    return functional.scaled_dot_product_attention(query, key, value, is_causal=True).flatten(1, 2)


def _of_three(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    query, key, value = (t.flatten(0, 1) for t in (query, _repeated(key), _repeated(value)))
    output = functional.scaled_dot_product_attention(query, key, value, LOW)
    return output.view(BATCH, HEADS, LENGTH, HEAD_WIDTH)


LOW = -1e4 * LATER.float()


def _flex(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    def causal(batch, head, q, k):
        return q >= k

    mask = create_block_mask(causal, None, None, LENGTH, LENGTH, device="cpu")
    return flex_attention(query, key, value, block_mask=mask, enable_gqa=True)


def _by_hand(hide: Callable[[Tensor], Tensor]) -> Attention:
    """Logits from which `hide` makes those that later keys are hidden in."""
    return lambda q, k, v: hide(q @ _repeated(k).mT * DEFAULT).softmax(-1) @ _repeated(v)


def _by(kernel: Attention, **options: object) -> Attention:
    return lambda q, k, v: kernel(q, _repeated(k), _repeated(v), **options)


SDPA = functional.scaled_dot_product_attention
BIAS = SLOPES * DISTANCE
KINDS: dict[str, tuple[Attention, float, bool]] = {
    "causal": (lambda q, k, v: SDPA(q, k, v, is_causal=True, enable_gqa=True), DEFAULT, False),
    "boolean mask": (_by(SDPA, attn_mask=~(LATER | PADDED), scale=0.3), 0.3, False),
    "added mask": (_by(SDPA, attn_mask=BIAS.masked_fill(LATER, -torch.inf)), DEFAULT, True),
    "flex": (_flex, DEFAULT, False),
    "folded": (_folded, DEFAULT, True),
    "capped": (
        _by_hand(lambda s: torch.where(LATER, torch.finfo(torch.float32).min, torch.tanh(s / 2.0) * 2.0)),
        DEFAULT,
        False,
    ),
    "grouped": (_grouped, 0.5, False),
    "einsum": (_by_einsum, DEFAULT, False),
    "in place": (_in_place, 0.5, True),
    "never apart": (_heads_and_contexts_in_one, DEFAULT, False),
    "any dimensions": (_by_einsum_of_any, DEFAULT, False),
    "five dimensions": (_of_five, DEFAULT, False),
    "three dimensions": (_of_three, DEFAULT, False),
    "low mask": (_by_hand(lambda s: s + LOW), DEFAULT, False),
    "mask of the logits' shape": (
        _by_hand(lambda s: s + torch.zeros_like(s).masked_fill(LATER, -torch.inf)),
        DEFAULT,
        False,
    ),
    "filled with what hides": (
        _by_hand(lambda s: torch.where(LATER, torch.full_like(s, -1e9), s)),
        DEFAULT,
        False,
    ),
    "multi-query": (_multi_query, DEFAULT, False),
}
"""Ways to attend: what queries and keys are multiplied by, and whether they add a bias."""


def _expected(kind: str, query: Tensor, key: Tensor) -> Tensor:
    """The weights by the definition."""
    _, scaling, biased = KINDS[kind]
    key = key[:, :1] if kind == "multi-query" else key
    logits = query.double() @ _repeated(key).double().mT * scaling + BIAS * biased
    if kind == "capped":
        logits = 2 * torch.tanh(logits / 2)
    return logits.masked_fill(LATER | PADDED if kind == "boolean mask" else LATER, -torch.inf).softmax(-1)


class _Attending(nn.Module):
    """A layer of one's own, which knows no model library."""

    def __init__(self, attention: Attention) -> None:
        super().__init__()
        self.attention = attention
        self.q = nn.Linear(WIDTH, WIDTH)
        self.kv = nn.Linear(WIDTH, 2 * KEY_HEADS * HEAD_WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def heads(self, x: Tensor) -> list[Tensor]:
        return [
            t.unflatten(-1, (-1, HEAD_WIDTH)).transpose(1, 2) for t in (self.q(x), *self.kv(x).chunk(2, -1))
        ]

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.attention(*self.heads(x)).transpose(1, 2).reshape(x.shape))


def _input() -> Tensor:
    return torch.randn(BATCH, LENGTH, WIDTH, generator=torch.Generator().manual_seed(0))


def _heard(model: nn.Module, x: Tensor) -> tuple[Tensor, list[tuple[nn.Module, AttentionInputs]]]:
    heard: list[tuple[nn.Module, AttentionInputs]] = []

    def tap(module, inputs):
        heard.append((module, inputs))
        return attend(inputs)

    with torch.no_grad(), tapped(model, tap):
        output = model(x)
    return output, heard


@torch.no_grad()
def _run(model: nn.Module, x: Tensor) -> Tensor:
    return model(x)


def in_thread(model: nn.Module, x: Tensor) -> Tensor:
    """What the model gives in another thread."""
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(_run, model, x).result()


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # flex_attention says that it is not compiled
        yield


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_heard_is_the_attention(kind):
    attention, scaling, biased = KINDS[kind]
    layer = _Attending(attention)
    model, x = nn.Sequential(nn.LayerNorm(WIDTH), layer).eval(), _input()
    with torch.no_grad():
        own = model(x)
        query, key, _ = layer.heads(model[0](x))
    output, [(owner, inputs)] = _heard(model, x)
    torch.testing.assert_close(output, own, rtol=1e-5, atol=1e-6)
    assert owner is layer
    assert inputs.query.shape[:2] == (BATCH, HEADS)
    assert (inputs.bias is not None) == biased
    # What queries and keys are multiplied by is λ, and none of W_q.
    assert inputs.scaling == pytest.approx(scaling)
    torch.testing.assert_close(inputs.query, query, rtol=1e-5, atol=1e-6)
    # What hides a key is a mask, and no bias.
    assert inputs.causal or not bool((inputs.mask & LATER).any())
    weights = softmax(inputs.logits().double(), inputs.sink)
    torch.testing.assert_close(weights, _expected(kind, query, key), rtol=1e-5, atol=1e-6)
    with torch.no_grad():
        assert torch.equal(model(x), own)  # and afterwards it is its own again


KEYS = {"key_padding_mask": PADDED[:, 0, 0]}


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize(
    ("masks", "more"),
    [
        ({"attn_mask": torch.zeros(LENGTH, LENGTH).masked_fill(LATER, -torch.inf)}, {}),
        ({"attn_mask": LATER, "is_causal": True}, {}),
        ({}, {}),
        (KEYS, {}),
        (KEYS | {"attn_mask": LATER}, {"add_zero_attn": True}),
        ({}, {"add_bias_kv": True, "kdim": WIDTH, "vdim": 2 * WIDTH}),
    ],
)
def test_multihead_attention(need_weights, batch_first, masks, more):
    """Oracle: the weights that it returns."""
    layer = nn.MultiheadAttention(WIDTH, HEADS, batch_first=batch_first, **more).eval()
    x = _input() if batch_first else _input().transpose(0, 1)
    options = masks | {"average_attn_weights": False}
    seen = []

    class Wrapped(nn.Sequential):
        def forward(self, x):
            output, weights = self[0](x, x, values, need_weights=need_weights, **options)
            seen.append(weights)
            return output

    values = x.repeat(1, 1, more.get("vdim", WIDTH) // WIDTH)
    with torch.no_grad():
        own, own_weights = layer(x, x, values, need_weights=True, **options)
    output, [(owner, inputs)] = _heard(Wrapped(layer).eval(), x)
    torch.testing.assert_close(output, own, rtol=1e-5, atol=1e-6)
    assert owner is layer
    assert (inputs.mask is None) == (not masks)
    assert inputs.bias is None
    torch.testing.assert_close(softmax(inputs.logits(), None), own_weights, rtol=1e-5, atol=1e-6)
    if need_weights:
        torch.testing.assert_close(seen[-1], own_weights)
    else:
        assert seen[-1] is None


def test_the_fast_path_of_an_encoder_is_heard():
    """Oracle: the output of the fast path, which calls no function that could be heard."""
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 64, batch_first=True)
    model = nn.TransformerEncoder(layer, 3).eval()
    x = _input()
    with torch.no_grad():
        own = model(x)
    output, heard = _heard(model, x)
    torch.testing.assert_close(output, own, rtol=1e-5, atol=1e-5)
    assert [owner for owner, _ in heard] == [layer.self_attn for layer in model.layers]


def test_a_score_mod_is_refused_by_name():
    def score_mod(score, batch, head, q, k):
        return score + 1.0

    layer = _Attending(lambda q, k, v: flex_attention(q, k, v, score_mod=score_mod, enable_gqa=True))
    with pytest.raises(UsageError, match="_Attending gives flex_attention a score_mod, which is not read"):
        _heard(layer, _input())


@pytest.mark.parametrize(
    ("operation", "attention"),
    [
        ("__setitem__", lambda logits: _overwritten(logits).softmax(-1)),
        ("__setitem__", lambda logits: _written_elsewhere(logits).softmax(-1)),
        ("clamp", lambda logits: _written_elsewhere(logits.clamp(-1, 1)).softmax(-1)),
        ("cat", lambda logits: torch.cat([logits, NOTHING], -1).softmax(-1)[..., :-1]),
        ("clamp", lambda logits: logits.clamp(-1, 1).softmax(-1)),
        ("einsum", lambda logits: torch.einsum("bhqk,hg->bgqk", logits, torch.eye(HEADS)).softmax(-1)),
        ("einsum", lambda logits: (logits + torch.einsum("bhqk,hg->bgqk", logits, TALK)).softmax(-1)),
        ("sub", lambda logits: logits.softmax(-1) - 1 / LENGTH),
        ("exp", lambda logits: logits.exp() / logits.exp().sum(-1, keepdim=True)),
        ("exp", lambda logits: (logits - logits.amax(-1, keepdim=True)).exp()),
        ("log_softmax", lambda logits: logits.log_softmax(-1).exp()),
        ("relu", lambda logits: logits.relu()),
    ],
)
def test_what_cannot_be_followed_is_named(operation, attention):
    """Logits that depend on the logits of other heads are no bias."""

    def by_hand(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attention(query @ _repeated(key).mT) @ _repeated(value)

    model = nn.Sequential(nn.LayerNorm(WIDTH), _Attending(by_hand)).eval()
    attention_not_followed()
    _, heard = _heard(model, _input())
    assert not heard
    owner, lost = attention_not_followed()
    assert (owner, lost.operation) == (model[1], operation)
    assert attention_not_followed() is None


TALK = torch.full((HEADS, HEADS), 0.1)
NOTHING = torch.zeros(BATCH, HEADS, LENGTH, 1)


def _overwritten(logits: Tensor) -> Tensor:
    logits = logits.clone()
    logits[..., LATER] = -torch.inf
    return logits


def _written_elsewhere(logits: Tensor) -> Tensor:
    other = logits.new_zeros(logits.shape)
    other[:, :] = logits
    return other


def test_a_product_that_is_no_attention_is_left_alone():
    """Experts that are mixed by a softmax over them, and a softmax over queries."""

    def mixed(query, key, value):
        gates = functional.linear(query, torch.ones(LENGTH, HEAD_WIDTH)).softmax(-1)
        over_queries = (query @ _repeated(key).mT).softmax(-2)
        return (gates @ _repeated(value)) + over_queries @ _repeated(value)

    model, x = _Attending(mixed).eval(), _input()
    with torch.no_grad():
        own = model(x)
    output, heard = _heard(model, x)
    assert torch.equal(output, own)
    assert not heard


def test_another_model_and_another_thread_are_left_alone():
    """Oracle: the very bits of the kernel that they use without a tap."""
    (model, other), x = (_Attending(KINDS["causal"][0]).eval() for _ in range(2)), _input()
    own = _run(other, x)
    with tapped(model, lambda module, inputs: 0 * attend(inputs)):
        assert torch.equal(in_thread(other, x), own)


def test_an_intervention_holds_in_every_thread_and_an_interrupt_ends_it():
    model, x = _Attending(KINDS["causal"][0]).eval(), _input()
    with intervened(model, model, lambda inputs, answer: 0 * answer(inputs)):
        result = in_thread(model, x)
    torch.testing.assert_close(result, model.out.bias.detach().expand(x.shape))

    def interrupt(module, inputs):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), tapped(model, interrupt):
        model(x)
    own = _run(model, x)
    assert not torch.overrides._get_current_function_mode_stack()
    assert torch.equal(own, _run(model, x))


def test_hooks_are_gone_when_the_last_model_is_left_in_any_order():
    first, second = (_Attending(KINDS["causal"][0]).eval() for _ in range(2))
    before, filters = len(torch.nn.modules.module._global_forward_hooks), list(warnings.filters)
    outer, inner = (tapped(model, lambda _, inputs: attend(inputs)) for model in (first, second))
    outer.__enter__()
    inner.__enter__()
    outer.__exit__(None, None, None)
    assert len(_heard(second, _input())[1]) == 1
    inner.__exit__(None, None, None)
    assert len(torch.nn.modules.module._global_forward_hooks) == before
    assert warnings.filters == filters


def test_each_part_of_a_model_gets_its_own_implementation_back():
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlavaConfig(
        text_config=LlamaConfig(vocab_size=20, **sizes),
        vision_config=CLIPVisionConfig(image_size=8, patch_size=4, **sizes),
        image_token_index=19,
    )
    model = LlavaForConditionalGeneration(config)
    model.set_attn_implementation({"": "sdpa", "text_config": "sdpa", "vision_config": "eager"})
    with tapped(model, lambda _, inputs: attend(inputs)):
        implementations = {m.config._attn_implementation for m in model.modules() if hasattr(m, "config")}
        assert implementations == {"theodolite_with_masks"}  # the vision side says that it is not causal
    assert model.config._attn_implementation == "sdpa"
    assert config.text_config._attn_implementation == "sdpa"
    assert config.vision_config._attn_implementation == "eager"
    layers = model.model.vision_tower.modules()
    assert {m.config._attn_implementation for m in layers if hasattr(m, "config")} == {"eager"}
