"""The options of a pruning, checked without importing anything heavy as far as that can be done without the model."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

from theodolite.errors import UsageError
from theodolite.system.checkpoint_folders import ADAPTER
from theodolite.system.choices import check_number, check_whole

METHODS = ("oats", "sparsegpt", "wanda", "magnitude")
FORMS = ("merged", "factored", ADAPTER)  # how a pruned checkpoint is written

RANK_RATIO = 0.25  # of OATS κ, the share of the kept parameters in the low-rank part, as published
ITERATIONS = 80  # of OATS, as published
DAMPING = 0.1  # of SparseGPT, in mean diagonals of the Hessian (Zhang et al. 2025, appendix D; its own code has 0.01)
MOST_DAMPING = 1e12  # a matrix that needs more is far from positive semidefinite
TOKENS_A_BATCH = 1024  # default batch: what a block computes of so many tokens stays in a processor's cache

# Options that not every method reads, and which do.
OF_METHOD = {"rank_ratio": ("oats",), "exact": ("oats", "sparsegpt", "wanda"), "damping": ("sparsegpt",)}

Sparsity = float | Sequence[float] | Callable[[int, str], float | None] | None
"""One number for all blocks, one per block, or a function of block and name of the matrix; None: the pattern's."""

RankRatio = float | Callable[[int, str], float]
"""One number for all matrices, or a function of block and name of the matrix."""


@dataclass(frozen=True)
class PruningOptions:
    """The options of `prune_model` that decide its result or its folder, in its order; they are explained there."""

    method: str
    sparsity: Sparsity = None
    pattern: str | None = None
    rank_ratio: RankRatio = RANK_RATIO
    iterations: int = ITERATIONS
    seed: int = 0
    damping: float = DAMPING
    exact: bool = False
    skip: Sequence[str] = ()
    out: str | Path | None = None
    form: str = "merged"
    batch: int | None = None

    def checked(self, *, streamed: bool) -> PruningOptions:
        """Check each option and how they go together, with Python's own numbers, for JSON; or `UsageError`."""
        if self.method not in METHODS:
            raise UsageError(f"unknown method {self.method}: use {', '.join(METHODS)}")
        for name, methods in OF_METHOD.items():
            if self.method not in methods and getattr(self, name) != getattr(PruningOptions, name):
                raise UsageError(f"{self.method} has no such option: leave out --{name.replace('_', '-')}")
        if self.form not in FORMS:
            raise UsageError(f"unknown format {self.form}: use one of {', '.join(FORMS)}")
        if streamed and self.out is None:
            raise UsageError("a streamed model is read from its files and not kept: give out, a folder")
        if self.form == ADAPTER:
            if self.method != "oats":
                raise UsageError(f"{self.method} has no low-rank part that an adapter could hold: use oats")
            if find_spec("peft") is None:
                raise UsageError("adapters are PEFT's: pip install peft, or choose another --format")
        shares = self.sparsity if isinstance(self.sparsity, Sequence) else [self.sparsity]
        for share in shares:
            if share is not None and not callable(share):
                check_sparsity(share)
        if not callable(self.rank_ratio):
            check_ratio(self.rank_ratio)
        check_whole(iterations=self.iterations, seed=self.seed)
        check_number(damping=self.damping)
        check_damping(self.damping)
        if self.iterations < 1:
            raise UsageError(f"iterations is {self.iterations}: give a number from 1 on")
        if isinstance(self.skip, str):
            raise UsageError(f"skip is a list of patterns: give [{self.skip!r}]")
        return replace(
            self, iterations=int(self.iterations), seed=int(self.seed), damping=float(self.damping)
        )

    def shares(self, layer: int, name: str) -> tuple[float | None, float]:
        """Return the sparsity and the rank ratio of a matrix; `UsageError` where a function gives another number."""
        sparsity, rank_ratio = self.sparsity, self.rank_ratio
        ratio = check_ratio(rank_ratio(layer, name) if callable(rank_ratio) else rank_ratio)
        share = sparsity(layer, name) if callable(sparsity) else sparsity
        share = share[layer] if isinstance(share, Sequence) else share
        return None if share is None else check_sparsity(share), ratio

    @property
    def reads_text(self) -> bool:
        """True if what enters a matrix decides how it is pruned, so that blocks are run on the text."""
        return self.method != "magnitude"

    @property
    def moments_damping(self) -> float | None:
        """The damping of full second moments; None where their diagonals are enough."""
        return self.damping if self.method == "sparsegpt" else None


def check_damping(damping: float) -> None:
    """Raise `UsageError` where a damping is negative, NaN, or larger than any that could help."""
    if not 0 <= damping < MOST_DAMPING:
        raise UsageError(f"damping is {damping}: give a number from 0 on")


def check_sparsity(sparsity: object) -> float:
    """Check a share of entries to remove; `UsageError` where it is no number in (0, 1)."""
    if sparsity is None:
        raise UsageError("no sparsity is given: pass the share to remove, or a pattern such as 2:4")
    if not isinstance(sparsity, numbers.Real) or not 0 < float(sparsity) < 1:
        raise UsageError(f"sparsity is {sparsity!r}: give the share to remove, between 0 and 1, excluded")
    return float(sparsity)


def check_ratio(ratio: object) -> float:
    """Check the share of the kept parameters in a low-rank part; `UsageError` where it is no number in [0, 1]."""
    if not isinstance(ratio, numbers.Real) or not 0 <= float(ratio) <= 1:
        raise UsageError(f"rank_ratio is {ratio!r}: give the share of the low-rank part, from 0 to 1")
    return float(ratio)
