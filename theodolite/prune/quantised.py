"""A weight matrix on a grid of few bits: rounded, rounded by GPTQ, or as a rounded plus a low-rank one.

Each output has one scale for every `group` consecutive inputs, and integers from −2^(b−1) to 2^(b−1) − 1: what servers
read as symmetric integer weights (compressed-tensors' `pack-quantized`). A scale is the one, of a few below the span of
its group, that loses the least; it is a number of the weight's own half precision, or of bfloat16.

Independent of models and texts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int8
from torch import Tensor

from theodolite.errors import UsageError
from theodolite.prune.methods import (
    INPUTS_AT_ONCE,
    SUBBLOCK,
    HessianFactor,
    changed_in_blocks,
    check_inputs_of,
    factor_hessian,
    inputs_in_turn,
)
from theodolite.prune.patterns import checked_inputs, checked_weight, precision_of
from theodolite.prune.subspace import SMALL, randomised_svd, truncated_svd
from theodolite.system.choices import check_bits
from theodolite.system.pruning_options import DAMPING, GROUP, ITERATIONS, RANK_RATIO

BITS = 4
"""Unless others are given."""

_BEYOND = 20
"""Scales that are tried beyond those at which the largest weight of a group is a last point of the grid: a sixteenth
more of the points each time, so that the largest weights are cut and the others rounded more finely."""

_NEARBY = (0.97, 1.0, 1.03)
"""The same, of a scale that was chosen for nearly the same weights."""


@dataclass(frozen=True, repr=False)
class Quantised:
    """Ŵ = codes · scale, group by group, + left · right.

    Attributes:
        codes: (outputs, inputs), from −2^(bits−1) to 2^(bits−1) − 1.
        scale: (outputs, groups), in the weight's half precision; of a wider weight in bfloat16.
        bits: of a code.
        dtype: of the weight, and so of `dense`.
        left, right: the low-rank part, (outputs, rank) and (rank, inputs), in the weight's dtype; None without one.
    """

    codes: Int8[Tensor, "outputs inputs"]
    scale: Float[Tensor, "outputs groups"]
    bits: int
    dtype: torch.dtype
    left: Float[Tensor, "outputs rank"] | None = None
    right: Float[Tensor, "rank inputs"] | None = None

    def rounded(self) -> Float[Tensor, "outputs inputs"]:
        """The quantised part, each product rounded once to the dtype: as readers of the format compute it."""
        inputs = self.codes.shape[1]
        return self.codes.to(self.dtype) * _spread(self.scale.to(self.dtype), inputs)

    def dense(self) -> Float[Tensor, "outputs inputs"]:
        """The sum as one matrix in the dtype of the weight, rounded once more where there is a low-rank part."""
        if self.left is None or self.right is None:
            return self.rounded()
        return (self.rounded().double() + self.left.double() @ self.right.double()).to(self.dtype)


def group_of(group: int, inputs: int) -> int:
    """Inputs per scale; 0 stands for all.

    Raises:
        UsageError: not a number of inputs, or it does not divide those of the matrix.
    """
    if isinstance(group, bool) or not isinstance(group, int) or group < 0:
        raise UsageError(f"group is {group!r}: give the number of inputs that share a scale, or 0 for all")
    if group and inputs % group:
        raise UsageError(
            f"groups of {group} need a multiple of {group} inputs; a matrix has {inputs}: choose another --group, or "
            "0 for one scale per output"
        )
    return group or inputs


def quantised_bits(shape: tuple[int, int], bits: int, group: int, dtype: torch.dtype) -> int:
    """Bits of the codes and the scales of a matrix (outputs, inputs); scales are stored in its dtype."""
    outputs, inputs = shape
    return outputs * (inputs * bits + inputs // group_of(group, inputs) * 8 * dtype.itemsize)


def rank_at(shape: tuple[int, int], bits: int, group: int, rank_ratio: float, dtype: torch.dtype) -> int:
    """The largest rank whose factors, in `dtype`, are at most the share `rank_ratio` of all bits of a matrix.

    Raises:
        UsageError: the share is not in [0, 1).
    """
    if not 0 <= rank_ratio < 1:
        raise UsageError(
            f"rank_ratio is {rank_ratio}: give the share of the low-rank part, from 0 to below 1 with --bits"
        )
    low_rank = rank_ratio / (1 - rank_ratio) * quantised_bits(shape, bits, group, dtype)
    # A share that was made from a rank gives that rank back.
    return min(int(low_rank / (8 * dtype.itemsize * sum(shape)) * (1 + 1e-9)), *shape)


@torch.no_grad()
def round_to_nearest(weight: Tensor, bits: int = BITS, group: int = GROUP) -> Quantised:
    """Each entry at the nearest point of its grid; scales of least squared error.

    Args:
        weight: (outputs, inputs).
        bits: 3, 4 or 8.
        group: inputs per scale, a divisor of the inputs; 0: all of them.

    Raises:
        UsageError: values that are not finite, not a matrix, or invalid bits or group.
    """
    weight = checked_weight(weight)
    check_bits(bits)
    original, ones = weight.to(precision_of(weight)), torch.ones(weight.shape[1]).to(weight.device)
    width = group_of(group, weight.shape[1])
    scale = _searched(original, ones, _largest(original, width), _first(bits), bits, weight.dtype)
    return _quantised(original, scale, bits, weight.dtype)


def gptq(
    weight: Tensor, hessian: Tensor, bits: int = BITS, group: int = GROUP, *, damping: float = DAMPING
) -> Quantised:
    """Round input by input, and let the later inputs make up for each error (Frantar et al. 2023, algorithm 1).

    Inputs are taken in their order. Scales are those of the weights as they are when a group is reached, as published;
    the released code takes the span of a group for its scale.

    Args:
        weight: (outputs, inputs).
        hessian: (inputs, inputs): the sum or the mean of x xᵀ over the tokens.
        bits, group: as in `round_to_nearest`.
        damping: share of the mean diagonal that is added to the Hessian's diagonal; 0.01 in the released code.

    Returns:
        The quantised weight. Inputs that are always 0 get weight 0.

    Raises:
        UsageError: as `round_to_nearest` and `factor_hessian`, or a Hessian of another width.
    """
    return gptq_factored(weight, factor_hessian(hessian, damping), bits, group)


@torch.no_grad()
def gptq_factored(weight: Tensor, factor: HessianFactor, bits: int = BITS, group: int = GROUP) -> Quantised:
    """`gptq` with a factored Hessian.

    With U = R⁻¹, an error of input j costs (w_j − ŵ_j)² / U_jj² = (w_j − ŵ_j)² R_jj², by which scales are chosen.

    Raises:
        UsageError: as `gptq`.
    """
    weight = checked_weight(weight)
    check_inputs_of(factor, weight)
    check_bits(bits)
    return _gptq(weight, factor, bits, group, weight.dtype)


def _gptq(weight: Tensor, factor: HessianFactor, bits: int, group: int, dtype: torch.dtype) -> Quantised:
    """`dtype`: of what is quantised, of which `weight` may be a part that is not rounded to it."""
    width = group_of(group, weight.shape[1])
    costs = factor.upper.diagonal().square()
    costs = (costs / costs.max()).to(precision_of(weight))
    scales: list[Tensor] = []
    if not group:
        alive = torch.where(factor.dead, 0, weight.to(precision_of(weight)))
        scales.append(_searched(alive, costs, _largest(alive, width), _first(bits), bits, dtype))

    def round_block(rows: Tensor, upper: Tensor, now: slice) -> None:
        if group:
            scales.append(_searched(rows.T, costs[now], _largest(rows.T, width), _first(bits), bits, dtype))
        _round_block(rows, upper, scales[-1].squeeze(1).to(rows.dtype), bits)

    rounded = changed_in_blocks(weight.to(precision_of(weight)), factor, group or INPUTS_AT_ONCE, round_block)
    return _quantised(rounded, torch.cat(scales, dim=1), bits, dtype)


@torch.no_grad()
def quantised_oats(
    weight: Tensor,
    second_moment: Tensor,
    bits: int = BITS,
    group: int = GROUP,
    rank_ratio: float = RANK_RATIO,
    iterations: int = ITERATIONS,
    *,
    seed: int = 0,
    factor: HessianFactor | None = None,
) -> Quantised:
    """A quantised plus a low-rank matrix, alternating as OATS does, with rounding in place of its sparse part.

    With D = √(second moment of each input), L D is the rank-r truncated SVD of (W − Q) D, from Q = 0 (randomised, of a
    large matrix, as in `oats`), and Q is W − L on its grid. No step adds to ‖(W − Q − L) D‖: L takes one step of
    subspace iteration from the last one's row space once it has one, and scales move only where that loses less. Errors
    of inputs with large second moments, outlier dimensions among them, weigh by these, so that L takes on what the grid
    would lose there.

    Args:
        weight: (outputs, inputs).
        second_moment: (inputs,): mean of x_j² over the tokens; a common factor changes nothing.
        bits, group: as in `round_to_nearest`.
        rank_ratio: share of the bits of codes, scales and factors together that goes into the factors (`rank_at`).
        iterations: alternations.
        seed: of the random start, where no full SVD is the first one: a matrix of 256 or more rows and columns.
        factor: of the inputs' full second moments; with it, W − L is rounded by GPTQ at the end.

    Raises:
        UsageError: as `round_to_nearest`, a rank ratio outside [0, 1), or moments that do not fit.
    """
    weight = checked_weight(weight)
    check_bits(bits)
    moments = checked_inputs("second_moment", second_moment, weight)
    if iterations < 1:
        raise UsageError(f"iterations is {iterations}: give 1 or more")
    width = group_of(group, weight.shape[1])
    rank = rank_at((weight.shape[0], weight.shape[1]), bits, group, rank_ratio, weight.dtype)
    original = weight.to(precision_of(weight))
    importance = (moments / moments.max()).to(original.dtype)
    generator = torch.Generator(weight.device).manual_seed(seed)
    left, right = _first_low_rank(original, importance, rank, generator)
    scale, tried = _largest(original - left @ right, width), _first(bits)
    rounded = original
    for iteration in range(iterations if rank else 1):
        if iteration:
            left, right = _next_low_rank(original - rounded, importance, right)
        rest = original - left @ right
        scale = _searched(rest, importance, scale, tried, bits, weight.dtype)
        tried = _NEARBY
        rounded = _on_grid(rest, _spread(scale, rest.shape[1]), bits)
    left, right = left.to(weight.dtype).contiguous(), right.to(weight.dtype).contiguous()
    rest = original - left.to(original.dtype) @ right.to(original.dtype)
    if factor is None:
        quantised = _quantised(rest, scale, bits, weight.dtype)
    else:
        quantised = _gptq(rest, factor, bits, group, weight.dtype)
    return replace(quantised, left=left, right=right) if rank else quantised


def _first_low_rank(
    target: Float[Tensor, "outputs inputs"],
    importance: Float[Tensor, " inputs"],
    rank: int,
    generator: torch.Generator,
) -> tuple[Float[Tensor, "outputs rank"], Float[Tensor, "rank inputs"]]:
    """L = left · right, the truncated SVD of the target, or nearly it, in the norm of √importance.

    An input that is always 0 gets what the others make of it: the projection of its column.
    """
    scaled = target * importance.sqrt()
    small = not rank or min(scaled.shape) < SMALL
    left = (truncated_svd(scaled, rank) if small else randomised_svd(scaled, rank, generator)).left
    return left, left.mT @ target


def _next_low_rank(
    target: Float[Tensor, "outputs inputs"],
    importance: Float[Tensor, " inputs"],
    right: Float[Tensor, "rank inputs"],
) -> tuple[Float[Tensor, "outputs rank"], Float[Tensor, "rank inputs"]]:
    """The same by one step of subspace iteration from the row space of the last one's `right`."""
    scale = importance.sqrt()
    left = torch.linalg.qr((target * scale) @ torch.linalg.qr((right * scale).mT).Q).Q
    return left, left.mT @ target


