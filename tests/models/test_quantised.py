"""Weights that wait for a quantiser are refused by name before anything is measured; masks and old buffers are not."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from theodolite.corpus.corpus import Corpus
from theodolite.errors import WorkError
from theodolite.logits.constituents import constituents
from theodolite.models import open_model
from theodolite.models.lazy_weights import open_weights
from theodolite.passes.survey import spectra, survey
from theodolite.sinks.trace import trace_sinks

Q = "model.layers.1.self_attn.q_proj"
IDS = torch.arange(64).view(2, 32)
CORPUS = Corpus("ids", IDS, torch.full((2,), -1), [], 0)

Tensors = dict[str, torch.Tensor]


def written(source: Path, folder: Path, change: Callable[[Tensors], object]) -> Path:
    shutil.copytree(source, folder)
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def stored_as(dtype: torch.dtype) -> Callable[[Tensors], object]:
    return lambda weights: weights.update({f"{Q}.weight": weights[f"{Q}.weight"].to(dtype)})


def beside(name: str) -> Callable[[Tensors], object]:
    return lambda weights: weights.update({f"{Q}.{name}": torch.ones(1)})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (stored_as(torch.float8_e4m3fn), rf"tensor {Q}\.weight is F8_E4M3"),
        (stored_as(torch.float8_e5m2), rf"tensor {Q}\.weight is F8_E5M2"),
        (stored_as(torch.int8), rf"tensor {Q}\.weight is I8"),
        (stored_as(torch.uint8), rf"tensor {Q}\.weight is U8"),
        (stored_as(torch.bool), rf"tensor {Q}\.weight is BOOL"),
        (stored_as(torch.int64), rf"tensor {Q}\.weight is I64"),
        (beside("weight_scale"), rf"tensor {Q}\.weight_scale scales {Q}\.weight"),
        (beside("weight_scale_inv"), rf"tensor {Q}\.weight_scale_inv scales"),
        (beside("weight_scale_2"), rf"tensor {Q}\.weight_scale_2 scales"),
        (beside("SCB"), rf"tensor {Q}\.SCB scales"),
        (beside("scales"), rf"tensor {Q}\.scales scales"),
        (beside("weight_zero_point"), rf"tensor {Q}\.weight_zero_point scales"),
    ],
)
def test_a_checkpoint_without_a_quantization_config(change, said, checkpoint, tmp_path):
    folder = written(checkpoint("llama3"), tmp_path / "model", change)
    for opener in (open_model, open_weights):
        with pytest.raises(
            WorkError, match=f"{said}.* no quantization_config: give a dequantised copy"
        ) as refused:
            opener(folder)
        assert "\n" not in str(refused.value)


def test_a_pruned_model_s_own_names_are_no_exception(checkpoint, tmp_path):
    """The prefix of the backbone may be missing, and a mask is no weight, though its name ends as a bias does."""

    def bare(weights: Tensors) -> None:
        for name in list(weights):
            weights[name.removeprefix("transformer.")] = weights.pop(name)

    def old(weights: Tensors) -> None:
        bare(weights)
        weights["h.0.attn.bias"] = torch.ones(1, 1, 128, 128, dtype=torch.bool)
        weights["h.0.attn.masked_bias"] = torch.tensor(-1e4)
        weights["logit_scale"] = torch.ones(())

    def wrong(weights: Tensors) -> None:
        bare(weights)
        weights["h.0.attn.c_attn.bias"] = weights["h.0.attn.c_attn.bias"].to(torch.int8)

    expected = spectra(open_model(checkpoint("gpt2")))
    opened = open_model(written(checkpoint("gpt2"), tmp_path / "old", old))
    assert spectra(opened).heads.equals(expected.heads)
    with pytest.raises(WorkError, match=r"tensor h\.0\.attn\.c_attn\.bias is I8"):
        open_model(written(checkpoint("gpt2"), tmp_path / "wrong", wrong))


class Scaled(nn.Module):
    """As `transformers` has eight-bit linear layers: what it computes is right, what it holds is no W."""

    def __init__(self, linear: nn.Linear, dtype: torch.dtype, scale: str) -> None:
        super().__init__()
        factor = linear.weight.abs().max() / 100
        self.weight = nn.Parameter((linear.weight / factor).to(dtype), requires_grad=False)
        self.register_buffer(scale, factor)
        self.factor = factor

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs @ (self.weight.float() * self.factor).T


def in_a_live_model(model: nn.Module, dtype: torch.dtype, scale: str = "weight_scale_inv") -> None:
    model.set_submodule(Q, Scaled(model.get_submodule(Q), dtype, scale))


@pytest.mark.parametrize(
    ("dtype", "said"),
    [
        (torch.float8_e4m3fn, rf"{Q}\.weight is float8_e4m3fn"),
        (torch.int8, rf"{Q}\.weight is int8"),
        (torch.bfloat16, rf"{Q}\.weight_scale_inv scales the weight beside it"),
    ],
)
def test_live_modules_are_refused_before_the_pass(dtype, said, checkpoint):
    model = open_model(checkpoint("mistral"))
    in_a_live_model(model.hf, dtype)
    began: list[str] = []
    for measure in (
        lambda: survey(model, CORPUS, show_progress=lambda what, done, total: began.append(what)),
        lambda: trace_sinks(model, CORPUS, show_progress=lambda what, done, total: began.append(what)),
        lambda: spectra(model),
        lambda: constituents(model, IDS, 1),
    ):
        with pytest.raises(WorkError, match=said):
            measure()
    assert not began
    with pytest.raises(WorkError, match=r"q_proj\.weight"):
        model.head_weights(1)
    assert torch.isfinite(model.forward(IDS)).all()  # what needs no weights is measured as before


def test_modules_without_parameters_are_refused(checkpoint):
    model = open_model(checkpoint("llama2"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's own successor is another package
        torch.ao.quantization.quantize_dynamic(model.hf, {nn.Linear}, inplace=True)
    with pytest.raises(
        WorkError, match=r"layers\.0\.self_attn\.q_proj is a Linear of torch\.ao\.nn\.quantized"
    ):
        spectra(model)


def test_a_config_that_names_its_quantiser_is_left_to_it(checkpoint, tmp_path):
    folder = written(checkpoint("gpt_oss"), tmp_path / "experts", lambda weights: None)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["self_attn"]}
    (folder / "config.json").write_text(json.dumps(config))
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.0.mlp.experts.gate_up_proj_blocks"] = torch.ones(2, 2, dtype=torch.uint8)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    assert len(spectra(open_weights(folder)).heads) == 12
