"""PEFT adapters that add a matrix to a weight (LoRA), and refusals of weights that are no one matrix."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from theodolite.errors import UsageError
from theodolite.models.stored.dequantised import holds_quantised_layers
from theodolite.models.training.shards import ParameterPlace, is_dtensor


def is_adapter(module: nn.Module) -> bool:
    """Tell whether a module is an adapter layer of PEFT, around another."""
    return type(module).__module__.split(".")[0] == "peft" and hasattr(module, "base_layer")


def without_adapters(module: nn.Module) -> None:
    """Replace adapters by the layers inside them, in a copy of a model."""
    adapters: Any = [(name, child) for name, child in module.named_modules() if is_adapter(child)]
    for name, adapter in adapters:
        module.set_submodule(name, adapter.base_layer)


def adapted_weight(adapter: Any, weight: Tensor) -> Tensor:
    """Return the weight plus what active adapters add, if any and unless they are merged into it."""
    for name in active(adapter):
        weight = weight + adapter.get_delta_weight(name).to(weight.dtype)
    return weight


def adapter_places(adapter: Any) -> list[ParameterPlace]:
    """List the places of the parameters that make what is added to the matrix of an adapter, if there is one."""
    if adapter is None:
        return []
    modules = dict.fromkeys(
        part
        for group in adapter.adapter_layer_names
        for name in active(adapter)
        if isinstance(inside := getattr(adapter, group, None), nn.ModuleDict) and name in inside
        for part in inside[name].modules()
    )
    return [(part, name) for part in modules for name, p in part._parameters.items() if p is not None]


def active(adapter: Any) -> list[str]:
    """List the adapters that add something now, by name."""
    if adapter is None or adapter.merged or adapter.disable_adapters:
        return []
    return [name for name in adapter.active_adapters if name in getattr(adapter, "scaling", {name: 1.0})]


def with_adapter_merged(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """Merge a PEFT adapter into a model's matrices, each sum taken in float64 and rounded once."""
    from peft import PeftModel

    with warnings.catch_warnings(action="ignore"):  # of what PEFT asks of transformers
        adapted: Any = PeftModel.from_pretrained(model, folder)
    for module in filter(is_adapter, list(adapted.modules())):
        layer: Any = module
        dtype = layer.base_layer.weight.dtype
        layer.double().merge()
        layer.to(dtype)
    merged: PreTrainedModel = adapted.unload()
    return merged


def check_adapter(where: str, adapter: Any) -> None:
    """Check on a few rows that an adapter, if any, adds to its matrix; `UsageError` where it does not (DoRA, IA3)."""
    if adapter is None:
        return
    refusal = UsageError(
        f"{where} carries an adapter that is no matrix added to its weight (DoRA, say): use LoRA, or leave the layer "
        "out by layers=[…]"
    )
    # DoRA answers as LoRA does until its first step.
    variants = getattr(adapter, "lora_variant", {})
    if not hasattr(adapter, "get_delta_weight") or any(name in variants for name in active(adapter)):
        raise refusal
    weight = adapter.base_layer.weight
    if is_dtensor(weight) or weight.ndim != 2 or hasattr(weight, "ds_id"):
        return  # spread over ranks: it can be asked in a pass only
    with torch.no_grad():
        effective = adapted_weight(adapter, weight)
        transposed = not isinstance(adapter.base_layer, nn.Linear)
        matrix = effective if transposed else effective.T
        rows = torch.eye(len(matrix), dtype=weight.dtype, device=weight.device)[:8]
        rows[0] = torch.linspace(-1, 1, len(matrix)).to(rows)
        answer = adapter(rows) - adapter(torch.zeros_like(rows))
        expected = rows @ matrix
    # In whatever precision it has; another kind is off by more.
    if not (answer - expected).abs().max() <= 1e-2 * expected.abs().max():
        raise refusal


def refuse_replaced_weights(model: nn.Module, participle: str) -> None:
    """Raise `UsageError` where matrices are quantised or carry an adapter; `participle` is what they cannot be."""
    refuse_quantised_weights(model, participle)
    adapters = [name for name, m in model.named_modules() if type(m).__module__.split(".")[0] == "peft"]
    if adapters:
        raise UsageError(
            f"{adapters[0]} carries a PEFT adapter, so its weight is not one matrix that could be {participle}: "
            "merge the adapter (merge_and_unload) or train without one"
        )


def refuse_quantised_weights(model: nn.Module, participle: str) -> None:
    """Raise `UsageError` where matrices are quantised; `participle` is what they cannot be."""
    if getattr(model, "is_quantized", False) or holds_quantised_layers(model):
        raise UsageError(
            f"{type(model).__name__} is quantised, so its W_q and W_k cannot be {participle}: load it in bfloat16 "
            "or float32"
        )
