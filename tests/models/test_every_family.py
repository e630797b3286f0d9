"""What holds for every family: each is opened once, and every claim is checked on that one model."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests import checkpoints
from theodolite.attention.inputs import AttentionInputs, attend, softmax
from theodolite.errors import UsageError
from theodolite.logits.constituents import constituents
from theodolite.models import OpenModel, open_model, open_streamed
from theodolite.models.calls import stop_at_tap
from theodolite.models.doors.taps import tapped
from theodolite.models.hooks import Hooks, hooked
from theodolite.models.weights.head_weights import HeadWeights, read_head_weights, through_tap
from theodolite.models.weights.weight_map import find_projections, replaced
from theodolite.passes.run import Run
from theodolite.passes.survey import spectra

HEADS, LENGTH = 4, 20
LAYERS = range(3)
IN_FLOAT32 = ("gpt_oss", "cohere")
"""These two rotate in float32 whatever their dtype."""

FACTS = {"gpt2": (True, "learned", 128), "bert": (False, "learned", 128), "bloom": (True, "alibi", None)}
FACTS |= {"opt": (True, "learned", 128), "vit": (False, "learned", None)}
OUTPUTS = {
    "gpt2": "transformer.h.{}.attn.c_proj",
    "bert": "bert.encoder.layer.{}.attention.output.dense",
    "bloom": "transformer.h.{}.self_attention.dense",
    "gpt_neox": "gpt_neox.layers.{}.attention.dense",
    "opt": "model.decoder.layers.{}.self_attn.out_proj",
    "vit": "vit.layers.{}.attention.o_proj",
}


def sample(family: str, contexts: int = 3, length: int = LENGTH) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    if family == "vit":
        return {"pixel_values": torch.randn(contexts, 3, 16, 16, generator=generator)}
    return {"input_ids": torch.randint(checkpoints.VOCABULARY, (contexts, length), generator=generator)}


def by_heads(weight: Tensor) -> Tensor:
    """(out, in) of a Linear → (heads, in, head_width), each key head repeated for its query heads."""
    width = 12 if weight.shape[0] in (24, 48) else 8
    heads = weight.reshape(-1, width, weight.shape[1]).transpose(1, 2)
    return heads.repeat_interleave(HEADS // heads.shape[0], dim=0)


def named_weights(family: str, state: dict[str, Tensor], layer: int) -> list[Tensor]:
    """W_q, W_k, W_v of one layer, read by parameter name: the oracle."""
    if family == "gpt2":
        return [by_heads(w.T) for w in state[f"transformer.h.{layer}.attn.c_attn.weight"].chunk(3, dim=1)]
    if family == "bert":
        prefix = f"bert.encoder.layer.{layer}.attention.self."
        return [by_heads(state[prefix + name + ".weight"]) for name in ("query", "key", "value")]
    if family in ("bloom", "gpt_neox"):
        block = "transformer.h.{}.self_attention" if family == "bloom" else "gpt_neox.layers.{}.attention"
        fused = state[block.format(layer) + ".query_key_value.weight"].view(HEADS, 3, 8, 32)
        return [fused[:, part].transpose(1, 2) for part in range(3)]
    if family == "phi3":
        fused = state[f"model.layers.{layer}.self_attn.qkv_proj.weight"]
        return [by_heads(w) for w in fused.split([32, 16, 16])]
    place = {"opt": "model.decoder.layers.{}.self_attn.", "vit": "vit.layers.{}.attention."}
    prefix = place.get(family, "model.layers.{}.self_attn.").format(layer)
    return [by_heads(state[f"{prefix}{name}_proj.weight"]) for name in "qkv"]


def output_module(family: str, model: nn.Module, layer: int) -> nn.Module:
    return model.get_submodule(OUTPUTS.get(family, "model.layers.{}.self_attn.o_proj").format(layer))


def named_output(family: str, model: nn.Module, layer: int) -> Tensor:
    """W_O by parameter name, (heads, value_width, d): the oracle."""
    weight = output_module(family, model, layer).weight.double()
    return (weight if family == "gpt2" else weight.T).reshape(HEADS, -1, 32)


@contextmanager
def eager(model: nn.Module) -> Iterator[None]:
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    yield
    model.set_attn_implementation(before)


@contextmanager
def softmax_arguments() -> Iterator[list[Tensor]]:
    """While open, what eager attention takes the softmax of, layer by layer, in float64."""
    own, arguments = nn.functional.softmax, []

    def keep(values: Tensor, *args: object, **kwargs: object) -> Tensor:
        if values.ndim == 4:  # not that of a router
            arguments.append(values.double().clone())
        return own(values, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.functional, "softmax", keep)
        yield arguments


class Seen(Hooks):
    """Keeps streams, what enters each attention module, what the tap gets, and what the heads answer."""

    def __init__(self) -> None:
        self.streams: list[Tensor] = []
        self.entered: list[Tensor] = []
        self.inputs: list[AttentionInputs] = []
        self.answers: list[Tensor] = []

    @property
    def weights(self) -> list[Tensor]:
        """By a dense softmax."""
        return [softmax(inputs.logits(), inputs.sink) for inputs in self.inputs]

    def stream(self, layer: int, hidden: Tensor) -> None:
        assert layer == len(self.streams)
        self.streams.append(hidden.clone())

    def attention_input(self, layer: int, hidden: Tensor) -> None:
        self.entered.append(hidden.double())

    def attention(self, layer: int, inputs: AttentionInputs) -> Tensor:
        self.inputs.append(inputs)
        self.answers.append(attend(inputs))
        return self.answers[-1]


def check_facts(family: str, model: OpenModel) -> None:
    """Oracle: the sizes in `tests/checkpoints.py`."""
    assert (model.causal, model.positions, model.longest) == FACTS.get(family, (True, "rotary", 128))
    width = 12 if family in ("qwen3", "gemma2", "gpt_oss") else 8
    assert (model.layers, model.heads, model.head_width, model.width) == (3, HEADS, width, 32)
    assert model.vocabulary == (None if family == "vit" else checkpoints.VOCABULARY)
    assert len(model.sha256 or "") == 64


def check_passes(family: str, model: OpenModel) -> None:
    """Oracle: logits, hidden states and attention matrices of `transformers`, called by hand; its outputs by name."""
    inputs, seen, left = sample(family), Seen(), []
    with torch.no_grad():
        own = model.hf(**inputs, output_hidden_states=True)
        hooks = [
            output_module(family, model.hf, layer).register_forward_hook(
                lambda m, _, output: left.append(output if m.bias is None else output - m.bias)
            )
            for layer in LAYERS
        ]
        with hooked(model, seen):
            ours = model.hf(**inputs).logits
        for hook in hooks:
            hook.remove()
        with eager(model.hf):
            matrices = model.hf(**inputs, output_attentions=True).attentions
        assert torch.equal(model.hf(**inputs).logits, own.logits)
    torch.testing.assert_close(ours, own.logits, rtol=1e-5, atol=1e-5 * float(own.logits.abs().max()))
    if family != "vit":
        assert torch.equal(model.forward(inputs["input_ids"]), own.hidden_states[-1])
        assert torch.equal(model.logits(inputs["input_ids"]), own.logits)
        assert not model.logits(inputs["input_ids"]).requires_grad
    assert len(seen.inputs) == len(matrices) == 3
    for layer, (weights, expected) in enumerate(zip(seen.weights, matrices, strict=True)):
        torch.testing.assert_close(weights, expected, rtol=1e-5, atol=2e-6)
        outputs = torch.einsum("bthw,hwd->btd", seen.answers[layer].double(), model.output_weights(layer))
        torch.testing.assert_close(outputs, left[layer].double(), rtol=1e-5, atol=1e-5)


def check_weights(family: str, model: OpenModel) -> None:
    """Oracles: the parameters by name; rows of [0; I] through the tap; tokens at position 0, where nothing rotates."""
    state = {name: value.double() for name, value in model.hf.state_dict().items()}
    seen = Seen()
    inputs = sample(family) if family == "vit" else sample(family, 9, 1)
    with torch.no_grad(), hooked(model, seen):
        model.hf.base_model(**inputs)
    for layer in LAYERS:
        weights, expected = model.head_weights(layer), named_weights(family, state, layer)
        with tapped(model.hf, stop_at_tap), torch.no_grad():
            rows = through_tap(model.structure.attention_at(layer), model.calls[layer])
        assert rows is not None
        assert (rows.scaling, rows.projection) == (weights.scaling, weights.projection)
        atol = 1e-6 if family in IN_FLOAT32 else 1e-13
        torch.testing.assert_close(_parts(weights), _parts(rows), rtol=0, atol=atol)
        if family == "gpt_oss":
            # YaRN multiplies cosines and sines, and so queries and keys, by 0.1 ln(factor) + 1.
            expected[:2] = [w * (0.1 * math.log(32.0) + 1) for w in expected[:2]]
        atol = 1e-7 if family in IN_FLOAT32 else 1e-12
        torch.testing.assert_close(_parts(weights)[:3], expected, rtol=0, atol=atol)
        output = named_output(family, model.hf, layer)
        torch.testing.assert_close(model.output_weights(layer), output, rtol=0, atol=1e-12)
        assert weights.projection == ("projection before norm" if family == "qwen3" else "projection")
        if family == "qwen3":
            continue
        given = seen.inputs[layer]
        assert given.scaling == weights.scaling
        for got, w, b in (
            (given.query, weights.w_q, weights.b_q),
            (given.key, weights.w_k, weights.b_k),
            (given.value, weights.w_v, weights.b_v),
        ):
            whole = torch.einsum("btd,hdw->bhtw", seen.entered[layer], w) + b[None, :, None]
            repeated = got.repeat_interleave(HEADS // got.shape[1], dim=1).double()
            torch.testing.assert_close(repeated, whole, rtol=1e-5, atol=1e-5 * float(whole.abs().max()))


def _parts(weights: HeadWeights) -> list[Tensor]:
    return [getattr(weights, part) for part in ("w_q", "w_k", "w_v", "b_q", "b_k", "b_v")]


def _read(model: OpenModel) -> HeadWeights:
    return read_head_weights(model.hf, model.structure, 1, model.calls[1])


def check_projections(family: str, model: OpenModel) -> None:
    """Oracle: `head_weights`. The gradient of ½‖W‖² is W, so that a step of −1 leaves zero where W_q and W_k are."""
    if family == "qwen3":
        with pytest.raises(
            UsageError, match=r"layer 0: .*layers\.0\.self_attn.*q_norm, k_norm.*layers=\[…\]"
        ):
            find_projections(model.hf, model.structure, model.calls, [0])
        return
    copied = copy.deepcopy(model)
    layers = find_projections(copied.hf, copied.structure, copied.calls, list(LAYERS))
    copied.hf.requires_grad_(True)
    for layer, projections in enumerate(layers):
        assert projections.layer == layer
        weights, value = model.head_weights(layer), projections.value
        assert value is not None
        read = [*projections.factors(), value.view_of(value.weight)]
        for got, expected in zip(read, (weights.w_q, weights.w_k, weights.w_v), strict=True):
            repeated = got.detach().double().repeat_interleave(HEADS // len(got), dim=0)
            atol = 1e-7 if family in IN_FLOAT32 else 1e-12
            torch.testing.assert_close(repeated, expected, rtol=0, atol=atol)
    w_q, w_k = layers[1].factors()
    ((w_q.square().sum() + w_k.square().sum()) / 2).backward()
    untouched, factor = _read(copied).w_v, layers[1].query.rows.factor
    with torch.no_grad():
        for module, name in layers[1].places:
            parameter = getattr(module, name)
            parameter -= parameter.grad if factor is None else parameter.grad / factor[0, 0] ** 2
    weights = _read(copied)
    for zeros in (weights.w_q, weights.w_k):
        torch.testing.assert_close(zeros, torch.zeros_like(zeros), rtol=0, atol=2e-7)
    assert torch.equal(weights.w_v, untouched)


def check_replacement(family: str, model: OpenModel) -> None:
    """Oracle: `read_head_weights`, also where queries and keys are normalised after their projection (qwen3)."""
    with torch.no_grad():
        (found,) = find_projections(model.hf, model.structure, model.calls, [1], replacing=True)
    before, last, matrix = _read(model), HEADS - 1, found.query.matrix().clone()
    matrix[len(matrix) * last // HEADS :] /= 2
    with replaced([(found.query, matrix)]):
        inside = _read(model)
    torch.testing.assert_close(inside.w_q[last], before.w_q[last] / 2, rtol=1e-6, atol=1e-7)
    assert torch.equal(inside.w_q[:last], before.w_q[:last])
    assert torch.equal(inside.w_k, before.w_k)
    assert torch.equal(_read(model).w_q, before.w_q)


def check_constituents(family: str, model: OpenModel, tolerance: float = 2e-6) -> None:
    """Oracle: the argument of the softmax in `transformers`' eager attention."""
    if family == "vit":
        return
    ids = sample(family)["input_ids"]
    with eager(model.hf):
        with torch.no_grad(), softmax_arguments() as arguments:
            matrices = model.hf(input_ids=ids, output_attentions=True).attentions
        splits = [constituents(model, ids, layer) for layer in range(model.layers)]
    for layer, (own, split) in enumerate(zip(arguments, splits, strict=False)):
        torch.testing.assert_close(split.attention, matrices[layer].double(), rtol=1e-5, atol=2e-6)
        summed = split.logits.sum(dim=(2, 3)) + split.additive
        assert float((summed - split.total).norm() / split.total.norm()) < 1e-12
        if split.inputs.softcap is not None:
            summed = split.inputs.softcap * torch.tanh(summed / split.inputs.softcap)
        own = own[..., :LENGTH]  # without a sink column
        visible = own > -1e30
        assert torch.equal(visible, split.visible)
        if split.inputs.sink is not None:  # gpt-oss takes the largest logit of a row away
            counts = visible.sum(-1, keepdim=True)
            own, summed = (
                x - x.masked_fill(~visible, 0).sum(-1, keepdim=True) / counts for x in (own, summed)
            )
        error = float((summed - own)[visible].norm() / own[visible].norm())
        assert error < tolerance, f"layer {layer}: {error}"


