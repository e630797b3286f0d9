"""Quantised layers are read as what they compute, and adapters count; what cannot be read is refused before the pass.

Scales that wait for a quantiser whom nothing names are refused; masks and old buffers are not. The oracles are the
quantisers' own dequantised weights, PEFT's merged ones, and the same layers without a quantiser.
"""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pandas.testing import assert_frame_equal
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel

from tests.checkpoints import edited, with_tensors
from theodolite.corpus.corpus import Corpus
from theodolite.errors import UsageError, WorkError
from theodolite.logits.constituents import constituents
from theodolite.models import open_model
from theodolite.models.guard import guarded
from theodolite.models.open import open_streamed
from theodolite.models.stored.dequantised import EXACT, dequantised, has_own_class, quantised_layers
from theodolite.passes.survey import spectra, survey
from theodolite.sinks.trace import trace_sinks
from theodolite.train.geometry import GeometryReader
from theodolite.train.locater import Locater
from theodolite.train.monitor import GeometryMonitor

Q = "model.layers.1.self_attn.q_proj"
IDS = torch.arange(64).view(2, 32)
CORPUS = Corpus.from_ids(IDS)
Tensors = dict[str, torch.Tensor]

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # PEFT asks it

FOUR_BITS = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.float32}


def _bitsandbytes(**options: Any) -> dict[str, Any]:
    pytest.importorskip("bitsandbytes")
    return {"quantization_config": BitsAndBytesConfig(**options)}


def _torchao(kind: str, **options: Any) -> dict[str, Any]:
    quantization = pytest.importorskip("torchao.quantization")
    transformers = pytest.importorskip("transformers")
    return {"quantization_config": transformers.TorchAoConfig(getattr(quantization, kind)(**options))}


QUANTISERS: dict[str, Callable[[], dict[str, Any]]] = {
    "int8 of bitsandbytes": lambda: _bitsandbytes(load_in_8bit=True),
    "nf4": lambda: _bitsandbytes(**FOUR_BITS),
    "nf4, quantised twice, bfloat16": lambda: _bitsandbytes(
        **FOUR_BITS | {"bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": torch.bfloat16}
    ),
    "int8": lambda: _torchao("Int8WeightOnlyConfig"),
    "int8, activations too": lambda: _torchao("Int8DynamicActivationInt8WeightConfig"),
    "float8": lambda: _torchao("Float8WeightOnlyConfig"),
}
ROUNDING = {"int8 of bitsandbytes": 2**-11, "nf4, quantised twice, bfloat16": 2**-8}
"""Of the arithmetic in which these two answer."""


def load(path: Path, name: str) -> PreTrainedModel:
    options = {"device_map": "cpu", "dtype": torch.float32} | QUANTISERS[name]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the libraries, as they are imported
        return AutoModelForCausalLM.from_pretrained(path, **options).eval()


def own_weight(layer: Any) -> torch.Tensor:
    """As the quantiser dequantises it; to be asked before the layer is run."""
    if has_own_class(layer.weight):
        return layer.weight.dequantize().float()
    functional = pytest.importorskip("bitsandbytes.functional")
    if layer.weight.dtype == torch.int8:
        return functional.int8_vectorwise_dequant(layer.weight.data, layer.weight.SCB)
    return functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state).float()


def twin(model: PreTrainedModel, path: Path) -> PreTrainedModel:
    """The model of the checkpoint with the quantiser's own weights in plain layers."""
    plain = AutoModelForCausalLM.from_pretrained(path).eval()
    for name, layer in quantised_layers(model):
        weight, parameter = own_weight(layer), plain.get_parameter(f"{name}.weight")
        parameter.data.copy_(weight if weight.shape == parameter.shape and "c_" not in name else weight.T)
    return plain


PARTS = ("w_q", "w_k", "w_v", "b_q", "b_k", "b_v")


