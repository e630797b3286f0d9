"""How a model is pruned: the settings, checked against its matrices, and one matrix pruned by them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from theodolite.errors import UsageError, WorkError
from theodolite.models.block_matrices import Matrix
from theodolite.models.factored import PrunedMatrix
from theodolite.prune.methods import (
    INPUTS_AT_ONCE,
    HessianFactor,
    count_left,
    factor_hessian,
    magnitude,
    sparsegpt_factored,
    wanda,
)
from theodolite.prune.moments import Moments
from theodolite.prune.oats import oats, rank_and_entries
from theodolite.prune.patterns import check_sparsity, pattern_of
from theodolite.prune.quantised import (
    GROUP,
    Quantised,
    gptq_factored,
    group_of,
    quantised_bits,
    quantised_oats,
    rank_at,
    round_to_nearest,
)
from theodolite.system.choices import WEIGH_NO_INPUTS, check_bits, check_method, check_number

Sparsity = float | Sequence[float] | Callable[[int, str], float | None] | None
"""One number for all blocks, one per block, or a function of block and name of the matrix; None: the pattern's."""

RankRatio = float | Callable[[int, str], float]
"""One number for all matrices, or a function of block and name of the matrix."""

NO_TOKENS = "no token of the text reached it: all inputs weighted equally"