def opened_whole(line: str) -> None:
    """What `open_streamed` says of a model that it opened whole fails."""
    assert not line.startswith("opened whole"), line


def check_read_by_blocks(model: OpenModel, folder: Path) -> None:
    """Oracle: the model opened whole. Weights, spectra and provenance are equal to the bit."""
    streamed = open_streamed(folder, device="cpu", say=opened_whole)
    for layer in range(model.layers):
        got, expected = streamed.head_weights(layer), model.head_weights(layer)
        assert all(map(torch.equal, _parts(got), _parts(expected)))
        assert (got.scaling, got.projection) == (expected.scaling, expected.projection)
    assert all(p.is_meta for block in streamed.structure.blocks for p in block.parameters())
    same_run(spectra(streamed), spectra(model))


def same_run(run: Run, expected: Run) -> None:
    assert run.provenance == expected.provenance
    assert run.heads.equals(expected.heads)
    assert run.arrays.keys() == expected.arrays.keys()
    for name, tensor in expected.arrays.items():
        torch.testing.assert_close(run.arrays[name], tensor, rtol=0, atol=0, equal_nan=True)


CHECKS: tuple[Callable[[str, OpenModel], None], ...] = (
    check_facts,
    check_passes,
    check_weights,
    check_projections,
    check_replacement,
    check_constituents,
)