@pytest.mark.parametrize(
    ("name", "family"),
    [*((name, "llama3") for name in QUANTISERS), ("int8 of bitsandbytes", "gpt2"), ("nf4", "qwen3")],
)
def test_quantised_models_are_read_as_their_quantisers_do(family, name, checkpoint):
    path = checkpoint(family)
    model = load(path, name)
    plain = open_model(twin(model, path))
    assert any("attn" in layer for layer, _ in quantised_layers(model))
    opened = open_model(model)
    for layer in range(opened.layers):
        ours, own = opened.head_weights(layer), plain.head_weights(layer)
        pairs = [(getattr(ours, part), getattr(own, part)) for part in PARTS]
        pairs.append((opened.output_weights(layer), plain.output_weights(layer)))
        for read, expected in pairs:
            assert (read - expected).abs().max() <= ROUNDING.get(name, 1e-6) * expected.abs().max()


@pytest.mark.parametrize("name", ["int8 of bitsandbytes", "nf4", "int8"])
def test_a_quantised_checkpoint_is_opened(name, checkpoint, tmp_path):
    load(checkpoint("llama3"), name).save_pretrained(tmp_path / "quantised")
    said: list[str] = []
    whole = open_model(tmp_path / "quantised", device="cpu")
    lazily = open_streamed(tmp_path / "quantised", say=said.append)
    assert spectra(lazily).heads.equals(spectra(whole).heads)
    assert "is quantised" in said[0]
    assert not whole.weights().changed
    with torch.no_grad():
        next(whole.root.parameters()).data.add_(1)
    assert whole.weights().changed


@pytest.mark.parametrize("static", [False, True])
def test_what_is_unpacked_at_the_first_pass(static, copied):
    """compressed-tensors' int8, activations too. Oracle: the stored numbers times their scales."""
    pytest.importorskip("compressed_tensors")
    expected: Tensors = {}

    def eight_bits(weights: Tensors) -> None:
        for name in [name for name in weights if name.endswith("proj.weight")]:
            scale = weights[name].abs().amax(1, keepdim=True) / 127
            stored = (weights[name] / scale).round()
            expected[name] = (stored * scale).double()
            weights |= {name: stored.to(torch.int8), f"{name}_scale": scale}
            if static:
                weights[name.replace("weight", "input_scale")] = torch.full((1,), 0.3)
        expected[f"{Q}.bias"] = weights[f"{Q}.bias"]

    kind = {"num_bits": 8, "symmetric": True, "type": "int"}
    activations = {"dynamic": not static, "strategy": "tensor" if static else "token", **kind}
    group = {"format": "int-quantized", "targets": ["Linear"], "input_activations": activations}
    group["weights"] = {"dynamic": False, "strategy": "channel", **kind}
    method = {"quant_method": "compressed-tensors", "format": "int-quantized", "ignore": ["lm_head"]}
    method |= {"quantization_status": "compressed", "config_groups": {"group_0": group}}
    path = edited(with_tensors(copied("llama3"), eight_bits), quantization_config=method)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the library, as it is imported
        model = open_model(path)
    if static:
        with pytest.raises(WorkError, match="as where activations are rounded to a fixed grid"):
            spectra(model)
        return
    read, own = model.head_weights(1), expected[f"{Q}.weight"]
    assert (read.w_q.mT.flatten(0, 1) - own).abs().max() <= 1e-5 * own.abs().max()
    assert torch.equal(read.b_q.flatten().float(), expected[f"{Q}.bias"])


