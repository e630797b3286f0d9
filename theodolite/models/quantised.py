"""Files with weights that are numbers only to a quantiser (eight bits, and a scale beside them): refused by name.

What a `quantization_config` names is left to `transformers`; layers that it keeps quantised are read as
`dequantised.py` does.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from theodolite.errors import WorkError

FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Of safetensors, those that are weights as they are; others wait for what a quantiser does to them."""

SCALE = re.compile(r"[._](scales?(_inv|_\d+)?|SCB|scb|zero_points?|q?zeros|g_idx|absmax|quant_map|amax)$")
"""What a quantiser keeps beside a weight."""

WHAT_TO_DO = "give a dequantised copy (bfloat16 or float32)"


def kinds_of(path: str | Path) -> dict[str, str]:
    """The type of each tensor of a safetensors file; none of a damaged one, which is refused where it is loaded."""
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
    except SafetensorError:
        return {}


def refuse_quantised_files(source: str | Path, model: nn.Module, files: Iterable[str | Path]) -> None:
    """Refuse tensors that are weights only after a quantiser whom nothing names has scaled them.

    Args:
        source: for the message.
        model: with the parameters that are wanted, and the config.
        files: of safetensors.

    Raises:
        WorkError: a weight is stored in a type that is none of `FLOATS`, or scales are left beside one.
    """
    if getattr(model.config, "quantization_config", None):
        return
    kinds = {name: kind for path in files for name, kind in kinds_of(path).items()}
    parameters = {kind_of_name(name) for name, _ in model.named_parameters()}
    ends = {name[at:] for name in parameters for at in _starts(name)}

    def is_weight(name: str) -> bool:
        kind = kind_of_name(name)
        return name.endswith("weight") or kind in ends or any(kind[at:] in parameters for at in _starts(kind))

    for name, kind in kinds.items():
        weight = SCALE.sub("", name)
        scales = weight != name and any(weight + end in kinds for end in ("", ".weight", ".qweight"))
        if kind not in FLOATS and is_weight(name):
            what = f"is {kind}"
        elif scales and kind_of_name(name) not in ends:
            what = f"scales {weight}"
        else:
            continue
        raise WorkError(
            f"{source}: tensor {name} {what}, and config.json has no quantization_config: {WHAT_TO_DO}"
        )


def kind_of_name(name: str) -> str:
    """The name without the numbers of layers and experts."""
    return re.sub(r"\.\d+(?=\.)", ".#", name)


def _starts(name: str) -> list[int]:
    """Where the name begins, and each of its parts."""
    return [0, *(match.end() for match in re.finditer(r"\.", name))]
