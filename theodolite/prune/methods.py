"""Prune a weight matrix by magnitude, Wanda or SparseGPT.

A weight W is (outputs, inputs), as `nn.Linear` holds it: y = W x. A pattern N:M fixes the sparsity at 1 − N/M. Counts
are exact, rounded down; the released codes of magnitude and SparseGPT remove one more entry, and all ties.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64, Shaped
from torch import Tensor

from theodolite.errors import UsageError
from theodolite.prune.options import DAMPING, MOST_DAMPING, check_damping, check_sparsity
from theodolite.theory.checks import check_finite

INPUTS_AT_ONCE = 128  # a block of SparseGPT, whose entries are selected jointly, as in the released code
SUBBLOCK = 16  # inputs per matrix product within a block, where no pattern sets it
_FACTORED_AT_ONCE = 512  # inputs a step of the factorisation of a Hessian
_STRIP = 2048  # columns of what is left that are updated together
ROWS = 1024  # rows of a matrix of which there is a copy at a time
AGREEMENT = 1e-3  # tolerance between a given sparsity and that of a pattern, such as 0.333 for 1/3

_NEAR = 0.05  # share of itself by which a threshold is moved to see how many entries it passes
_STEP_SIZES = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4)  # of the threshold search, which cannot oscillate forever
_FEW_THREADS = 2  # up to so many, numpy's partition beats torch's kthvalue, by 3 on one thread


@torch.no_grad()
def magnitude(weight: Tensor, sparsity: float | None = None, pattern: str | None = None) -> Tensor:
    """Keep the entries of largest |W| over the whole matrix, as in the released code of Wanda.

    Args:
        weight: (outputs, inputs).
        sparsity: share removed, in (0, 1).
        pattern: N:M; then the largest of each group.

    Returns: the pruned weight, in its own dtype; of ties the last are kept.

    Raises:
        UsageError: values that are not finite, not a matrix, or an invalid sparsity or pattern.
    """
    weight = checked_weight(weight)
    share, n_of_m = share_removed(sparsity, pattern, weight.shape[1])
    scores = weight.abs().to(precision_of(weight))
    kept = weight.numel() - int(share * weight.numel())
    mask = n_of_m.largest(scores) if n_of_m else largest(scores.reshape(1, -1), kept).view(weight.shape)
    return torch.where(mask, weight, 0)


@torch.no_grad()
def wanda(
    weight: Tensor, input_norm: Tensor, sparsity: float | None = None, pattern: str | None = None
) -> Tensor:
    """Keep the entries of largest |W_ij| ‖x_j‖₂ for each output (Sun, Liu, Bair & Kolter 2024, eq. 1).

    Args:
        input_norm: (inputs,): ‖x_j‖₂ over the tokens, or the root mean square: a common factor changes at most
            rounding. `UsageError` where the shape is another.
        weight, sparsity (of each output), pattern: as in `magnitude`, and so are the result and the errors.
    """
    weight = checked_weight(weight)
    share, n_of_m = share_removed(sparsity, pattern, weight.shape[1])
    norms = checked_inputs("input_norm", input_norm, weight)
    precision = precision_of(weight)
    # Divided by a power of two near the largest: exact, and in the range of float32; 2^1023 is the largest.
    norms = norms * 2.0 ** min(-int(torch.frexp(norms.max()).exponent), 1000)
    scores = weight.abs().to(precision) * norms.to(precision)
    kept = scores.shape[1] - int(share * scores.shape[1])
    mask = n_of_m.largest(scores) if n_of_m else largest(scores, kept)
    return torch.where(mask, weight, 0)


@dataclass(frozen=True)
class HessianFactor:
    """A Hessian factored for SparseGPT, shared by matrices with the same inputs: R Rᵀ = H + damping · mean(diag H) I.

    R is the `upper`. Of `dead` inputs, always 0, the diagonal of H counts as 1.
    """

    upper: Float64[Tensor, "inputs inputs"]
    dead: Bool[Tensor, " inputs"]
    damping: float


@torch.no_grad()
def factor_hessian(hessian: Tensor, damping: float = DAMPING, *, overwrite: bool = False) -> HessianFactor:
    """Factor a Hessian (inputs, inputs) in float64; arguments and errors are those of `sparsegpt`.

    `overwrite`: R may take the place of a Hessian in float64, so that there is one matrix of this size in memory.
    """
    if hessian.ndim != 2 or hessian.shape[0] != hessian.shape[1]:
        raise UsageError(f"hessian has shape {tuple(hessian.shape)}: give (inputs, inputs)")
    check_damping(damping)
    upper = hessian.detach().to(torch.float64, copy=not overwrite)
    check_finite("hessian", upper)
    diagonal = upper.diagonal().clone()
    dead = diagonal == 0
    diagonal[dead] = 1
    mean = float(diagonal.mean())
    while damping < MOST_DAMPING:
        upper.diagonal().copy_(diagonal + damping * mean)
        if _factor(upper):
            return HessianFactor(upper.triu_(), dead, damping)
        _mirror(upper)
        damping = max(10 * damping, torch.finfo(torch.float64).eps)
    raise UsageError("hessian is far from positive semidefinite: give the sum of x xᵀ")


def _factor(matrix: Float64[Tensor, "inputs inputs"]) -> bool:
    """Put R of R Rᵀ into the upper triangle, its last columns first, and leave what is below; whether it succeeded."""
    for stop in range(len(matrix), 0, -_FACTORED_AT_ONCE):
        now = slice(max(stop - _FACTORED_AT_ONCE, 0), stop)
        before, block = slice(0, now.start), matrix[now, now]
        # Cholesky of the flipped matrix, flipped back, is upper times lower instead of lower times upper.
        lower, failed = torch.linalg.cholesky_ex(block.flip(0, 1))
        if failed:
            return False
        upper = lower.flip(0, 1)
        block.copy_(block.tril(-1).add_(upper))
        above = matrix[before, now]
        above.copy_(torch.linalg.solve_triangular(upper.mT, above, upper=False, left=False))
        for end in range(now.start, 0, -_STRIP):
            strip = slice(max(end - _STRIP, 0), end)
            left, explained = matrix[:end, strip], above[strip].mT
            below = left[strip].tril(-1)
            left.addmm_(above[:end], explained, alpha=-1)
            left[strip].triu_().add_(below)
    return True


def _mirror(matrix: Float64[Tensor, "inputs inputs"]) -> None:
    """Copy the lower triangle into the upper one."""
    for start in range(0, len(matrix), _FACTORED_AT_ONCE):
        now = slice(start, start + _FACTORED_AT_ONCE)
        matrix[:start, now] = matrix[now, :start].mT
        below = matrix[now, now].tril(-1)
        matrix[now, now].tril_().add_(below.mT)


@torch.no_grad()
def sparsegpt(
    weight: Tensor,
    hessian: Tensor | HessianFactor,
    sparsity: float | None = None,
    pattern: str | None = None,
    *,
    damping: float = DAMPING,
) -> Tensor:
    """Remove entries input by input, updating the later inputs after each, by the optimal brain surgeon.

    Frantar & Alistarh 2023, algorithm 1, which carries what was removed forward through the Cholesky factor U of the
    inverse, H⁻¹ = Uᵀ U. Here U = R⁻¹ is never formed: only its diagonal blocks are inverted.

    Args:
        weight: (outputs, inputs).
        hessian: (inputs, inputs): the sum or the mean of x xᵀ over the tokens; or its `factor_hessian`, which several
            matrices may share, and which says the damping.
        sparsity: share removed of each block of 128 inputs, in (0, 1).
        pattern: N:M; then selected group by group, after the updates from earlier groups.
        damping: share of the mean diagonal that is added to it; raised tenfold until the Hessian can be factored.

    Returns: the pruned weight, in its own dtype. Inputs that are always 0 get weight 0.

    Raises:
        UsageError: as `magnitude`; or the Hessian is not finite, of another width, or far from positive semidefinite.
    """
    factor = hessian if isinstance(hessian, HessianFactor) else factor_hessian(hessian, damping)
    weight = checked_weight(weight)
    share, n_of_m = share_removed(sparsity, pattern, weight.shape[1])
    if len(factor.upper) != weight.shape[1]:
        raise UsageError(f"the Hessian is of {len(factor.upper)} inputs, the weight of {weight.shape[1]}")
    block = max(INPUTS_AT_ONCE // n_of_m.of, 1) * n_of_m.of if n_of_m else INPUTS_AT_ONCE
    precision = precision_of(weight)
    pruned = torch.empty_like(weight, memory_format=torch.contiguous_format)
    # Weights, and of inputs that are done what was added to them. Transposed: an input's weights to all outputs, read
    # and written together, are contiguous.
    change = torch.where(factor.dead, 0, weight.to(precision)).T.contiguous()
    # With Δ the change so far, what minimises the error moves the next block by −Δ R_before R_block⁻¹.
    for start in range(0, len(change), block):
        now = slice(start, min(start + block, len(change)))
        diagonal = factor.upper[now, now]
        inverse = torch.linalg.solve_triangular(diagonal, torch.eye(len(diagonal)).to(diagonal), upper=True)
        inverse = inverse.to(precision)
        asked = factor.upper[:start, now].to(precision).mT @ change[:start]
        rows = torch.addmm(change[now], inverse.mT, asked, alpha=-1)
        _prune_block(rows, inverse, n_of_m or rows.numel() - int(share * rows.numel()))
        pruned[:, now] = rows.T
        torch.sub(rows, change[now], out=change[now])
    return pruned


def _prune_block(
    rows: Float[Tensor, "inputs outputs"], upper: Float[Tensor, "inputs inputs"], keep: Pattern | int
) -> None:
    """Prune some inputs in place; `keep`: their total number of kept entries, or the pattern."""
    # Where the paper takes the i-th error from all later inputs, each takes all earlier ones from itself: fewer writes.
    scale = upper.diagonal().unsqueeze(1)
    errors = torch.empty_like(rows)
    mask = torch.empty_like(rows, dtype=torch.bool)
    if isinstance(keep, int):
        mask = largest((rows / scale).abs().view(1, -1), keep).view(rows.shape)
    size = keep.of if isinstance(keep, Pattern) else SUBBLOCK
    for first in range(0, len(rows), size):
        group = slice(first, min(first + size, len(rows)))
        rows[group].addmm_(upper[:first, group].mT, errors[:first], alpha=-1)
        if isinstance(keep, Pattern):
            mask[group] = keep.largest_down((rows[group] / scale[group]).abs())
        share = ~mask[group] / scale[group]
        for i in range(first, group.stop):
            if i > first:
                rows[i].addmv_(errors[first:i].mT, upper[first:i, i], alpha=-1)
            torch.mul(rows[i], share[i - first], out=errors[i])
    rows.masked_fill_(~mask, 0)


@dataclass(frozen=True)
class Pattern:
    """N:M: of every `of` consecutive inputs of an output at most `kept` are nonzero."""

    kept: int
    of: int

    def __str__(self) -> str:
        return f"{self.kept}:{self.of}"

    def largest(self, scores: Float[Tensor, "rows columns"]) -> Bool[Tensor, "rows columns"]:
        """Mark the `kept` largest of each group; of ties the last are kept."""
        groups = scores.reshape(-1, self.of).T.contiguous()
        return self.largest_down(groups).T.reshape(scores.shape)

    def largest_down(self, groups: Float[Tensor, "of groups"]) -> Bool[Tensor, "of groups"]:
        """Mark the `kept` largest of each column, of ties the last, by comparing pairs: sorting four costs more."""
        beaten = torch.zeros_like(groups, dtype=torch.int16)
        for distance in range(1, self.of):
            later_wins = groups[distance:] >= groups[:-distance]
            beaten[:-distance] += later_wins
            beaten[distance:] += ~later_wins
        return beaten < self.kept


def pattern_of(given: object, inputs: int) -> Pattern | None:
    """Read N:M, such as "2:4", for matrices with `inputs` inputs; None for None, `UsageError` if it is no pattern."""
    if given is None:
        return None
    text = re.fullmatch(r"(\d+):(\d+)", str(given))
    nonzeros, of = (int(text[1]), int(text[2])) if text else (0, 0)
    if not 0 < nonzeros < of:
        raise UsageError(f'pattern is {given!r}: give N:M with 0 < N < M, such as "2:4"')
    if inputs % of:
        raise UsageError(f"pattern {nonzeros}:{of} needs a multiple of {of} inputs; the matrix has {inputs}")
    return Pattern(nonzeros, of)


def share_removed(sparsity: float | None, pattern: str | None, inputs: int) -> tuple[float, Pattern | None]:
    """Find the share to remove, by None that of the pattern, and the pattern; `UsageError` where they do not fit."""
    n_of_m = pattern_of(pattern, inputs)
    if n_of_m is None:
        return check_sparsity(sparsity), None
    fixed = 1 - n_of_m.kept / n_of_m.of
    if sparsity is not None and abs(check_sparsity(sparsity) - fixed) > AGREEMENT:
        raise UsageError(
            f"pattern {n_of_m} removes {fixed:.4g} of the entries, not {sparsity:g}: pass sparsity {fixed:.4g} or None"
        )
    return fixed, n_of_m


def checked_weight(weight: Tensor) -> Float[Tensor, "outputs inputs"]:
    """Check that a weight is a finite matrix, and give it detached and contiguous; else `UsageError`."""
    if weight.ndim != 2 or 0 in weight.shape:
        raise UsageError(f"weight has shape {tuple(weight.shape)}: give a matrix (outputs, inputs)")
    check_finite("weight", weight)
    return weight.detach().contiguous()


def precision_of(weight: Tensor) -> torch.dtype:
    """Choose the dtype in which a weight is pruned: float32, or float64 if it is that."""
    return torch.promote_types(weight.dtype, torch.float32)


def checked_inputs(
    name: str, values: Tensor, weight: Float[Tensor, "outputs inputs"]
) -> Float[Tensor, " inputs"]:
    """Check one number for each input, else `UsageError`; float64 on the weight's device, all zeros become ones."""
    if values.shape != weight.shape[1:]:
        raise UsageError(f"{name} must be one number for each of {weight.shape[1]} inputs, as a tensor")
    numbers = values.detach().to(weight.device, torch.float64)
    check_finite(name, numbers)
    return numbers if numbers.any() else torch.ones_like(numbers)


