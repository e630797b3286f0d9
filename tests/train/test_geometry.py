"""Oracles: the dense computation of `tests/dense.py`, which shares no code with ours; the model's own eager attention
and hidden states; its weights by name; and the bytes of a training run that nobody looked at."""

from __future__ import annotations

import copy
import re

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from tests import checkpoints, dense
from tests.models.test_every_family import eager, softmax_arguments
from tests.slow import slow_but
from theodolite.errors import UsageError
from theodolite.models.open import unwrap
from theodolite.models.source import Source
from theodolite.models.structure_search import find_structure
from theodolite.train.geometry import QUERIES, GeometryReader

IDS = torch.randint(checkpoints.VOCABULARY, (3, 24), generator=torch.Generator().manual_seed(1))


def model_of(family: str) -> PreTrainedModel:
    return checkpoints.build(family).train()


def dense_of(family: str) -> dense.Dense:
    model = model_of(family).eval()
    structure = find_structure(Source.of_transformers(model))
    return dense.run(model, IDS, list(structure.attention), list(structure.blocks))


@pytest.mark.parametrize("family", slow_but(["llama3"], ["bert", "llama3", "gpt_oss", "bloom"]))
def test_columns_equal_the_dense_computation(family):
    """Oracle: every matrix kept whole, each column by its definition (`tests/dense.py`)."""
    model = model_of(family)
    geometry = GeometryReader(model, IDS).look(7)
    dense_run = dense_of(family)
    for name, expected in dense.head_columns(dense_run, IDS.numpy(), family != "bert").items():
        np.testing.assert_allclose(geometry.heads[name], expected, rtol=1e-4, atol=1e-5, err_msg=name)
    columns = dense.layer_columns(dense_run, np.zeros(len(IDS)))
    columns["norm_growth"] = np.append(np.nan, columns["norm"][1:] / columns["norm"][:-1])
    for name in geometry.layers.columns.drop("layer"):
        np.testing.assert_allclose(geometry.layers[name], columns[name], rtol=1e-4, atol=1e-5, err_msg=name)
    assert geometry.step == 7
    assert geometry.seconds > 0


def eager_logits(model: PreTrainedModel) -> list[torch.Tensor]:
    """What the model's own eager attention takes the softmax of, layer by layer, in float64; −∞ where masked."""
    model = model.double().eval()
    model.set_experts_implementation("eager")  # the fast ones have no float64
    with torch.no_grad(), eager(model), softmax_arguments() as logits:
        model(IDS)
    for layer, sinks in enumerate(p for name, p in model.named_parameters() if name.endswith("sinks")):
        # gpt-oss subtracts the largest of each row, the sink's column with it: that column tells which.
        logits[layer] = logits[layer] + (sinks.detach().view(1, -1, 1) - logits[layer][..., -1])[..., None]
    return [x.masked_fill(x < -1e30, -torch.inf) for x in logits]


@pytest.mark.parametrize("family", slow_but(["gpt_oss"], ["mistral", "gemma2", "gpt_oss", "bloom"]))
def test_largest_logit_and_log_sum_exp_are_those_of_eager_attention(family):
    """Oracle: the inputs of the softmax in transformers' own eager attention, in float64."""
    logits = eager_logits(model_of(family))
    heads = GeometryReader(model_of(family), IDS).look().heads
    assert len(logits) == heads["layer"].nunique()
    keys = slice(IDS.shape[1])  # not the sink's column
    largest = torch.stack([x[..., keys].amax((0, 2, 3)) for x in logits]).flatten()
    log_sum_exp = torch.stack([x.logsumexp(-1).mean((0, 2)) for x in logits]).flatten()
    np.testing.assert_allclose(heads["largest_logit"], largest, rtol=1e-4)
    np.testing.assert_allclose(heads["log_sum_exp"], log_sum_exp, rtol=1e-4)


@pytest.mark.parametrize("family", slow_but(["gpt_oss"], ["bert", "gpt_oss"]))
def test_entropy_share_is_one_for_uniform_attention(family):
    """Oracle: a uniform row has the largest entropy, ln of what it sees; zero queries make all rows uniform."""
    model = model_of(family)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "c_attn" in name:
                parameter[..., : model.config.hidden_size] = 0
            elif re.search(r"q_proj|\.query\.|sinks", name):
                parameter.zero_()
    heads = GeometryReader(model, IDS).look().heads
    np.testing.assert_allclose(heads["entropy_share"], 1, rtol=1e-5)
    assert (heads["propagation"] == 1).all()
    assert (heads["regime"] == "uniform").all()


