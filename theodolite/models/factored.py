"""Checkpoints whose matrices are kept as a sparse plus a low-rank one: their files, and the layer that runs them.

    config.json …  dense.safetensors  block-000.safetensors  block-001.safetensors …

`dense.safetensors` holds what was not pruned, under the model's own names. A sparse matrix is written as its entries
that are not zero, row by row, and one bit an entry that says where they are; a bit is what a pattern such as 2:4 takes
as well (two bits for each of two kept in four). No file bears a name from which `transformers` would load a model: it
would fill in random weights for those that are packed. How a matrix is pruned is not known here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from mmap import mmap
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import torch
from jaxtyping import Float, Int64, UInt8
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import GenerationConfig, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.utils import GENERATION_CONFIG_NAME

from theodolite.errors import WorkError
from theodolite.models.guard import MAKING
from theodolite.system.allocator import return_pages
from theodolite.system.checksums import read_checked, write_checked

DENSE = "dense.safetensors"
BLOCK = "block-{:03d}.safetensors"


@dataclass(frozen=True)
class PrunedMatrix:
    """One pruned matrix, sparse + left · right, and where it belongs.

    Attributes:
        key: its name in its block.
        parameter: the model's name of the parameter that holds it.
        expert: which slice of a 3-D parameter, else None.
        dimension: that of the outputs in the parameter or its slice.
        rows: which outputs of the parameter, in the order of the matrix; None: all.
        sparse: the sparse (or quantised) part, and all of it where `left` and `right` are None.
        scale: of a quantised part, whose entries are whole multiples of these; None of a sparse one.
    """

    key: str
    parameter: str
    expert: int | None
    dimension: int
    rows: Int64[Tensor, " outputs"] | None
    sparse: Float[Tensor, "outputs inputs"]
    left: Float[Tensor, "outputs rank"] | None = None
    right: Float[Tensor, "rank inputs"] | None = None
    scale: Float[Tensor, "outputs groups"] | None = None

    def merged(self, device: torch.device | None = None) -> Float[Tensor, "outputs inputs"]:
        """The matrix that it stands for, rounded once; put together where it is, or on `device`."""
        device = device or self.sparse.device
        sparse = self.sparse.to(device)
        if self.left is None or self.right is None:
            return sparse
        low_rank = self.left.to(device).double() @ self.right.to(device).double()
        return (sparse.double() + low_rank).to(sparse.dtype)

    def to(self, device: torch.device) -> PrunedMatrix:
        """The same on another device."""
        parts = {name: getattr(self, name) for name in ("sparse", "left", "right", "scale")}
        return replace(self, **{name: part.to(device) for name, part in parts.items() if part is not None})

    def tensors(self) -> dict[str, Tensor]:
        """What is written of it, by the last part of its name."""
        values, bits = packed(self.sparse)
        parts = {"values": values, "bits": bits, "rows": self.rows, "left": self.left, "right": self.right}
        parts["scale"] = self.scale
        return {name: tensor.cpu().contiguous() for name, tensor in parts.items() if tensor is not None}


def write_matrices(path: Path, matrices: Sequence[PrunedMatrix], notes: dict[str, Any]) -> None:
    """Write the matrices of a block with some notes."""
    tensors = {
        f"{matrix.key}/{name}": tensor for matrix in matrices for name, tensor in matrix.tensors().items()
    }
    headers = [
        {
            "key": matrix.key,
            "parameter": matrix.parameter,
            "expert": matrix.expert,
            "dimension": matrix.dimension,
            "shape": list(matrix.sparse.shape),
        }
        for matrix in matrices
    ]
    write_checked(path, tensors, {"matrices": headers, "notes": notes})


def read_matrices(path: Path) -> tuple[list[PrunedMatrix], dict[str, Any]]:
    """What `write_matrices` wrote.

    Raises:
        WorkError: the file is damaged.
    """
    try:
        tensors, block = read_checked(path)
        return [_matrix(header, tensors) for header in block["matrices"]], block["notes"]
    except (KeyError, TypeError, ValueError) as error:
        raise WorkError(f"{path} is damaged: {error}") from error


def _matrix(header: dict[str, Any], tensors: dict[str, Tensor]) -> PrunedMatrix:
    key, shape = header["key"], tuple(header.pop("shape"))
    sparse = unpacked(tensors[f"{key}/values"], tensors[f"{key}/bits"], shape)
    rows, left, right = (tensors.get(f"{key}/{name}") for name in ("rows", "left", "right"))
    if (left is None) != (right is None):
        raise ValueError(f"{key} has {'right' if left is None else 'left'} and no other factor")
    if left is not None and right is not None:
        rank = left.shape[-1]
        if (left.shape, right.shape) != ((shape[0], rank), (rank, shape[1])):
            raise ValueError(
                f"{key}/left and {key}/right have the shapes {tuple(left.shape)}, {tuple(right.shape)}"
            )
    if rows is not None and (rows.dtype != torch.int64 or rows.shape != shape[:1]):
        raise ValueError(f"{key}/rows are {rows.dtype} of shape {tuple(rows.shape)}")
    scale = tensors.get(f"{key}/scale")
    return PrunedMatrix(**header, rows=rows, sparse=sparse, left=left, right=right, scale=scale)


class SparseLowRankLinear(nn.Module):
    """y = x Sᵀ + b + (x Rᵀ) Lᵀ, the matrices of the projections that share a layer side by side.

    S is kept dense with its zeros: at half of the entries PyTorch's product with a sparse matrix is slower than the
    dense one (`benchmarks/pruned_latency.py`), so that what is saved is saved on disk. `PackedLinear` saves memory.
    """

    order: Tensor | None

    def __init__(self, matrices: Sequence[PrunedMatrix], bias: nn.Parameter | None) -> None:
        super().__init__()
        rows = [
            torch.arange(len(matrix.sparse)) if matrix.rows is None else matrix.rows for matrix in matrices
        ]
        every = torch.cat(rows)
        order = every.argsort()
        if not torch.equal(every[order], torch.arange(len(every))):
            names = ", ".join(f"{matrix.key}/rows" for matrix in matrices)
            raise ValueError(f"{names} are not every output once")
        in_order = torch.equal(order, torch.arange(len(order)))
        sparse = torch.cat([matrix.sparse for matrix in matrices])
        self.in_features, self.out_features = sparse.shape[1], len(order)
        self.weight = nn.Parameter(sparse[order], requires_grad=False)
        self.bias = bias
        lefts = [_or_empty(matrix.left, (len(matrix.sparse), 0), sparse) for matrix in matrices]
        rights = [_or_empty(matrix.right, (0, sparse.shape[1]), sparse) for matrix in matrices]
        self.left = nn.ParameterList([nn.Parameter(left, requires_grad=False) for left in lefts])
        self.right = nn.Parameter(torch.cat(rights), requires_grad=False)
        self.register_buffer("order", None if in_order else order, persistent=False)

    def forward(self, inputs: Float[Tensor, "*batch inputs"]) -> Float[Tensor, "*batch outputs"]:
        """The layer's outputs, in the order of the layer that it stands for."""
        outputs = functional.linear(inputs, self.sparse_part(), self.bias)
        if not len(self.right):
            return outputs
        inner = functional.linear(inputs, self.right).split([left.shape[1] for left in self.left], dim=-1)
        low = torch.cat([functional.linear(x, left) for x, left in zip(inner, self.left, strict=True)], -1)
        return outputs + (low if self.order is None else low.index_select(-1, self.order))

    def sparse_part(self) -> Float[Tensor, "outputs inputs"]:
        """S, in the order of the layer's outputs."""
        return self.weight


