"""Sum the second moments of each matrix's inputs in float64, without storing the inputs.

Wanda and OATS need the diagonal, SparseGPT the full matrix. Matrices with the same inputs (W_q, W_k and W_v; gate and
up) share one sum. Nothing here depends on how a matrix is pruned.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from theodolite.accumulate.second_moments import SecondMoments
from theodolite.errors import WorkError
from theodolite.models.weights.block_matrices import Matrix, tapped_products
from theodolite.prune.methods import ROWS, HessianFactor, factor_hessian
from theodolite.system.choices import wider_than


@dataclass(frozen=True)
class Moments:
    """Second moments of the input vectors x of a matrix.

    Attributes:
        count: number of vectors.
        diagonal: mean of x_i².
        factor: mean of x xᵀ, factored, or None where not requested.
    """

    count: int
    diagonal: Float64[Tensor, " inputs"]
    factor: HessianFactor | None

    def squared_norms(self, matrix: Float[Tensor, "outputs inputs"]) -> tuple[float, float]:
        """Compute the mean of ‖M x‖² from full moments (else NaN), and ‖M D‖², its value for uncorrelated inputs."""
        exact = math.nan if self.factor is None else self.factor.squared_norm(matrix)
        norms = [rows.double().square() @ self.diagonal for rows in matrix.split(ROWS)]
        return exact, float(torch.cat(norms).sum())


class InputMoments:
    """Sums over the inputs of some matrices; `damping` is that of the full moments' factors, None: diagonals only."""

    def __init__(self, matrices: Sequence[Matrix], damping: float | None = None) -> None:
        self._damping = damping
        self._widths = {matrix.holder.data_ptr(): matrix.shape[1] for matrix in matrices}
        self._sums: dict[int, _Diagonal | _Full] = {}
        self._moments: dict[int, Moments] = {}
        self._first: dict[int, int] = {}
        self._last: tuple[int, Tensor | None] = (0, None)

    def collecting(self) -> AbstractContextManager[None]:
        """While open, collect the inputs of products with the matrices."""
        return tapped_products(self._add)

    @torch.inference_mode()  # as the pass in which sums were made, which are changed in place
    def of(self, matrix: Matrix) -> Moments:
        """Give the moments of a matrix's inputs, unit ones with a count of 0 if there were none; or `WorkError`."""
        at, device = matrix.holder.data_ptr(), matrix.holder.device
        first = self._first.get(at, at)
        if first not in self._sums and first not in self._moments:
            ones = torch.ones(matrix.shape[1], dtype=torch.float64, device=device)
            return Moments(0, ones, self._factored(ones.diag()))
        if first not in self._moments:
            count, diagonal, full = self._sums.pop(first).means(device)
            if not torch.isfinite(diagonal).all():
                raise WorkError(
                    f"the input of {matrix.parameter} is NaN, infinite or too large: "
                    f"{wider_than(matrix.holder.dtype)}"
                )
            self._moments[first] = Moments(count, diagonal, self._factored(full))
        return self._moments[first]

    def _factored(self, full: Float64[Tensor, "inputs inputs"] | None) -> HessianFactor | None:
        if full is None or self._damping is None:
            return None
        return factor_hessian(full, self._damping, overwrite=True)

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
        rows = inputs.detach().reshape(-1, inputs.shape[-1])
        if not len(rows):  # an expert may be run on none
            return
        if at not in self._sums:
            self._sums[at] = (_Diagonal if self._damping is None else _Full)(self._widths[at])
        self._sums[at].update(rows)


_Means = tuple[int, Float64[Tensor, " inputs"], Float64[Tensor, "inputs inputs"] | None]
"""Number of vectors, mean of x_i², and mean of x xᵀ where it was summed."""


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

    def means(self, device: torch.device) -> _Means:
        """Average over all rows."""
        return self._count, self._sum.to(device) / self._count, None


class _Full:
    """Products of rows, centred while summing, so that a large common offset loses no precision."""

    def __init__(self, width: int) -> None:
        self._sums = SecondMoments(1, width)

    def update(self, rows: Float[Tensor, "rows width"]) -> None:
        """Add rows."""
        self._sums.update(0, rows)

    def means(self, device: torch.device) -> _Means:
        """Average over all rows, once: mean(x xᵀ) = covariance + x̄ x̄ᵀ takes the place of the sums."""
        count, mean, moment = (self._sums.at(name, 0, device) for name in ("count", "mean", "moment"))
        full = moment.div_(count).addr_(mean, mean)
        return int(count), full.diagonal().clone(), full