def test_a_largest_logit_may_be_negative():
    """Oracle: queries −1 and keys 1 in every dimension, whose logit is −head_width · scaling = −√8."""
    model = model_of("gpt2")
    with torch.no_grad():
        for block in model.transformer.h:
            block.attn.c_attn.weight.zero_()
            block.attn.c_attn.bias[:32] = -1
            block.attn.c_attn.bias[32:64] = 1
    heads = GeometryReader(model, IDS).look().heads
    np.testing.assert_allclose(heads["largest_logit"], -(8**0.5), rtol=1e-6)


def test_attention_by_distance_equals_its_definition():
    """Oracle: the model's own attention; plain loops over it."""
    heads = GeometryReader(model_of("gpt2"), IDS).look().heads
    length = IDS.shape[1]
    rows = [(k + 1) * length // QUERIES - 1 for k in range(QUERIES)]
    attentions = dense_of("gpt2").attention.swapaxes(1, 2).reshape(-1, len(IDS), length, length)
    for index, attention in enumerate(attentions):
        mean = attention.mean(0)
        by_distance = {
            distance: np.mean([mean[t, t - distance] for t in rows if t >= distance])
            for distance in range(length)
            if sum(t >= distance for t in rows) >= QUERIES // 2
        }
        assert heads["at_distance"][index] == pytest.approx(max(by_distance.values()), rel=1e-3)


def test_spectra_equal_those_of_the_whole_matrix():
    """Oracle: W_QK d×d of GPT-2's weights read by name, with numpy."""
    model = model_of("gpt2")
    reader = GeometryReader(model, IDS)
    heads = reader.look().heads
    width, heads_of_layer = 32, 4
    head_width = width // heads_of_layer
    scaling = head_width**-0.5
    for _, row in heads.iterrows():
        weight = model.transformer.h[row["layer"]].attn.c_attn.weight.detach().double().numpy()
        q, k, _ = np.split(weight, 3, axis=1)
        part = slice(row["head"] * head_width, (row["head"] + 1) * head_width)
        w = q[:, part] @ k[:, part].T
        expected = {"trace": np.trace(w), "r": np.trace(w) * scaling, "trace_of_square": np.trace(w @ w)}
        expected |= {"frobenius_squared": (w**2).sum(), "spectral_norm": np.linalg.norm(w, 2) * scaling}
        assert row[list(expected)].to_dict() == pytest.approx(expected, rel=1e-6)
    assert "trace" not in reader.look(spectra=False).heads


@pytest.mark.parametrize("family", slow_but(["gpt2"], ["gpt2", "bert", "gpt_oss"]))
def test_a_look_leaves_the_model_as_it_was(family):
    """Oracle: the model before; bytes of weights and gradients, modes, hooks, random numbers."""
    model = model_of(family)
    frozen = next(m for m in model.modules() if "Norm" in type(m).__name__)
    frozen.eval()
    first = next(model.parameters())
    first.grad = torch.ones_like(first)
    before = copy.deepcopy(model.state_dict())
    modes = [m.training for m in model.modules()]
    needs = [p.requires_grad for p in model.parameters()]
    implementation = model.config._attn_implementation
    random = torch.get_rng_state()
    GeometryReader(model, IDS).look()
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert [m.training for m in model.modules()] == modes
    assert [p.requires_grad for p in model.parameters()] == needs
    assert torch.equal(first.grad, torch.ones_like(first))
    assert all(p.grad is None for p in list(model.parameters())[1:])
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert model.config._attn_implementation == implementation
    assert torch.equal(torch.get_rng_state(), random)


@pytest.mark.slow
def test_dropout_and_checkpointing_change_nothing():
    """Oracle: the look at a model in evaluation mode, without these."""
    model, plain = model_of("gpt2"), GeometryReader(model_of("gpt2").eval(), IDS).look()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.1
    model.activation_checkpointing_enable()
    look = GeometryReader(model, IDS).look()
    assert look.heads.equals(plain.heads)
    assert look.layers.equals(plain.layers)


@pytest.mark.slow
def test_wrapped_models_are_unwrapped(tmp_path):
    """Oracle: the look at the bare model; wrappers are PyTorch's own."""
    model = model_of("gpt2")
    plain = GeometryReader(model, IDS).look()
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        distributed = torch.nn.parallel.DistributedDataParallel(model)
        compiled = torch.compile(distributed, backend="eager")
        for wrapped in (torch.nn.DataParallel(model), distributed, compiled):
            assert unwrap(wrapped) is model
            assert GeometryReader(wrapped, IDS).look().heads.equals(plain.heads)
        distributed(input_ids=IDS, labels=IDS).loss.backward()  # its hooks still stand
        # Let go of while the group is there: left to the function's end, gloo's thread was once waited for forever.
        del distributed, compiled, wrapped
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_a_model_compiled_in_place_runs_eagerly_for_the_look():
    """Oracle: a backend that counts the graphs it is given, and the look before compilation."""
    model = model_of("gpt2")
    plain = GeometryReader(model, IDS).look()
    graphs: list[object] = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> object:
        graphs.append(graph)
        return graph.forward

    model.base_model.compile(backend=backend)
    assert GeometryReader(model, IDS).look().heads.equals(plain.heads)
    assert not graphs
    model(input_ids=IDS)
    assert graphs


def test_ids_and_models_that_do_not_fit_are_refused():
    for ids, words in (
        (torch.full((2, 16), 300), "token id 300 does not fit the 300 tokens"),
        (torch.full((2, 16), -100), "token id -100 does not fit"),
        (torch.zeros(2, 129, dtype=torch.int64), "longer than the 128 that"),
    ):
        with pytest.raises(UsageError, match=words):
            GeometryReader(model_of("gpt2"), ids)
    with pytest.raises(UsageError, match="reads pixel_values"):
        GeometryReader(checkpoints.build("vit"), IDS)
    with pytest.raises(UsageError, match="holds no model of transformers"):
        GeometryReader(torch.nn.Linear(2, 2), IDS)


def entropies(model, rounded: bool) -> torch.Tensor:
    """From the queries and keys that GPT-2 projects, under autocast to bfloat16 or not; the softmax in float64.

    Its attention multiplies them with sums in float32 (eager attention would round each logit once more).
    """
    projected: list[torch.Tensor] = []
    hooks = [
        block.attn.c_attn.register_forward_hook(lambda *given: projected.append(given[-1].double()))
        for block in model.transformer.h
    ]
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=rounded):
        copy.copy(model).eval()(IDS)
    for hook in hooks:
        hook.remove()
    result = []
    for layer in projected:
        query, key, _ = (part.unflatten(-1, (4, 8)).transpose(1, 2) for part in layer.split(32, dim=-1))
        logits = query @ key.mT / 8**0.5
        hidden = torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1)
        weights = logits.masked_fill(hidden, -torch.inf).softmax(dim=-1)
        result.append(torch.special.entr(weights).sum(-1).mean((0, 2)))
    return torch.stack(result)


