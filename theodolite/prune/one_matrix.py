"""One matrix pruned by checked options, and its row of the table. The formulas are in the modules of the methods."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from theodolite.errors import WorkError
from theodolite.models.block_matrices import Matrix
from theodolite.models.factored import PrunedMatrix
from theodolite.prune.methods import ROWS, HessianFactor, magnitude, sparsegpt_factored, wanda
from theodolite.prune.moments import Moments
from theodolite.prune.oats import oats
from theodolite.prune.patterns import precision_of
from theodolite.prune.quantised import (
    Quantised,
    gptq_factored,
    quantised_bits,
    quantised_oats,
    round_to_nearest,
)
from theodolite.system.pruning_options import PruningOptions

NO_TOKENS = "no token of the text reached it: all inputs weighted equally"


def pruned_matrix(
    options: PruningOptions,
    matrix: Matrix,
    moments: Moments,
    sparsity: float | None,
    ratio: float,
    device: torch.device | None = None,
) -> tuple[PrunedMatrix, dict[str, Any]]:
    """One matrix pruned, in its own dtype, and its row of the table.

    Args:
        options: checked.
        matrix: in its block, which is present.
        moments: of its inputs.
        sparsity, ratio: of its entries, and of its low-rank part.
        device: that of the moments, on which it is pruned; None: where it is.

    Raises:
        WorkError: nothing was seen to enter a matrix that every token should reach.
    """
    if not moments.count and not matrix.is_of_expert and options.weighs_inputs:
        blind = "magnitude" if options.bits is None else "round"
        raise WorkError(
            f"nothing was seen to enter {matrix.parameter} while its block read the text, so that {options.method} "
            f"cannot weigh its inputs: use --method {blind}, which weighs none"
        )
    weight = matrix.read().to(device)
    approximation = approximated(options, weight, moments, sparsity, ratio)
    pruned = PrunedMatrix(
        key=matrix.key,
        parameter=matrix.parameter,
        expert=matrix.expert,
        dimension=matrix.dimension,
        rows=matrix.rows,
        # A negative zero would not outlive packing.
        sparse=approximation.sparse.masked_fill_(approximation.sparse == 0, 0),
        left=approximation.left,
        right=approximation.right,
        scale=approximation.scale,
    )
    lost = moments.squared_norms(_less(weight, pruned.merged()))
    whole = moments.squared_norms(weight.to(precision_of(weight)))
    exact, scaled = (
        math.sqrt(max(missing, 0) / all_) if all_ > 0 else math.nan
        for missing, all_ in zip(lost, whole, strict=True)
    )
    return pruned, {
        "layer": matrix.layer,
        "matrix": matrix.name,
        "expert": -1 if matrix.expert is None else matrix.expert,
        "parameter": matrix.parameter,
        "outputs": matrix.shape[0],
        "inputs": matrix.shape[1],
        "method": options.method,
        "asked": math.nan if sparsity is None else sparsity,
        **_counts(options, pruned),
        "error": exact,
        "error_scaled": scaled,
        "damping": approximation.damping,
        "tokens": moments.count,
        "fallback": approximation.fallback if moments.count or not options.weighs_inputs else NO_TOKENS,
    }


def _less(weight: Tensor, other: Tensor) -> Tensor:
    """Their difference, taken in float64 of some rows at a time."""
    difference = torch.empty_like(weight, dtype=precision_of(weight))
    for rows, ours, theirs in zip(*(each.split(ROWS) for each in (difference, weight, other)), strict=True):
        rows.copy_(ours.double() - theirs.double())
    return difference


@dataclass(frozen=True)
class Approximation:
    """A pruned matrix as a method returns it."""

    sparse: Tensor
    left: Tensor | None = None
    right: Tensor | None = None
    damping: float = math.nan
    fallback: str = ""
    scale: Tensor | None = None


def approximated(
    options: PruningOptions, weight: Tensor, moments: Moments, sparsity: float | None, ratio: float
) -> Approximation:
    """A weight by the method of the options, as that returns it."""
    pattern = options.pattern
    if options.bits is not None:
        return _quantised(options, weight, moments, ratio)
    if options.method == "magnitude":
        return Approximation(magnitude(weight, sparsity, pattern))
    if options.method == "wanda":
        return Approximation(wanda(weight, moments.diagonal.sqrt(), sparsity, pattern))
    if options.method == "sparsegpt":
        factor = moments.factor
        assert factor is not None
        pruned = sparsegpt_factored(weight, factor, sparsity, pattern)
        return Approximation(pruned, damping=factor.damping, fallback=_raised(options, factor))
    split = oats(
        weight,
        moments.diagonal,
        sparsity,
        ratio,
        options.iterations,
        pattern,
        seed=options.seed,
        exact=options.exact,
    )
    stalled = f"full SVD in {split.stalls} of {split.iterations} iterations" if split.stalls else ""
    if not split.left.numel():
        return Approximation(split.sparse, fallback=stalled)
    return Approximation(split.sparse, split.left, split.right, fallback=stalled)


def _quantised(options: PruningOptions, weight: Tensor, moments: Moments, ratio: float) -> Approximation:
    method, bits, group = options.method, options.bits, options.group
    assert bits is not None
    if method == "round":
        return _of(round_to_nearest(weight, bits, group))
    factor = moments.factor
    assert factor is not None
    if method == "gptq":
        quantised = gptq_factored(weight, factor, bits, group)
    else:
        diagonal, iterations, seed = moments.diagonal, options.iterations, options.seed
        quantised = quantised_oats(weight, diagonal, bits, group, ratio, iterations, seed=seed, factor=factor)
    return _of(quantised, factor.damping, _raised(options, factor))


def _of(quantised: Quantised, damping: float = math.nan, fallback: str = "") -> Approximation:
    return Approximation(
        quantised.rounded(), quantised.left, quantised.right, damping, fallback, quantised.scale
    )


def _raised(options: PruningOptions, factor: HessianFactor) -> str:
    return f"damping raised to {factor.damping:g}" if factor.damping > options.damping else ""


def _counts(options: PruningOptions, pruned: PrunedMatrix) -> dict[str, Any]:
    """Sparsity reached, rank, nonzero entries, bits of one, and bytes: dense and as stored."""
    low_rank = [factor for factor in (pruned.left, pruned.right) if factor is not None]
    entries, size = pruned.sparse.numel(), pruned.sparse.element_size()
    nonzeros = int((pruned.sparse != 0).sum())
    inside = sum(factor.numel() for factor in low_rank)
    bits = options.bits
    if bits is None:
        numbers_of_rows = 0 if pruned.rows is None else pruned.rows.nbytes
        stored = nonzeros * size + -(-entries // 8) + numbers_of_rows
    else:
        outputs, inputs = pruned.sparse.shape
        stored = -(-quantised_bits((outputs, inputs), bits, options.group, pruned.sparse.dtype) // 8)
    return {
        "sparsity": 1 - (nonzeros + inside) / entries if bits is None else math.nan,
        "rank": low_rank[1].shape[0] if low_rank else 0,
        "nonzeros": nonzeros,
        "bits": bits or 8 * size,
        "dense_bytes": entries * size,
        "compact_bytes": stored + inside * size,
    }
