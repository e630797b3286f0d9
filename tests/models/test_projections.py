"""W_q and W_k as views of a model's parameters, against the probe's, in every family."""

from __future__ import annotations

import pytest
import torch
import transformers
from transformers.pytorch_utils import Conv1D

import theodolite.models.projections
from tests import checkpoints
from theodolite.errors import UsageError
from theodolite.models.calls import capture_calls
from theodolite.models.head_weights import read_head_weights
from theodolite.models.projections import find_projections
from theodolite.models.replaced_weights import replaced
from theodolite.models.source import Source
from theodolite.models.structure_search import find_structure

LAYERS = [0, 1, 2]


def sample(family: str) -> dict[str, torch.Tensor]:
    if family == "vit":
        return {"pixel_values": torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(0))}
    return {"input_ids": torch.tensor([[7]]), "use_cache": False}


def found(model: transformers.PreTrainedModel, inputs: dict[str, torch.Tensor], layers: list[int]):
    with torch.no_grad():
        structure = find_structure(Source.of_transformers(model))
        calls = capture_calls(model, structure, lambda: model.base_model(**inputs))
        return structure, calls, find_projections(model, structure, calls, layers)


@pytest.mark.parametrize("family", [f for f in checkpoints.FAMILIES if f != "qwen3"])
def test_factors_are_those_that_the_probe_reads(family):
    """Oracle: `read_head_weights`, which reads every row of the weights through the tap and no parameter."""
    model = checkpoints.build(family)
    structure, calls, layers = found(model, sample(family), LAYERS)
    atol = 1e-7 if family in ("gpt_oss", "cohere") else 1e-12  # these two rotate in float32
    for projections, layer in zip(layers, LAYERS, strict=True):
        assert projections.layer == layer
        weights = read_head_weights(model, structure, layer, calls[layer])
        w_q, w_k = (w.detach().double() for w in projections.factors())
        torch.testing.assert_close(w_q, weights.w_q, rtol=0, atol=atol)
        repeated = w_k.repeat_interleave(len(w_q) // len(w_k), dim=0)
        torch.testing.assert_close(repeated, weights.w_k, rtol=0, atol=atol)
        assert projections.value is not None
        by_head = projections.value.matrix().double().unflatten(0, (len(w_k), -1)).mT
        repeated = by_head.repeat_interleave(len(w_q) // len(w_k), dim=0)
        torch.testing.assert_close(repeated, weights.w_v, rtol=0, atol=1e-12)


@pytest.mark.parametrize("family", [f for f in checkpoints.FAMILIES if f != "qwen3"])
def test_a_gradient_step_through_the_factors_moves_the_weights_that_the_probe_reads(family):
    """Oracle: the gradient of ½‖W‖² is W, so that a step of −1 leaves exactly zero where W_q and W_k are read."""
    model = checkpoints.build(family)
    structure, calls, layers = found(model, sample(family), [1])
    w_q, w_k = layers[0].factors()
    ((w_q.square().sum() + w_k.square().sum()) / 2).backward()
    untouched = read_head_weights(model, structure, 1, calls[1]).w_v
    with torch.no_grad():
        for module, name in layers[0].places:
            parameter = getattr(module, name)
            factor = layers[0].query.factor
            parameter -= parameter.grad if factor is None else parameter.grad / factor[0] ** 2
    weights = read_head_weights(model, structure, 1, calls[1])
    for name in ("w_q", "w_k"):
        torch.testing.assert_close(getattr(weights, name), torch.zeros_like(weights.w_q), rtol=0, atol=2e-7)
    torch.testing.assert_close(weights.w_v, untouched, rtol=0, atol=0)


def test_finding_leaves_the_model_as_it_was():
    """Oracle: bytes of every parameter, and the identity of every module, before and after."""
    for family in ("gpt2", "bloom", "llama3"):
        model = checkpoints.build(family)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        modules = [(id(module), module.training) for module in model.modules()]
        found(model, sample(family), LAYERS)
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        assert [(id(module), module.training) for module in model.modules()] == modules
        assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("family", checkpoints.FAMILIES)
def test_a_replaced_matrix_is_what_the_probe_reads(family):
    """Oracle: `read_head_weights`. Also where queries and keys are normalised after their projection (qwen3)."""
    model = checkpoints.build(family)
    inputs = sample(family)
    with torch.no_grad():
        structure = find_structure(Source.of_transformers(model))
        calls = capture_calls(model, structure, lambda: model.base_model(**inputs))
        (projections,) = find_projections(model, structure, calls, [1], purpose="replacement")
    before = read_head_weights(model, structure, 1, calls[1])
    last = projections.query.heads - 1
    halved = projections.query.matrix([last]) / 2
    with replaced([(projections.query, [last], halved)]):
        inside = read_head_weights(model, structure, 1, calls[1])
    after = read_head_weights(model, structure, 1, calls[1])
    torch.testing.assert_close(inside.w_q[last], before.w_q[last] / 2, rtol=1e-6, atol=1e-7)
    assert torch.equal(inside.w_q[:last], before.w_q[:last])
    assert torch.equal(inside.w_k, before.w_k)
    assert torch.equal(after.w_q, before.w_q)


def test_new_parameters_are_read():
    """Oracle: loading with assign=True gives the modules new parameters, here twice the old ones."""
    model = checkpoints.build("gpt_neox")
    _, _, (projections,) = found(model, sample("gpt_neox"), [0])
    before = [w.detach().clone() for w in projections.factors()]
    model.load_state_dict({name: 2 * value for name, value in model.state_dict().items()}, assign=True)
    for got, expected in zip(projections.factors(), before, strict=True):
        assert torch.equal(got, 2 * expected)


def test_weights_of_half_precision_are_read_exactly():
    """Oracle: the parameters by name; a bfloat16 model is found by markers of float64."""
    model = checkpoints.build("gpt2").to(torch.bfloat16)
    _, _, (projections,) = found(model, sample("gpt2"), [2])
    fused = model.transformer.h[2].attn.c_attn.weight
    w_q, w_k = projections.factors()
    assert w_q.dtype == torch.bfloat16
    assert torch.equal(w_q, fused[:, :32].view(32, 4, 8).transpose(0, 1))
    assert torch.equal(w_k, fused[:, 32:64].view(32, 4, 8).transpose(0, 1))


def test_norms_after_the_projection_are_refused_by_name():
    with pytest.raises(UsageError, match=r"layer 1: .*layers\.1\.self_attn .*q_norm, k_norm.*layers=\[…\]"):
        found(checkpoints.build("qwen3"), sample("qwen3"), [1])


def test_quantised_weights_are_refused_by_name():
    model = checkpoints.build("llama2")
    model.is_quantized = True
    with pytest.raises(UsageError, match="is quantised"):
        found(model, sample("llama2"), [0])


def test_a_projection_that_is_no_single_matrix_is_refused():
    """W_q = A B, as in low-rank projections: linear, but no selection of a matrix's entries."""
    model = checkpoints.build("llama2")
    attention = model.model.layers[0].self_attn
    attention.q_proj = torch.nn.Sequential(
        torch.nn.Linear(32, 4, bias=False), torch.nn.Linear(4, 32, bias=False)
    )
    with pytest.raises(
        UsageError, match=r"layer 0: .*not its input times one weight matrix each, so LocAteR"
    ):
        found(model, sample("llama2"), [0])


class Swapping(Conv1D):
    """Queries and keys one for the other, in layers that say so: of the same kind as those that do not."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second, value = super().forward(x).split(32, dim=-1)
        return torch.cat([second, first, value] if self.swaps else [first, second, value], dim=-1)


def test_layers_alike_are_found_by_the_first_and_others_by_themselves(monkeypatch):
    """Oracle: the search in every layer by itself."""
    model = checkpoints.build("gpt2")
    for block in model.transformer.h:
        block.attn.c_attn.__class__, block.attn.c_attn.swaps = Swapping, False
    searched: list[int] = []

    def searching(structure, layer, *rest):
        searched.append(layer)
        return search(structure, layer, *rest)

    def factors(layers):
        searched.clear()
        return [w.detach() for layer in found(model, sample("gpt2"), layers)[2] for w in layer.factors()]

    search = theodolite.models.projections._find
    monkeypatch.setattr(theodolite.models.projections, "_find", searching)
    for swapped, expected in (([], [0]), ([1], [0, 1, 2]), ([2], [0, 2])):
        for layer, block in enumerate(model.transformer.h):
            block.attn.c_attn.swaps = layer in swapped
        alone = [w for layer in range(3) for w in factors([layer])]
        together = factors([0, 1, 2])
        assert searched == expected  # the last search of a kind is what the next layer of it is tried with
        assert all(torch.equal(a, b) for a, b in zip(together, alone, strict=True))
