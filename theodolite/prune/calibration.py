"""Run a model block by block over the calibration contexts, and sum the second moments of what enters its matrices.

How each block is called is recorded in a pass in which blocks give back what they get: masks and angles do not depend
on it. Where the start of one context, the witness, shows that they do, every context gets a whole pass. After that only
the hidden states that enter the current block are stored, in the model's dtype. The witness goes through the blocks as
well: at the start and at the end it is compared with a pass of the whole model. Nothing here depends on how a matrix is
pruned.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Float64
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

from theodolite.accumulate.second_moments import SecondMoments
from theodolite.corpus.corpus import Corpus
from theodolite.errors import WorkError, first_line
from theodolite.models import OpenModel
from theodolite.models.guard import without_autocast
from theodolite.models.structure import first_tensor, removed_on_leaving
from theodolite.models.sweep import with_hidden
from theodolite.models.weights.block_matrices import Matrix, TappedProducts
from theodolite.passes.corpus_pass import refuse_nonfinite_stream
from theodolite.prune.methods import ROWS, HessianFactor, factor_hessian, precision_of
from theodolite.system.choices import wider_than
from theodolite.system.mapped import kept

Hidden = Float[Tensor, "contexts positions width"]

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Of a call, by place and by name."""

MAX_ROUNDINGS = 16
"""Tolerance between block-by-block and whole forward passes, in machine epsilons of the largest entry."""

WITNESS = 64
"""Tokens of the first context that are the witness: its whole passes and those through every block cost little."""

SUMMED_AT_ONCE = 256
"""Squares summed in float32, before they are added up in float64: seven digits of a sum, in a tenth of the time."""

MOST_VARIANTS = 4
"""Distinct argument tensors per shape that a new one is compared with, to store equal ones once."""


class BlockByBlock:
    """Hidden states that enter the current block, batch by batch, and how each block is called.

    Args:
        model: from `open_model`; its blocks may be changed between calls.
        rounded: take the products in bfloat16 (`torch.autocast`), all but those of the witness.
        corpus: the calibration contexts.
        batch: contexts per forward pass.
        between: called after every batch; it may raise to stop.
        folder: keep hidden states in files without a name there, which memory holds as far as it has room; None: in
            memory.

    Raises:
        WorkError: the family computes something between its blocks, so that they cannot be run one by one; or the
            folder, which is made, cannot be written to.
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
        self._rounded = rounded
        self._model, self._between, self._folder = model, between, folder
        self._blocks = model.structure.blocks
        self._tensors: dict[tuple[torch.Size, torch.dtype, torch.device], list[Tensor]] = {}
        self._witness_ids = corpus.ids(slice(0, 1))[:, :WITNESS]
        self._witness_calls, self._witness, output = self._pass(self._witness_ids)
        hidden = self._witness
        for layer in range(model.layers):
            hidden = self._run(layer, self._witness_calls, hidden)
        self._compare(hidden, _first(output))
        self._refuse_if_not_rounded()
        record = self._pass
        # T5's blocks give the next ones more than hidden states.
        if not isinstance(output, tuple) or all(part is None for part in output[1:]):
            calls, entered, _ = self._passing_through(self._witness_ids, output)
            if torch.equal(entered, self._witness) and _equal(calls, self._witness_calls):
                record = lambda ids: self._passing_through(ids, output)  # noqa: E731
        self._hidden: list[Hidden] = []
        self._calls: list[list[Arguments]] = []  # by batch, then by block, without hidden states
        for part in corpus.batches(batch):
            calls, entered, _ = record(corpus.ids(part))
            self._hidden.append(kept(entered, None, folder))
            self._calls.append(calls)
            between()

    def read(self, layer: int, moments: InputMoments) -> None:
        """Run a block on all contexts for the moments of what enters its matrices."""
        for calls, hidden in self._batches():
            with moments.collecting():
                self._run(layer, calls, hidden, rounded=self._rounded)

    def advance(self, layer: int) -> None:
        """Run a block on all contexts; its outputs become the inputs of the next one."""
        self._witness = self._run(layer, self._witness_calls, self._witness)
        for number, (calls, hidden) in enumerate(self._batches()):
            output = self._run(layer, calls, hidden, rounded=self._rounded)
            refuse_nonfinite_stream(layer + 1, output)
            self._hidden[number] = kept(output, self._hidden[number], self._folder)

    def verify_end(self) -> None:
        """Raise `WorkError` where the last block gives the witness another output than a pass of the pruned model."""
        last = self._model.layers - 1
        ours = self._run(last, self._witness_calls, self._witness)
        refuse_nonfinite_stream(last + 1, ours)
        self._compare(ours, _first(self._pass(self._witness_ids)[2]))

    def _batches(self) -> Iterator[tuple[list[Arguments], Hidden]]:
        for calls, hidden in zip(self._calls, self._hidden, strict=True):
            yield calls, hidden.to(self._model.device)
            self._between()

    def _run(self, layer: int, calls: list[Arguments], hidden: Hidden, *, rounded: bool = False) -> Hidden:
        args, kwargs = with_hidden(*calls[layer], hidden)
        with torch.inference_mode(), torch.autocast(hidden.device.type, torch.bfloat16, enabled=rounded):
            return _first(self._blocks[layer](*args, **kwargs)).to(hidden.dtype)

    def _refuse_if_not_rounded(self) -> None:
        """Raise `WorkError` where the blocks cannot take their products in bfloat16, as they are asked to."""
        if not self._rounded:
            return
        try:
            self._run(0, self._witness_calls, self._witness, rounded=True)
        except RuntimeError as error:
            raise WorkError(
                f"{self._model.source.name} does not run with products in bfloat16: use --exact ({first_line(error)})"
            ) from error

    def _pass(self, ids: Tensor) -> tuple[list[Arguments], Hidden, Any]:
        """Run the model's own pass: how each block is called, the input of the first and the output of the last one."""
        calls: list[Arguments] = []
        entered: list[Hidden] = []
        left: list[Any] = []

        def enter(_: nn.Module, args: Any, kwargs: Any) -> None:
            if not calls:
                entered.append(first_tensor(args, kwargs))
            calls.append(tree_map(self._stored, with_hidden(args, kwargs, None)))

        hooks: list[Any] = [
            block.register_forward_pre_hook(enter, with_kwargs=True) for block in self._blocks
        ]
        hooks.append(self._blocks[-1].register_forward_hook(lambda _, args, output: left.append(output)))
        with removed_on_leaving(hooks):
            self._model.forward(ids)
        return calls, entered[0], left[0]

    def _stored(self, value: Any) -> Any:
        """Replace a tensor by an equal one that is stored: masks and rotations are alike in all blocks."""
        if not isinstance(value, Tensor):
            return value
        alike = self._tensors.setdefault((value.shape, value.dtype, value.device), [])
        for known in alike:
            if torch.equal(known, value):
                return known
        if len(alike) < MOST_VARIANTS:
            alike.append(value)
        return value

    def _passing_through(self, ids: Tensor, output: Any) -> tuple[list[Arguments], Hidden, Any]:
        """Do as `_pass`, every block returning its input instead of the hidden states in such an `output`."""

        def give_back(*args: Any, **kwargs: Any) -> Any:
            hidden = first_tensor(args, kwargs)
            return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

        own = [vars(block).get("forward") for block in self._blocks]
        try:
            for block in self._blocks:
                vars(block)["forward"] = give_back
            return self._pass(ids)
        finally:
            for block, forward in zip(self._blocks, own, strict=True):
                del vars(block)["forward"]
                if forward is not None:  # such as accelerate's
                    vars(block)["forward"] = forward

    def _compare(self, ours: Hidden, reference: Hidden) -> None:
        largest = reference.abs().max().double().clamp_min(1e-300)
        error = float((ours.double() - reference.double()).abs().max() / largest)
        if not error <= MAX_ROUNDINGS * torch.finfo(reference.dtype).eps:
            family = self._model.source.name
            raise WorkError(
                f"{family}: running its blocks one by one differs from the model's own pass by {error:.1e}, so it "
                "cannot be pruned block by block"
            )