def _state(model: nn.Module) -> list[object]:
    modules = [
        (id(m), m.training, len(m._forward_hooks), len(m._forward_pre_hooks), "forward" in vars(m))
        for m in model.modules()
    ]
    return [modules, model.config._attn_implementation]


@pytest.mark.parametrize("family", checkpoints.FAMILIES)
def test_what_holds_for_every_family(family, opened, checkpoint):
    """And the model is left as it was: bytes of parameters and buffers, modules, hooks, and how it attends."""
    model = opened(family)
    with torch.no_grad():  # with what transformers hooks for these itself
        model.hf(**sample(family), output_attentions=True, output_hidden_states=True)
    tensors, state = {name: value.clone() for name, value in model.hf.state_dict().items()}, _state(model.hf)
    for check in CHECKS:
        check(family, model)
    check_read_by_blocks(model, checkpoint(family))
    assert _state(model.hf) == state
    assert all(torch.equal(value, tensors[name]) for name, value in model.hf.state_dict().items())


@pytest.mark.parametrize("family", ["gpt2", "bloom", "qwen3", "gemma2"])
def test_constituents_sum_to_the_logits_to_the_last_digits_in_float64(family, checkpoint):
    check_constituents(family, open_model(checkpoint(family), dtype="float64"), 1e-12)


def test_half_precision_weights_are_read_exactly(anew):
    """A bfloat16 module is read in float64, so that subtracting the bias costs no digit."""
    for family in ("gpt2", "bert"):
        model = anew(family, "bfloat16")
        assert model.hf.dtype == torch.bfloat16
        state = {name: value.double() for name, value in model.hf.state_dict().items()}
        expected = named_weights(family, state, 2)
        torch.testing.assert_close(_parts(model.head_weights(2))[:3], expected, rtol=0, atol=1e-14)
        assert torch.equal(model.output_weights(2), named_output(family, model.hf, 2))
        (projections,) = find_projections(model.hf, model.structure, model.calls, [2])
        for got, w in zip(projections.factors(), expected, strict=False):
            assert got.dtype == torch.bfloat16
            assert torch.equal(got.double(), w)
