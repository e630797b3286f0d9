"""LocAteR on LoRA: the penalty of W + s·BA, and its gradient in A and B."""

from __future__ import annotations

import copy
from typing import Any

import pandas as pd
import peft
import pytest
import torch
from torch import nn

from tests import checkpoints
from tests.train.test_locater import MEAN, SCALE, dense_penalty, gradients
from theodolite.errors import UsageError
from theodolite.train import GeometryMonitor, Locater

# Which PEFT asks for.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")


def adapted(family: str = "llama3", modules: Any = ("q_proj", "v_proj"), **options: Any) -> Any:
    """A model with an adapter whose B is not zero, as after some steps."""
    torch.manual_seed(3)
    options |= {"r": 3, "lora_alpha": 5, "lora_dropout": 0.1, "init_lora_weights": False}
    config = peft.LoraConfig(target_modules=list(modules), **options)
    return peft.get_peft_model(checkpoints.build(family).double(), config)


def merged(model: Any) -> nn.Module:
    return copy.deepcopy(model).merge_and_unload()


@pytest.mark.parametrize(
    ("modules", "options"),
    [(("q_proj", "v_proj"), {"use_rslora": True}), (("q_proj", "k_proj"), {"layers_to_transform": [1]})],
)
def test_the_penalty_is_that_of_the_merged_weights(modules, options):
    """Oracle: PEFT's own merged model, and the d×d penalty of its weights."""
    model = adapted(modules=modules, **options).train()
    penalty = Locater(model, SCALE, MEAN)()
    torch.testing.assert_close(penalty, dense_penalty(merged(model)), rtol=1e-10, atol=0)


def test_the_gradient_reaches_the_adapter_and_nothing_else():
    """Oracle: W + (α/r)·BA written out, and differentiated by autograd through d×d matrices."""
    model = adapted(modules=("q_proj", "k_proj")).train()
    written = checkpoints.build("llama3").double()
    parts = {}
    for layer, block in enumerate(written.model.layers):
        for name in ("q_proj", "k_proj"):
            where = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            lora, linear = model.get_submodule(where), block.self_attn.get_submodule(name)
            a, b = (
                part["default"].weight.detach().clone().requires_grad_()
                for part in (lora.lora_A, lora.lora_B)
            )
            base = linear.weight.detach()
            del linear.weight
            linear.weight = base + 5 / 3 * b @ a
            parts |= {f"{where}.lora_A.default.weight": a, f"{where}.lora_B.default.weight": b}
    dense_penalty(written).backward()
    for way in ("in the loss", "added"):
        model.zero_grad()
        locater = Locater(model, SCALE, MEAN)
        if way == "added":
            locater.add_gradient()
        else:
            locater().backward()
        torch.testing.assert_close(gradients(model), {name: part.grad for name, part in parts.items()})


@pytest.mark.slow
def test_fused_projections_and_adapters_that_are_switched():
    """GPT-2's matrix is transposed, and holds queries, keys and values; two adapters, one at a time, or none."""
    model = adapted("gpt2", ("c_attn",), fan_in_fan_out=True).eval()
    torch.manual_seed(4)
    config = peft.LoraConfig(r=2, target_modules=["c_attn"], init_lora_weights=False, fan_in_fan_out=True)
    model.add_adapter("other", config)
    model.double()
    locater = Locater(model, SCALE, MEAN)
    for name in ("default", "other"):
        model.set_adapter(name)
        torch.testing.assert_close(locater(), Locater(merged(model).requires_grad_(), SCALE, MEAN)())
    plain = Locater(checkpoints.build("gpt2").double(), SCALE, MEAN)
    other = locater().item()
    with model.disable_adapter():
        model.base_model.requires_grad_(True)
        torch.testing.assert_close(locater(), plain())
    model.merge_adapter()
    assert locater().item() == pytest.approx(other)


def test_what_is_no_matrix_added_is_refused():
    with pytest.raises(UsageError, match=r"self_attn.q_proj carries an adapter that is no matrix added"):
        Locater(adapted(use_dora=True), SCALE, MEAN)
    model = peft.get_peft_model(
        checkpoints.build("llama3"), peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[])
    )
    with pytest.raises(UsageError, match=r"self_attn.k_proj carries an adapter that is no matrix added"):
        Locater(model, SCALE, MEAN)


@pytest.mark.slow
def test_an_adapter_is_monitored():
    """Oracle: the merged model."""
    model = adapted().eval()
    ids = torch.randint(1, checkpoints.VOCABULARY, (2, 16), generator=torch.Generator().manual_seed(1))
    looks = [GeometryMonitor(which, ids, every=1) for which in (model, merged(model))]
    columns = ["entropy", "trace", "spectral_norm"]
    first, second = (monitor(0) and monitor.last.heads[columns] for monitor in looks)
    pd.testing.assert_frame_equal(first, second, rtol=1e-6, atol=1e-8)