def _first(output: Any) -> Hidden:
    return output[0] if isinstance(output, tuple) else output


def _equal(one: list[Arguments], other: list[Arguments]) -> bool:
    """Tell whether calls are the same: tensors by their numbers, all else by `==`."""
    (ours, structure), (theirs, theirs_too) = tree_flatten(one), tree_flatten(other)
    return structure == theirs_too and all(
        (a.dtype == b.dtype and torch.equal(a, b))
        if isinstance(a, Tensor) and isinstance(b, Tensor)
        else type(a) is type(b) and (a is b or bool(a == b))
        for a, b in zip(ours, theirs, strict=True)
    )


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
        norms = [rows.square() @ self.diagonal.to(matrix.dtype) for rows in matrix.split(ROWS)]
        return exact, float(torch.cat(norms).double().sum())


class _AllInputsSeen(Exception):
    """Raised to leave a block that has nothing left to show."""


class InputMoments:
    """Sums over the inputs of some matrices, none of which is stored.

    Matrices with the same inputs (W_Q, W_K and W_V; gate and up) share one sum: Wanda and OATS need squares, SparseGPT
    all products, which are centred while summing, so that a large common offset loses no precision.

    Args:
        matrices: of one block.
        damping: of the factors of the full moments; None: diagonals only.
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
        """Collect the inputs of products with the matrices in one run of the block.

        The first run goes to its end. Where it used each matrix once, the others are left before the last product: of
        a gated MLP that saves a quarter of the work.
        """
        self._uses.clear()
        with suppress(_AllInputsSeen), TappedProducts(self._add):
            yield
        self._may_leave = all(self._uses[at] == 1 for at in self._widths)

    @torch.inference_mode()  # as the pass in which sums were made, which are changed in place
    def of(self, matrix: Matrix) -> Moments:
        """Give the moments of a matrix's inputs, unit ones with a count of 0 if there were none; or `WorkError`."""
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