class PackedLinear(SparseLowRankLinear):
    """The same, with S packed in memory as on disk, and put together for the time of each product only.

    `weight` holds the entries of S that are not zero: some families (T5) ask a layer's weight for its dtype.
    """

    bits: Tensor

    def __init__(self, matrices: Sequence[PrunedMatrix], bias: nn.Parameter | None) -> None:
        super().__init__(matrices, bias)
        values, bits = packed(self.weight.detach())
        self.weight = nn.Parameter(values, requires_grad=False)
        self.register_buffer("bits", bits)

    def sparse_part(self) -> Float[Tensor, "outputs inputs"]:
        """S, put together from its values and bits on their device."""
        entries = self.out_features * self.in_features
        if self.bits.device.type == "cpu":
            mask = torch.from_numpy(np.unpackbits(self.bits.numpy(), count=entries)).view(torch.bool)
            # Pages of its own: on the heap, these leave a hole after each layer, which no other one fits into.
            pages = mmap(-1, entries * self.weight.element_size())
            sparse = torch.frombuffer(pages, dtype=self.weight.dtype)
        else:
            places = torch.arange(7, -1, -1, dtype=torch.uint8, device=self.bits.device)
            mask = (self.bits[:, None].bitwise_right_shift(places) & 1).bool().view(-1)[:entries]
            sparse = self.weight.new_zeros(entries)
        return sparse.masked_scatter_(mask, self.weight).view(self.out_features, self.in_features)


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


