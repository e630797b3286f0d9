"""PEFT adapters that add a matrix to a weight (LoRA), and refusals of weights that are no one matrix."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from theodolite.errors import UsageError
from theodolite.models.stored.dequantised import holds_quantised_layers
from theodolite.models.training.shards import ParameterPlace


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
    """List the places of the parameters of LoRA that make what is added to a matrix, if an adapter is there."""
    factors = [(adapter.lora_A[name], adapter.lora_B[name]) for name in active(adapter)]
    return [(factor, "weight") for both in factors for factor in both]


def active(adapter: Any) -> list[str]:
    """List the adapters that add something now, by name."""
    if adapter is None or adapter.merged or adapter.disable_adapters:
        return []
    return [name for name in adapter.active_adapters if name in getattr(adapter, "scaling", {})]


def with_adapter_merged(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """Merge a PEFT adapter into a model's matrices, each sum taken in float64 and rounded once."""
    from peft import PeftModel

    with warnings.catch_warnings(action="ignore"):  # of what PEFT asks of transformers
        adapted: Any = PeftModel.from_pretrained(model, folder)
    for layer in [module for module in adapted.modules() if is_adapter(module)]:
        dtype = layer.base_layer.weight.dtype
        layer.double().merge()
        layer.to(dtype)
    return adapted.unload()


def check_adapter(where: str, adapter: Any) -> None:
    """Raise `UsageError` where an adapter, if there is one, is not LoRA's, or a variant of it (DoRA)."""
    if adapter is None:
        return
    from peft.tuners.lora import LoraLayer

    if not isinstance(adapter, LoraLayer) or any(name in adapter.lora_variant for name in active(adapter)):
        raise UsageError(
            f"{where} carries an adapter that is no matrix added to its weight, as LoRA's is: use LoRA, or leave the "
            "layer out by layers=[…]"
        )


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
