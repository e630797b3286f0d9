"""Sums of rows that are not known beforehand: a row comes into being when its key is first seen."""

from __future__ import annotations

import torch
from jaxtyping import Int
from torch import Tensor

from theodolite.accumulate.sums import Mergeable, State


class KeyedSums:
    """Tensors name → (rows, *shape) in float64, a row a key; keys are tuples of integers."""

    def __init__(self, width: int, shapes: dict[str, tuple[int, ...]]) -> None:
        self.width = width
        self._row_of: dict[tuple[int, ...], int] = {}
        self._tensors = {name: torch.zeros(0, *shape, dtype=torch.float64) for name, shape in shapes.items()}

    def rows(self, keys: Int[Tensor, "some width"]) -> Int[Tensor, " some"]:
        """The row of each key, new ones at the end."""
        rows = [self._row_of.setdefault(tuple(key), len(self._row_of)) for key in keys.tolist()]
        have = len(next(iter(self._tensors.values())))
        if len(self._row_of) > have:
            more = max(len(self._row_of), 2 * have) - have  # doubling: each row is copied a few times only
            for name, tensor in self._tensors.items():
                self._tensors[name] = torch.cat([tensor, tensor.new_zeros(more, *tensor.shape[1:])])
        return torch.tensor(rows, dtype=torch.int64)

    def add(self, name: str, rows: Int[Tensor, " some"], values: Tensor) -> None:
        """Add `values` (some, *shape) to rows, which may repeat."""
        self._tensors[name].index_add_(0, rows, values.to("cpu", torch.float64))

    def at(self, name: str) -> Tensor:
        """The tensor itself, (rows, *shape) and spare rows behind; change it in place."""
        return self._tensors[name]

    def state(self) -> State:
        """`keys` (K, width) in ascending order, and every tensor's rows in that order."""
        ordered = sorted(self._row_of.items())
        rows = torch.tensor([row for _, row in ordered], dtype=torch.int64)
        keys = torch.tensor([key for key, _ in ordered], dtype=torch.int64).reshape(-1, self.width)
        return {"keys": keys} | {name: tensor[rows] for name, tensor in self._tensors.items()}

    def restore(self, state: State) -> None:
        """Continue from what `state` gave."""
        self._row_of = {tuple(key): row for row, key in enumerate(state["keys"].tolist())}
        self._tensors = {name: state[name].clone() for name in self._tensors}

    def merge(self, other: Mergeable) -> None:
        """Take in what another one has seen."""
        state = other.state()
        rows = self.rows(state["keys"])
        for name in self._tensors:
            self.add(name, rows, state[name])
