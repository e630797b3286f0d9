"""What is asked of a pruning, checked against the model and the text before anything is pruned.

It gives what is to be done: the matrices, the settings of each, the text that calibrates, and the fingerprint of the
result. How blocks are run is not known here.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from theodolite.corpus.corpus import Corpus
from theodolite.errors import UsageError
from theodolite.models import OpenModel
from theodolite.models.block_matrices import Matrix, block_matrices
from theodolite.passes.corpus_pass import batch_of, check_fit, fingerprint_of
from theodolite.prune.adapter import refuse_form, writes_adapter
from theodolite.prune.by_block import DenseReading, check_sparsity_by
from theodolite.prune.compressed import refuse_unpackable
from theodolite.prune.devices import usable_devices
from theodolite.prune.methods import DAMPING
from theodolite.prune.names import Names
from theodolite.prune.oats import ITERATIONS, RANK_RATIO
from theodolite.prune.quantised import GROUP
from theodolite.prune.recipe import Recipe
from theodolite.prune.recover import Recovery
from theodolite.prune.settings import PruningSettings, RankRatio, Sparsity
from theodolite.prune.skipped import Matrices, without_skipped
from theodolite.system.choices import check_form, check_whole
from theodolite.system.progress import ShowProgress
from theodolite.system.pruned_folders import ADAPTER, COMPRESSED, SETTINGS, refuse_inside

PRUNED_SHARE = 0.3
"""Share of exact zeros in its matrices above which a model counts as already pruned."""


@dataclass(frozen=True)
class Asked:
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


@dataclass(frozen=True)
class Plan:
    """What is to be done.

    Attributes:
        model: it will be pruned.
        corpus: the whole text.
        asked: what was asked, with what a recipe skips.
        matrices: those that are pruned, of every block.
        settings: of each of them.
        recovery: what follows the pruning, if anything does.
        devices: on which matrices are pruned; none: each where it is.
        fingerprint: everything that decides the result.
    """

    model: OpenModel
    corpus: Corpus
    asked: Asked
    matrices: Matrices
    settings: PruningSettings
    recovery: Recovery | None
    devices: Sequence[torch.device]
    fingerprint: dict[str, Any]

    @property
    def batch(self) -> int:
        """Contexts per forward pass."""
        return batch_of(self.corpus, self.asked.batch)

    @property
    def calibration(self) -> Corpus:
        """The text on which blocks are run."""
        return self.recovery.read if self.recovery else self.corpus

    @property
    def reads(self) -> bool:
        """Whether blocks are run on the text."""
        return self.settings.weighs_inputs or self.asked.errors

    def read_on(self, device: str) -> Plan:
        """The same, where blocks are run on this kind of device; that on which matrices are pruned may be another."""
        pruned_on = self.devices[0].type if self.devices else self.model.device.type
        pruning = {name: value for name, value in self.fingerprint["pruning"].items() if name != "pruned_on"}
        pruning |= {"pruned_on": pruned_on} if pruned_on != device else {}
        return replace(self, fingerprint=self.fingerprint | {"device": device, "pruning": pruning})


def planned(model: OpenModel, corpus: Corpus, asked: Asked, show_progress: ShowProgress) -> Plan:
    """The plan of what is asked.

    Args:
        model: dense; for a sparsity by outliers it reads the text.
        show_progress: as for `prune_model`, while that is done.

    Raises:
        UsageError: as `prune_model`.
    """
    check_fit(model, corpus, least_contexts=1)
    if corpus.images is not None:
        raise UsageError(f"{model.id} reads images: only models of text are pruned")
    check_form(asked.form)
    devices = usable_devices(asked.devices)
    _refuse_streamed(model, asked)
    recovery = _recovery(model, corpus, asked)
    if isinstance(asked.sparsity, str):
        raise UsageError("sparsity is a number, or one a block: give no text")
    skip = asked.skip
    if isinstance(skip, str) or not isinstance(skip, Collection) or not all(isinstance(s, str) for s in skip):
        raise UsageError(f"skip is {skip!r}: give a list of names")
    if asked.sparsity_by is not None and asked.bits is not None:
        raise UsageError("bits say how weights are stored, not which: leave out --sparsity-by")
    if asked.out is not None:
        refuse_inside(Path(asked.out), model.id)
    refuse_form(asked.form, asked.method, asked.bits)
    of_file = None if asked.recipe is None else Recipe.read(asked.recipe)
    given_by = dict.fromkeys(of_file.skip, f"{of_file.path}: skip") if of_file else {}
    given_by |= dict.fromkeys(skip, "--skip")
    asked = replace(asked, skip=tuple(given_by))
    as_a_whole = asked.form in ("factored", COMPRESSED)
    by_layer = f"--format {asked.form}" if as_a_whole else "--recover" if recovery else None
    matrices = without_skipped(model, _dense_matrices(model), given_by, by_layer)
    if asked.form == COMPRESSED:
        refuse_unpackable(asked.bits, matrices)
    check_whole(iterations=asked.iterations, seed=asked.seed, group=asked.group)
    if of_file and of_file.rank_ratio and asked.method != "oats":
        raise UsageError(f"{of_file.path}: {asked.method} has no low-rank part: leave rank_ratio out")
    calibration = recovery.read if recovery else corpus
    batch = batch_of(corpus, asked.batch)
    settings = _settings(model, calibration, batch, asked, of_file, matrices, show_progress)
    beside_experts = [matrix for block in matrices for matrix in block if matrix.expert is None]
    if writes_adapter(asked.form, asked.method) and not any(map(settings.rank_of, beside_experts)):
        raise UsageError(
            "every matrix gets rank 0, which leaves no low-rank part that an adapter could hold: choose a larger rank "
            "ratio, or another --format"
        )
    _refuse_short(calibration, matrices, settings)
    fingerprint = {
        **fingerprint_of(model),
        "corpus": corpus.sha256,
        "batch": batch,
        "pruning": settings.fingerprint()
        | ({"skip": sorted(set(asked.skip))} if asked.skip else {})
        | ({"recover": asked.recover} if asked.recover else {})
        | ({"sparsity_by": asked.sparsity_by} if asked.sparsity_by else {})
        | ({"errors": True} if asked.errors and not settings.weighs_inputs else {}),
    }
    plan = Plan(model, corpus, asked, matrices, settings, recovery, devices, fingerprint)
    return plan.read_on(model.device.type)


def _refuse_streamed(model: OpenModel, asked: Asked) -> None:
    """Refuse what a model whose blocks are read as they run has no place for."""
    if model.streamed is None:
        return
    if asked.out is None:
        raise UsageError(f"the blocks of {model.id} are read from its files and not kept: give out, a folder")
    if asked.recover is not None:
        raise UsageError("recover trains a model in memory: use open_model")


def _recovery(model: OpenModel, corpus: Corpus, asked: Asked) -> Recovery | None:
    """How low-rank parts are trained afterwards, checked."""
    if asked.recover is None:
        return None
    recovery = Recovery(corpus, asked.recover, batch_of(corpus, asked.batch), asked.seed)
    if asked.form != ADAPTER:
        raise UsageError(f"--recover trains an adapter: give --format {ADAPTER} in place of {asked.form}")
    if asked.out is None:
        raise UsageError("recover writes an adapter: give out, a folder")
    recovery.check(model)
    return recovery


def _settings(
    model: OpenModel,
    calibration: Corpus,
    batch: int,
    asked: Asked,
    of_file: Recipe | None,
    matrices: Matrices,
    show_progress: ShowProgress,
) -> PruningSettings:
    """The settings of each matrix, by what was asked, by outliers and by a recipe."""
    sparsity = asked.sparsity
    if asked.sparsity_by is not None:
        mean, total = check_sparsity_by(asked.sparsity_by, sparsity, asked.pattern), sum(map(len, matrices))
        beside = None if asked.out is None else Path(asked.out).parent  # OUT.partial is not claimed yet
        reading = DenseReading(model, calibration, matrices, batch, beside, lambda: show_progress(0, total))
        sparsity = reading.sparsities(asked.sparsity_by, mean)
    return PruningSettings.of(
        asked.method,
        sparsity,
        asked.pattern,
        asked.rank_ratio,
        asked.iterations,
        asked.seed,
        asked.damping,
        matrices,
        exact=asked.exact,
        bits=asked.bits,
        group=asked.group,
        by_recipe=of_file.settings(Names(model), matrices) if of_file else {},
    )


def _dense_matrices(model: OpenModel) -> Matrices:
    """The matrices of a model that was not pruned yet."""
    if model.interventions:
        raise UsageError(
            f"the opened model was modified ({model.interventions[-1]}): open it anew to prune it"
        )
    if (Path(model.id).expanduser() / SETTINGS).is_file():
        raise UsageError(
            f"{model.id} is pruned already ({SETTINGS} is next to its weights): give the dense model"
        )
    entries = zeros = 0

    def count(matrices: list[Matrix]) -> None:
        nonlocal entries, zeros
        for holder in {matrix.holder.data_ptr(): matrix.holder for matrix in matrices}.values():
            entries += holder.numel()
            zeros += holder.numel() - int(holder.count_nonzero())

    matrices = block_matrices(model, count)
    if not entries:
        raise UsageError(f"{model.source.name} has no linear layers in its blocks that could be pruned")
    share = zeros / entries
    if share > PRUNED_SHARE:
        raise UsageError(
            f"{share:.0%} of the weights of {model.id} are 0, as if it had been pruned: give the dense model"
        )
    return matrices


def _refuse_short(corpus: Corpus, matrices: Matrices, settings: PruningSettings) -> None:
    tokens = len(corpus.tokens)
    widest = max(matrix.shape[1] for block in matrices for matrix in block)
    if settings.needs_full_moments and tokens < widest:
        raise UsageError(
            f"{tokens} tokens do not calibrate {'SparseGPT' if settings.bits is None else 'GPTQ'} for matrices of "
            f"{widest} inputs: give more text, or more --contexts"
        )
