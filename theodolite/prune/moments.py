"""Second moments of the inputs of each matrix of a block, streamed in float64 without storing the inputs.

Wanda and OATS need the diagonal, SparseGPT the full matrix. Matrices with the same inputs (W_q, W_k and W_v; gate and
up) share one sum. Nothing here depends on how a matrix is pruned.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from theodolite.accumulate.second_moments import SecondMoments
from theodolite.errors import WorkError
from theodolite.models.block_matrices import Matrix, tapped_products
from theodolite.prune.methods import HessianFactor, factor_hessian

ROWS = 1024
"""Vectors squared in float64 at a time: bounds memory to ROWS × inputs."""


@dataclass(frozen=True)
class Moments:
    """Second moments of the input vectors x of a matrix.

    Attributes:
        count: number of vectors.
        diagonal: mean of x_i².
        full: mean of x xᵀ, or None where not requested.
    """

    count: int
    diagonal: Float64[Tensor, " inputs"]
    full: Float64[Tensor, "inputs inputs"] | None
    _factors: dict[float, HessianFactor] = field(default_factory=dict, repr=False, compare=False)

    def factor(self, damping: float) -> HessianFactor:
        """The full moments factored for SparseGPT, once for all matrices that share them."""
        assert self.full is not None
        if damping not in self._factors:
            self._factors[damping] = factor_hessian(self.full, damping)
        return self._factors[damping]

    def squared_norms(self, matrix: Float[Tensor, "outputs inputs"]) -> tuple[float, float]:
        """Mean of ‖M x‖² from the full moments (NaN without them), and ‖M D‖², its value for uncorrelated inputs."""
        matrix = matrix.double()
        scaled = float((matrix.square() @ self.diagonal).sum())
        exact = float("nan") if self.full is None else float(((matrix @ self.full) * matrix).sum())
        return exact, scaled


class InputMoments:
    """Sums over the inputs of some matrices, keyed by the memory address of the matrix."""

    def __init__(self, matrices: Sequence[Matrix], *, full: bool) -> None:
        self._full = full
        self._widths = {matrix.holder.data_ptr(): matrix.shape[1] for matrix in matrices}
        self._sums: dict[int, _Diagonal | _Full] = {}
        self._moments: dict[int, Moments] = {}
        self._first: dict[int, int] = {}
        self._last: tuple[int, Tensor | None] = (0, None)

    def collecting(self) -> AbstractContextManager[None]:
        """While open, collect the inputs of products with the matrices."""
        return tapped_products(self._add)

    def of(self, matrix: Matrix) -> Moments:
        """Moments of the inputs of a matrix; unit moments with a count of 0 if there were none.

        Raises:
            WorkError: the moments are not finite.
        """
        at, width, device = matrix.holder.data_ptr(), matrix.shape[1], matrix.holder.device
        first = self._first.get(at, at)
        if first not in self._sums and first not in self._moments:
            ones = torch.ones(width, dtype=torch.float64, device=device)
            return Moments(0, ones, ones.diag() if self._full else None)
        if first not in self._moments:
            self._moments[first] = self._sums.pop(first).moments()
        moments = self._moments[first]
        if not torch.isfinite(moments.diagonal).all():
            raise WorkError(
                f"the input of {matrix.parameter} is NaN, infinite or too large: try --dtype float32"
            )
        return moments

    def _add(self, inputs: Tensor, matrix: Tensor) -> None:
        at = matrix.data_ptr()
        if self._widths.get(at) != inputs.shape[-1]:
            return
        last, tensor = self._last
        first = self._first.setdefault(at, last if inputs is tensor else at)
        if first != at:
            if inputs is not tensor:
                raise WorkError("two matrices share their inputs in one batch and not in another")
            return
        self._last = (at, inputs)
        sums = self._sums.get(at)
        if sums is None:
            sums = self._sums[at] = (_Full if self._full else _Diagonal)(inputs.shape[-1])
        rows = inputs.detach().reshape(-1, inputs.shape[-1])
        if len(rows):
            sums.update(rows)


class _Diagonal:
    """Count and sums of squares of rows."""

    def __init__(self, width: int) -> None:
        self._count = 0
        self._sum = torch.zeros(width, dtype=torch.float64)

    def update(self, rows: Float[Tensor, "rows width"]) -> None:
        """Add rows."""
        self._sum = self._sum.to(rows.device)
        self._count += len(rows)
        for chunk in rows.split(ROWS):
            self._sum += chunk.double().square().sum(dim=0)

    def moments(self) -> Moments:
        """Of all rows."""
        return Moments(self._count, self._sum / self._count, None)


class _Full:
    """Products of rows, centred while summing, so that a large common offset loses no precision."""

    def __init__(self, width: int) -> None:
        self._sums = SecondMoments(1, width)
        self._device = torch.device("cpu")

    def update(self, rows: Float[Tensor, "rows width"]) -> None:
        """Add rows."""
        self._device = rows.device
        self._sums.update(0, rows)

    def moments(self) -> Moments:
        """Of all rows: mean(x xᵀ) = covariance + x̄ x̄ᵀ."""
        count, mean, moment = (self._sums.at(name, 0, self._device) for name in ("count", "mean", "moment"))
        full = (moment / count).addr_(mean, mean)
        return Moments(int(count), full.diagonal().clone(), full)
