"""Choose the matrices that are pruned and the settings of each, and prune one.

The formulas are in the modules of the methods.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from theodolite.errors import UsageError, WorkError
from theodolite.models import OpenModel
from theodolite.models.stored.factored import PrunedMatrix
from theodolite.models.weights.block_matrices import Matrix
from theodolite.prune.methods import (
    INPUTS_AT_ONCE,
    ROWS,
    HessianFactor,
    count_left,
    factor_hessian,
    magnitude,
    sparsegpt_factored,
    wanda,
)
from theodolite.prune.moments import Moments
from theodolite.prune.options import PruningOptions, RankRatio, Sparsity
from theodolite.prune.patterns import check_sparsity, pattern_of, precision_of
from theodolite.prune.sparse_low_rank import oats, rank_and_entries
from theodolite.system.checkpoint_folders import ADAPTER
from theodolite.system.choices import check_number

Matrices = list[list[Matrix]]
"""Of every block."""

NO_TOKENS = "no token of the text reached it: all inputs weighted equally"


def without_skipped(model: OpenModel, matrices: Matrices, options: PruningOptions) -> Matrices:
    """Leave out the matrices that `options.skip` names.

    A glob of `options.skip` is of a matrix, or of a module that it is in, by its name in the block ("mlp.down_proj",
    "q", "mlp"), that behind the block's number ("0.q"), or that in the model ("model.layers.0").

    Raises:
        UsageError: a glob is of nothing, nothing is left to prune, or a factored layer would be in part dense.
    """
    name_of = {module: name for name, module in model.root.named_modules()}
    blocks = [name_of[block] for block in model.structure.blocks]
    inside = tuple(f"{block}." for block in blocks)
    outside = [name for name in name_of.values() if not f"{name}.".startswith(inside)]
    names = {id(matrix): _names(matrix, blocks[matrix.layer]) for matrix in chain(*matrices)}
    skipped: set[int] = set()
    for glob in options.skip:
        fitting = {at for at, each in names.items() if any(fnmatchcase(name, glob) for name in each)}
        if not fitting and not any(fnmatchcase(name, glob) for name in outside):
            known = ", ".join(matrix.key for matrix in next(filter(None, matrices)))
            raise UsageError(
                f"--skip {glob}: no matrix of {model.id} is called so, and none is in a module of that name; "
                f"those of a block are {known}"
            )
        skipped |= fitting
    left = [[matrix for matrix in block if id(matrix) not in skipped] for block in matrices]
    if not any(left):
        raise UsageError(f"--skip {','.join(options.skip)}: nothing is left to prune")
    if options.form == "factored":
        pruned = {matrix.parameter for matrix in chain(*left)}
        for matrix in chain(*matrices):
            if matrix.parameter in pruned and id(matrix) in skipped:
                raise UsageError(
                    f"{matrix.key} of block {matrix.layer} is a part of {matrix.parameter}, which --format factored "
                    "keeps as a whole: skip all of its parts, or none"
                )
    return left


def _names(matrix: Matrix, block: str) -> list[str]:
    """List the names of a matrix, and of the modules that it is in."""
    module = matrix.parameter.removesuffix(".weight")
    inner = module.removeprefix(f"{block}.")
    whole = (matrix.key, f"{matrix.layer}.{matrix.key}", module, inner)
    above = [
        ".".join(parts[:end]) for parts in (name.split(".") for name in whole) for end in range(1, len(parts))
    ]
    return [*whole, matrix.name, f"{matrix.layer}.{matrix.name}", matrix.parameter, *above]


@dataclass(frozen=True)
class PruningSettings:
    """How the matrices of a model are pruned.

    Attributes:
        options: as they were given.
        sparsity, rank_ratio: of each (block, key of a matrix).
    """

    options: PruningOptions
    sparsity: dict[tuple[int, str], float | None]
    rank_ratio: dict[tuple[int, str], float]

    @classmethod
    def of(cls, options: PruningOptions, matrices: Matrices) -> PruningSettings:
        """Find the settings of each matrix by checked options.

        Raises:
            UsageError: a number out of range, a sparsity too small to remove anything, or an adapter of nothing.
        """
        sparsity = options.sparsity
        if isinstance(sparsity, Sequence) and len(sparsity) != len(matrices):
            raise UsageError(
                f"{len(sparsity)} sparsities for {len(matrices)} blocks: give one, or one per block"
            )
        every = list(chain(*matrices))
        shares: dict[tuple[int, str], float | None] = {}
        ratios: dict[tuple[int, str], float] = {}
        for matrix in every:
            at = matrix.layer, matrix.key
            ratio = _ratio_at(options.rank_ratio, matrix)
            check_number(rank_ratio=ratio)
            if not 0 <= ratio <= 1:
                raise UsageError(
                    f"rank ratio {ratio:g} of {matrix.key} in block {matrix.layer} is not between 0 and 1"
                )
            ratios[at] = float(ratio)
            share = _share_at(sparsity, matrix)
            shares[at] = None if share is None else check_sparsity(share)
            pattern_of(options.pattern, matrix.shape[1])
        settings = cls(options, shares, ratios)
        for share, ratio in {(shares[at], ratio) for at, ratio in ratios.items()}:
            settings._try(share, ratio)
        if not any(map(settings._removes, every)):
            largest = max(share or 0 for share in shares.values())
            raise UsageError(f"a sparsity of {largest:g} removes no entry of any matrix: give a larger one")
        if options.form == ADAPTER and not any(
            settings._rank_of(matrix) for matrix in every if matrix.expert is None
        ):
            raise UsageError(
                "every matrix gets rank 0, which leaves no low-rank part that an adapter could hold: choose a larger "
                "rank ratio, or another --format"
            )
        return settings

    def fingerprint(self) -> dict[str, Any]:
        """Describe what decides the result, as plain values; one value where all blocks or matrices agree."""
        options = self.options
        plain: dict[str, Any] = {
            "method": options.method,
            "sparsity": _plain(self.sparsity),
            "pattern": options.pattern,
        }
        if options.method == "oats":
            plain["rank_ratio"] = _plain(self.rank_ratio)
            plain |= {"iterations": options.iterations, "seed": options.seed}
            plain |= {"exact": True} if options.exact else {}
        if options.moments_damping is not None:
            plain["damping"] = options.damping
        plain |= {"skip": sorted(set(options.skip))} if options.skip else {}
        plain |= {"errors": True} if options.errors and not options.weighs_inputs else {}
        return plain

    def prune(self, matrix: Matrix, moments: Moments) -> tuple[PrunedMatrix, dict[str, Any]]:
        """Prune one matrix of a block in memory, in its own dtype; it and its row of the table, or `WorkError`."""
        options = self.options
        if not moments.count and not matrix.is_of_expert and options.weighs_inputs:
            raise WorkError(
                f"nothing was seen to enter {matrix.parameter} while its block read the text, so that {options.method} "
                "cannot weigh its inputs: use --method magnitude, which weighs none"
            )
        share, ratio = self.sparsity[matrix.layer, matrix.key], self.rank_ratio[matrix.layer, matrix.key]
        weight = matrix.read()
        approximation = _approximated(options, weight, moments, share, ratio)
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
            "asked": math.nan if share is None else share,
            **_counts(pruned),
            "error": exact,
            "error_scaled": scaled,
            "damping": approximation.damping,
            "tokens": moments.count,
            "fallback": approximation.fallback if moments.count or not options.weighs_inputs else NO_TOKENS,
        }

    def _rank_of(self, matrix: Matrix) -> int:
        """The rank of the low-rank part that OATS gives a matrix."""
        at = matrix.layer, matrix.key
        return rank_and_entries(
            matrix.shape, self.sparsity[at], self.rank_ratio[at], self.options.pattern
        ).rank

    def _removes(self, matrix: Matrix) -> bool:
        """Whether the sparsity removes any entry of a matrix."""
        share, (outputs, inputs) = self.sparsity[matrix.layer, matrix.key], matrix.shape
        if self.options.pattern or share is None:
            return True
        among = {
            "magnitude": outputs * inputs,
            "wanda": inputs,
            "sparsegpt": outputs * min(inputs, INPUTS_AT_ONCE),
            "oats": outputs * inputs,
        }[self.options.method]
        return count_left(among, share) < among

    def _try(self, sparsity: float | None, ratio: float) -> None:
        """Prune a tiny matrix, so that incompatible settings are refused before the real work."""
        pattern = pattern_of(self.options.pattern, 0)
        ones = torch.ones(pattern.of if pattern else 1, dtype=torch.float64)
        damping = self.options.moments_damping
        factor = None if damping is None else factor_hessian(ones.diag(), damping)
        _approximated(self.options, torch.ones(1, len(ones)), Moments(1, ones, factor), sparsity, ratio)


def _share_at(sparsity: Sparsity, matrix: Matrix) -> float | None:
    if callable(sparsity):
        return sparsity(matrix.layer, matrix.name)
    return sparsity[matrix.layer] if isinstance(sparsity, Sequence) else sparsity


def _ratio_at(rank_ratio: RankRatio, matrix: Matrix) -> float:
    return rank_ratio(matrix.layer, matrix.name) if callable(rank_ratio) else rank_ratio


def _plain(values: Mapping[tuple[int, str], float | None]) -> Any:
    """Write one value where all matrices agree, one a block where those of each block do, else all by name."""
    by_block: dict[int, set[float | None]] = {}
    for (layer, _), value in values.items():
        by_block.setdefault(layer, set()).add(value)
    if len(set(values.values())) == 1:
        return next(iter(values.values()))
    if list(by_block) == list(range(len(by_block))) and all(len(found) == 1 for found in by_block.values()):
        return [found.pop() for found in by_block.values()]
    return {f"{layer}/{key}": value for (layer, key), value in values.items()}


@dataclass(frozen=True)
class _Approximation:
    """A pruned matrix as a method returns it."""

    sparse: Tensor
    left: Tensor | None = None
    right: Tensor | None = None
    damping: float = math.nan
    fallback: str = ""


def _approximated(
    options: PruningOptions, weight: Tensor, moments: Moments, sparsity: float | None, ratio: float
) -> _Approximation:
    """Prune a weight by the method of the options."""
    pattern = options.pattern
    if options.method == "magnitude":
        return _Approximation(magnitude(weight, sparsity, pattern))
    if options.method == "wanda":
        return _Approximation(wanda(weight, moments.diagonal.sqrt(), sparsity, pattern))
    if options.method == "sparsegpt":
        factor = moments.factor
        assert isinstance(factor, HessianFactor)
        raised = f"damping raised to {factor.damping:g}" if factor.damping > options.damping else ""
        pruned = sparsegpt_factored(weight, factor, sparsity, pattern)
        return _Approximation(pruned, damping=factor.damping, fallback=raised)
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
        return _Approximation(split.sparse, fallback=stalled)
    return _Approximation(split.sparse, split.left, split.right, fallback=stalled)


def _less(weight: Tensor, other: Tensor) -> Tensor:
    """Subtract in float64, some rows at a time."""
    difference = torch.empty_like(weight, dtype=precision_of(weight))
    for rows, ours, theirs in zip(*(each.split(ROWS) for each in (difference, weight, other)), strict=True):
        rows.copy_(ours.double() - theirs.double())
    return difference


def _counts(pruned: PrunedMatrix) -> dict[str, Any]:
    """Count what is left: sparsity reached, rank, nonzero entries, and bytes, dense and as stored."""
    low_rank = [factor for factor in (pruned.left, pruned.right) if factor is not None]
    entries, size = pruned.sparse.numel(), pruned.sparse.element_size()
    nonzeros = int((pruned.sparse != 0).sum())
    inside = sum(factor.numel() for factor in low_rank)
    numbers_of_rows = 0 if pruned.rows is None else pruned.rows.nbytes
    return {
        "sparsity": 1 - (nonzeros + inside) / entries,
        "rank": low_rank[1].shape[0] if low_rank else 0,
        "nonzeros": nonzeros,
        "dense_bytes": entries * size,
        "compact_bytes": (nonzeros + inside) * size + -(-entries // 8) + numbers_of_rows,
    }
