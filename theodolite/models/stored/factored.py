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
import safetensors
import torch
from jaxtyping import Float, Int64, UInt8
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.utils import GENERATION_CONFIG_NAME

from theodolite.errors import WorkError, first_line
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
    return [_matrix(header, tensors) for header in block["matrices"]], block["notes"]


def read_matrices(path: Path) -> tuple[list[PrunedMatrix], dict[str, Any]]:
    """Read the matrices and the notes in the file of a block; `WorkError` where it is damaged."""
    try:
        return unpacked_block(*read_checked(path))
    except (KeyError, TypeError, ValueError) as error:
        raise WorkError(f"{path} is damaged: {error}") from error


def _matrix(header: dict[str, Any], tensors: dict[str, Tensor]) -> PrunedMatrix:
    key, shape = header["key"], tuple(header.pop("shape"))
    sparse = unpacked(tensors[f"{key}/values"], tensors[f"{key}/bits"], shape)
    rows, left, right = (tensors.get(f"{key}/{name}") for name in ("rows", "left", "right"))
    return PrunedMatrix(**header, rows=rows, sparse=sparse, left=left, right=right)


def packed(
    matrix: Float[Tensor, "outputs inputs"],
) -> tuple[Float[Tensor, " nonzeros"], UInt8[Tensor, " bytes"]]:
    """Pack the entries that are not zero, and the bits that say where they are."""
    nonzero = matrix != 0
    bits = np.packbits(nonzero.flatten().cpu().numpy())
    return matrix[nonzero].cpu(), torch.from_numpy(bits)


def unpacked(
    values: Float[Tensor, " nonzeros"], bits: UInt8[Tensor, " bytes"], shape: tuple[int, int]
) -> Float[Tensor, "outputs inputs"]:
    """Unpack the matrix; `ValueError` where bits and values do not belong together, or not to this shape."""
    entries = shape[0] * shape[1]
    if len(bits) != -(-entries // 8):
        raise ValueError(f"{len(bits)} bytes of bits for {entries} entries")
    nonzero = torch.from_numpy(np.unpackbits(bits.numpy(), count=entries)).bool()
    if int(nonzero.sum()) != len(values):
        raise ValueError(f"{len(values)} values for {int(nonzero.sum())} bits")
    matrix = torch.zeros(entries, dtype=values.dtype)
    matrix[nonzero] = values
    return matrix.view(shape)


def is_factored(folder: Path) -> bool:
    """Tell whether a folder holds such a checkpoint."""
    return (folder / DENSE).is_file()


def dense_tensors(model: PreTrainedModel, pruned: set[str]) -> dict[str, Tensor]:
    """Return all tensors in memory but the pruned parameters; of tied ones, the one that the others are tied to."""
    tied = model.all_tied_weights_keys
    tensors: dict[str, Tensor] = {}
    written: set[tuple[int, int]] = set()
    for name, tensor in sorted(model.state_dict().items(), key=lambda item: item[0] in tied):
        at = (tensor.data_ptr(), tensor.numel())
        if name not in pruned and not tensor.is_meta and not (name in tied and at in written):
            tensors[name] = tensor.contiguous().cpu()
            written.add(at)
    return tensors


def load_factored(architecture: Any, config: Any, folder: Path) -> PreTrainedModel:
    """Load the model of such a checkpoint, with the parts of every matrix added up; `WorkError` where it is damaged."""
    try:
        dense = load_file(folder / DENSE)
    except (OSError, safetensors.SafetensorError) as error:
        raise WorkError(f"{folder / DENSE} is damaged: {error}") from error
    with MAKING, no_init_weights():
        model = architecture._from_config(config)
    loaded = model.load_state_dict(dense, strict=False, assign=True)
    if loaded.unexpected_keys:
        raise WorkError(f"{folder / DENSE} has tensors of another architecture: {loaded.unexpected_keys[0]}")
    missing = set(loaded.missing_keys)
    for path in sorted(folder.glob(BLOCK.format(0).replace("000", "*"))):
        parts: dict[str, list[PrunedMatrix]] = {}
        for matrix in read_matrices(path)[0]:
            parts.setdefault(matrix.parameter, []).append(matrix)
        for name, matrices in parts.items():
            try:
                _put(model, name, matrices)
            except (ValueError, AttributeError, IndexError, RuntimeError) as error:
                raise WorkError(f"{folder} is damaged: {name}: {first_line(error)}") from error
        missing -= parts.keys()
    model.tie_weights()
    missing -= model.all_tied_weights_keys.keys()
    if missing:
        raise WorkError(f"{folder} lacks {len(missing)} of the model's tensors (first: {min(missing)})")
    if (folder / GENERATION_CONFIG_NAME).is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model


def _put(model: PreTrainedModel, name: str, matrices: Sequence[PrunedMatrix]) -> None:
    """Give the model a parameter, of which the matrices are every entry once; any error where they are not."""
    owner, _, attribute = name.rpartition(".")
    module = model.get_submodule(owner)
    weight = torch.empty_like(getattr(module, attribute), dtype=matrices[0].sparse.dtype)
    filled = torch.zeros_like(weight, dtype=torch.bool)
    for matrix in matrices:
        for whole, part in ((weight, matrix.merged()), (filled, torch.ones(1, dtype=torch.bool))):
            whole = whole if matrix.expert is None else whole[matrix.expert]
            whole = whole if matrix.dimension == 0 else whole.T
            whole[slice(None) if matrix.rows is None else matrix.rows] = part
    if sum(matrix.sparse.numel() for matrix in matrices) != weight.numel() or not filled.all():
        raise ValueError(f"{', '.join(matrix.key for matrix in matrices)} are not every entry once")
    module.register_parameter(attribute, nn.Parameter(weight, requires_grad=False))
