"""The options of a pruning, each once: its default, and what it does not go with.

A command line has them before any library of models is imported. What only the model or the text can refuse is in
`prune/plan.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from theodolite.errors import UsageError
from theodolite.system.choices import (
    PACKED_BITS,
    WEIGH_NO_INPUTS,
    check_bits,
    check_form,
    check_method,
    check_number,
    check_whole,
    refuse_unread,
)
from theodolite.system.pruned_folders import ADAPTER, COMPRESSED, writes_adapter

RANK_RATIO, ITERATIONS = 0.25, 80
"""Of OATS: κ, share of the kept parameters in the low-rank part; alternations, as published."""

DAMPING = 0.1
"""Of SparseGPT, in mean diagonals of the Hessian (Zhang et al. 2025, appendix D; 0.01 in its released code)."""

GROUP = 128
"""Inputs that share a scale, of quantised weights."""

Sparsity = float | Sequence[float] | Callable[[int, str], float | None] | None
"""One number for all blocks, one per block, or a function of block and name of the matrix; None: the pattern's."""

RankRatio = float | Callable[[int, str], float]
"""One number for all matrices, or a function of block and name of the matrix."""


@dataclass(frozen=True)
class PruningOptions:
    """The options of `prune_model` that decide its result or its folder; they are explained there."""

    method: str
    sparsity: Sparsity = None
    sparsity_by: str | None = None
    pattern: str | None = None
    rank_ratio: RankRatio = RANK_RATIO
    iterations: int = ITERATIONS
    seed: int = 0
    damping: float = DAMPING
    exact: bool = False
    skip: Sequence[str] = ()
    recipe: str | Path | None = None
    bits: int | None = None
    group: int = GROUP
    recover: int | None = None
    out: str | Path | None = None
    form: str = "merged"
    batch: int | None = None
    devices: Sequence[str] = ()
    errors: bool = False

    @classmethod
    def among(cls, arguments: Mapping[str, Any]) -> PruningOptions:
        """Those of a function's arguments that are options."""
        return cls(**{option.name: arguments[option.name] for option in fields(cls)})

    def checked(self, *, streamed: bool, on_ray: bool) -> PruningOptions:
        """The same with Python's own numbers, since JSON has none of numpy's.

        Args:
            streamed: the blocks of the model are read from its files as they run.
            on_ray: workers of a Ray cluster run them.

        Raises:
            UsageError: an option is none of its kind, or does not go with another one.
        """
        bits = self.bits
        if bits is not None:
            check_bits(bits)
            given = {
                "--sparsity": self.sparsity,
                "--pattern": self.pattern,
                "--sparsity-by": self.sparsity_by,
            }
            refuse_unread("bits say how weights are stored, not which", given)
        check_method(self.method, bits)
        check_form(self.form)
        if on_ray:
            given = {"--recover": self.recover, "--sparsity-by": self.sparsity_by}
            refuse_unread("--ray: no worker has all of the text", given)
            if not self.reads_text:
                raise UsageError(
                    f"{self.method} reads no text that workers could share: leave out --ray, or give --errors"
                )
        if streamed and self.out is None:
            raise UsageError(
                "the blocks of a streamed model are read from its files and not kept: give out, a folder"
            )
        if streamed and self.recover is not None:
            raise UsageError("recover trains a model in memory: use open_model, or leave out --stream")
        self._check_form()
        if self.exact and bits is not None:
            raise UsageError(
                "exact is the published iteration of OATS, which quantises nothing: leave it or --bits out"
            )
        if isinstance(self.sparsity, str):
            raise UsageError("sparsity is a number, or one a block: give no text")
        names = self.skip
        if (
            isinstance(names, str)
            or not isinstance(names, Collection)
            or not all(isinstance(n, str) for n in names)
        ):
            raise UsageError(f"skip is {names!r}: give a list of names")
        check_whole(iterations=self.iterations, seed=self.seed, group=self.group)
        check_number(damping=self.damping)
        return replace(
            self,
            iterations=int(self.iterations),
            seed=int(self.seed),
            damping=float(self.damping),
            bits=None if bits is None else int(bits),
        )

    def _check_form(self) -> None:
        """Refuse a form that cannot hold what is left, and what is for another form."""
        if self.recover is not None:
            if isinstance(self.recover, bool) or not isinstance(self.recover, int) or self.recover < 1:
                raise UsageError(f"recover is {self.recover}: give a number of steps, 1 or more")
            if self.form != ADAPTER:
                raise UsageError(
                    f"--recover trains an adapter: give --format {ADAPTER} in place of {self.form}"
                )
            if self.out is None:
                raise UsageError("recover writes an adapter: give out, a folder")
        if self.form == "factored" and self.bits is not None:
            raise UsageError("quantised weights have no zeros to leave out: use --format merged")
        if self.form == COMPRESSED and self.bits not in PACKED_BITS:
            bits = " or ".join(map(str, PACKED_BITS))
            raise UsageError(f"--format compressed is for --bits {bits}: choose them, or --format merged")
        if writes_adapter(self.form, self.method):
            if self.method != "oats":
                raise UsageError(
                    f"{self.method} has no low-rank part that an adapter could hold: use oats, or --format merged"
                )
            if find_spec("peft") is None:
                raise UsageError("adapters are PEFT's: pip install peft, or choose another --format")

    @property
    def weighs_inputs(self) -> bool:
        """Whether what enters a matrix decides how it is pruned."""
        return self.method not in WEIGH_NO_INPUTS

    @property
    def reads_text(self) -> bool:
        """Whether blocks are run on the text."""
        return self.weighs_inputs or self.errors

    @property
    def needs_full_moments(self) -> bool:
        """Whether the diagonal of the second moments is not enough."""
        return self.method in ("sparsegpt", "gptq") or (self.method == "oats" and self.bits is not None)

    @property
    def moments_damping(self) -> float | None:
        """As `InputMoments` takes it: None where diagonals are enough."""
        return self.damping if self.needs_full_moments else None
