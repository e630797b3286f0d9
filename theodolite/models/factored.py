"""Checkpoints whose matrices are kept as a sparse plus a low-rank one: their files, and the layer that runs them.

    config.json …  dense.safetensors  block-000.safetensors  block-001.safetensors …

`dense.safetensors` holds what was not pruned, under the model's own names. A sparse matrix is written as its entries
that are not zero, row by row, and one bit an entry that says where they are; a bit is what a pattern such as 2:4 takes
as well (two bits for each of two kept in four). No file bears a name from which `transformers` would load a model: it
would fill in random weights for those that are packed. How a matrix is pruned is not known here.
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
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import GenerationConfig, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.utils import GENERATION_CONFIG_NAME

from theodolite.errors import WorkError
from theodolite.system.checksums import read_sealed, write_sealed

DENSE = "dense.safetensors"
BLOCK = "block-{:03d}.safetensors"


@dataclass(frozen=True)
class Piece:
    """One pruned matrix, sparse + left · right, and where it belongs.

    Attributes:
        key: its name in its block.
        parameter: the model's name of the parameter that holds it.
        expert: which slice of a 3-D parameter, else None.
        dimension: that of the outputs in the parameter or its slice.
        rows: which outputs of the parameter, in the order of the matrix; None: all.
        sparse: the sparse part, and all of it where `left` and `right` are None.
    """

    key: str
    parameter: str
    expert: int | None
    dimension: int
    rows: Int64[Tensor, " outputs"] | None
    sparse: Float[Tensor, "outputs inputs"]
    left: Float[Tensor, "outputs rank"] | None = None
    right: Float[Tensor, "rank inputs"] | None = None

    def merged(self, device: torch.device | None = None) -> Float[Tensor, "outputs inputs"]:
        """The matrix that it stands for, rounded once; put together where it is, or on `device`."""
        device = device or self.sparse.device
        sparse = self.sparse.to(device)
        if self.left is None or self.right is None:
            return sparse
        low_rank = self.left.to(device).double() @ self.right.to(device).double()
        return (sparse.double() + low_rank).to(sparse.dtype)

    def tensors(self) -> dict[str, Tensor]:
        """What is written of it, by the last part of its name."""
        values, bits = packed(self.sparse)
        parts = {"values": values, "bits": bits, "rows": self.rows, "left": self.left, "right": self.right}
        return {name: tensor.cpu().contiguous() for name, tensor in parts.items() if tensor is not None}


def write_pieces(path: Path, pieces: Sequence[Piece], notes: dict[str, Any]) -> None:
    """Write the matrices of a block with some notes."""
    tensors = {f"{piece.key}/{name}": tensor for piece in pieces for name, tensor in piece.tensors().items()}
    headers = [
        {
            "key": piece.key,
            "parameter": piece.parameter,
            "expert": piece.expert,
            "dimension": piece.dimension,
            "shape": list(piece.sparse.shape),
        }
        for piece in pieces
    ]
    write_sealed(path, tensors, {"matrices": headers, "notes": notes})


def read_pieces(path: Path) -> tuple[list[Piece], dict[str, Any]]:
    """What `write_pieces` wrote.

    Raises:
        WorkError: the file is damaged.
    """
    try:
        tensors, block = read_sealed(path)
        return [_piece(header, tensors) for header in block["matrices"]], block["notes"]
    except (KeyError, TypeError, ValueError) as error:
        raise WorkError(f"{path} is damaged: {error}") from error


def _piece(header: dict[str, Any], tensors: dict[str, Tensor]) -> Piece:
    key, shape = header["key"], tuple(header.pop("shape"))
    sparse = unpacked(tensors[f"{key}/values"], tensors[f"{key}/bits"], shape)
    rows, left, right = (tensors.get(f"{key}/{name}") for name in ("rows", "left", "right"))
    return Piece(**header, rows=rows, sparse=sparse, left=left, right=right)


class SparseLowRankLinear(nn.Module):
    """y = x Sᵀ + b + (x Rᵀ) Lᵀ, the matrices of the projections that share a layer side by side.

    S is kept dense with its zeros: at half of the entries PyTorch's product with a sparse matrix is slower than the
    dense one (`benchmarks/pruned_latency.py`), so that what is saved is saved on disk.
    """

    order: Tensor | None

    def __init__(self, pieces: Sequence[Piece], bias: nn.Parameter | None) -> None:
        super().__init__()
        rows = [torch.arange(len(piece.sparse)) if piece.rows is None else piece.rows for piece in pieces]
        order = torch.cat(rows).argsort()
        in_order = torch.equal(order, torch.arange(len(order)))
        sparse = torch.cat([piece.sparse for piece in pieces])
        self.in_features, self.out_features = sparse.shape[1], len(order)
        self.weight = nn.Parameter(sparse[order], requires_grad=False)
        self.bias = bias
        lefts = [_or_empty(piece.left, (len(piece.sparse), 0), sparse) for piece in pieces]
        rights = [_or_empty(piece.right, (0, sparse.shape[1]), sparse) for piece in pieces]
        self.left = nn.ParameterList([nn.Parameter(left, requires_grad=False) for left in lefts])
        self.right = nn.Parameter(torch.cat(rights), requires_grad=False)
        self.register_buffer("order", None if in_order else order, persistent=False)

    def forward(self, inputs: Float[Tensor, "*batch inputs"]) -> Float[Tensor, "*batch outputs"]:
        """The layer's outputs, in the order of the layer that it stands for."""
        outputs = functional.linear(inputs, self.weight, self.bias)
        if not len(self.right):
            return outputs
        inner = functional.linear(inputs, self.right).split([left.shape[1] for left in self.left], dim=-1)
        low = torch.cat([functional.linear(x, left) for x, left in zip(inner, self.left, strict=True)], -1)
        return outputs + (low if self.order is None else low.index_select(-1, self.order))


