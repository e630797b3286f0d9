"""Run a model block by block over the calibration contexts, and sum the second moments of what enters its matrices.

A `Sweep` takes the contexts through the blocks: only the hidden states that enter the current block are stored, in the
model's dtype. The start of one context, the witness, goes through the blocks as well: at the start and at the end it is
compared with a pass of the whole model.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from theodolite.accumulate.second_moments import SecondMoments
from theodolite.corpus.corpus import Corpus
from theodolite.errors import WorkError
from theodolite.models import OpenModel
from theodolite.models.guard import without_autocast
from theodolite.models.stored.loading import RUNNING_ERRORS, reason_of
from theodolite.models.structure import first_output, removed_on_leaving
from theodolite.models.sweep import Sweep
from theodolite.models.weights.block_matrices import Matrix, TappedProducts
from theodolite.passes.corpus_pass import refuse_nonfinite_stream
from theodolite.prune.methods import ROWS, HessianFactor, factor_hessian, precision_of
from theodolite.system.choices import wider_than

MAX_ROUNDINGS = 16
"""Tolerance between block-by-block and whole forward passes, in machine epsilons of the largest entry."""

WITNESS = 64
"""Tokens of the first context that are the witness: its whole passes and those through every block cost little."""

SUMMED_AT_ONCE = 256
"""Squares summed in float32, before they are added up in float64: seven digits of a sum, in a tenth of the time."""


class BlockByBlock:
    """The calibration contexts on their way through the blocks, batch by batch, and the witness beside them.

    The blocks of the model may be changed between calls. `WorkError` where they cannot be run one by one.

    Args:
        between: called after every batch; it may raise to stop.
        folder: keep hidden states in files without a name there, which memory holds as far as it has room; None: in
            memory.
        rounded: take the products in bfloat16 (`torch.autocast`), all but those of the witness.
    """

    def __init__(
        self,
        model: OpenModel,
        corpus: Corpus,
        batch: int,
        between: Callable[[], None],
        folder: Path | None = None,
        *,
        rounded: bool = False,
    ) -> None:
        self._model, self._between, self._rounded = model, between, rounded
        self._batches = [corpus.ids(part) for part in corpus.batches(batch)]
        self._witness_ids = corpus.ids(slice(0, 1))[:, :WITNESS]
        dense, self._witness, self._sweep = (
            Sweep(model.structure.blocks, of, beside=True) for of in (None, None, folder)
        )
        try:
            for layer in range(model.layers):
                with model.block_present(layer):
                    self._advance_witness(dense, layer)
        except (WorkError, *RUNNING_ERRORS) as error:
            raise WorkError(
                f"{model.source.name} cannot be pruned block by block: {reason_of(error)}"
            ) from error
        self._compare(dense)
        self._witness.others = self._sweep.others = dense.others

    def read(self, layer: int, moments: InputMoments) -> None:
        """Run a block on all contexts for the moments of what enters its matrices."""

        @contextmanager
        def collecting() -> Iterator[None]:
            with self._rounding(), moments.collecting():
                yield

        with self._sweep.block(layer, collecting, keep=False):
            for ids in self._batches:
                self._model.forward(ids)
                self._between()

    def advance(self, layer: int) -> None:
        """Run a block on all contexts; its outputs become the inputs of the next one."""
        self._advance_witness(self._witness, layer)
        with self._sweep.block(layer, self._rounding):
            for number, ids in enumerate(self._batches):
                self._model.forward(ids)
                refuse_nonfinite_stream(layer + 1, self._sweep.carried[number])
                self._between()

    def verify_end(self) -> None:
        """Raise `WorkError` where the last block gives the witness another output than a pass of the pruned model."""
        last = self._model.layers - 1
        self._advance_witness(self._witness, last)
        refuse_nonfinite_stream(last + 1, self._witness.carried[0])
        self._compare(self._witness)

    def _advance_witness(self, sweep: Sweep, layer: int) -> None:
        with sweep.block(layer):
            self._model.forward(self._witness_ids)

    def _rounding(self) -> AbstractContextManager[object]:
        return torch.autocast(self._model.device.type, torch.bfloat16, enabled=self._rounded)

    def _compare(self, sweep: Sweep) -> None:
        """Raise `WorkError` where a sweep left the witness with another output than a pass of the whole model."""
        outputs: list[Tensor] = []
        last = self._model.structure.blocks[-1]
        hook = last.register_forward_hook(lambda _, args, output: outputs.append(first_output(output)))
        with removed_on_leaving([hook]):
            self._model.forward(self._witness_ids)
        ours, reference = sweep.carried[0].double(), outputs[0]
        largest = reference.abs().max().double().clamp_min(1e-300)
        error = float((ours - reference.double()).abs().max() / largest)
        if not error <= MAX_ROUNDINGS * torch.finfo(reference.dtype).eps:
            family = self._model.source.name
            raise WorkError(
                f"{family}: running its blocks one by one differs from the model's own pass by {error:.1e}, so it "
                "cannot be pruned block by block"
            )


@dataclass(frozen=True)
class Moments:
    """Second moments of the `count` input vectors x of a matrix: mean of x_i², and if requested of x xᵀ, factored."""

    count: int
    diagonal: Float64[Tensor, " inputs"]
    factor: HessianFactor | None

    def squared_norms(self, matrix: Float[Tensor, "outputs inputs"]) -> tuple[float, float]:
        """Compute the mean of ‖M x‖² from full moments (else NaN), and ‖M D‖², its value for uncorrelated inputs."""
        exact = math.nan if self.factor is None else self.factor.squared_norm(matrix)
        norms = [rows.square() @ self.diagonal.to(matrix.dtype) for rows in matrix.split(ROWS)]
        return exact, float(torch.cat(norms).double().sum())


class _AllInputsSeen(Exception):
    """Raised to leave a block that has nothing left to show."""


class InputMoments:
    """Sums over the inputs of the matrices of one block; those with the same inputs (W_Q, W_K and W_V) share one.

    `damping`: of the factors of the full moments, centred while summing; None: diagonals only.
    """

    def __init__(self, matrices: Sequence[Matrix], damping: float | None = None) -> None:
        self._damping = damping
        self._widths = {matrix.holder.data_ptr(): matrix.shape[1] for matrix in matrices}
        self._sums: dict[int, SecondMoments | tuple[int, Tensor]] = {}
        self._moments: dict[int, Moments] = {}
        self._first: dict[int, int] = {}
        self._last: tuple[int, Tensor | None] = (0, None)
        self._uses: Counter[int] = Counter()  # in this run of the block
        self._may_leave = False

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Collect the inputs of products with the matrices in one run of the block."""
        # Where the first run used each matrix once, the others are left before the last product: of a gated MLP that
        # saves a quarter of the work.
        self._uses.clear()
        with suppress(_AllInputsSeen), TappedProducts(self._add):
            yield
        self._may_leave = all(self._uses[at] == 1 for at in self._widths)

    @torch.inference_mode()  # as the pass in which sums were made, which are changed in place
    def of(self, matrix: Matrix) -> Moments:
        """Return the moments of a matrix's inputs, those of the identity if it had none; `WorkError` if infinite."""
        at, device = matrix.holder.data_ptr(), matrix.holder.device
        first = self._first.get(at, at)
        if first in self._moments:
            return self._moments[first]
        sums, full = self._sums.pop(first, None), None
        if sums is None:
            count, diagonal = 0, torch.ones(matrix.shape[1], dtype=torch.float64, device=device)
            full = None if self._damping is None else diagonal.diag()
        elif isinstance(sums, tuple):
            count, diagonal = sums[0], sums[1].to(device) / sums[0]
        else:  # mean(x xᵀ) = covariance + x̄ x̄ᵀ takes the place of the sums
            total, mean, moment = (sums.at(name, 0, device) for name in ("count", "mean", "moment"))
            full = moment.div_(total).addr_(mean, mean)
            count, diagonal = int(total), full.diagonal().clone()
        if not torch.isfinite(diagonal).all():
            raise WorkError(
                f"the input of {matrix.parameter} is NaN, infinite or too large: {wider_than(matrix.holder.dtype)}"
            )
        factor = None
        if full is not None and self._damping is not None:
            factor = factor_hessian(full, self._damping, overwrite=True)
        moments = Moments(count, diagonal, factor)
        if count:
            self._moments[first] = moments
        return moments

    def _add(self, inputs: Tensor, matrix: Tensor) -> None:
        at = matrix.data_ptr()
        if self._widths.get(at) != inputs.shape[-1]:
            return
        self._uses[at] += 1
        last, tensor = self._last
        first = self._first.setdefault(at, last if inputs is tensor else at)
        if first == at:
            self._last = (at, inputs)
            with without_autocast():
                self._sum(at, inputs)
        elif inputs is not tensor:
            raise WorkError("two matrices share their inputs in one batch and not in another")
        if self._may_leave and len(self._uses) == len(self._widths):
            raise _AllInputsSeen

    def _sum(self, at: int, inputs: Tensor) -> None:
        rows = inputs.detach().reshape(-1, inputs.shape[-1])
        if not len(rows):  # an expert may be run on none
            return
        sums = self._sums.get(at)
        if self._damping is not None:
            if sums is None:
                sums = self._sums[at] = SecondMoments(1, rows.shape[1])
            assert isinstance(sums, SecondMoments)
            sums.update(0, rows)
        else:
            assert not isinstance(sums, SecondMoments)
            count, squares = sums or (0, rows.new_zeros(rows.shape[1], dtype=torch.float64))
            for chunk in rows.split(SUMMED_AT_ONCE):
                squares = squares + chunk.to(precision_of(chunk)).square().sum(dim=0)
            self._sums[at] = count + len(rows), squares