def _largest(weight: Float[Tensor, "outputs inputs"], width: int) -> Float[Tensor, "outputs groups"]:
    return weight.reshape(len(weight), -1, width).abs().amax(dim=-1)


def _first(bits: int) -> tuple[float, ...]:
    """Multiples of the largest weight that are tried as scales."""
    last = 2 ** (bits - 1)
    return (1 / (last - 1), *(1 / (last * (1 + more / 16)) for more in range(_BEYOND + 1)))


def _searched(
    weight: Float[Tensor, "outputs inputs"],
    importance: Float[Tensor, " inputs"],
    around: Float[Tensor, "outputs groups"],
    multiples: tuple[float, ...],
    bits: int,
    dtype: torch.dtype,
) -> Float[Tensor, "outputs groups"]:
    """Of some multiples of `around`, as numbers that can be stored, those that lose the least."""
    inputs, half = weight.shape[1], _scale_dtype(dtype)
    smallest = torch.finfo(half).tiny * torch.finfo(half).eps
    best, least = around, torch.full_like(around, torch.inf)
    for multiple in multiples:
        scale = (multiple * around).to(half).clamp_min(smallest).to(weight.dtype)
        error = (weight - _on_grid(weight, _spread(scale, inputs), bits)).square_().mul_(importance)
        lost = error.view(*around.shape, -1).sum(dim=-1)
        better = lost < least
        best, least = torch.where(better, scale, best), torch.where(better, lost, least)
    return best


