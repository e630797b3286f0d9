"""`prune_model`: prune all matrices in place, block by block, each calibrated on the outputs of the pruned ones.

The formulas are in `methods.py` and `oats.py`, the streaming in `sequential.py`, the files in `checkpoint.py`.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import pandas as pd
from torch import Tensor

from theodolite.corpus.corpus import Corpus
from theodolite.errors import UsageError
from theodolite.models import OpenModel, open_model
from theodolite.models.block_matrices import Matrix, block_matrices, left_dense, one_expert_at_a_time
from theodolite.models.factored import BLOCK, PrunedMatrix, is_factored, read_matrices
from theodolite.models.guard import measures
from theodolite.passes.corpus_pass import batch_of, check_fit, fingerprint_of
from theodolite.passes.provenance import describe_corpus, describe_model, describe_pass
from theodolite.prune.adapter import refuse_form
from theodolite.prune.checkpoint import UnfinishedPruning, WriteExtras, write_block
from theodolite.prune.compressed import refuse_unpackable
from theodolite.prune.methods import DAMPING
from theodolite.prune.moments import InputMoments
from theodolite.prune.oats import ITERATIONS, RANK_RATIO
from theodolite.prune.owl import check_sparsity_by, sparsity_by_outliers
from theodolite.prune.pruned import Pruned, TableRows, low_rank_of
from theodolite.prune.quantised import GROUP
from theodolite.prune.recipe import Recipe
from theodolite.prune.recover import Recovery, recovered
from theodolite.prune.sequential import BlockByBlock, Keep, kept_in_memory
from theodolite.prune.settings import PruningSettings, RankRatio, Sparsity
from theodolite.prune.skipped import without_skipped
from theodolite.system.choices import check_form
from theodolite.system.progress import ShowProgress
from theodolite.system.pruned_folders import ADAPTER, COMPRESSED, SETTINGS, refuse_inside

SCHEMA_VERSION = 1

PRUNED_SHARE = 0.3
"""Share of exact zeros in its matrices above which a model counts as already pruned."""


@measures
def prune_model(
    model: OpenModel,
    corpus: Corpus,
    method: str,
    sparsity: Sparsity = None,
    *,
    sparsity_by: str | None = None,
    pattern: str | None = None,
    rank_ratio: RankRatio = RANK_RATIO,
    iterations: int = ITERATIONS,
    seed: int = 0,
    damping: float = DAMPING,
    exact: bool = False,
    skip: Sequence[str] = (),
    recipe: str | Path | None = None,
    bits: int | None = None,
    group: int = GROUP,
    recover: int | None = None,
    out: str | Path | None = None,
    form: str = "merged",
    batch: int | None = None,
    write_extras: WriteExtras = lambda pruned, folder: None,
    show_progress: ShowProgress = lambda done, total: None,
) -> Pruned:
    """Prune a model in place, and write it as a checkpoint where `out` says.

    Of a model from `open_streamed`, a block is in memory while it is pruned, and its pruned matrices are written to
    `out` only.

    Every linear layer inside the blocks is pruned, W_Q, W_K and W_V separately where they are fused, and the matrices
    of every expert on the tokens routed to it; embeddings, head, norms, biases and routers are not.

    Args:
        model: from `open_model`, and left half pruned by an interrupt; or from `open_streamed`.
        corpus: the calibration text; all its tokens count.
        method: "oats", "sparsegpt", "wanda" or "magnitude"; with `bits`, "oats", "gptq" or "round".
        sparsity: share of entries removed, strictly between 0 and 1; one number for all blocks, or one per block, or a
            function of (block, name of the matrix). For OATS, the low-rank part counts among the kept entries. None:
            the sparsity of the pattern, or with `bits`.
        sparsity_by: "owl": blocks with more outliers keep more, and `sparsity` is the mean (Yin et al. 2024).
        pattern: "2:4" keeps at most 2 of every 4 consecutive inputs of an output, in the sparse part.
        rank_ratio: for OATS: the share of the kept parameters (with `bits`: of the bytes) in the low-rank part, from 0
            to 1; or a function of (block, name of the matrix): `lambda layer, name: 0.5 if name in "qk" else 0.25`.
        iterations: for OATS.
        seed: for OATS: of the random start, and of the probes that check whether its subspace is still the leading one.
        damping: for SparseGPT, as in `sparsegpt`; with `bits`, for GPTQ and OATS.
        exact: for OATS: a full SVD in every iteration, as published, of large matrices too.
        skip: globs of names of matrices that stay dense, in their block ("mlp.down_proj", "q") or in the model
            ("model.layers.0.*").
        recipe: a YAML file with sparsities, rank ratios and what to skip by matrix (`recipe.py`).
        bits: 8, 4 or 3: put weights on a grid of so many bits instead of removing some; what is not pruned stays.
        group: inputs that share a scale there; 0: all inputs of an output.
        recover: for "adapter": steps of AdamW in which the low-rank parts are trained on the text, whose last tenth is
            held out from pruning and training, and says what they brought (`pruning.json`).
        out: folder of the checkpoint, which a streamed model needs; to resume an interrupted call, repeat it on a newly
            opened model. Where it holds this same pruning already, that is read instead.
        form: "merged" (`transformers` opens it), "factored" (`open_model` opens it), "adapter" (`transformers` opens
            the sparse parts, PEFT the low-rank ones), or "compressed" (as "adapter", with packed bits).
        batch: contexts per forward pass; None: 4096 tokens' worth.
        write_extras: writes further files, given the result and the temporary folder that becomes `out`.
        show_progress: told (done, total) matrices, also after every batch; it may raise to stop.

    Raises:
        UsageError: settings out of range, a text that does not fit or is too short, a model that is already pruned,
            quantised or under an intervention, or `out` holds something else.
        WorkError: the family cannot be run block by block, NaN occurred, or a file cannot be written.
    """
    check_fit(model, corpus, least_contexts=1)
    if corpus.images is not None:
        raise UsageError(f"{model.id} reads images: only models of text are pruned")
    check_form(form)
    if out is None and model.streamed is not None:
        raise UsageError(f"the blocks of {model.id} are read from its files and not kept: give out, a folder")
    if model.streamed is not None and (form == COMPRESSED or recover is not None or sparsity_by is not None):
        raise UsageError("format compressed, recover and sparsity_by need a model in memory: use open_model")
    recovery = None if recover is None else Recovery(corpus, recover, batch_of(corpus, batch), seed)
    if recovery:
        if form != ADAPTER or out is None:
            raise UsageError("--recover trains an adapter: give --format adapter, and a folder for it")
        recovery.check(model)
    if isinstance(sparsity, str) or isinstance(skip, str):
        raise UsageError("sparsity is a number, or one a block, and skip a list of names: give no text")
    if sparsity_by is not None and bits is not None:
        raise UsageError("bits say how weights are stored, not which: leave out --sparsity-by")
    if out is not None:
        refuse_inside(Path(out), model.id)
    refuse_form(form, method, bits)
    of_file = None if recipe is None else Recipe.read(recipe)
    skip = (*skip, *(of_file.skip if of_file else ()))
    by_layer = f"--format {form}" if form in ("factored", COMPRESSED) else "--recover" if recovery else None
    matrices = without_skipped(model, _dense_matrices(model), skip, by_layer)
    if form == COMPRESSED:
        refuse_unpackable(bits, matrices)
    calibration = recovery.read if recovery else corpus
    if sparsity_by is not None:
        mean, total = check_sparsity_by(sparsity_by, sparsity, pattern), sum(map(len, matrices))
        sparsity = sparsity_by_outliers(
            model, calibration, matrices, mean, batch_of(corpus, batch), lambda: show_progress(0, total)
        )
    if of_file:
        sparsity, rank_ratio = of_file.applied(sparsity, rank_ratio, matrices)
    settings = PruningSettings.of(
        method,
        sparsity,
        pattern,
        rank_ratio,
        iterations,
        seed,
        damping,
        matrices,
        exact=exact,
        bits=bits,
        group=group,
    )
    if form == ADAPTER and not any(settings.rank_ratio.values()):
        raise UsageError(
            "a rank ratio of 0 leaves no low-rank part that an adapter could hold: choose another --format"
        )
    _refuse_short(calibration, matrices, settings)
    fingerprint = {
        **fingerprint_of(model),
        "corpus": corpus.sha256,
        "batch": batch_of(corpus, batch),
        "pruning": settings.fingerprint()
        | ({"skip": sorted(set(skip))} if skip else {})
        | ({"recover": recover} if recover else {})
        | ({"sparsity_by": sparsity_by} if sparsity_by else {}),
    }
    work = _PruningRun(model, calibration, matrices, settings, fingerprint, show_progress, recovery)
    if out is None:
        return work.run(None)
    unfinished = UnfinishedPruning(Path(out), json.loads(json.dumps(fingerprint)), describe_corpus(corpus))
    with unfinished.claimed():
        written = unfinished.finished(form)
        if written is not None:
            if model.streamed is None:
                work.restore(Path(out))
            return written
        return unfinished.finish(model, matrices, work.run(unfinished), form, write_extras)


@dataclass(frozen=True)
class _PruningRun:
    """One pruning: its inputs and its steps."""

    model: OpenModel
    corpus: Corpus
    matrices: list[list[Matrix]]
    settings: PruningSettings
    fingerprint: dict[str, Any]
    show_progress: ShowProgress
    recovery: Recovery | None = None

    def run(self, unfinished: UnfinishedPruning | None) -> Pruned:
        """Prune every unfinished block, and write the result of every block into the model."""
        started = time.monotonic() - (unfinished.seconds if unfinished else 0.0)
        rows: TableRows = []
        low_rank: dict[tuple[int, str], tuple[Tensor, Tensor]] = {}  # where no file has them
        dense = [matrix.read() for matrix in chain(*self.matrices)] if self.recovery else []
        pruned_so_far: list[PrunedMatrix] = []
        total = sum(map(len, self.matrices))
        described = describe_model(self.model)
        with ExitStack() as undo:
            undo.enter_context(one_expert_at_a_time(self.model.root))
            keep: Keep = kept_in_memory
            if unfinished and self.model.streamed is not None:
                keep = undo.enter_context(unfinished.kept_states())
            stream = BlockByBlock(
                self.model,
                self.corpus,
                self.fingerprint["batch"],
                lambda: self.show_progress(len(rows), total),
                keep,
            )
            if self.model.streamed is None:
                self._record()
            for layer, matrices in enumerate(self.matrices):
                with self.model.block_present(layer):
                    done = unfinished.block(layer) if unfinished else None
                    pruned_matrices, block_rows = done or self._pruned_block(stream, layer, total)
                    write_block(matrices, pruned_matrices)
                    if unfinished and not done:
                        unfinished.save(layer, pruned_matrices, block_rows, time.monotonic() - started)
                    rows += block_rows
                    if unfinished is None:
                        low_rank |= low_rank_of(layer, pruned_matrices)
                    pruned_so_far += pruned_matrices if self.recovery else []
                    if layer + 1 < self.model.layers:
                        stream.advance(layer)
            with unfinished.written_into(self.model, self.matrices) if unfinished else nullcontext():
                stream.verify_end()
        told = self._recover(pruned_so_far, dense, unfinished) if self.recovery and unfinished else {}
        self.show_progress(total, total)
        seconds = time.monotonic() - started
        text = self.recovery.corpus if self.recovery else self.corpus
        provenance = described | describe_pass(self.model, text, self.settings.seed, self.fingerprint)
        left = left_dense(self.model, [matrix for block in self.matrices for matrix in block])
        pruning = {"schema_version": SCHEMA_VERSION, **self.fingerprint["pruning"], "left_dense": left} | told
        provenance |= {"wall_seconds": seconds, "pruning": pruning}
        return Pruned(pd.DataFrame(rows), provenance, unfinished.low_rank(rows) if unfinished else low_rank)

    def _recover(
        self, pruned: Sequence[PrunedMatrix], dense: Sequence[Tensor], unfinished: UnfinishedPruning
    ) -> dict[str, Any]:
        """Train the low-rank parts; what that brought, as provenance has it."""
        assert self.recovery is not None
        mine = list(chain(*self.matrices))
        pairs = list(zip(mine, pruned, strict=True))
        last = len(mine) - 1
        trained, told = recovered(
            self.model, pairs, dense, self.recovery, lambda: self.show_progress(last, len(mine))
        )
        low_rank: dict[tuple[int, str], tuple[Tensor, Tensor]] = {}
        for own, finished in zip(mine, trained, strict=True):
            low_rank |= low_rank_of(own.layer, [finished])
        unfinished.put_low_rank(low_rank)
        return {"recovery": told}

    def restore(self, folder: Path) -> None:
        """Put the matrices of this same pruning, finished in `folder`, into the model."""
        mine = list(chain(*self.matrices))
        if is_factored(folder):
            blocks = (read_matrices(folder / BLOCK.format(layer))[0] for layer in range(self.model.layers))
            finished = [
                pruned.merged(own.holder.device) for own, pruned in zip(mine, chain(*blocks), strict=True)
            ]
        else:
            opened = open_model(folder, dtype=self.model.source.dtype, device="cpu")
            keys = {(matrix.layer, matrix.key) for matrix in mine}
            theirs = (
                matrix for matrix in chain(*block_matrices(opened)) if (matrix.layer, matrix.key) in keys
            )
            finished = [matrix.read() for matrix in theirs]
        for own, matrix in zip(mine, finished, strict=True):
            own.write(matrix)
        self._record()

    def _record(self) -> None:
        digest = hashlib.sha256(json.dumps(self.fingerprint).encode()).hexdigest()
        self.model.record_intervention(f"pruned({self.settings.method}, sha256:{digest[:16]})")

    def _pruned_block(
        self, stream: BlockByBlock, layer: int, total: int
    ) -> tuple[list[PrunedMatrix], TableRows]:
        """Prune the matrices of a block on their current inputs; also their rows of the table."""
        matrices, pruned_matrices, rows = self.matrices[layer], list[PrunedMatrix](), TableRows()
        moments = InputMoments(matrices, self.settings.damping if self.settings.needs_full_moments else None)
        with moments.collecting():
            stream.read(layer)
        before = sum(map(len, self.matrices[:layer]))
        for matrix in matrices:
            # Not after the last matrix: a finished block is saved before an interrupt can stop the work.
            self.show_progress(before + len(rows), total)
            pruned, row = self.settings.prune(matrix, moments.of(matrix))
            pruned_matrices.append(pruned)
            rows.append(row)
        return pruned_matrices, rows


def _dense_matrices(model: OpenModel) -> list[list[Matrix]]:
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


def _refuse_short(corpus: Corpus, matrices: list[list[Matrix]], settings: PruningSettings) -> None:
    tokens = len(corpus.tokens)
    widest = max(matrix.shape[1] for block in matrices for matrix in block)
    if settings.needs_full_moments and tokens < widest:
        raise UsageError(
            f"{tokens} tokens do not calibrate {'SparseGPT' if settings.bits is None else 'GPTQ'} for matrices of "
            f"{widest} inputs: give more text, or more --contexts"
        )
