"""States of passes as they travel between machines: as arrays, without most of what is zero."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Packed = dict[str, tuple[NDArray[Any], NDArray[Any] | None, tuple[int, ...]]]


def packed(state: dict[str, Tensor]) -> Packed:
    """A state as arrays that travel without a copy, without the rows along dimension 1 that are zero in all layers.

    A part of a corpus fills few groups of contexts and few places of the sample, and these are most of a state.
    """
    arrays: Packed = {}
    for name, tensor in state.items():
        rows = None
        if tensor.ndim > 2:
            filled = (tensor != 0).flatten(2).any(dim=2).any(dim=0)
            rows = filled.nonzero().flatten()
        values = tensor if rows is None or len(rows) == tensor.shape[1] else tensor[:, rows]
        indices = None if values is tensor or rows is None else rows.numpy()
        arrays[name] = (values.contiguous().numpy(), indices, tuple(tensor.shape))
    return arrays


def unpacked(state: Packed) -> dict[str, Tensor]:
    """What `packed` was given."""
    tensors = {}
    for name, (values, rows, shape) in state.items():
        filled = torch.from_numpy(np.array(values))  # Ray's own arrays are read-only
        tensors[name] = filled if rows is None else filled.new_zeros(shape)
        if rows is not None:
            tensors[name][:, torch.from_numpy(np.array(rows))] = filled
    return tensors