def dense_tensors(model: PreTrainedModel, pruned: set[str]) -> dict[str, Tensor]:
    """All tensors in memory but the pruned parameters; of tied ones, the one that the others are tied to."""
    tied = model.all_tied_weights_keys
    tensors: dict[str, Tensor] = {}
    written: set[tuple[int, int]] = set()
    for name, tensor in sorted(model.state_dict().items(), key=lambda item: item[0] in tied):
        at = (tensor.data_ptr(), tensor.numel())
        if name not in pruned and not tensor.is_meta and not (name in tied and at in written):
            tensors[name] = tensor.contiguous().cpu()
            written.add(at)
    return tensors


def load_factored(
    architecture: Any,
    config: Any,
    folder: Path,
    *,
    in_memory: type[SparseLowRankLinear] = SparseLowRankLinear,
) -> PreTrainedModel:
    """The model of such a checkpoint, with a layer `in_memory` where one was pruned.

    Matrices of experts are put together again: no layer of their own holds them.

    Raises:
        WorkError: a file is damaged, or tensors are missing.
    """
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
        try:
            missing -= _put_block(model, read_matrices(path)[0], missing, in_memory)
        except (ValueError, AttributeError) as error:
            raise WorkError(f"{folder} is damaged: {error}") from error
        if in_memory is PackedLinear:
            return_pages()  # of the block as it was unpacked, which lie between those of its packed matrices
    model.tie_weights()
    missing -= model.all_tied_weights_keys.keys()
    if missing:
        raise WorkError(f"{folder} lacks {len(missing)} of the model's tensors (first: {min(missing)})")
    if (folder / GENERATION_CONFIG_NAME).is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model


def by_module(matrices: Iterable[PrunedMatrix]) -> dict[str, list[PrunedMatrix]]:
    """The matrices of each module, by its name in the model."""
    parts: dict[str, list[PrunedMatrix]] = {}
    for matrix in matrices:
        parts.setdefault(matrix.parameter.rpartition(".")[0], []).append(matrix)
    return parts


def _put_block(
    model: PreTrainedModel,
    matrices: Sequence[PrunedMatrix],
    missing: set[str],
    in_memory: type[SparseLowRankLinear],
) -> set[str]:
    """Put a block's matrices where they belong; returns the parameters that they stand for.

    Raises:
        ValueError, AttributeError: they make no layer, or the model has none there.
    """
    for matrix in matrices:
        if matrix.expert is not None:
            _put(model, matrix, new=matrix.parameter in missing)
            missing = missing - {matrix.parameter}
    for name, parts in by_module(matrix for matrix in matrices if matrix.expert is None).items():
        try:
            module: Any = model.get_submodule(name)
            layer = in_memory(parts, module.bias)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
        model.set_submodule(name, layer)
    return {matrix.parameter for matrix in matrices}


def _put(model: PreTrainedModel, matrix: PrunedMatrix, *, new: bool) -> None:
    """Write the matrix of an expert into its slice."""
    owner, _, name = matrix.parameter.rpartition(".")
    module = model.get_submodule(owner)
    if new:  # all of them are written; what the parameter holds now are no numbers
        empty = torch.empty_like(getattr(module, name), dtype=matrix.sparse.dtype)
        module.register_parameter(name, nn.Parameter(empty, requires_grad=False))
    merged = matrix.merged()
    getattr(module, name).data[matrix.expert].copy_(merged if matrix.dimension == 0 else merged.T)
