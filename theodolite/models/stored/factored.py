"""Checkpoints whose matrices are kept as a sparse plus a low-rank one: their files, and how they are loaded.

    config.json …  dense.safetensors  block-000.safetensors  block-001.safetensors …

`dense.safetensors` holds what was not pruned, under the model's own names. A sparse matrix is written as its entries
that are not zero, row by row, and one bit an entry that says where they are. No file bears a name from which
`transformers` would load a model: it would fill in random weights for those that are packed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int64, UInt8
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.utils import GENERATION_CONFIG_NAME

from theodolite.errors import WorkError
from theodolite.models.guard import MAKING
from theodolite.system.files import read_checked

DENSE = "dense.safetensors"
BLOCK = "block-{:03d}.safetensors"


@dataclass(frozen=True)
class PrunedMatrix:
    """One pruned matrix, sparse + left · right, and where it belongs: as `weights.block_matrices.Matrix` has it."""

    key: str
    parameter: str
    expert: int | None
    dimension: int
    rows: Int64[Tensor, " outputs"] | None
    sparse: Float[Tensor, "outputs inputs"]
    left: Float[Tensor, "outputs rank"] | None = None
    right: Float[Tensor, "rank inputs"] | None = None

    def merged(self, device: torch.device | None = None) -> Float[Tensor, "outputs inputs"]:
        """Add the parts up to the matrix that they stand for, rounded once; where they are, or on `device`."""
        device = device or self.sparse.device
        sparse = self.sparse.to(device)
        factors = [factor.to(device).double() for factor in (self.left, self.right) if factor is not None]
        if not factors:
            return sparse
        left, right = factors  # or a ValueError, where one of them is missing
        return (sparse.double() + left @ right).to(sparse.dtype)


def packed_block(
    matrices: Sequence[PrunedMatrix], notes: dict[str, Any]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Pack the matrices of a block with some notes as tensors and notes of a file."""
    tensors: dict[str, Tensor] = {}
    headers = []
    for of in matrices:
        values, bits = packed(of.sparse)
        parts = {"values": values, "bits": bits, "rows": of.rows, "left": of.left, "right": of.right}
        tensors |= {f"{of.key}/{n}": part.cpu().contiguous() for n, part in parts.items() if part is not None}
        header = {name: getattr(of, name) for name in ("key", "parameter", "expert", "dimension")}
        headers.append({**header, "shape": list(of.sparse.shape)})
    return tensors, {"matrices": headers, "notes": notes}


def unpacked_block(
    tensors: dict[str, Tensor], block: dict[str, Any]
) -> tuple[list[PrunedMatrix], dict[str, Any]]:
    """Unpack what `packed_block` made; `KeyError`, `TypeError` or `ValueError` where it did not make it."""
    matrices = []
    for header in block["matrices"]:
        key, shape = header["key"], tuple(header.pop("shape"))
        sparse = unpacked(tensors[f"{key}/values"], tensors[f"{key}/bits"], shape)
        rows, left, right = (tensors.get(f"{key}/{name}") for name in ("rows", "left", "right"))
        matrices.append(PrunedMatrix(**header, rows=rows, sparse=sparse, left=left, right=right))
    return matrices, block["notes"]


def read_matrices(path: Path) -> tuple[list[PrunedMatrix], dict[str, Any]]:
    """Read the matrices and the notes in the file of a block; `WorkError` where it is damaged."""
    try:
        return unpacked_block(*read_checked(path))
    except (KeyError, TypeError, ValueError) as error:
        raise WorkError(f"{path} is damaged: {error}") from error


def packed(
    matrix: Float[Tensor, "outputs inputs"],
) -> tuple[Float[Tensor, " nonzeros"], UInt8[Tensor, " bytes"]]:
    """Pack the entries that are not zero, and the bits that say where they are."""
    nonzero = matrix != 0
    return matrix[nonzero].cpu(), torch.from_numpy(np.packbits(nonzero.flatten().cpu().numpy()))


def unpacked(
    values: Float[Tensor, " nonzeros"], bits: UInt8[Tensor, " bytes"], shape: tuple[int, int]
) -> Float[Tensor, "outputs inputs"]:
    """Unpack the matrix that `packed` packed."""
    nonzero = torch.from_numpy(np.unpackbits(bits.numpy(), count=shape[0] * shape[1])).bool().view(shape)
    matrix = torch.zeros(shape, dtype=values.dtype)
    matrix[nonzero] = values
    return matrix


def is_factored(folder: Path) -> bool:
    """Tell whether a folder holds such a checkpoint."""
    return (folder / DENSE).is_file()


def dense_tensors(model: PreTrainedModel, pruned: set[str]) -> dict[str, Tensor]:
    """Return all tensors in memory but the pruned parameters; of tied ones, the one that the others are tied to."""
    left_out = pruned | model.all_tied_weights_keys.keys()
    tensors = model.state_dict().items()
    return {n: t.contiguous().cpu() for n, t in tensors if n not in left_out and not t.is_meta}


def load_factored(architecture: Any, config: Any, folder: Path) -> tuple[PreTrainedModel, set[str]]:
    """Load the model of such a checkpoint, with the parts of every matrix added up; also returns what it lacks."""
    with MAKING, no_init_weights():
        model = architecture._from_config(config)
    loaded = model.load_state_dict(load_file(folder / DENSE), strict=False, assign=True)
    if loaded.unexpected_keys:
        raise WorkError(f"{folder / DENSE} has tensors of another architecture: {loaded.unexpected_keys[0]}")
    missing = set(loaded.missing_keys)
    for path in sorted(folder.glob(BLOCK.format(0).replace("000", "*"))):
        parts: dict[str, list[PrunedMatrix]] = {}
        for matrix in read_matrices(path)[0]:
            parts.setdefault(matrix.parameter, []).append(matrix)
        for name, matrices in parts.items():
            _put(model, name, matrices)
        missing -= parts.keys()
    model.tie_weights()
    if (folder / GENERATION_CONFIG_NAME).is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model, missing - model.all_tied_weights_keys.keys()


def _put(model: PreTrainedModel, name: str, matrices: Sequence[PrunedMatrix]) -> None:
    """Give the model a parameter, of which the matrices are every entry once."""
    owner, _, attribute = name.rpartition(".")
    module = model.get_submodule(owner)
    weight = torch.empty_like(getattr(module, attribute), dtype=matrices[0].sparse.dtype)
    for matrix in matrices:
        whole = weight if matrix.expert is None else weight[matrix.expert]
        whole = whole if matrix.dimension == 0 else whole.T
        whole[slice(None) if matrix.rows is None else matrix.rows] = matrix.merged()
    module.register_parameter(attribute, nn.Parameter(weight, requires_grad=False))
