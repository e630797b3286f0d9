"""What is asked of a pruning, checked against the model and the text before anything is pruned.

It gives what is to be done: the matrices, the settings of each, the text that calibrates, and the fingerprint of the
result. How blocks are run is not known here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from theodolite.corpus.corpus import Corpus
from theodolite.errors import UsageError
from theodolite.models import OpenModel
from theodolite.models.block_matrices import Matrix, block_matrices
from theodolite.passes.corpus_pass import batch_of, check_fit, fingerprint_of
from theodolite.prune.by_block import check_sparsity_by
from theodolite.prune.compressed import refuse_unpackable
from theodolite.prune.devices import usable_devices
from theodolite.prune.names import Names
from theodolite.prune.recipe import Recipe
from theodolite.prune.recover import Recovery
from theodolite.prune.settings import PruningSettings
from theodolite.prune.skipped import Matrices, without_skipped
from theodolite.system.pruned_folders import COMPRESSED, SETTINGS, refuse_inside
from theodolite.system.pruning_options import PruningOptions

PRUNED_SHARE = 0.3
"""Share of exact zeros in its matrices above which a model counts as already pruned."""


@dataclass(frozen=True)
class Plan:
    """What is to be done.

    Attributes:
        model: it will be pruned.
        corpus: the whole text.
        options: as they were given, and what a recipe skips.
        matrices: those that are pruned, of every block.
        by_recipe: what a recipe says of single ones (`Recipe.settings`).
        settings: of each of them; sparsities that the text decides are the mean, until `with_sparsities`.
        recovery: what follows the pruning, if anything does.
        devices: on which matrices are pruned; none: each where it is.
        fingerprint: everything that decides the result.
    """

    model: OpenModel
    corpus: Corpus
    options: PruningOptions
    matrices: Matrices
    by_recipe: Mapping[str, Mapping[tuple[int, str], float]]
    settings: PruningSettings
    recovery: Recovery | None
    devices: Sequence[torch.device]
    fingerprint: dict[str, Any]

    @property
    def batch(self) -> int:
        """Contexts per forward pass."""
        return batch_of(self.corpus, self.options.batch)

    @property
    def reads_text(self) -> bool:
        """Whether anything is read of the text; else it decides nothing, and is not named in the result."""
        return self.options.reads_text or self.options.sparsity_by is not None

    @property
    def calibration(self) -> Corpus:
        """The text on which blocks are run."""
        return self.recovery.read if self.recovery else self.corpus

    def with_sparsities(self, each: list[float]) -> Plan:
        """The same with the sparsity of each block, which the text and the options of the fingerprint decide."""
        options = replace(self.options, sparsity=each)
        settings = PruningSettings.of(options, self.matrices, self.by_recipe)
        return replace(self, options=options, settings=settings)

    def read_on(self, device: str) -> Plan:
        """The same, where blocks are run on this kind of device; that on which matrices are pruned may be another."""
        pruned_on = self.devices[0].type if self.devices else self.model.device.type
        pruning = {name: value for name, value in self.fingerprint["pruning"].items() if name != "pruned_on"}
        pruning |= {"pruned_on": pruned_on} if pruned_on != device else {}
        return replace(self, fingerprint=self.fingerprint | {"device": device, "pruning": pruning})


def planned(
    model: OpenModel,
    corpus: Corpus,
    options: PruningOptions,
    *,
    on_ray: bool = False,
) -> Plan:
    """The plan of what is asked.

    Args:
        model: dense.
        corpus: the whole text.
        options: as they were given.
        on_ray: workers of a Ray cluster are to run the blocks.

    Raises:
        UsageError: as `prune_model`.
    """
    check_fit(model, corpus, least_contexts=1)
    if corpus.images is not None:
        raise UsageError(f"{model.id} reads images: only models of text are pruned")
    options = options.checked(streamed=model.streamed is not None, on_ray=on_ray)
    devices, batch = usable_devices(options.devices), batch_of(corpus, options.batch)
    recovery = None
    if options.recover is not None:
        recovery = Recovery(corpus, options.recover, batch, options.seed)
        recovery.check(model)
    if options.out is not None:
        refuse_inside(Path(options.out), model.id)
    of_file = None if options.recipe is None else Recipe.read(options.recipe)
    given_by = dict.fromkeys(of_file.skip, f"{of_file.path}: skip") if of_file else {}
    given_by |= dict.fromkeys(options.skip, "--skip")
    options = replace(options, skip=tuple(given_by))
    as_a_whole = options.form in ("factored", COMPRESSED)
    by_layer = f"--format {options.form}" if as_a_whole else "--recover" if recovery else None
    matrices = without_skipped(model, _dense_matrices(model), given_by, by_layer)
    if options.form == COMPRESSED:
        refuse_unpackable(matrices)
    if of_file and of_file.rank_ratio and options.method != "oats":
        raise UsageError(f"{of_file.path}: {options.method} has no low-rank part: leave rank_ratio out")
    if of_file and of_file.sparsity and options.bits is not None:
        raise UsageError(f"{of_file.path}: bits say how weights are stored, not which: leave out sparsity")
    calibration = recovery.read if recovery else corpus
    if options.sparsity_by is not None:
        check_sparsity_by(options.sparsity_by, options.sparsity, options.pattern)
    by_recipe = of_file.settings(Names(model), matrices) if of_file else {}
    settings = PruningSettings.of(options, matrices, by_recipe)
    _refuse_short(calibration, matrices, settings)
    fingerprint = fingerprint_of(model) | {"pruning": settings.fingerprint()}
    plan = Plan(model, corpus, options, matrices, by_recipe, settings, recovery, devices, fingerprint)
    if plan.reads_text:
        plan = replace(plan, fingerprint=fingerprint | {"corpus": corpus.sha256, "batch": batch})
    return plan.read_on(model.device.type)


def _dense_matrices(model: OpenModel) -> Matrices:
    """The matrices of a model that was not pruned yet."""
    if model.interventions:
        raise UsageError(
            f"the opened model was modified ({model.interventions[-1]}): open it anew to prune it"
        )
    if (Path(model.id) / SETTINGS).is_file():
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
    tokens, method = len(corpus.tokens), "SparseGPT" if settings.options.bits is None else "GPTQ"
    widest = max(matrix.shape[1] for block in matrices for matrix in block)
    if settings.options.needs_full_moments and tokens < widest:
        raise UsageError(
            f"{tokens} tokens do not calibrate {method} for matrices of "
            f"{widest} inputs: give more text, or more --contexts"
        )