class Scaled(nn.Module):
    """As `transformers` has eight-bit linear layers: what it computes is right, what it holds is no W."""

    def __init__(self, linear: nn.Linear, dtype: torch.dtype) -> None:
        super().__init__()
        self.in_features, self.factor = linear.in_features, linear.weight.abs().max() / 100
        self.weight = nn.Parameter((linear.weight / self.factor).to(dtype), requires_grad=False)
        self.register_buffer("weight_scale_inv", self.factor)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.answer(inputs, lambda x: x @ (self.weight.float() * self.factor).T)

    def answer(self, inputs: torch.Tensor, product: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        return product(inputs)


class Nameless(Scaled):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        del self.in_features


def _rounded_to_four_bits(inputs: torch.Tensor) -> torch.Tensor:
    largest = inputs.abs().amax(-1, keepdim=True).clamp_min(1e-9)
    return (inputs / largest * 7).round() * largest / 7


def _unable(inputs: torch.Tensor, product: Any) -> torch.Tensor:
    raise NotImplementedError("kernels for another machine")


NO_SUM = "its answers do not add up, as where activations are rounded to a fixed grid"


UNREADABLE: dict[str, tuple[Any, str]] = {
    "fixed grid": (lambda x, product: product((x / 0.3).round().clamp(-128, 127) * 0.3), NO_SUM),
    "four bits": (lambda x, product: product(_rounded_to_four_bits(x)), NO_SUM),
    "shifted": (lambda x, product: product(x) + 1, NO_SUM),
    "unable": (_unable, "kernels for another machine"),
    "nameless": (None, "it does not say how wide its input is"),
    "unscaled": (lambda x, product: product(x) / 0, NO_SUM),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_what_cannot_be_read_is_refused_before_the_pass(name, checkpoint):
    answer, why = UNREADABLE[name]
    model = open_model(checkpoint("mistral"))
    kind, first = Nameless if answer is None else Scaled, Q.replace("1", "0")
    layer = kind(model.root.get_submodule(first), torch.int8)
    layer.answer = answer or layer.answer
    model.root.set_submodule(first, layer)
    began: list[tuple[object, ...]] = []
    said = rf"{first} is quantised \({kind.__name__} of .*cannot be read: {why}; give a dequantised copy"
    for measure in (
        lambda: survey(model, CORPUS, show_progress=lambda *told: began.append(told)),
        lambda: trace_sinks(model, CORPUS, show_progress=lambda *told: began.append(told)),
        lambda: spectra(model),
        lambda: constituents(model, IDS, 0),
    ):
        with pytest.raises(WorkError, match=said) as refused:
            measure()
        assert "\n" not in str(refused.value)
    assert not began
    with pytest.raises(WorkError, match=why):
        model.head_weights(0)
    if name not in ("unable", "unscaled"):
        assert torch.isfinite(model.forward(IDS)).all()  # what needs no weights is measured as before
        with pytest.raises(WorkError, match=why):
            GeometryReader(model.root, IDS)


def test_a_wrong_matrix_is_refused():
    """Whatever a layer says of itself, what it answers decides. EXACT is of roundings, a scale is off by more."""
    assert EXACT < 0.02
    layer = Scaled(nn.Linear(32, 16), torch.int8)
    layer.answer = lambda x, product: product(x) * torch.where((x != 0).sum(-1, keepdim=True) == 1, 1.02, 1.0)
    with pytest.raises(WorkError, match=NO_SUM):
        dequantised("q", layer)


def test_what_bitsandbytes_says_at_each_call_is_not_heard_in_a_pass(caplog):
    logger = logging.getLogger("bitsandbytes.autograd._functions")
    with guarded(nn.Linear(2, 2)):
        logger.warning("MatMul8bitLt: inputs will be cast from %s to float16", torch.float32)
        logger.warning("another warning")
    assert [record.getMessage() for record in caplog.records] == ["another warning"]


@pytest.mark.parametrize("name", ["nf4", "int8 of bitsandbytes", "int8"])
def test_a_quantised_matrix_is_not_penalised(name, checkpoint):
    with pytest.raises(UsageError, match="is quantised, so its W_q and W_k cannot be penalised"):
        Locater(load(checkpoint("llama3"), name), scale=1.0, mean=1.0)


def adapted(model: nn.Module, family: str = "llama3", **options: Any) -> Any:
    """The model with random adapters of queries, keys and values."""
    peft = pytest.importorskip("peft")
    targets = ["c_attn"] if family == "gpt2" else ["q_proj", "k_proj", "v_proj"]
    config = {"r": 4, "lora_alpha": 16, "target_modules": targets, "fan_in_fan_out": family == "gpt2"}
    model = peft.get_peft_model(model, peft.LoraConfig(**config | options))
    fill(model)
    return model


def fill(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))


def close(ours: Any, expected: Any) -> bool:
    return all(torch.allclose(getattr(ours, p), getattr(expected, p), rtol=1e-5, atol=1e-5) for p in PARTS)


@pytest.mark.parametrize(("family", "dora"), [("llama3", True), ("gpt2", False)])
def test_adapters_count(family, dora, checkpoint):
    """Oracle: PEFT's own merge. The active adapter counts, also merged in place; one that is switched off does not."""
    peft = pytest.importorskip("peft")
    model = adapted(AutoModelForCausalLM.from_pretrained(checkpoint(family)), family, use_dora=dora)
    model.add_adapter(
        "other", peft.LoraConfig(r=2, target_modules=model.peft_config["default"].target_modules)
    )
    fill(model)
    opened, base = open_model(model.eval()), open_model(checkpoint(family))
    for adapter in ("default", "other"):
        model.set_adapter(adapter)
        merged = open_model(copy.deepcopy(model).merge_and_unload())
        assert close(opened.head_weights(1), merged.head_weights(1))
        assert not close(opened.head_weights(1), base.head_weights(1))
    with model.disable_adapter():
        assert close(opened.head_weights(1), base.head_weights(1))
    model.merge_adapter()
    assert close(opened.head_weights(1), merged.head_weights(1))


def test_an_adapter_beside_its_weights_counts(checkpoint, tmp_path, monkeypatch):
    """transformers loads it where it finds PEFT, and nothing else may read the weights alone."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint("llama3"))
    model.save_pretrained(tmp_path / "both")
    model = adapted(model)
    for folder in ("both", "alone"):
        model.save_pretrained(tmp_path / folder)
    merged = open_model(copy.deepcopy(model).merge_and_unload().eval())
    for opener in (open_model, open_streamed):
        assert close(opener(tmp_path / "both").head_weights(1), merged.head_weights(1))
        with pytest.raises(
            UsageError, match=r"holds an adapter alone.*open_model\(PeftModel.from_pretrained"
        ):
            opener(tmp_path / "alone")
    monkeypatch.setattr("theodolite.models.stored.loading.is_peft_available", lambda: False)
    for opener in (open_model, open_streamed):
        with pytest.raises(UsageError, match="has an adapter beside its weights, which PEFT reads"):
            opener(tmp_path / "both")


def test_learned_prompts_are_refused(checkpoint):
    peft = pytest.importorskip("peft")
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(checkpoint("llama3")), config)
    with pytest.raises(UsageError, match="has learned prompts"):
        open_model(model)


def bits(model: nn.Module) -> list[list[int]]:
    """What 4-bit layers hold, as they hold it."""
    layers = [layer for _, layer in quantised_layers(model)]
    assert layers
    return [[*w.data.flatten().tolist(), *w.quant_state.absmax.tolist()] for w in (x.weight for x in layers)]


def trained(path: Path, looked_at: bool) -> tuple[list[float], Any, GeometryMonitor | None]:
    """Losses of a QLoRA training of three steps with dropout, and the model."""
    base = load(path, "nf4")
    before = bits(base)
    model = adapted(base, lora_dropout=0.1).train()
    monitor = GeometryMonitor(model, IDS, every=1, spectra_every=1) if looked_at else None
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
    torch.manual_seed(0)
    losses = []
    for step in range(3):
        loss = model(input_ids=IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if monitor is not None:
            monitor(step)
    assert bits(base) == before
    return losses, model, monitor


def test_a_qlora_training_is_monitored_and_not_changed(checkpoint):
    """On a CPU, bitsandbytes' layers would be others after a pass in evaluation mode. Oracle: plain layers, merged."""
    losses, model, monitor = trained(checkpoint("llama3"), looked_at=True)
    assert monitor is not None
    assert monitor.last is not None
    assert losses == trained(checkpoint("llama3"), looked_at=False)[0]
    plain = adapted(twin(load(checkpoint("llama3"), "nf4"), checkpoint("llama3")))
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            plain.get_parameter(name).data.copy_(parameter)
    expected = GeometryReader(plain.merge_and_unload().eval(), IDS).look()
    ours = monitor.last.heads[expected.heads.columns]
    assert_frame_equal(ours, expected.heads, rtol=1e-3, atol=1e-4)


def test_a_device_without_float64_is_refused(checkpoint, monkeypatch):
    """Apple's; here it is only said to be one."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint("gpt2"))
    monkeypatch.setattr("theodolite.models.source.device_of", lambda _: torch.device("mps"))
    for measure in (lambda: open_model(model), lambda: GeometryReader(model, IDS)):
        with pytest.raises(
            UsageError, match="cannot use device mps: sums are taken in float64, which it lacks"
        ):
            measure()
    with pytest.raises(UsageError, match="cannot use device mps"):
        open_model(checkpoint("gpt2"), device="mps")


def beside(name: str) -> Callable[[Tensors], object]:
    return lambda weights: weights.update({f"{Q}.{name}": torch.ones(1)})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (beside("weight_scale"), rf"tensor {Q}\.weight_scale scales {Q}\.weight"),
        (beside("SCB"), rf"tensor {Q}\.SCB scales"),
        (beside("scales"), rf"tensor {Q}\.scales scales"),
        (beside("weight_zero_point"), rf"tensor {Q}\.weight_zero_point scales"),
    ],
)
def test_a_checkpoint_without_a_quantization_config(change, said, copied):
    folder = with_tensors(copied("llama3"), change)
    for opener in (open_model, open_streamed):
        words = f"{said}.* no quantization_config: give a dequantised copy"
        with pytest.raises(WorkError, match=words) as refused:
            opener(folder)
        assert "\n" not in str(refused.value)


def test_a_pruned_model_s_own_names_are_no_exception(checkpoint, copied):
    """The prefix of the backbone may be missing, and a mask is no weight, though its name ends as a bias does."""

    def old(weights: Tensors) -> None:
        for name in list(weights):
            weights[name.removeprefix("transformer.")] = weights.pop(name)
        weights["h.0.attn.bias"] = torch.ones(1, 1, 128, 128, dtype=torch.bool)
        weights["h.0.attn.masked_bias"] = torch.tensor(-1e4)
        weights["logit_scale"] = torch.ones(())

    folder = with_tensors(copied("gpt2"), old)
    assert spectra(open_model(folder)).heads.equals(spectra(open_model(checkpoint("gpt2"))).heads)


def test_eight_bits_with_blocks_of_scales_are_read_by_transformers(copied):
    """DeepSeek's FP8. Oracle: each block of the stored numbers times its scale."""
    blocks, stored = {}, torch.float8_e4m3fn

    def eight_bits(weights: Tensors) -> None:
        for name in [name for name in weights if name.endswith("proj.weight")]:
            by_block = weights[name].view(-1, 8, weights[name].shape[1] // 8, 8)
            scale = by_block.abs().amax((1, 3), keepdim=True) / torch.finfo(stored).max
            eight = (by_block / scale).to(stored)
            blocks[name] = (eight.float() * scale).view_as(weights[name])
            weights[name] = eight.view_as(weights[name])
            weights[name + "_scale_inv"] = scale[:, 0, :, 0].contiguous()

    folder = with_tensors(copied("mistral"), eight_bits)
    with pytest.raises(WorkError, match="no quantization_config"):
        open_model(folder)
    method = {"quant_method": "fp8", "weight_block_size": [8, 8], "activation_scheme": "dynamic"}
    edited(folder, quantization_config=method)
    for opener in (open_model, open_streamed):
        read = opener(folder).head_weights(1).w_q.mT.flatten(0, 1)
        torch.testing.assert_close(read, blocks[f"{Q}.weight"].double(), rtol=1e-6, atol=1e-9)