def _or_empty(matrix: Tensor | None, shape: tuple[int, int], like: Tensor) -> Tensor:
    return torch.empty(shape, dtype=like.dtype) if matrix is None else matrix


def packed(
    matrix: Float[Tensor, "outputs inputs"],
) -> tuple[Float[Tensor, " nonzeros"], UInt8[Tensor, " bytes"]]:
    """The entries that are not zero, and the bits (the first entry the highest bit of the first byte)."""
    nonzero = matrix != 0
    bits = np.packbits(nonzero.flatten().cpu().numpy())
    return matrix[nonzero].cpu(), torch.from_numpy(bits)


def unpacked(
    values: Float[Tensor, " nonzeros"], bits: UInt8[Tensor, " bytes"], shape: tuple[int, int]
) -> Float[Tensor, "outputs inputs"]:
    """The matrix again.

    Raises:
        ValueError: bits and values do not belong together, or not to this shape.
    """
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
    """Whether a folder holds such a checkpoint."""
    return (folder / DENSE).is_file()


def write_dense(path: Path, model: PreTrainedModel, pruned: set[str]) -> None:
    """Write all tensors but the pruned parameters; of tied ones, the one that the others are tied to."""
    tied = model.all_tied_weights_keys
    tensors: dict[str, Tensor] = {}
    written: set[tuple[int, int]] = set()
    for name, tensor in sorted(model.state_dict().items(), key=lambda item: item[0] in tied):
        at = (tensor.data_ptr(), tensor.numel())
        if name not in pruned and not (name in tied and at in written):
            tensors[name] = tensor.contiguous().cpu()
            written.add(at)
    save_file(tensors, path, {"format": "pt"})


def load_factored(architecture: Any, config: Any, folder: Path) -> PreTrainedModel:
    """The model of such a checkpoint, with `SparseLowRankLinear` where a layer was pruned.

    Matrices of experts are put together again: no layer of their own holds them.

    Raises:
        WorkError: a file is damaged, or tensors are missing.
    """
    try:
        dense = load_file(folder / DENSE)
    except (OSError, safetensors.SafetensorError) as error:
        raise WorkError(f"{folder / DENSE} is damaged: {error}") from error
    with no_init_weights():
        model = architecture._from_config(config)
    loaded = model.load_state_dict(dense, strict=False, assign=True)
    if loaded.unexpected_keys:
        raise WorkError(f"{folder / DENSE} has tensors of another architecture: {loaded.unexpected_keys[0]}")
    missing = set(loaded.missing_keys)
    by_module: dict[str, list[Piece]] = {}
    for path in sorted(folder.glob(BLOCK.format(0).replace("000", "*"))):
        for piece in read_pieces(path)[0]:
            if piece.expert is None:
                by_module.setdefault(piece.parameter.rpartition(".")[0], []).append(piece)
            else:
                _put(model, piece, new=piece.parameter in missing)
            missing.discard(piece.parameter)
    for name, pieces in by_module.items():
        model.set_submodule(name, SparseLowRankLinear(pieces, model.get_submodule(name).bias))
    model.tie_weights()
    missing -= model.all_tied_weights_keys.keys()
    if missing:
        raise WorkError(f"{folder} lacks {len(missing)} of the model's tensors (first: {min(missing)})")
    if (folder / GENERATION_CONFIG_NAME).is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model


def _put(model: PreTrainedModel, piece: Piece, *, new: bool) -> None:
    """Write the matrix of an expert into its slice."""
    owner, _, name = piece.parameter.rpartition(".")
    module = model.get_submodule(owner)
    if new:  # all of them are written; what the parameter holds now are no numbers
        empty = torch.empty_like(getattr(module, name), dtype=piece.sparse.dtype)
        module.register_parameter(name, nn.Parameter(empty, requires_grad=False))
    merged = piece.merged()
    getattr(module, name).data[piece.expert].copy_(merged if piece.dimension == 0 else merged.T)
