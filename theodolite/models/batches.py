"""What a forward pass over a corpus reads, and the arguments that it becomes."""

from __future__ import annotations

from typing import Any

from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from theodolite.models.loading import device_of

Inputs = Int[Tensor, "contexts positions"] | Float[Tensor, "contexts channels height columns"]
"""Token ids, or the pixel values of images."""


def as_read(model: PreTrainedModel, inputs: Inputs) -> dict[str, Any]:
    """The arguments of a forward pass over token ids, or over pixel values in the model's dtype."""
    if inputs.is_floating_point():
        return {"pixel_values": inputs.to(device_of(model), model.dtype)}
    return {"input_ids": inputs.to(device_of(model)), "use_cache": False}
