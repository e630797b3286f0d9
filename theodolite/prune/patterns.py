"""Select the entries to keep by exact counts or N:M patterns, and check the arguments of the pruning methods.

How entries are scored is up to the methods.
"""

from __future__ import annotations

import numbers
import re
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from theodolite.errors import UsageError
from theodolite.theory.checks import check_finite

AGREEMENT = 1e-3
"""Tolerance between a given sparsity and that of a pattern, such as 0.333 for 1/3."""

_NEAR = 0.05
"""How far a threshold is moved to see how many entries it passes, as a share of itself."""

_DAMPING = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4)
"""Step sizes of the threshold search; decreasing, so that it cannot oscillate forever."""

_FEW_THREADS = 2
"""Up to so many, numpy's partition (one thread, vectorised) beats torch's kthvalue, by 3 on one thread."""


@dataclass(frozen=True)
class Pattern:
    """N:M: of every `of` consecutive inputs of an output at most `kept` are nonzero."""

    kept: int
    of: int

    def __str__(self) -> str:
        return f"{self.kept}:{self.of}"

    @property
    def density(self) -> float:
        """Share of entries kept."""
        return self.kept / self.of

    def largest(self, scores: Float[Tensor, "rows columns"]) -> Bool[Tensor, "rows columns"]:
        """Mark the `kept` largest of each group; of ties the last are kept."""
        groups = scores.reshape(-1, self.of).T.contiguous()
        return self.largest_down(groups).T.reshape(scores.shape)

    def largest_down(self, groups: Float[Tensor, "of groups"]) -> Bool[Tensor, "of groups"]:
        """Do as `largest`, each column a group. Pairs are compared: sorting a row of four costs more than the four."""
        beaten = torch.zeros_like(groups, dtype=torch.int16)
        for distance in range(1, self.of):
            later_wins = groups[distance:] >= groups[:-distance]
            beaten[:-distance] += later_wins
            beaten[distance:] += ~later_wins
        return beaten < self.kept


def pattern_of(given: object, inputs: int) -> Pattern | None:
    """Read a pattern, None, "2:4" or (2, 4), for matrices with `inputs` inputs; `UsageError` where it is none."""
    if given is None:
        return None
    text = re.fullmatch(r"(\d+):(\d+)", given) if isinstance(given, str) else None
    nonzeros, of = 0, 0
    if text:
        nonzeros, of = int(text[1]), int(text[2])
    elif isinstance(given, tuple) and len(given) == 2 and all(type(number) is int for number in given):
        nonzeros, of = given
    if not 0 < nonzeros < of:
        raise UsageError(f'pattern is {given!r}: give N:M with 0 < N < M, such as "2:4"')
    if inputs % of:
        raise UsageError(f"pattern {nonzeros}:{of} needs a multiple of {of} inputs; the matrix has {inputs}")
    return Pattern(nonzeros, of)


def check_sparsity(sparsity: object) -> float:
    """Check a share of entries to remove; `UsageError` where it is no number in (0, 1)."""
    if sparsity is None:
        raise UsageError("no sparsity is given: pass the share to remove, or a pattern such as 2:4")
    if isinstance(sparsity, bool) or not isinstance(sparsity, numbers.Real) or not 0 < float(sparsity) < 1:
        raise UsageError(
            f"sparsity is {sparsity!r}: give the share to remove, between 0 and 1, both excluded"
        )
    return float(sparsity)


def sparsity_of(sparsity: float | None, pattern: Pattern | None) -> float:
    """Find the share to remove, by None that of the pattern; `UsageError` where it is none, or another."""
    if pattern is None:
        return check_sparsity(sparsity)
    fixed = 1 - pattern.density
    if sparsity is not None and abs(check_sparsity(sparsity) - fixed) > AGREEMENT:
        raise UsageError(
            f"pattern {pattern} removes {fixed:.4g} of the entries, not {sparsity:g}: pass sparsity {fixed:.4g} or None"
        )
    return fixed


def checked_weight(weight: object) -> Float[Tensor, "outputs inputs"]:
    """Check that a weight is a finite real matrix, and give it detached and contiguous; else `UsageError`."""
    if not isinstance(weight, Tensor) or not weight.is_floating_point():
        raise UsageError("weight must be a tensor of floating-point numbers")
    if weight.ndim != 2 or 0 in weight.shape:
        raise UsageError(f"weight has shape {tuple(weight.shape)}: give a matrix (outputs, inputs)")
    check_finite("weight", weight)
    return weight.detach().contiguous()


def precision_of(weight: Tensor) -> torch.dtype:
    """Choose the dtype in which a weight is pruned: float32, or float64 if it is that."""
    return torch.promote_types(weight.dtype, torch.float32)


def checked_inputs(
    name: str, values: object, weight: Float[Tensor, "outputs inputs"]
) -> Float[Tensor, " inputs"]:
    """Check one number ≥ 0 for each input; float64 on the weight's device, all-zero values become ones.

    Raises:
        UsageError: another shape, negative or not finite.
    """
    if not isinstance(values, Tensor) or values.shape != weight.shape[1:] or values.is_complex():
        shape = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
        raise UsageError(f"{name} must be one number for each of {weight.shape[1]} inputs, not {shape}")
    numbers = values.detach().to(weight.device, torch.float64)
    check_finite(name, numbers)
    if (numbers < 0).any():
        raise UsageError(f"{name} holds negative numbers: give norms or mean squares")
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
    """Repeated `largest` of the same rows while their scores change little.

    Each row's threshold starts where it was and moves by how many entries are too many, which takes a few passes of
    comparing and counting, half the time of a new selection. Rows that still miss the count are selected exactly.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._threshold: Tensor | None = None
        # How many entries of a row a threshold passes as it moves by its own size, on the average.
        self._density: Tensor | None = None

    def mark(self, scores: Float[Tensor, "rows columns"], out: Float[Tensor, "rows columns"]) -> None:
        """Make `out` 1 at exactly the `count` largest scores of each row, else 0."""
        if self._threshold is None or self._density is None or not 0 < self._count < scores.shape[1]:
            largest(scores, self._count, out)
            if 0 < self._count < scores.shape[1]:
                self._threshold = _kth_smallest(scores, scores.shape[1] - self._count).clone()
                passed = self._count - (scores > (1 + _NEAR) * self._threshold).sum(dim=1)
                self._density = (passed.to(scores) / _NEAR).mean().clamp_min(1)
            return
        for damping in _DAMPING:
            torch.gt(scores, self._threshold, out=out)
            excess = out.sum(dim=1, keepdim=True) - self._count
            self._threshold *= (1 + damping * excess / self._density).clamp(0.5, 2)
        missed = excess.squeeze(1).nonzero().squeeze(1)
        if len(missed):
            out[missed] = largest(scores[missed], self._count).to(out.dtype)
