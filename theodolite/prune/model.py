"""`prune_model`: prune all matrices in place, block by block, each calibrated on the outputs of the pruned ones.

What is asked is checked in `plan.py`; the formulas are in `methods.py` and `oats.py`, the streaming in
`sequential.py`, the files in `checkpoint.py`.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import pandas as pd
from torch import Tensor

from theodolite.corpus.corpus import Corpus
from theodolite.models import OpenModel, open_model
from theodolite.models.block_matrices import block_matrices, left_dense, one_expert_at_a_time
from theodolite.models.factored import BLOCK, PrunedMatrix, is_factored, read_matrices
from theodolite.models.guard import measures
from theodolite.passes.provenance import describe_corpus, describe_model, describe_pass
from theodolite.prune.calibration import Calibration, InThisProcess, Unread
from theodolite.prune.checkpoint import UnfinishedPruning, WriteExtras, write_block
from theodolite.prune.devices import pruned_block
from theodolite.prune.plan import Plan, planned
from theodolite.prune.pruned import Pruned, TableRows, low_rank_of
from theodolite.prune.recover import recovered
from theodolite.prune.sequential import BlockByBlock, Keep, keeping
from theodolite.prune.skipped import Matrices
from theodolite.system.choices import ATTENTIONS, Attention
from theodolite.system.progress import ShowProgress
from theodolite.system.pruning_options import (
    DAMPING,
    GROUP,
    ITERATIONS,
    RANK_RATIO,
    PruningOptions,
    RankRatio,
    Sparsity,
)

SCHEMA_VERSION = 1


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
    devices: Sequence[str] = (),
    errors: bool = False,
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
        sparsity_by: "owl": blocks with more outliers keep more, and `sparsity` is the mean (Yin et al. 2024). "tags":
            those whose heads' outputs are more of what sinks write (ours).
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
        devices: of one kind ("cuda:0", "cuda:1"), which share the matrices of a block; those with the same inputs stay
            together where a method needs full moments. The result does not depend on how many there are.
        errors: of "magnitude" and "round", which weigh no inputs: run the text all the same, for the errors of outputs
            in the table; else these are of the weights alone.
        write_extras: writes further files, given the result and the temporary folder that becomes `out`.
        show_progress: told (done, total) matrices, also after every batch; it may raise to stop.

    Raises:
        UsageError: settings out of range, a text that does not fit or is too short, a model that is already pruned,
            quantised or under an intervention, or `out` holds something else.
        WorkError: the family cannot be run block by block, NaN occurred, or a file cannot be written.
    """
    options = PruningOptions.among(locals())
    plan = planned(model, corpus, options, show_progress)
    return PruningRun(plan, in_this_process, show_progress).finished(write_extras)


def _attention_of(model: OpenModel) -> Attention | None:
    """Of an encoder-decoder of transformers; a module of one's own calls its attention by any name."""
    if not getattr(getattr(model.root, "config", None), "is_encoder_decoder", False):
        return None
    return next((each for each in ATTENTIONS if each == model.source.attention), None)


Calibrated = Callable[[Plan, Keep, Callable[[], None]], Calibration]
"""Begins to calibrate, given what keeps hidden states, and what is called after every batch and may raise to stop."""


def in_this_process(plan: Plan, keep: Keep, between: Callable[[], None]) -> Calibration:
    """Calibrate without workers."""
    if not plan.options.reads_text:
        return Unread()
    stream = BlockByBlock(plan.model, plan.calibration, plan.batch, between, keep)
    return InThisProcess(stream, plan.options.moments_damping)