@dataclass(frozen=True)
class PruningSettings:
    """How a model is pruned.

    Attributes:
        method: one of METHODS, or of QUANTISERS where there are `bits`.
        sparsity: of each (block, key of a matrix).
        pattern: as "2:4", or None.
        rank_ratio: of each (block, key of a matrix); used by OATS only, as are `iterations`, `seed` and `exact`.
        damping: used by SparseGPT and where weights are quantised, but not by plain rounding.
        bits: of quantised weights; None: weights are pruned.
        group: inputs per scale, 0 for all; used with `bits` only.
    """

    method: str
    sparsity: dict[tuple[int, str], float | None]
    pattern: str | None
    rank_ratio: dict[tuple[int, str], float]
    iterations: int
    seed: int
    damping: float
    exact: bool = False
    bits: int | None = None
    group: int = GROUP

    @classmethod
    def of(
        cls,
        method: str,
        sparsity: Sparsity,
        pattern: str | None,
        rank_ratio: RankRatio,
        iterations: int,
        seed: int,
        damping: float,
        matrices: Sequence[Sequence[Matrix]],
        *,
        exact: bool = False,
        bits: int | None = None,
        group: int = GROUP,
        by_recipe: Mapping[str, Mapping[tuple[int, str], float]] = MappingProxyType({}),
    ) -> PruningSettings:
        """The settings, checked; what a recipe says of a matrix (`Recipe.settings`) counts.

        Raises:
            UsageError: an unknown method, a number out of range, a sparsity too small to remove anything, or one
                beside `bits`.
        """
        if bits is not None:
            check_bits(bits)
            if sparsity is not None or pattern is not None:
                raise UsageError(
                    "bits say how weights are stored, not which: leave out --sparsity and --pattern"
                )
        check_method(method, bits)
        if exact and bits is not None:
            raise UsageError(
                "exact is the published iteration of OATS, which quantises nothing: leave it or --bits out"
            )
        if isinstance(sparsity, Sequence) and len(sparsity) != len(matrices):
            raise UsageError(
                f"{len(sparsity)} sparsities for {len(matrices)} blocks: give one, or one per block"
            )
        shares: dict[tuple[int, str], float | None] = {}
        ratios: dict[tuple[int, str], float] = {}
        told = {name: by_recipe.get(name, {}) for name in ("sparsity", "rank_ratio")}
        for matrix in (matrix for block in matrices for matrix in block):
            at = matrix.layer, matrix.key
            ratio = told["rank_ratio"].get(at, _ratio_at(rank_ratio, matrix))
            check_number(rank_ratio=ratio)
            if not 0 <= ratio <= 1:
                raise UsageError(
                    f"rank ratio {ratio:g} of {matrix.key} in block {matrix.layer} is not between 0 and 1"
                )
            ratios[at] = float(ratio)
            share = told["sparsity"].get(at, _share_at(sparsity, matrix))
            shares[at] = None if share is None else check_sparsity(share)
            pattern_of(pattern, matrix.shape[1])
            if bits is not None:
                group_of(group, matrix.shape[1])
        check_number(damping=damping)
        settings = cls(
            method,
            shares,
            pattern,
            ratios,
            int(iterations),  # of numpy's numbers, which JSON has none of
            int(seed),
            float(damping),
            exact,
            bits if bits is None else int(bits),
            group,
        )
        for share, ratio in {(shares[at], ratio) for at, ratio in ratios.items()}:
            settings._try(share, ratio)
        if bits is None and not any(settings._removes(matrix) for block in matrices for matrix in block):
            largest = max(share or 0 for share in shares.values())
            raise UsageError(f"a sparsity of {largest:g} removes no entry of any matrix: give a larger one")
        return settings

    @property
    def needs_full_moments(self) -> bool:
        """Whether the diagonal of the second moments is not enough."""
        return self.method in ("sparsegpt", "gptq") or (self.method == "oats" and self.bits is not None)

    @property
    def weighs_inputs(self) -> bool:
        """Whether what enters a matrix decides how it is pruned."""
        return self.method not in WEIGH_NO_INPUTS

    @property
    def moments_damping(self) -> float | None:
        """As `InputMoments` takes it: None where diagonals are enough."""
        return self.damping if self.needs_full_moments else None

    def fingerprint(self) -> dict[str, Any]:
        """The settings that the method reads, as plain values; one value where all blocks or matrices agree."""
        plain: dict[str, Any] = {
            "method": self.method,
            "sparsity": _plain(self.sparsity),
            "pattern": self.pattern,
        }
        if self.method == "oats":
            plain["rank_ratio"] = _plain(self.rank_ratio)
            plain |= {"iterations": self.iterations, "seed": self.seed} | (
                {"exact": True} if self.exact else {}
            )
        if self.bits is not None:
            plain |= {"bits": self.bits, "group": self.group}
        if self.needs_full_moments:
            plain["damping"] = self.damping
        return plain

    def prune(
        self, matrix: Matrix, moments: Moments, device: torch.device | None = None
    ) -> tuple[PrunedMatrix, dict[str, Any]]:
        """One matrix pruned, in its own dtype, and its row of the table.

        Args:
            matrix, moments: of its inputs.
            device: that of the moments, on which it is pruned; None: where it is.

        Raises:
            WorkError: nothing was seen to enter a matrix that every token should reach.
        """
        if not moments.count and not matrix.is_of_expert and self.weighs_inputs:
            blind = "magnitude" if self.bits is None else "round"
            raise WorkError(
                f"nothing was seen to enter {matrix.parameter} while its block read the text, so that {self.method} "
                f"cannot weigh its inputs: use --method {blind}, which weighs none"
            )
        weight = matrix.read().to(device)
        at = matrix.layer, matrix.key
        share, ratio = self.sparsity[at], self.rank_ratio[at]
        approximation = self._pruned(weight, moments, share, ratio)
        pruned = PrunedMatrix(
            key=matrix.key,
            parameter=matrix.parameter,
            expert=matrix.expert,
            dimension=matrix.dimension,
            rows=matrix.rows,
            # A negative zero would not outlive packing.
            sparse=torch.where(approximation.sparse == 0, 0, approximation.sparse),
            left=approximation.left,
            right=approximation.right,
            scale=approximation.scale,
        )
        precision = torch.promote_types(weight.dtype, torch.float32)
        lost = moments.squared_norms((weight.double() - pruned.merged().double()).to(precision))
        whole = moments.squared_norms(weight.to(precision))
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
            "method": self.method,
            "asked": math.nan if share is None else share,
            **self._counts(pruned),
            "error": exact,
            "error_scaled": scaled,
            "damping": approximation.damping,
            "tokens": moments.count,
            "fallback": approximation.fallback if moments.count or not self.weighs_inputs else NO_TOKENS,
        }

    def _pruned(
        self, weight: Tensor, moments: Moments, sparsity: float | None, ratio: float
    ) -> _Approximation:
        if self.bits is not None:
            return self._quantised(weight, moments, ratio)
        pattern = self.pattern
        if self.method == "magnitude":
            return _Approximation(magnitude(weight, sparsity, pattern))
        if self.method == "wanda":
            return _Approximation(wanda(weight, moments.diagonal.sqrt(), sparsity, pattern))
        if self.method == "sparsegpt":
            factor = moments.factor
            assert factor is not None
            pruned = sparsegpt_factored(weight, factor, sparsity, pattern)
            return _Approximation(pruned, damping=factor.damping, fallback=self._raised(factor))
        seed, exact = self.seed, self.exact
        split = oats(
            weight, moments.diagonal, sparsity, ratio, self.iterations, pattern, seed=seed, exact=exact
        )
        stalled = f"full SVD in {split.stalls} of {split.iterations} iterations" if split.stalls else ""
        if not split.left.numel():
            return _Approximation(split.sparse, fallback=stalled)
        return _Approximation(split.sparse, split.left, split.right, fallback=stalled)

    def _quantised(self, weight: Tensor, moments: Moments, ratio: float) -> _Approximation:
        assert self.bits is not None
        if self.method == "round":
            return _of(round_to_nearest(weight, self.bits, self.group))
        factor = moments.factor
        assert factor is not None
        if self.method == "gptq":
            quantised = gptq_factored(weight, factor, self.bits, self.group)
        else:
            quantised = quantised_oats(
                weight, moments.diagonal, self.bits, self.group, ratio, self.iterations, factor=factor
            )
        return _of(quantised, factor.damping, self._raised(factor))

    def _raised(self, factor: HessianFactor) -> str:
        return f"damping raised to {factor.damping:g}" if factor.damping > self.damping else ""

    def _counts(self, pruned: PrunedMatrix) -> dict[str, Any]:
        """Sparsity reached, rank, nonzero entries, bits of one, and bytes: dense and as stored."""
        low_rank = [factor for factor in (pruned.left, pruned.right) if factor is not None]
        entries, size = pruned.sparse.numel(), pruned.sparse.element_size()
        nonzeros = int((pruned.sparse != 0).sum())
        inside = sum(factor.numel() for factor in low_rank)
        if self.bits is None:
            stored = nonzeros * size + -(-entries // 8)
        else:
            outputs, inputs = pruned.sparse.shape
            stored = -(-quantised_bits((outputs, inputs), self.bits, self.group, pruned.sparse.dtype) // 8)
        return {
            "sparsity": 1 - (nonzeros + inside) / entries if self.bits is None else math.nan,
            "rank": low_rank[1].shape[0] if low_rank else 0,
            "nonzeros": nonzeros,
            "bits": self.bits or 8 * size,
            "dense_bytes": entries * size,
            "compact_bytes": stored + inside * size,
        }

    def rank_of(self, matrix: Matrix) -> int:
        """Of the low-rank part that a matrix gets."""
        share, ratio = self.sparsity[matrix.layer, matrix.key], self.rank_ratio[matrix.layer, matrix.key]
        if self.method != "oats":
            return 0
        if self.bits is not None:
            return rank_at(matrix.shape, self.bits, self.group, ratio, matrix.holder.dtype)
        return rank_and_entries(matrix.shape, share, ratio, self.pattern).rank

    def _removes(self, matrix: Matrix) -> bool:
        """Whether fewer entries are kept than there are among which the method chooses."""
        share, (outputs, inputs) = self.sparsity[matrix.layer, matrix.key], matrix.shape
        if self.pattern or share is None:
            return True
        among = {
            "magnitude": outputs * inputs,
            "wanda": inputs,
            "sparsegpt": outputs * min(inputs, INPUTS_AT_ONCE),
            "oats": outputs * inputs,
        }[self.method]
        return count_left(among, share) < among

    def _try(self, sparsity: float | None, ratio: float) -> None:
        """Prune a tiny matrix, so that incompatible settings are refused before the real work."""
        pattern = pattern_of(self.pattern, 0)
        inputs = pattern.of if pattern else self.group if self.bits and self.group else 1
        ones = torch.ones(inputs, dtype=torch.float64)
        factor = factor_hessian(ones.diag(), self.damping) if self.needs_full_moments else None
        self._pruned(torch.ones(1, inputs), Moments(1, ones, factor), sparsity, ratio)


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


@dataclass(frozen=True)
class _Approximation:
    """A pruned matrix as a method returns it."""

    sparse: Tensor
    left: Tensor | None = None
    right: Tensor | None = None
    damping: float = math.nan
    fallback: str = ""
    scale: Tensor | None = None


def _of(quantised: Quantised, damping: float = math.nan, fallback: str = "") -> _Approximation:
    return _Approximation(
        quantised.rounded(), quantised.left, quantised.right, damping, fallback, quantised.scale
    )