def look_entropy(reader: GeometryReader) -> torch.Tensor:
    return torch.tensor(reader.look(spectra=False).heads["entropy"].to_numpy()).view(3, -1)


def test_a_look_rounds_as_training_does():
    """Keys that all share a large part: rounded to bfloat16 they are alike, and attention is that of a mean.

    Oracle: the model's own queries and keys, under autocast too. In float32 nothing shows.
    """
    model = model_of("gpt2")
    with torch.no_grad():
        for block in model.transformer.h:
            block.attn.c_attn.weight[:, :64] *= 8
            block.attn.c_attn.bias[32:64] += 1000
    plain, rounded = entropies(model, False), entropies(model, True)
    assert (rounded - plain).abs().max() > 0.05
    exact = look_entropy(GeometryReader(model, IDS))
    torch.testing.assert_close(exact, plain, rtol=1e-3, atol=1e-3)
    with torch.autocast("cpu", torch.bfloat16):
        around = look_entropy(GeometryReader(model, IDS))
        assert torch.is_autocast_enabled("cpu")
    torch.testing.assert_close(around, rounded, rtol=1e-2, atol=1e-2)


@pytest.mark.slow
def test_a_look_rounds_as_accelerate_does(request):
    """Oracle: the same look under autocast. accelerate casts in a `forward` that it puts around the model's."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)  # a Trainer before this leaves its own precision
    request.addfinalizer(lambda: AcceleratorState._reset_state(reset_partial_state=True))
    model = model_of("gpt2")
    with torch.autocast("cpu", torch.bfloat16):
        expected = look_entropy(GeometryReader(model, IDS))
    prepared = Accelerator(cpu=True, mixed_precision="bf16").prepare(model)
    assert torch.equal(look_entropy(GeometryReader(prepared, IDS)), expected)
