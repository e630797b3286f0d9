"""How the matrices of a model are pruned: the options, checked against them, and what differs from one to another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from theodolite.errors import UsageError
from theodolite.models.block_matrices import Matrix
from theodolite.models.factored import PrunedMatrix
from theodolite.prune.methods import INPUTS_AT_ONCE, count_left, factor_hessian
from theodolite.prune.moments import Moments
from theodolite.prune.oats import rank_and_entries
from theodolite.prune.one_matrix import approximated, pruned_matrix
from theodolite.prune.patterns import check_sparsity, pattern_of
from theodolite.prune.quantised import group_of, rank_at
from theodolite.system.choices import check_number
from theodolite.system.pruned_folders import writes_adapter
from theodolite.system.pruning_options import PruningOptions, RankRatio, Sparsity


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
    def of(
        cls,
        options: PruningOptions,
        matrices: Sequence[Sequence[Matrix]],
        by_recipe: Mapping[str, Mapping[tuple[int, str], float]],
    ) -> PruningSettings:
        """The settings of some matrices by checked options; what a recipe says of one (`Recipe.settings`) counts.

        Raises:
            UsageError: a number out of range, a sparsity too small to remove anything, or an adapter of nothing.
        """
        sparsity, pattern = options.sparsity, options.pattern
        if isinstance(sparsity, Sequence) and len(sparsity) != len(matrices):
            raise UsageError(
                f"{len(sparsity)} sparsities for {len(matrices)} blocks: give one, or one per block"
            )
        every = list(chain(*matrices))
        shares: dict[tuple[int, str], float | None] = {}
        ratios: dict[tuple[int, str], float] = {}
        told = {name: by_recipe.get(name, {}) for name in ("sparsity", "rank_ratio")}
        for matrix in every:
            at = matrix.layer, matrix.key
            ratio = told["rank_ratio"].get(at, _ratio_at(options.rank_ratio, matrix))
            check_number(rank_ratio=ratio)
            if not 0 <= ratio <= 1:
                raise UsageError(
                    f"rank ratio {ratio:g} of {matrix.key} in block {matrix.layer} is not between 0 and 1"
                )
            ratios[at] = float(ratio)
            share = told["sparsity"].get(at, _share_at(sparsity, matrix))
            shares[at] = None if share is None else check_sparsity(share)
            pattern_of(pattern, matrix.shape[1])
            if options.bits is not None:
                group_of(options.group, matrix.shape[1])
        settings = cls(options, shares, ratios)
        for share, ratio in {(shares[at], ratio) for at, ratio in ratios.items()}:
            settings._try(share, ratio)
        if options.bits is None and not any(map(settings._removes, every)):
            largest = max(share or 0 for share in shares.values())
            raise UsageError(f"a sparsity of {largest:g} removes no entry of any matrix: give a larger one")
        beside_experts = (matrix for matrix in every if matrix.expert is None)
        if writes_adapter(options.form, options.method) and not any(map(settings.rank_of, beside_experts)):
            raise UsageError(
                "every matrix gets rank 0, which leaves no low-rank part that an adapter could hold: choose a larger "
                "rank ratio, or another --format"
            )
        return settings

    def fingerprint(self) -> dict[str, Any]:
        """What decides the result, as plain values; one value where all blocks or matrices agree."""
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
        if options.bits is not None:
            plain |= {"bits": options.bits, "group": options.group}
        if options.needs_full_moments:
            plain["damping"] = options.damping
        plain |= {"skip": sorted(set(options.skip))} if options.skip else {}
        plain |= {"recover": options.recover} if options.recover else {}
        plain |= {"sparsity_by": options.sparsity_by} if options.sparsity_by else {}
        plain |= {"errors": True} if options.errors and not options.weighs_inputs else {}
        return plain

    def prune(
        self, matrix: Matrix, moments: Moments, device: torch.device | None = None
    ) -> tuple[PrunedMatrix, dict[str, Any]]:
        """As `pruned_matrix`, by the sparsity and the rank ratio of this matrix."""
        at = matrix.layer, matrix.key
        return pruned_matrix(self.options, matrix, moments, self.sparsity[at], self.rank_ratio[at], device)

    def rank_of(self, matrix: Matrix) -> int:
        """Of the low-rank part that a matrix gets."""
        share, ratio = self.sparsity[matrix.layer, matrix.key], self.rank_ratio[matrix.layer, matrix.key]
        options = self.options
        if options.method != "oats":
            return 0
        if options.bits is not None:
            return rank_at(matrix.shape, options.bits, options.group, ratio, matrix.holder.dtype)
        return rank_and_entries(matrix.shape, share, ratio, options.pattern).rank

    def _removes(self, matrix: Matrix) -> bool:
        """Whether fewer entries are kept than there are among which the method chooses."""
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
        options = self.options
        pattern = pattern_of(options.pattern, 0)
        inputs = pattern.of if pattern else options.group if options.bits and options.group else 1
        ones = torch.ones(inputs, dtype=torch.float64)
        damping = options.moments_damping
        factor = None if damping is None else factor_hessian(ones.diag(), damping)
        approximated(options, torch.ones(1, inputs), Moments(1, ones, factor), sparsity, ratio)


def _share_at(sparsity: Sparsity, matrix: Matrix) -> float | None:
    if callable(sparsity):
        return sparsity(matrix.layer, matrix.name)
    return sparsity[matrix.layer] if isinstance(sparsity, Sequence) else sparsity


def _ratio_at(rank_ratio: RankRatio, matrix: Matrix) -> float:
    return rank_ratio(matrix.layer, matrix.name) if callable(rank_ratio) else rank_ratio


def _plain(values: Mapping[tuple[int, str], float | None]) -> Any:
    """One value where all matrices agree, one a block where those of each block do, else all of them by name."""
    by_block: dict[int, set[float | None]] = {}
    for (layer, _), value in values.items():
        by_block.setdefault(layer, set()).add(value)
    if len(set(values.values())) == 1:
        return next(iter(values.values()))
    if list(by_block) == list(range(len(by_block))) and all(len(found) == 1 for found in by_block.values()):
        return [found.pop() for found in by_block.values()]
    return {f"{layer}/{key}": value for (layer, key), value in values.items()}
