"""The truncated SVD of a matrix, found by a full SVD or followed by subspace iteration from one near it.

A randomised start is that of Halko, Martinsson & Tropp 2011 (algorithm 4.4). Independent of models and texts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

SMALL = 256
"""Matrices with fewer rows or columns get a full SVD in each step, on one thread: a second one brings nothing, and
where another process has its core, LAPACK waits for it at every call."""

_START_STEPS, _MORE = 3, 8
"""Steps from a random start, and directions beyond the rank, of the first decomposition of a large matrix."""

_TOLERANCE = 0.03
"""Subspace iteration stops when a step turns the subspace by less: root mean square sine of the angles."""

_MOST_STEPS = 16
"""Steps that together cost less than a full SVD; a subspace that still turns then has stalled."""

_ROUNDING = 32
"""Directions of fewer times the machine epsilon, of the largest one, are rounding: a matrix of lower rank has them."""

_PROBES, _PROBE_STEPS, _SLACK = 8, 4, 1.01
"""Of the check: no direction outside may be larger than the least one inside."""


class Truncated(NamedTuple):
    """L = left · right, the columns of left orthonormal; rightᵀ = space · factor, as `torch.linalg.qr` has it."""

    left: Tensor
    right: Tensor
    space: Tensor
    factor: Tensor


def _step(target: Tensor, space: Tensor) -> Truncated:
    """One step of subspace iteration.

    Of all matrices whose columns lie in target · space, L is the nearest one to the target. That includes the best
    one with rows in `space`, so a step never loses, whatever `space` is.
    """
    left = torch.linalg.qr(target @ space).Q
    right = left.mT @ target
    return Truncated(left, right, *torch.linalg.qr(right.mT))


def truncated_svd(target: Tensor, rank: int) -> Truncated:
    """The truncated SVD, up to a rotation of its factors, by a step from where it ends."""
    return _step(target, _leading(target, rank))


def randomised_svd(target: Tensor, rank: int, generator: torch.Generator) -> Truncated:
    """Nearly the truncated SVD: subspace iteration from a random start, then the best of what it found."""
    size = target.shape[1], min(rank + _MORE, *target.shape)
    space = torch.randn(size, generator=generator, dtype=target.dtype, device=target.device)
    for _ in range(_START_STEPS):
        step = _step(target, space)
        space = step.space
    return _step(target, space @ torch.linalg.svd(step.factor).U[:, :rank])


def follow(target: Tensor, space: Tensor) -> Truncated | None:
    """Iterate until the subspace converges; None if it does not."""
    for _ in range(_MOST_STEPS):
        step = _step(target, space)
        sines = 1 - (space.mT @ step.space).square().sum(dim=0)
        size = step.factor.diagonal().abs()
        if (
            sines[size > _ROUNDING * torch.finfo(size.dtype).eps * size.max()].sum()
            <= len(size) * _TOLERANCE**2
        ):
            return step
        space = step.space
    return None


def misses(target: Tensor, low_rank: Truncated, generator: torch.Generator) -> bool:
    """Whether a direction outside of the subspace is larger than the least one inside.

    Subspace iteration cannot see what is orthogonal to where it started. A few random probes can: the largest
    singular value that they find in what is left over is a lower bound, so a truncated SVD never fails.
    """
    left, right = low_rank.left, low_rank.right
    probes = torch.randn(right.shape[1], _PROBES, generator=generator, dtype=right.dtype, device=right.device)
    for _ in range(_PROBE_STEPS):
        sketch = target @ probes - left @ (right @ probes)
        probes = torch.linalg.qr((sketch.mT @ target - sketch.mT @ left @ right).mT).Q
    outside = torch.linalg.svdvals(target @ probes - left @ (right @ probes))[0]
    inside = torch.linalg.svdvals(low_rank.factor)
    rounding = _ROUNDING * torch.finfo(inside.dtype).eps * inside[0]
    return bool(outside > torch.maximum(_SLACK * inside[-1], rounding))


def _leading(target: Tensor, rank: int) -> Tensor:
    """The leading right singular vectors (inputs, rank), or a basis of their span, by a full SVD.

    Of the square factor of a QR decomposition: half the work for a tall matrix, and a fourth for a wide one.
    """
    if not rank:
        return target.new_empty(target.shape[1], 0)
    if target.shape[0] >= target.shape[1]:
        return torch.linalg.svd(torch.linalg.qr(target, mode="r").R).Vh[:rank].mT
    return target.mT @ torch.linalg.svd(torch.linalg.qr(target.mT, mode="r").R).Vh[:rank].mT