def largest(
    scores: Float[Tensor, "rows columns"], count: int, out: Tensor | None = None
) -> Shaped[Tensor, "rows columns"]:
    """Mark the `count` largest scores of each row; of ties the last are kept. 1 in a numeric `out`."""
    if out is None:
        out = torch.empty_like(scores, dtype=torch.bool)
    removed = scores.shape[1] - count
    if removed <= 0 or count <= 0:
        return out.fill_(count > 0)
    threshold = _kth_smallest(scores, removed)
    torch.gt(scores, threshold, out=out)
    missing = count - out.sum(dim=1)
    tied = missing.nonzero().squeeze(1)
    if len(tied):
        equal = scores[tied] == threshold[tied]
        from_here_on = equal.flip(1).cumsum(1).flip(1)
        out[tied] += equal & (from_here_on <= missing[tied, None])
    return out


def _kth_smallest(scores: Float[Tensor, "rows columns"], k: int) -> Float[Tensor, "rows 1"]:
    if scores.device.type == "cpu" and torch.get_num_threads() <= _FEW_THREADS:
        return torch.from_numpy(np.partition(scores.numpy(), k - 1, axis=1)[:, k - 1 : k])
    return scores.kthvalue(k, dim=1, keepdim=True).values


class ThresholdTracker:
    """Repeated `largest` of the same rows while their scores change little, in half the time."""

    def __init__(self, count: int) -> None:
        self._count = count
        # The threshold of each row; how many entries of a row it passes as it moves by its own size, on the average.
        self._found: tuple[Tensor, Tensor] | None = None

    def mark(self, scores: Float[Tensor, "rows columns"], out: Float[Tensor, "rows columns"]) -> None:
        """Make `out` 1 at exactly the `count` largest scores of each row, else 0."""
        if self._found is None:
            largest(scores, self._count, out)
            if 0 < self._count < scores.shape[1]:
                threshold = _kth_smallest(scores, scores.shape[1] - self._count).clone()
                passed = self._count - (scores > (1 + _NEAR) * threshold).sum(dim=1)
                self._found = threshold, (passed.to(scores) / _NEAR).mean().clamp_min(1)
            return
        threshold, density = self._found
        for step in _STEP_SIZES:
            torch.gt(scores, threshold, out=out)
            excess = out.sum(dim=1, keepdim=True) - self._count
            threshold *= (1 + step * excess / density).clamp(0.5, 2)
        missed = excess.squeeze(1).nonzero().squeeze(1)
        if len(missed):
            out[missed] = largest(scores[missed], self._count).to(out.dtype)
