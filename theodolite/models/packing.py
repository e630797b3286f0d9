"""Sparse matrices as bytes: the entries that are not zero, row by row, and one bit an entry that says where they are.

A bit an entry is what a pattern such as 2:4 takes as well (two bits for each of two kept in four). It knows no file.
"""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor


def packed(
    matrix: Float[Tensor, "outputs inputs"],
) -> tuple[Float[Tensor, " nonzeros"], UInt8[Tensor, " bytes"]]:
    """The entries that are not zero, and the bits (the first entry the highest bit of the first byte)."""
    kept = matrix != 0
    bits = np.packbits(kept.flatten().cpu().numpy())
    return matrix[kept].cpu(), torch.from_numpy(bits)


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
    kept = torch.from_numpy(np.unpackbits(bits.numpy(), count=entries)).bool()
    if int(kept.sum()) != len(values):
        raise ValueError(f"{len(values)} values for {int(kept.sum())} bits")
    matrix = torch.zeros(entries, dtype=values.dtype)
    matrix[kept] = values
    return matrix.view(shape)
