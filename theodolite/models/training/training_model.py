"""Find a model in training inside its wrappers, and leave it as it was after a measurement."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from theodolite.errors import UsageError
from theodolite.models.guard import guarded
from theodolite.models.opened import OpenModel
from theodolite.models.source import Source, device_of
from theodolite.models.stored.loading import usable_device
from theodolite.models.training.shards import as_sharded, gathering_entry, register_spread


def training_source(model: nn.Module | OpenModel) -> Source:
    """Return the `Source` of a model in training, which is run by all ranks together, if it is sharded."""
    if isinstance(model, OpenModel):
        register_spread(model.root)  # it may have been spread since it was opened
        return model.source
    register_spread(model)
    inner = unwrap(model)
    source = Source.of_transformers(inner, entry=gathering_entry(model, inner))
    usable_device(source.device)
    return source


def unwrap(model: nn.Module) -> PreTrainedModel:
    """Return the `transformers` model inside DDP, FSDP, DeepSpeed, DataParallel, `torch.compile` or PEFT."""
    inner: Any = model
    while not isinstance(inner, PreTrainedModel):
        if isinstance(getattr(inner, "_orig_mod", None), nn.Module):
            inner = inner._orig_mod
        elif isinstance(getattr(inner, "module", None), nn.Module):
            inner = inner.module
        elif callable(getattr(inner, "get_base_model", None)):
            if prompts := [c for c in inner.peft_config.values() if getattr(c, "is_prompt_learning", False)]:
                raise UsageError(
                    f"{type(inner).__name__} has learned prompts ({prompts[0].peft_type.value}), which are outside of "
                    "the model that theodolite reads: give model.get_base_model() to measure it without them"
                )
            inner = inner.get_base_model()
        else:
            raise UsageError(
                f"{type(model).__name__} holds no model of transformers: give open_module(model, vocabulary=…)"
            )
    if any(getattr(module, "attention_type", None) == "block_sparse" for module in inner.modules()):
        raise UsageError(
            f"{type(inner).__name__} turns itself to full attention for good as it reads a short text: call its "
            'set_attention_type("original_full") first'
        )
    return inner


def autocast_dtype(model: nn.Module) -> torch.dtype | None:
    """Return the dtype that products are rounded to in training: by autocast, or by accelerate's around `forward`."""
    device = device_of(model).type
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    if not hasattr(model, "_original_forward"):
        return None
    from accelerate.state import AcceleratorState

    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(AcceleratorState().mixed_precision)


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Guard the model (`guarded`), and restore PyTorch's random state on leaving."""
    devices = {parameter.device for parameter in model.parameters()}
    with torch.random.fork_rng([d for d in devices if d.type == "cuda"]), guarded(model), as_sharded(model):
        yield