@dataclass(frozen=True)
class PruningRun:
    """One pruning: what is planned, who runs the blocks, and its steps."""

    plan: Plan
    calibrated: Calibrated
    show_progress: ShowProgress

    @property
    def model(self) -> OpenModel:
        """The model that is pruned."""
        return self.plan.model

    @property
    def matrices(self) -> Matrices:
        """The matrices that are pruned, of every block."""
        return self.plan.matrices

    def finished(self, write_extras: WriteExtras) -> Pruned:
        """Prune, and write the checkpoint where one is asked for; or read it where it is there."""
        options = self.plan.options
        if options.out is None:
            return self.run(None)
        fingerprint = json.loads(json.dumps(self.plan.fingerprint))
        unfinished = UnfinishedPruning(Path(options.out), fingerprint, describe_corpus(self.plan.corpus))
        with unfinished.claimed():
            written = unfinished.finished(options.form)
            if written is not None:
                if self.model.streamed is None:
                    self.restore(Path(options.out))
                return written
            pruned = self.run(unfinished)
            return unfinished.finish(self.model, self.matrices, pruned, options.form, write_extras)

    def run(self, unfinished: UnfinishedPruning | None) -> Pruned:
        """Prune every unfinished block, and write the result of every block into the model."""
        started = time.monotonic() - (unfinished.seconds if unfinished else 0.0)
        rows: TableRows = []
        low_rank: dict[tuple[int, str], tuple[Tensor, Tensor]] = {}  # where no file has them
        dense = [matrix.read() for matrix in chain(*self.matrices)] if self.plan.recovery else []
        pruned_so_far: list[PrunedMatrix] = []
        total = sum(map(len, self.matrices))
        described = describe_model(self.model)
        with ExitStack() as undo:
            undo.enter_context(one_expert_at_a_time(self.model.root))
            keep = undo.enter_context(keeping(self.model, unfinished.folder if unfinished else None))
            text = self.calibrated(self.plan, keep, lambda: self.show_progress(len(rows), total))
            if self.model.streamed is None:
                self._record()
            for layer, matrices in enumerate(self.matrices):
                with self.model.block_present(layer):
                    done = unfinished.block(layer) if unfinished else None
                    pruned_matrices, block_rows = done or self._pruned_block(text, layer, total)
                    write_block(matrices, pruned_matrices)
                    if unfinished and not done:
                        unfinished.save(layer, pruned_matrices, block_rows, time.monotonic() - started)
                    rows += block_rows
                    if unfinished is None:
                        low_rank |= low_rank_of(layer, pruned_matrices)
                    pruned_so_far += pruned_matrices if self.plan.recovery else []
                    if layer + 1 < self.model.layers:
                        text.advance(layer)
            with unfinished.written_into(self.model, self.matrices) if unfinished else nullcontext():
                text.verify_end()
        told = self._recover(pruned_so_far, dense, unfinished) if self.plan.recovery and unfinished else {}
        self.show_progress(total, total)
        seconds = time.monotonic() - started
        plan = self.plan
        provenance = described | describe_pass(self.model, plan.corpus, plan.options.seed, plan.fingerprint)
        left = left_dense(self.model, [matrix for block in self.matrices for matrix in block])
        pruning = {"schema_version": SCHEMA_VERSION, **plan.fingerprint["pruning"], "left_dense": left} | told
        attention = _attention_of(self.model)
        if attention is not None:  # the other half has its own blocks
            pruning["half"] = "encoder" if attention == "encoder" else "decoder"
        provenance |= {"wall_seconds": seconds, "pruning": pruning}
        return Pruned(pd.DataFrame(rows), provenance, unfinished.low_rank(rows) if unfinished else low_rank)

    def _recover(
        self, pruned: Sequence[PrunedMatrix], dense: Sequence[Tensor], unfinished: UnfinishedPruning
    ) -> dict[str, Any]:
        """Train the low-rank parts; what that brought, as provenance has it."""
        assert self.plan.recovery is not None
        mine = list(chain(*self.matrices))
        pairs = list(zip(mine, pruned, strict=True))
        last = len(mine) - 1
        trained, told = recovered(
            self.model, pairs, dense, self.plan.recovery, lambda: self.show_progress(last, len(mine))
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
            dtype, attention = self.model.source.dtype, _attention_of(self.model)
            opened = open_model(folder, dtype=dtype, device="cpu", attention=attention)
            keys = {(matrix.layer, matrix.key) for matrix in mine}
            theirs = (
                matrix for matrix in chain(*block_matrices(opened)) if (matrix.layer, matrix.key) in keys
            )
            finished = [matrix.read() for matrix in theirs]
        for own, matrix in zip(mine, finished, strict=True):
            own.write(matrix)
        self._record()

    def _record(self) -> None:
        digest = hashlib.sha256(json.dumps(self.plan.fingerprint).encode()).hexdigest()
        self.model.record_intervention(f"pruned({self.plan.options.method}, sha256:{digest[:16]})")

    def _pruned_block(
        self, text: Calibration, layer: int, total: int
    ) -> tuple[list[PrunedMatrix], TableRows]:
        """Prune the matrices of a block on their current inputs; also their rows of the table."""
        matrices, before = self.matrices[layer], sum(map(len, self.matrices[:layer]))
        finished = pruned_block(
            self.plan.settings,
            matrices,
            text.moments(layer, matrices),
            self.plan.devices,
            # Not after the last matrix: a finished block is saved before an interrupt can stop the work.
            lambda done: self.show_progress(before + done, total),
        )
        return [pruned for pruned, _ in finished], [row for _, row in finished]
