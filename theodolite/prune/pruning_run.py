"""The steps of a pruning: block by block, and what becomes of the checkpoint.

How a matrix is pruned is in `one_matrix.py`, how blocks are run in `sequential.py`, the files in `checkpoint.py`.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from theodolite.models import OpenModel, open_model
from theodolite.models.block_matrices import block_matrices, left_dense, one_expert_at_a_time
from theodolite.models.factored import BLOCK, PrunedMatrix, is_factored, read_matrices
from theodolite.passes.provenance import describe_corpus, describe_model, describe_pass
from theodolite.prune.by_block import DenseReading
from theodolite.prune.calibration import Calibration, InThisProcess, Unread
from theodolite.prune.checkpoint import UnfinishedPruning, WriteExtras, write_block
from theodolite.prune.devices import pruned_block
from theodolite.prune.patterns import check_sparsity
from theodolite.prune.plan import Plan
from theodolite.prune.pruned import Pruned, TableRows, low_rank_of
from theodolite.prune.recover import recovered
from theodolite.prune.sequential import BlockByBlock, Keep, keeping
from theodolite.prune.skipped import Matrices
from theodolite.system.choices import ATTENTIONS, Attention
from theodolite.system.progress import ShowProgress

SCHEMA_VERSION = 1

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
            return self._by_block(None).run(None)
        fingerprint = json.loads(json.dumps(self.plan.fingerprint))
        corpus = describe_corpus(self.plan.corpus) if self.plan.reads_text else None
        unfinished = UnfinishedPruning(Path(options.out), fingerprint, corpus)
        with unfinished.claimed():
            written = unfinished.finished(options.form)
            if written is not None:
                if self.model.streamed is None:
                    self.restore(Path(options.out))
                return written
            pruned = self._by_block(unfinished).run(unfinished)
            return unfinished.finish(self.model, self.matrices, pruned, options.form, write_extras)

    def _by_block(self, unfinished: UnfinishedPruning | None) -> PruningRun:
        """The same with sparsities that the dense model's reading of the text gives each block, where that is asked."""
        plan = self.plan
        by = plan.options.sparsity_by
        if by is None:
            return self
        folder, total = unfinished.folder if unfinished else None, sum(map(len, self.matrices))
        reading = DenseReading(
            plan.model,
            plan.calibration,
            plan.matrices,
            plan.batch,
            folder,
            lambda: self.show_progress(0, total),
        )

        def read() -> list[float]:
            return reading.sparsities(by, check_sparsity(plan.options.sparsity))

        return replace(self, plan=plan.with_sparsities(unfinished.sparsities(read) if unfinished else read()))

    def run(self, unfinished: UnfinishedPruning | None) -> Pruned:
        """Prune every unfinished block, and write the result of every block into the model."""
        started = time.monotonic() - (unfinished.seconds if unfinished else 0.0)
        rows: TableRows = []
        low_rank: dict[tuple[int, str], tuple[Tensor, Tensor]] = {}  # where no file has them
        dense = [matrix.read().cpu() for matrix in chain(*self.matrices)] if self.plan.recovery else []
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
                    if self.plan.recovery:
                        pruned_so_far += [matrix.to(torch.device("cpu")) for matrix in pruned_matrices]
                    del done, pruned_matrices  # a block's worth of memory, before the next one is read
                    if layer + 1 < self.model.layers:
                        text.advance(layer)
            with unfinished.written_into(self.model, self.matrices) if unfinished else nullcontext():
                text.verify_end()
        told = self._recover(pruned_so_far, dense, unfinished) if self.plan.recovery and unfinished else {}
        self.show_progress(total, total)
        provenance = described | self._provenance(told) | {"wall_seconds": time.monotonic() - started}
        return Pruned(pd.DataFrame(rows), provenance, unfinished.low_rank(rows) if unfinished else low_rank)

    def _provenance(self, told: dict[str, Any]) -> dict[str, Any]:
        """Of the text and the settings, with what is told of recovery."""
        plan = self.plan
        left = left_dense(self.model, list(chain(*self.matrices)))
        pruning = {"schema_version": SCHEMA_VERSION, **plan.fingerprint["pruning"], "left_dense": left} | told
        pruning |= {"sparsities": plan.options.sparsity} if plan.options.sparsity_by else {}
        attention = _attention_of(self.model)
        if attention is not None:  # the other half has its own blocks
            pruning["half"] = "encoder" if attention == "encoder" else "decoder"
        described: dict[str, Any] = {"seed": plan.options.seed, "fingerprint": plan.fingerprint}
        if plan.reads_text:
            described = describe_pass(self.model, plan.corpus, plan.options.seed, plan.fingerprint)
        return described | {"pruning": pruning}

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
            finished = (
                pruned.merged(own.holder.device) for own, pruned in zip(mine, chain(*blocks), strict=True)
            )
        else:
            dtype, attention = self.model.source.dtype, _attention_of(self.model)
            opened = open_model(folder, dtype=dtype, device="cpu", attention=attention)
            keys = {(matrix.layer, matrix.key) for matrix in mine}
            theirs = (
                matrix for matrix in chain(*block_matrices(opened)) if (matrix.layer, matrix.key) in keys
            )
            finished = (matrix.read() for matrix in theirs)
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


def _attention_of(model: OpenModel) -> Attention | None:
    """Of an encoder-decoder of transformers; a module of one's own calls its attention by any name."""
    if not getattr(getattr(model.root, "config", None), "is_encoder_decoder", False):
        return None
    return next((each for each in ATTENTIONS if each == model.source.attention), None)
