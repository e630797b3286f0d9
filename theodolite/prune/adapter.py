"""Write the low-rank parts of a pruned model as one LoRA adapter of PEFT, on a checkpoint of the sparse parts.

    OUT/config.json  OUT/model.safetensors  OUT/adapter/adapter_config.json  OUT/adapter/adapter_model.safetensors

Of a module that W_Q, W_K and W_V share, B holds the left factors side by side, each in the rows of its own outputs, and
A the right ones below each other: rank r_Q + r_K + r_V. lora_alpha is the rank of each module, so that what PEFT adds
is B A itself. Experts have no layer that an adapter goes around: their low-rank parts stay in the checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from theodolite.models import OpenModel
from theodolite.models.stored.factored import PrunedMatrix
from theodolite.system.checkpoint_folders import ADAPTER_FILES

PREFIX = "base_model.model."  # of PEFT, before the names of the model's modules


def has_layer(matrix: PrunedMatrix) -> bool:
    """Whether the matrix has a low-rank part that an adapter can hold."""
    return matrix.left is not None and matrix.expert is None


def write_adapter(
    folder: Path, model: OpenModel, blocks: Iterable[Sequence[PrunedMatrix]], base: Path
) -> None:
    """Write the low-rank parts as PEFT's `PeftModel.from_pretrained(model, folder)` reads them.

    Args:
        folder: made here. blocks: their matrices, one block after the other, of which some have a low-rank part that
            an adapter can hold. base: where the sparse parts will lie.
    """
    from peft import LoraConfig
    from peft.utils import TaskType

    factors: dict[str, tuple[Tensor, Tensor]] = {}
    transposed = False
    for block in blocks:
        held = list(filter(has_layer, block))
        transposed |= any(matrix.dimension == 1 for matrix in held)
        by_module: dict[str, list[PrunedMatrix]] = {}
        for matrix in held:
            by_module.setdefault(matrix.parameter.rpartition(".")[0], []).append(matrix)
        factors |= {name: _stacked(model, name, parts) for name, parts in by_module.items()}
    ranks = {name: len(a) for name, (a, _) in factors.items()}
    config = LoraConfig(
        r=max(ranks.values()),
        lora_alpha=max(ranks.values()),
        rank_pattern=ranks,
        alpha_pattern=ranks,
        target_modules=sorted(ranks),
        fan_in_fan_out=transposed,
        base_model_name_or_path=str(base),
        task_type=TaskType.CAUSAL_LM if model.hf.can_generate() else None,
        inference_mode=True,
    )
    config.save_pretrained(str(folder))
    tensors: dict[str, Tensor] = {}
    for name, (a, b) in factors.items():
        tensors[f"{PREFIX}{name}.lora_A.weight"], tensors[f"{PREFIX}{name}.lora_B.weight"] = a, b
    save_file(tensors, folder / ADAPTER_FILES[1], {"format": "pt"})


def _stacked(model: OpenModel, name: str, parts: Sequence[PrunedMatrix]) -> tuple[Tensor, Tensor]:
    """Stack the factors of a module's matrices to A (rank, inputs) and B (outputs, rank)."""
    weight: Any = model.hf.get_submodule(name).weight
    a = torch.cat([part.right.cpu() for part in parts if part.right is not None])
    b = torch.zeros(weight.shape[parts[0].dimension], len(a), dtype=a.dtype)
    column = 0
    for part in parts:
        assert part.left is not None
        rows = torch.arange(len(b)) if part.rows is None else part.rows.cpu()
        b[rows, column : column + part.left.shape[1]] = part.left.cpu()
        column += part.left.shape[1]
    return a.contiguous(), b.contiguous()
