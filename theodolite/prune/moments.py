"""Second moments of the inputs of each matrix of a block, streamed in float64 without storing the inputs.

Wanda and OATS need the diagonal, SparseGPT the full matrix. Matrices with the same inputs (W_q, W_k and W_v; gate and
up) share one sum. Sums over parts of a text travel as states, and are merged in the order of the parts. Nothing here
depends on how a matrix is pruned.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from theodolite.accumulate.second_moments import SecondMoments
from theodolite.accumulate.sums import SavedState, State, joined, part_of
from theodolite.errors import WorkError
from theodolite.models.block_matrices import Matrix, tapped_products
from theodolite.prune.methods import ROWS, HessianFactor, factor_hessian
from theodolite.system.choices import wider_than

_SHARED_AT_TIMES = "two matrices share their inputs in one batch and not in another"

_Means = tuple[int, Float64[Tensor, " inputs"], Float64[Tensor, "inputs inputs"] | None]
"""Number of vectors, mean of x_i², and mean of x xᵀ where it was summed."""


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

    def diagonal_on(self, device: torch.device) -> Moments:
        """With the diagonal on another device; a factor stays on the one that has pruned with it."""
        return replace(self, diagonal=self.diagonal.to(device))

    def squared_norms(self, matrix: Float[Tensor, "outputs inputs"]) -> tuple[float, float]:
        """Mean of ‖M x‖² from the full moments (NaN without them), and ‖M D‖², its value for uncorrelated inputs."""
        exact = math.nan if self.factor is None else self.factor.squared_norm(matrix)
        norms = [rows.double().square() @ self.diagonal for rows in matrix.split(ROWS)]
        return exact, float(torch.cat(norms).sum())


class InputMoments:
    """Sums over the inputs of some matrices, keyed by the memory address of the matrix.

    Args:
        matrices: of a block.
        damping: of the full moments' factors, as in `factor_hessian`; None: diagonals only.
    """

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

    def end_part(self) -> None:
        """What was collected since the last call is a part of the text: it is summed by itself, as another process has.

        Sums of diagonals then have the bytes of the merged states of these parts. Full moments do not: they would need
        a second matrix of inputs × inputs for each.
        """
        for sums in self._sums.values():
            sums.end_part()

    def state(self) -> State:
        """What was collected, on the CPU, to be merged into moments of the same matrices; the sums are gone from here.

        `first` is the number of the matrix whose sums each one shares, −1 where nothing entered; "0.count", "0.sum" and
        so on are the sums of the first matrix.
        """
        numbers = {at: number for number, at in enumerate(self._widths)}
        first = torch.tensor([numbers.get(self._first.get(at, -1), -1) for at in numbers])
        sums = {str(numbers[at]): self._sums.pop(at).state() for at in list(self._sums)}
        return {"first": first, **joined(sums)}

    def merge(self, state: State) -> None:
        """Take in what `state` gave elsewhere, of the next part of the text.

        Raises:
            WorkError: other matrices shared their inputs there.
        """
        places = list(self._widths)
        for at, first in zip(places, state["first"].tolist(), strict=True):
            if first >= 0 and self._first.setdefault(at, places[first]) != places[first]:
                raise WorkError(_SHARED_AT_TIMES)
        for number, at in enumerate(places):
            sums = part_of(state, str(number))
            if sums:
                self._sums_at(at).merge(sums)

    def together(self, matrices: Sequence[Matrix]) -> list[list[int]]:
        """Which of the matrices share one factor, by their number; each by itself where there are none."""
        groups: dict[int, list[int]] = {}
        for number, matrix in enumerate(matrices):
            at = matrix.holder.data_ptr()
            key = -number if self._damping is None else self._first.get(at, at)
            groups.setdefault(key, []).append(number)
        return list(groups.values())

    @torch.inference_mode()  # as the pass in which sums were made, which are changed in place
    def of(self, matrix: Matrix, device: torch.device | None = None) -> Moments:
        """Moments of the inputs of a matrix; unit moments with a count of 0 if there were none.

        Args:
            matrix: one of those given.
            device: where they are put together, one for all matrices that are `together`; None: where the matrix is.

        Raises:
            WorkError: the moments are not finite.
        """
        at, width, device = matrix.holder.data_ptr(), matrix.shape[1], device or matrix.holder.device
        first = self._first.get(at, at)
        if first not in self._sums and first not in self._moments:
            ones = torch.ones(width, dtype=torch.float64, device=device)
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
                raise WorkError(_SHARED_AT_TIMES)
            return
        self._last = (at, inputs)
        rows = inputs.detach().reshape(-1, inputs.shape[-1])
        if len(rows):  # an expert may be run on none
            self._sums_at(at).update(rows)

    def _sums_at(self, at: int) -> _Diagonal | _Full:
        if at not in self._sums:
            self._sums[at] = (_Diagonal if self._damping is None else _Full)(self._widths[at])
        return self._sums[at]


class _Diagonal:
    """Count and sums of squares of rows, those of the current part of the text apart from those before."""

    def __init__(self, width: int) -> None:
        self._count = 0
        self._before = torch.zeros(width, dtype=torch.float64)
        self._sum = torch.zeros_like(self._before)

    def update(self, rows: Float[Tensor, "rows width"]) -> None:
        """Add rows."""
        self._sum = self._sum.to(rows.device)
        self._count += len(rows)
        for chunk in rows.split(ROWS):
            self._sum += chunk.double().square().sum(dim=0)

    def end_part(self) -> None:
        """The next rows are of another part."""
        self._before = self._whole()
        self._sum = torch.zeros_like(self._sum)

    def state(self) -> State:
        """Count and sum (width)."""
        return {"count": torch.tensor(self._count), "sum": self._whole().cpu()}

    def merge(self, state: State) -> None:
        """Add the rows of another part."""
        self._count += int(state["count"])
        self._before = self._before + state["sum"]

    def means(self, device: torch.device) -> _Means:
        """Of all rows."""
        return self._count, self._whole().to(device) / self._count, None

    def _whole(self) -> Float64[Tensor, " width"]:
        return self._before.to(self._sum.device) + self._sum


class _Full:
    """Products of rows, centred while summing, so that a large common offset loses no precision."""

    def __init__(self, width: int) -> None:
        self._sums = SecondMoments(1, width)

    def update(self, rows: Float[Tensor, "rows width"]) -> None:
        """Add rows."""
        self._sums.update(0, rows)

    def end_part(self) -> None:
        """Rows of all parts are summed in one."""

    def state(self) -> State:
        """Count, mean and centred second moment, as `SecondMoments` has them."""
        return self._sums.state()

    def merge(self, state: State) -> None:
        """Take in the rows of another part."""
        self._sums.merge(SavedState(state))

    def means(self, device: torch.device) -> _Means:
        """Of all rows, once: mean(x xᵀ) = covariance + x̄ x̄ᵀ takes the place of the sums."""
        count, mean, moment = (self._sums.at(name, 0, device) for name in ("count", "mean", "moment"))
        full = moment.div_(count).addr_(mean, mean)
        return int(count), full.diagonal().clone(), full
