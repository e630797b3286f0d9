"""A quantised model as compressed-tensors' `pack-quantized`, which `transformers` and vLLM open.

    OUT/config.json (with a quantization_config)  OUT/model.safetensors  OUT/adapter/ (of OATS: its low-rank parts)

Of a quantised layer NAME the file holds NAME.weight_packed (codes of 4 or 8 bits, offset to be positive, in int32 words
from the lowest bits up, row by row), NAME.weight_scale (outputs, groups; in the dtype of the model, in which readers
multiply) and NAME.weight_shape. compressed-tensors is not needed to write it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int32
from torch import Tensor, nn

from theodolite.errors import UsageError
from theodolite.models import OpenModel
from theodolite.models.block_matrices import Matrix
from theodolite.models.factored import PrunedMatrix, by_module

FORMAT = "pack-quantized"


def refuse_unpackable(matrices: Sequence[Sequence[Matrix]]) -> None:
    """Raise `UsageError` where a matrix is none that readers unpack."""
    for matrix in (matrix for block in matrices for matrix in block):
        kind = type(matrix.module)
        if kind is not nn.Linear or matrix.expert is not None:
            raise UsageError(
                f"{matrix.parameter} is of {kind.__name__}, and compressed-tensors packs nn.Linear alone: use --format "
                "merged"
            )


def write_compressed(
    folder: Path, model: OpenModel, block: Callable[[int], Sequence[PrunedMatrix]], bits: int, group: int
) -> None:
    """Write config and weights, all but the quantised ones as the model has them.

    Args:
        folder: is there. block: the matrices of a layer. bits, group: of all of them, as in `prune_model`.
    """
    packed: set[str] = set()

    def pack(layer: int, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        modules = by_module(block(layer))
        for name, parts in modules.items():
            weight = tensors.pop(f"{name}.weight")
            codes, scale = _together(parts, len(weight))
            tensors[f"{name}.weight_packed"] = packed_codes(codes, bits)
            tensors[f"{name}.weight_scale"] = scale.to(weight.dtype)
            tensors[f"{name}.weight_shape"] = torch.tensor(codes.shape)
        packed.update(modules)
        return tensors

    if model.streamed is not None:
        model.streamed.save(folder, pack)
    else:
        tensors: dict[str, Tensor] = dict(model.hf.state_dict())
        for layer in range(model.layers):
            tensors = pack(layer, tensors)
        model.hf.save_pretrained(folder, state_dict=tensors)
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    linear = [name for name, module in model.hf.named_modules() if isinstance(module, nn.Linear)]
    ignored = [name for name in linear if name not in packed]
    config["quantization_config"] = _quantization(bits, group, ignored)
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def packed_codes(codes: Float[Tensor, "outputs inputs"], bits: int) -> Int32[Tensor, "outputs words"]:
    """Whole numbers from −2^(bits−1) on, 32 / bits of a row to a word; what is left of the last word is 0."""
    positive = (codes + 2 ** (bits - 1)).to(torch.uint8)
    each = 8 // bits
    bytes_ = -(-codes.shape[1] * bits // 32) * 4
    positive = nn.functional.pad(positive, (0, bytes_ * each - codes.shape[1]))
    lowest_first = positive.view(len(codes), bytes_, each) << torch.arange(0, 8, bits, dtype=torch.uint8)
    return lowest_first.sum(dim=2, dtype=torch.uint8).view(torch.int32)


def _together(parts: Sequence[PrunedMatrix], outputs: int) -> tuple[Tensor, Tensor]:
    """Codes (as floats) and scales of a module, each part in the rows of its own outputs."""
    first = parts[0]
    assert first.scale is not None
    codes = torch.empty(outputs, first.sparse.shape[1])
    scale = torch.empty(outputs, first.scale.shape[1], dtype=first.scale.dtype)
    for part in parts:
        assert part.scale is not None
        rows = slice(None) if part.rows is None else part.rows.cpu()
        stored = part.scale.cpu()
        width = part.sparse.shape[1] // stored.shape[1]
        codes[rows] = (part.sparse.cpu().float() / stored.float().repeat_interleave(width, dim=1)).round_()
        scale[rows] = stored
    return codes, scale


def _quantization(bits: int, group: int, ignored: list[str]) -> dict[str, Any]:
    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": True,
        "strategy": "group" if group else "channel",
        "group_size": group or None,
        "dynamic": False,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": FORMAT,
        "quantization_status": "compressed",
        "ignore": ignored,
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": weights,
                "input_activations": None,
                "output_activations": None,
            }
        },
    }