def _round_block(
    rows: Float[Tensor, "inputs outputs"],
    upper: Float[Tensor, "inputs inputs"],
    scale: Float[Tensor, " outputs"],
    bits: int,
) -> None:
    """Put some inputs on their grid in place, each after what the errors of the earlier ones ask of it."""
    errors = torch.empty_like(rows)
    for i, _ in inputs_in_turn(rows, upper, errors, SUBBLOCK):
        rounded = _on_grid(rows[i], scale, bits)
        torch.sub(rows[i], rounded, out=errors[i]).div_(upper[i, i])
        rows[i] = rounded


def _quantised(rounded: Tensor, scale: Tensor, bits: int, dtype: torch.dtype) -> Quantised:
    codes = _codes(rounded, _spread(scale, rounded.shape[1]), bits)
    return Quantised(codes.to(torch.int8), scale.to(_scale_dtype(dtype)), bits, dtype)


def _codes(weight: Tensor, scale: Tensor, bits: int) -> Tensor:
    return (weight / scale).round_().clamp_(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


def _on_grid(weight: Tensor, scale: Tensor, bits: int) -> Tensor:
    return _codes(weight, scale, bits).mul_(scale)


def _spread(scale: Float[Tensor, "outputs groups"], inputs: int) -> Float[Tensor, "outputs inputs"]:
    """Each scale at each of its inputs."""
    return scale.repeat_interleave(inputs // scale.shape[1], dim=1)


def _scale_dtype(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype in (torch.float16, torch.bfloat16) else torch.bfloat16
