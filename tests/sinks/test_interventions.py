"""Causal interventions, against edits by parameter name and hooks on transformers' own eager attention."""

from __future__ import annotations

import copy
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace

import pytest
import torch

from tests import checkpoints
from theodolite.attention.inputs import attend
from theodolite.errors import UsageError
from theodolite.models import open_model
from theodolite.models.hooks import hooked
from theodolite.sinks.interventions import ablate_direction, attention_knockout, without_low_rank
from theodolite.sinks.trace import trace_sinks

HEADS, WIDTH, LENGTH, LAYER = 4, 32, 14, 1
OUTPUTS = {
    "gpt2": "transformer.h.{}.attn.c_proj",
    "bert": "bert.encoder.layer.{}.attention.output.dense",
    "bloom": "transformer.h.{}.self_attention.dense",
    "vit": "vit.layers.{}.attention.o_proj",
}
FAMILIES = ("gpt2", "bert", "bloom", "llama3", "gemma2", "gpt_oss", "vit")
MASKABLE = ("gpt2", "bert", "llama3", "gpt_oss", "vit")  # BLOOM's own attention takes one mask for all heads


def _sample(family: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    if family == "vit":
        return {"pixel_values": torch.randn(2, 3, 16, 16, generator=generator)}
    return {"input_ids": torch.randint(checkpoints.VOCABULARY, (2, LENGTH), generator=generator)}


def _logits(model, family: str) -> torch.Tensor:
    with torch.no_grad():
        return model.hf(**_sample(family)).logits


def _direction(seed: int = 0) -> torch.Tensor:
    return torch.randn(WIDTH, generator=torch.Generator().manual_seed(seed))


def _projection(model, family: str, layer: int = LAYER) -> torch.nn.Module:
    """The module that holds W_O, by name."""
    return model.hf.get_submodule(OUTPUTS.get(family, "model.layers.{}.self_attn.o_proj").format(layer))


def _close(got: torch.Tensor, expected: torch.Tensor, share: float = 1e-4) -> None:
    torch.testing.assert_close(got, expected, rtol=0, atol=share * float(expected.abs().max()))


@contextmanager
def _written(model, family: str, head: int):
    """What the head writes, (batch, positions, d), in passes inside: by name, and not through theodolite."""
    projection, seen = _projection(model, family), []

    def note(module, args):
        value_width = args[0].shape[-1] // HEADS
        rows = slice(head * value_width, (head + 1) * value_width)
        weight = module.weight[rows] if family == "gpt2" else module.weight[:, rows].T
        seen.append((args[0][..., rows].double() @ weight.double()).flatten(0, -3))

    hook = projection.register_forward_pre_hook(note)
    try:
        yield seen
    finally:
        hook.remove()


# --- ablate_direction


@pytest.mark.parametrize("family", FAMILIES)
def test_removing_a_tag_is_removing_it_from_the_output_weights(family, opened):
    """Oracle: the same model with W_O (I − û ûᵀ) for the head's rows of W_O, written by parameter name."""
    model, head = opened(family), 2
    own = _logits(model, family)
    with ablate_direction(model, LAYER, head, _direction()) as tag:
        got = _logits(model, family)
    edited = copy.deepcopy(model.hf)
    projection = _projection(SimpleNamespace(hf=edited), family)
    weight = projection.weight.data if family == "gpt2" else projection.weight.data.T
    rows = slice(head * weight.shape[0] // HEADS, (head + 1) * weight.shape[0] // HEADS)
    basis = torch.linalg.qr(weight[rows].double().T).Q
    unit = basis @ (basis.T @ _direction().double())
    unit = unit / unit.norm()
    weight[rows] -= (weight[rows].double() @ torch.outer(unit, unit)).float()
    with torch.no_grad():
        expected = edited(**_sample(family)).logits
    torch.testing.assert_close(tag.direction, unit, rtol=0, atol=1e-6)
    assert tag.share == pytest.approx(
        float((basis.T @ _direction().double()).norm() / _direction().norm()), rel=1e-5
    )
    assert torch.equal(tag.along, tag.direction)
    _close(got, expected)
    assert (own - expected).abs().max() > 20 * (got - expected).abs().max()
    assert torch.equal(_logits(model, family), own)


@pytest.mark.parametrize("family", ["gpt2", "llama3", "gpt_oss"])
def test_the_control_takes_as_much_from_each_token_along_another_direction(family, opened):
    """Oracle: what the head writes, read at its projection by name, with and without."""
    model, head = opened(family), 1
    model.output_weights(LAYER)  # read through a copy of the projection, which would be seen as well
    with _written(model, family, head) as seen:
        _logits(model, family)
        with ablate_direction(model, LAYER, head, _direction()) as tag:
            _logits(model, family)
        for seed in (7, 7, 8):
            with ablate_direction(model, LAYER, head, _direction(), control=seed) as control:
                _logits(model, family)
    own, removed, *controls = seen
    component = own @ tag.direction
    _close(removed, own - component[..., None] * tag.direction, 1e-6)
    assert (removed @ tag.direction).abs().max() < 1e-6 * component.abs().max()
    for moved in controls:
        torch.testing.assert_close((moved - own).norm(dim=-1), component.abs(), rtol=1e-3, atol=1e-6)
    assert torch.equal(controls[0], controls[1])
    assert not torch.allclose(controls[1], controls[2], atol=1e-3)
    _close(controls[2], own - component[..., None] * control.along, 1e-6)
    assert abs(float(control.along @ control.direction)) < 0.999


def test_random_directions_are_uniform_in_the_row_space(opened):
    """Oracle: the mean of v vᵀ over many is the projection on the row space / value_width; 3 standard errors."""
    model = opened("gpt2")
    weights = _projection(model, "gpt2").weight[:8].double()
    total, seeds = torch.zeros(WIDTH, WIDTH, dtype=torch.float64), 100
    for seed in range(seeds):
        with ablate_direction(model, LAYER, 0, _direction(), control=seed) as tag:
            total += torch.outer(tag.along, tag.along) / seeds
    basis = torch.linalg.qr(weights.T).Q
    assert (total - basis @ basis.T / 8).norm() < 3 * seeds**-0.5


def test_only_the_queries_asked_for_lose_the_tag(opened):
    model = opened("llama2")
    per_context = torch.zeros(2, LENGTH, dtype=torch.bool)
    per_context[0, 3] = per_context[1, 9:] = True
    with ablate_direction(model, LAYER, 0, _direction()):
        pass  # the first of a model tries its projection, which is no call to be seen below
    with _written(model, "llama2", 0) as seen:
        for queries in ([4, 6], torch.tensor([4, 6]), per_context, 5):
            with ablate_direction(model, LAYER, 0, _direction(), queries=queries) as tag:
                _logits(model, "llama2")
        _logits(model, "llama2")
    *edited, own = seen
    without = own - (own @ tag.direction)[..., None] * tag.direction
    chosen = torch.zeros(2, LENGTH, dtype=torch.bool)
    chosen[:, [4, 6]] = True
    single = torch.zeros(2, LENGTH, dtype=torch.bool)
    single[:, 5] = True
    for got, flags in zip(edited, (chosen, chosen, per_context, single), strict=True):
        _close(got, torch.where(flags[..., None], without, own), 1e-6)


# --- attention_knockout


@contextmanager
def _eager_with_hidden_keys(model, heads: list[int], hidden: torch.Tensor):
    """Oracle: transformers' eager attention with an additive mask a head, −∞ (its lowest) where a key is hidden,
    but for queries that would see none and have no learned sink column."""

    def hide(module, args, kwargs):
        stream = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        contexts, length = stream.shape[:2]
        lowest = torch.finfo(torch.float32).min
        mask = kwargs.get("attention_mask")
        mask = torch.zeros(1, 1, length, length) if mask is None else mask
        mask = mask.expand(contexts, 1, length, length).repeat(1, HEADS, 1, 1)
        shown = mask.masked_fill(hidden[:, None, None, :], lowest)
        blind = (shown == lowest).all(-1, keepdim=True) & (not hasattr(module, "sinks"))
        mask[:, heads] = torch.where(blind, mask, shown)[:, heads]
        return args[:1], kwargs | {"attention_mask": mask}  # ViT hands the mask over as its second argument

    attention = model.structure.attention[LAYER]
    before = model.hf.config._attn_implementation
    model.hf.set_attn_implementation("eager")
    hook = attention.register_forward_pre_hook(hide, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()
        model.hf.set_attn_implementation(before)


def _hidden(family: str) -> torch.Tensor:
    length = 17 if family == "vit" else LENGTH
    hidden = torch.zeros(2, length, dtype=torch.bool)
    hidden[0, [0, 1, 5]] = True
    hidden[1, [0, 6]] = True
    return hidden


@pytest.mark.parametrize("family", MASKABLE)
def test_hiding_keys_is_masking_them_in_eager_attention(family, opened):
    """Oracle: `_eager_with_hidden_keys`."""
    model, own = opened(family), _logits(opened(family), family)
    everywhere = torch.zeros(1, _hidden(family).shape[1], dtype=torch.bool)
    everywhere[0, [0, 3]] = True
    for head, heads in ((2, [2]), (None, [0, 1, 2, 3])):
        for positions, hidden in (([0, 3], everywhere), (_hidden(family), _hidden(family))):
            with _eager_with_hidden_keys(model, heads, hidden):
                expected = _logits(model, family)
            with attention_knockout(model, LAYER, head, positions):
                got = _logits(model, family)
            _close(got, expected, 2e-5)
            assert (own - expected).abs().max() > 1e-3 * own.abs().max()
    assert torch.equal(_logits(model, family), own)


def test_hiding_keys_of_bloom(opened):
    """Oracle: BLOOM's own attention with −∞ added to its ALiBi, which it has a row for in each context and head."""
    model = opened("bloom")
    hidden = _hidden("bloom")

    def hide(module, args, kwargs):
        alibi = kwargs["alibi"].view(2, HEADS, 1, LENGTH).expand(2, HEADS, LENGTH, LENGTH).clone()
        shown = torch.zeros(2, LENGTH, LENGTH).masked_fill(hidden[:, None], -1e9)
        blind = ~(torch.ones(LENGTH, LENGTH).tril().bool() & ~hidden[:, None]).any(-1, keepdim=True)
        alibi[:, 3] += shown.masked_fill(blind, 0)
        return args, kwargs | {"alibi": alibi.view(2 * HEADS, LENGTH, LENGTH)}

    hook = model.structure.attention[LAYER].register_forward_pre_hook(hide, with_kwargs=True)
    expected = _logits(model, "bloom")
    hook.remove()
    with attention_knockout(model, LAYER, 3, hidden):
        _close(_logits(model, "bloom"), expected, 2e-5)


def test_hiding_keys_of_padded_contexts(opened):
    """A mask a context, and one set of keys for all. Oracle: `_eager_with_hidden_keys`."""
    model = opened("llama3")
    padding = torch.ones(2, LENGTH, dtype=torch.int64)
    padding[1, :3] = 0
    hidden = torch.zeros(1, LENGTH, dtype=torch.bool)
    hidden[0, 3] = True
    sample = _sample("llama3") | {"attention_mask": padding}
    with torch.no_grad():
        with _eager_with_hidden_keys(model, [1], hidden):
            expected = model.hf(**sample).logits
        with attention_knockout(model, LAYER, 1, 3):
            got = model.hf(**sample).logits
    _close(got[padding.bool()], expected[padding.bool()], 2e-5)


def test_hiding_a_learned_sink_column(tmp_path):
    """Oracle: the head's sink logit set to −∞ by name, in transformers' eager attention."""
    model = open_model(checkpoints.write("gpt_oss", tmp_path))
    sinks = model.hf.model.layers[LAYER].self_attn.sinks
    own = sinks.clone()
    with (
        attention_knockout(model, LAYER, 2, [], sink_column=True),
        _written(model, "gpt_oss", 2) as of_column,
    ):
        got = _logits(model, "gpt_oss")
    with attention_knockout(model, LAYER, 2, [0], sink_column=True), _written(model, "gpt_oss", 2) as seen:
        _logits(model, "gpt_oss")
    with _eager_with_hidden_keys(model, [2], torch.zeros(1, LENGTH, dtype=torch.bool)):
        sinks.data[2] = -1e9
        expected = _logits(model, "gpt_oss")
        sinks.data.copy_(own)
    _close(got, expected, 2e-5)
    # With its one key hidden as well, query 0 pays it what it paid without the sink column.
    _close(seen[0][:, 0], of_column[0][:, 0], 1e-6)
    assert not torch.allclose(seen[0][:, 1], of_column[0][:, 1], atol=1e-3)


@pytest.mark.parametrize("family", ["gpt2", "bloom", "mistral"])
def test_generation_with_hidden_keys(family, opened):
    """Oracle: greedy continuation by whole passes of the eager model with its keys hidden (BLOOM: the edited)."""
    model = opened(family)
    ids = _sample(family)["input_ids"]
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": -1}
    cached = family != "mistral"  # whose cache drops keys
    with ExitStack() as stack, torch.no_grad():
        expected = ids
        for _ in range(6):
            hidden = torch.zeros(1, expected.shape[1], dtype=torch.bool).index_fill(
                1, torch.tensor([0, 9]), True
            )
            with (
                attention_knockout(model, LAYER, None, [0, 9])
                if family == "bloom"
                else _eager_with_hidden_keys(model, [0, 1, 2, 3], hidden)
            ):
                logits = model.hf(input_ids=expected, use_cache=False).logits
            expected = torch.cat([expected, logits[:, -1:].argmax(-1)], dim=1)
        stack.enter_context(attention_knockout(model, LAYER, None, [0, 9]))
        assert torch.equal(model.hf.generate(ids, use_cache=False, **options), expected)
        if cached:
            assert torch.equal(model.hf.generate(ids, **options), expected)
        else:
            with pytest.raises(UsageError, match="use_cache=False"):
                model.hf.generate(ids, **options)


# --- without_low_rank


@pytest.mark.parametrize("family", FAMILIES)
def test_the_leading_part_of_each_matrix_is_gone(family, opened):
    """Oracle: numbers that the probe reads (no parameter name, no place), and `torch.linalg.svd`."""
    model, rank = opened(family), 3
    before = model.head_weights(LAYER)
    with without_low_rank(model, LAYER, rank) as shares:
        after = model.head_weights(LAYER)
        others = model.head_weights(LAYER + 1)
    assert torch.equal(others.w_q, model.head_weights(LAYER + 1).w_q)
    every = {"q": 1} | dict.fromkeys("kv", HEADS // (2 if torch.equal(before.w_k[0], before.w_k[1]) else 4))
    for name in "qkv":
        matrices = (getattr(w, f"w_{name}")[:: every[name]] for w in (before, after))
        old, new = (
            w.transpose(1, 2).flatten(0, 1) for w in matrices
        )  # (heads, d, head_width) → (features, d)
        parts = torch.linalg.svd(old, full_matrices=False)
        expected = (parts.U[:, rank:] * parts.S[rank:]) @ parts.Vh[rank:]
        torch.testing.assert_close(new, expected, rtol=0, atol=2e-6)
        share = float(parts.S[:rank].square().sum() / parts.S.square().sum())
        assert shares[name] == pytest.approx(share, rel=1e-5)
        assert torch.equal(getattr(before, f"b_{name}"), getattr(after, f"b_{name}"))
    assert torch.equal(model.head_weights(LAYER).w_q, before.w_q)


def _by_name(family: str, model) -> tuple[torch.nn.Parameter, dict[str, slice]]:
    if family == "gpt2":
        thirds = {name: slice(32 * part, 32 * part + 32) for part, name in enumerate("qkv")}
        return model.hf.transformer.h[LAYER].attn.c_attn.weight, thirds
    return (
        model.hf.model.layers[LAYER].self_attn.qkv_proj.weight,
        {"q": slice(0, 32), "k": slice(32, 48), "v": slice(48, 64)},
    )


@pytest.mark.parametrize("family", ["gpt2", "phi3"])
@pytest.mark.parametrize("of", ["q", "kv"])
def test_only_the_matrices_asked_for_change_in_a_fused_layout(family, of, opened):
    """Oracle: the fused parameter by name; and the logits of a model into which the same was written."""
    model = opened(family)
    fused, rows = _by_name(family, model)
    own = fused.detach().clone() if family == "phi3" else fused.detach().T.clone()
    expected = own.clone()
    for name in of:
        parts = torch.linalg.svd(own[rows[name]].double(), full_matrices=False)
        expected[rows[name]] = ((parts.U[:, 2:] * parts.S[2:]) @ parts.Vh[2:]).float()
    with without_low_rank(model, LAYER, 2, of=of) as shares:
        inside = _by_name(family, model)[0].detach()
        got = _logits(model, family)
    inside = inside if family == "phi3" else inside.T
    torch.testing.assert_close(inside, expected, rtol=0, atol=2e-6)
    untouched = [rows[name] for name in "qkv" if name not in of]
    assert all(torch.equal(inside[part], own[part]) for part in untouched)
    assert set(shares) == set(of)
    edited = copy.deepcopy(model)
    _by_name(family, edited)[0].data.copy_(expected if family == "phi3" else expected.T)
    _close(got, _logits(edited, family))
    assert _by_name(family, model)[0] is fused


def test_given_factors_and_their_control(opened):
    """Oracle: by name; the control has the same singular values and another matrix."""
    model = opened("llama2")
    projection = model.hf.model.layers[LAYER].self_attn.k_proj
    own = projection.weight.detach().clone()
    generator = torch.Generator().manual_seed(2)
    left, right = torch.randn(32, 3, generator=generator), torch.randn(3, 32, generator=generator)
    with without_low_rank(model, LAYER, factors={"k": (left, right)}) as shares:
        torch.testing.assert_close(projection.weight, own - left @ right, rtol=0, atol=2e-5)
    assert shares == {"k": pytest.approx(float((left @ right).norm() ** 2 / own.norm() ** 2), rel=1e-4)}
    with without_low_rank(model, LAYER, factors={"k": (left, right)}, control=1) as control:
        taken = own - projection.weight
    assert control["k"] == pytest.approx(shares["k"], rel=1e-9)
    values = torch.linalg.svdvals(taken)[:5]
    _close(values[:3], torch.linalg.svdvals(left @ right)[:3], 1e-5)
    assert values[3] < 1e-4
    assert (taken - left @ right).norm() > 0.5 * taken.norm()


def test_a_parameter_shared_with_another_layer_changes_in_one_only(tmp_path):
    model = open_model(checkpoints.write("llama2", tmp_path))
    first, second = (model.hf.model.layers[layer].self_attn.q_proj for layer in (0, 1))
    second.weight = first.weight
    shared = first.weight
    own = shared.detach().clone()
    with without_low_rank(model, 1, 4, of="q"):
        assert first.weight is shared
        assert torch.equal(shared, own)
        assert not torch.equal(second.weight, own)
    assert second.weight is first.weight is shared
    assert torch.equal(shared, own)


# --- all three


@contextmanager
def _all_three(model):
    with (
        without_low_rank(model, LAYER, 2),
        attention_knockout(model, LAYER, 1, [0]),
        ablate_direction(model, LAYER, 1, _direction()),
        ablate_direction(model, LAYER, 1, _direction(2), control=3),
        attention_knockout(model, 2, None, [3]),
        without_low_rank(model, LAYER, 1, of="v", control=5),
    ):
        yield


class _RecordingTap:
    def __init__(self) -> None:
        self.calls = 0

    def stream(self, layer, hidden):
        self.calls += 1

    def attention_input(self, layer, hidden):
        self.calls += 1

    def attention(self, layer, inputs):
        self.calls += 1
        return attend(inputs)


def _state(model):
    hf = model.hf
    tensors = {
        **dict(hf.named_parameters(remove_duplicate=False)),
        **dict(hf.named_buffers(remove_duplicate=False)),
    }
    return {
        "bits": {
            name: (id(t), t.stride(), t.detach().clone().view(-1).view(torch.uint8))
            for name, t in tensors.items()
        },
        "config": hf.config.to_dict() | {"_": hf.config._attn_implementation},
        "modules": [
            (id(m), m.training, sorted(vars(m)), len(m._forward_hooks), len(m._forward_pre_hooks))
            for m in hf.modules()
        ],
    }


def _assert_same(before, after) -> None:
    assert before["config"] == after["config"]
    assert before["modules"] == after["modules"]
    assert list(before["bits"]) == list(after["bits"])
    for name, (identity, stride, bits) in before["bits"].items():
        assert after["bits"][name][:2] == (identity, stride)
        assert torch.equal(after["bits"][name][2], bits)


@pytest.mark.parametrize(
    ("family", "dtype"), [*((name, None) for name in FAMILIES), ("gpt2", torch.bfloat16)]
)
def test_every_bit_of_the_model_is_restored(family, dtype, opened, tmp_path):
    """Nested, called inside, hooked inside, left by an exception: the same tensors, bytes, config, logits."""
    model = opened(family) if dtype is None else open_model(checkpoints.write(family, tmp_path, dtype=dtype))
    before, own = _state(model), _logits(model, family)
    assert own.dtype == (dtype or torch.float32)
    for leaves_by in (None, ZeroDivisionError):
        with pytest.raises(ZeroDivisionError) if leaves_by else ExitStack(), _all_three(model):
            plain = _logits(model, family)
            assert not torch.allclose(plain, own, rtol=0, atol=1e-3 * float(own.abs().max()))
            with hooked(model, hooks := _RecordingTap()):
                seen = _logits(model, family)
            assert torch.equal(seen, plain)
            assert hooks.calls == 10
            if leaves_by:
                raise leaves_by
        _assert_same(before, _state(model))
        assert torch.equal(_logits(model, family), own)
    with hooked(model, _RecordingTap()), _all_three(model):
        assert torch.equal(_logits(model, family), plain)
    _assert_same(before, _state(model))


@pytest.mark.parametrize(
    ("family", "order"),
    [("gpt2", (0, 1, 2, 3)), ("gpt2", (2, 0, 3, 1)), ("gpt2", (1, 3, 0, 2)), ("bloom", (3, 2, 1, 0))],
)
def test_left_in_any_order_the_model_is_whole(family, order, opened):
    """Oracle: the model with those that are still open alone; in the end the same tensors, bytes, hooks and config."""
    model = opened(family)
    before, own = _state(model), _logits(model, family)
    factors = {"k": (torch.ones(WIDTH, 1), 0.1 * torch.ones(1, WIDTH))}
    makers = [
        lambda: without_low_rank(model, LAYER, factors={"q": factors["k"]}),
        lambda: ablate_direction(model, LAYER, 1, _direction()),
        lambda: without_low_rank(model, LAYER, factors=factors),  # the same parameter, where it is fused
        lambda: hooked(model, _RecordingTap()),
    ]
    expected = {}
    for left in range(4):
        rest = [i for i in range(4) if i not in order[: left + 1]]
        with ExitStack() as stack:
            for i in rest:
                stack.enter_context(makers[i]())
            expected[left] = (_logits(model, family), [e.partition("(")[0] for e in model.interventions])
    _assert_same(before, _state(model))
    managers = [make() for make in makers]
    for manager in managers:
        manager.__enter__()
    assert not torch.allclose(_logits(model, family), own, rtol=0, atol=1e-3 * float(own.abs().max()))
    for left, i in enumerate(order):
        managers[i].__exit__(None, None, None)
        logits, interventions = expected[left]
        assert torch.equal(_logits(model, family), logits)
        assert [e.partition("(")[0] for e in model.interventions] == interventions
    _assert_same(before, _state(model))
    assert torch.equal(_logits(model, family), own)
    assert not model.interventions


NAN = torch.full((WIDTH,), torch.nan)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda m: ablate_direction(m, 3, 0, _direction()), "layer 3 does not exist: .* layers 0 to 2"),
        (lambda m: ablate_direction(m, 0, 4, _direction()), "head 4 does not exist: .* heads 0 to 3"),
        (
            lambda m: ablate_direction(m, 0, 0, torch.ones(31)),
            r"shape \(31,\): it must have the model's width 32",
        ),
        (lambda m: ablate_direction(m, 0, 0, NAN), "be finite and not zero"),
        (lambda m: ablate_direction(m, 0, 0, _unwritten(m)), "L0H0 writes nothing along"),
        (
            lambda m: ablate_direction(m, 0, 0, _direction(), queries=[-2]),
            "query positions are .-2.: give whole numbers from 0 on",
        ),
        (lambda m: ablate_direction(m, 0, 0, _direction(), queries=99), "query position 99 .* has 14 tokens"),
        (lambda m: attention_knockout(m, 0, 0, []), "no key positions were given"),
        (lambda m: attention_knockout(m, 1, 0, [], sink_column=True), "layer 1 has no learned sink column"),
        (lambda m: attention_knockout(m, 0, 0, [0.5]), "key positions are .0.5.: give whole numbers"),
        (
            lambda m: attention_knockout(m, 0, 0, [0, 14]),
            "key position 14 does not .*: the pass has 14 tokens",
        ),
        (lambda m: attention_knockout(m, 0, 0, torch.ones(3, 4) > 0), "for 3 contexts, the pass has 2"),
        (lambda m: without_low_rank(m, 0), "either a rank or factors"),
        (lambda m: without_low_rank(m, 0, 0), "rank 0 is not between 1 and 32, the rank of W_Q"),
        (lambda m: without_low_rank(m, 0, 1, of="qo"), "'qo' is not of W_Q, W_K and W_V"),
        (lambda m: _without(m, "q", (3, 1)), r"factors of W_Q multiply to \(3, 32\), not to \(32, 32\)"),
    ],
)
def test_what_cannot_be_done_is_refused_in_one_line(make, message, opened):
    model = opened("gpt2")
    with pytest.raises(UsageError, match=message) as refusal, make(model):
        _logits(model, "gpt2")
    assert "\n" not in str(refusal.value)


def _without(model, name: str, shape: tuple[int, int]):
    return without_low_rank(model, 0, factors={name: (torch.ones(shape), torch.ones(1, 32))})


def _unwritten(model) -> torch.Tensor:
    basis = torch.linalg.qr(_projection(model, "gpt2", 0).weight[:8].double().T).Q
    direction = _direction().double()
    return direction - basis @ (basis.T @ direction)


def test_queries_by_position_and_a_cache_do_not_go_together(opened):
    model = opened("gpt2")
    ids = _sample("gpt2")["input_ids"]
    with ablate_direction(model, 0, 0, _direction(), queries=3):
        model.hf.generate(ids, max_new_tokens=2, use_cache=False, do_sample=False, pad_token_id=0)
        with pytest.raises(UsageError, match=r"whole contexts; call generate with use_cache=False"):
            model.hf.generate(ids, max_new_tokens=2, do_sample=False, pad_token_id=0)


def test_matrices_that_are_no_selection_of_entries_are_refused(tmp_path):
    """W_v = A B: found by no marker. The queries' and keys' can still be taken."""
    model = open_model(checkpoints.write("llama2", tmp_path))
    attention = model.hf.model.layers[LAYER].self_attn
    attention.v_proj = torch.nn.Sequential(
        torch.nn.Linear(32, 4, bias=False), torch.nn.Linear(4, 32, bias=False)
    )
    with without_low_rank(model, LAYER, 1, of="qk"):
        pass
    with pytest.raises(
        UsageError, match=r"layer 1: the values of model\.layers\.1\.self_attn are not its input"
    ):
        without_low_rank(model, LAYER, 1).__enter__()
    attention.q_proj = attention.v_proj
    with pytest.raises(UsageError, match="one weight matrix each, so no part of them can be taken out"):
        without_low_rank(model, LAYER, 1, of="k").__enter__()


def test_what_is_measured_meanwhile_says_so_and_is_not_taken_for_the_models_own(opened, tmp_path):
    model = opened("gpt2")
    ids = torch.arange(48).reshape(2, 24)
    plain = trace_sinks(model, ids, tmp_path / "run")
    assert "interventions" not in plain.provenance["fingerprint"]
    with attention_knockout(model, 0, 1, [3]), without_low_rank(model, 0, 2, of="q"):
        interventions = trace_sinks(model, ids).provenance["fingerprint"]["interventions"]
        assert interventions[0] == "attention_knockout(layer=0, head=1, positions=[3], sink_column=False)"
        assert interventions[1].startswith("without_low_rank(layer=0, q=sha256:")
        with pytest.raises(UsageError):
            trace_sinks(model, ids, tmp_path / "run")
    assert not model.interventions
    trace_sinks(model, ids, tmp_path / "run")
