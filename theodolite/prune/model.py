"""Prune all matrices of a model in place, block by block, each calibrated on the outputs of the pruned ones.

How a matrix is pruned is in `matrices.py`, how blocks are run in `sequential.py`, the files in `checkpoint.py`.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import pandas as pd
from torch import Tensor

from theodolite.corpus.corpus import Corpus
from theodolite.errors import UsageError
from theodolite.models import OpenModel, open_model
from theodolite.models.guard import measures
from theodolite.models.stored.factored import PrunedMatrix
from theodolite.models.stored.lazy_weights import instead_of_offloaded
from theodolite.models.weights.block_matrices import Matrix, block_matrices, left_dense, one_expert_at_a_time
from theodolite.passes.corpus_pass import batch_of, check_fit, fingerprint_of
from theodolite.passes.provenance import describe_corpus, describe_model, describe_pass
from theodolite.prune.checkpoint import UnfinishedPruning, WriteExtras, write_block
from theodolite.prune.matrices import Matrices, PruningSettings, without_skipped
from theodolite.prune.moments import InputMoments
from theodolite.prune.options import DAMPING, ITERATIONS, RANK_RATIO, PruningOptions, RankRatio, Sparsity
from theodolite.prune.pruned import Pruned, TableRows, low_rank_of
from theodolite.prune.sequential import BlockByBlock
from theodolite.system.choices import ATTENTIONS, Attention
from theodolite.system.progress import ShowProgress
from theodolite.system.pruned_folders import SETTINGS, refuse_inside

SCHEMA_VERSION = 1

PRUNED_SHARE = 0.3
"""Share of exact zeros in its matrices above which a model counts as already pruned."""


@measures("model")
def prune_model(
    model: OpenModel,
    corpus: Corpus,
    method: str,
    sparsity: Sparsity = None,
    *,
    pattern: str | None = None,
    rank_ratio: RankRatio = RANK_RATIO,
    iterations: int = ITERATIONS,
    seed: int = 0,
    damping: float = DAMPING,
    exact: bool = False,
    skip: Sequence[str] = (),
    out: str | Path | None = None,
    form: str = "merged",
    batch: int | None = None,
    errors: bool = False,
    write_extras: WriteExtras = lambda pruned, folder: None,
    show_progress: ShowProgress = lambda done, total: None,
) -> Pruned:
    """Prune a model in place, and write it as a checkpoint where `out` says.

    Of a model from `open_streamed`, a block is in memory while it is pruned, and its pruned matrices are written to
    `out` only. So it is with a model that `device_map` has offloaded: its files are read, and it stays as it is.

    Every linear layer inside the blocks is pruned, W_Q, W_K and W_V separately where they are fused, and the matrices
    of every expert on the tokens routed to it; embeddings, head, norms, biases and routers are not.

    Args:
        model: from `open_model`, and left half pruned by an interrupt; or from `open_streamed`.
        corpus: the calibration text; all its tokens count.
        method: "oats", "sparsegpt", "wanda" or "magnitude".
        sparsity: share of entries removed, strictly between 0 and 1; one number for all blocks, or one per block, or a
            function of (block, name of the matrix). For OATS, the low-rank part counts among the kept entries. None:
            the sparsity of the pattern.
        pattern: "2:4" keeps at most 2 of every 4 consecutive inputs of an output, in the sparse part.
        rank_ratio: for OATS: the share of the kept parameters in the low-rank part, from 0 to 1; or a function of
            (block, name of the matrix): `lambda layer, name: 0.5 if name in "qk" else 0.25`.
        iterations: for OATS.
        seed: for OATS: of the random start, and of the probes that check whether its subspace is still the leading one.
        damping: for SparseGPT, as in `sparsegpt`.
        exact: for OATS: a full SVD in every iteration, as published, of large matrices too.
        skip: globs of names of matrices that stay dense, in their block ("mlp.down_proj", "q") or in the model
            ("model.layers.0.*").
        out: folder of the checkpoint, which a streamed model needs; to resume an interrupted call, repeat it on a newly
            opened model. Where it holds this same pruning already, that is read instead.
        form: "merged" (`transformers` opens it), "factored" (smaller; `open_model` opens it), or "adapter"
            (`transformers` opens the sparse parts, PEFT the low-rank ones).
        batch: contexts per forward pass; None: 4096 tokens' worth.
        errors: of "magnitude", which weighs no inputs: run the text all the same, for the errors of outputs in the
            table; else these are of the weights alone.
        write_extras: writes further files, given the result and the temporary folder that becomes `out`.
        show_progress: told (done, total) matrices, also after every batch; it may raise to stop.

    Raises:
        UsageError: settings out of range, a text that does not fit or is too short, a model that is already pruned,
            quantised or under an intervention, or `out` holds something else.
        WorkError: the family cannot be run block by block, NaN occurred, or a file cannot be written.
    """
    options = PruningOptions.among(locals())  # a test says that they agree
    return _Pruning.planned(instead_of_offloaded(model), corpus, options, show_progress).finished(
        write_extras
    )


@dataclass(frozen=True)
class _Pruning:
    """A pruning of a model: what is pruned and how, and the steps.

    Attributes:
        matrices: those that are pruned, of every block.
        settings: of each of them.
        batch: contexts per forward pass.
        fingerprint: everything that decides the result.
    """

    model: OpenModel
    corpus: Corpus
    options: PruningOptions
    matrices: Matrices
    settings: PruningSettings
    batch: int
    fingerprint: dict[str, Any]
    show_progress: ShowProgress

    @classmethod
    def planned(
        cls, model: OpenModel, corpus: Corpus, options: PruningOptions, show_progress: ShowProgress
    ) -> _Pruning:
        """Check the options against the model and the text before anything is pruned."""
        check_fit(model, corpus, least_contexts=1)
        if corpus.images is not None:
            raise UsageError(f"{model.id} reads images: only models of text are pruned")
        options, batch = options.checked(streamed=model.streamed is not None), batch_of(corpus, options.batch)
        if options.out is not None:
            refuse_inside(Path(options.out), model.id)
        matrices = without_skipped(model, _dense_matrices(model), options)
        settings = PruningSettings.of(options, matrices)
        widest = max(matrix.shape[1] for matrix in chain(*matrices))
        if options.moments_damping is not None and len(corpus.tokens) < widest:
            raise UsageError(
                f"{len(corpus.tokens)} tokens do not calibrate SparseGPT for matrices of {widest} inputs: give more "
                "text, or more --contexts"
            )
        fingerprint = fingerprint_of(model) | {"pruning": settings.fingerprint()}
        if options.reads_text:  # else it decides nothing, and is not named in the result
            fingerprint |= {"corpus": corpus.sha256, "batch": batch}
        return cls(model, corpus, options, matrices, settings, batch, fingerprint, show_progress)

    def finished(self, write_extras: WriteExtras) -> Pruned:
        """Prune, and write the checkpoint where one is asked for; or read it where it is there."""
        options = self.options
        if options.out is None:
            return self._run(None)
        corpus = describe_corpus(self.corpus) if options.reads_text else None
        unfinished = UnfinishedPruning(Path(options.out), self.fingerprint, corpus)
        with unfinished.claimed():
            written = unfinished.finished(options.form)
            if written is not None:
                if self.model.streamed is None:
                    self._restore(Path(options.out))
                return written
            return unfinished.finish(
                self.model, self.matrices, self._run(unfinished), options.form, write_extras
            )

    def _run(self, unfinished: UnfinishedPruning | None) -> Pruned:
        """Prune every unfinished block, and write the result of every block into the model."""
        model, total = self.model, sum(map(len, self.matrices))
        started = time.monotonic() - (unfinished.seconds if unfinished else 0.0)
        rows: TableRows = []
        low_rank: dict[tuple[int, str], tuple[Tensor, Tensor]] = {}  # where no file has them
        described = describe_model(model)
        folder = unfinished.folder if unfinished and model.streamed is not None else None
        with one_expert_at_a_time(model.root):
            text = None
            if self.options.reads_text:
                between = lambda: self.show_progress(len(rows), total)  # noqa: E731
                text = BlockByBlock(model, self.corpus, self.batch, between, folder)
            if model.streamed is None:
                self._record()
            for layer, matrices in enumerate(self.matrices):
                with model.block_present(layer):
                    done = unfinished.block(layer) if unfinished else None
                    pruned, block_rows = done or self._pruned_block(text, layer, matrices, len(rows))
                    write_block(matrices, pruned)
                    if unfinished and not done:
                        unfinished.save(layer, pruned, block_rows, time.monotonic() - started)
                    rows += block_rows
                    if unfinished is None:
                        low_rank |= low_rank_of(layer, pruned)
                    del done, pruned  # a block's worth of memory, before the next one is read
                    if text and layer + 1 < model.layers:
                        text.advance(layer)
            if text:
                with unfinished.written_into(model, self.matrices) if unfinished else nullcontext():
                    text.verify_end()
        self.show_progress(total, total)
        provenance = described | self._provenance() | {"wall_seconds": time.monotonic() - started}
        return Pruned(pd.DataFrame(rows), provenance, unfinished.low_rank(rows) if unfinished else low_rank)

    def _pruned_block(
        self, text: BlockByBlock | None, layer: int, matrices: Sequence[Matrix], before: int
    ) -> tuple[list[PrunedMatrix], TableRows]:
        """Prune a block's matrices on their inputs (no text: all alike), after `before` others; with their rows."""
        moments = InputMoments(matrices, self.options.moments_damping)
        if text:
            with moments.collecting():
                text.read(layer)
        pruned: list[PrunedMatrix] = []
        rows: TableRows = []
        for matrix in matrices:
            # Not after the last matrix: a finished block is saved before an interrupt can stop the work.
            self.show_progress(before + len(rows), sum(map(len, self.matrices)))
            one, row = self.settings.prune(matrix, moments.of(matrix))
            pruned.append(one)
            rows.append(row)
        return pruned, rows

    def _provenance(self) -> dict[str, Any]:
        """Describe the text and the settings."""
        left = left_dense(self.model, list(chain(*self.matrices)))
        pruning = {"schema_version": SCHEMA_VERSION, **self.fingerprint["pruning"], "left_dense": left}
        attention = _attention_of(self.model)
        if attention is not None:  # the other half has its own blocks
            pruning["half"] = "encoder" if attention == "encoder" else "decoder"
        seed = self.options.seed
        described: dict[str, Any] = {"seed": seed, "fingerprint": self.fingerprint}
        if self.options.reads_text:
            described = describe_pass(self.model, self.corpus, seed, self.fingerprint)
        return described | {"pruning": pruning}

    def _restore(self, folder: Path) -> None:
        """Put the matrices of this same pruning, finished in `folder`, into the model."""
        opened = open_model(
            folder, dtype=self.model.source.dtype, device="cpu", attention=_attention_of(self.model)
        )
        theirs = {(matrix.layer, matrix.key): matrix for matrix in chain(*block_matrices(opened))}
        for matrix in chain(*self.matrices):
            matrix.write(theirs[matrix.layer, matrix.key].read())
        self._record()

    def _record(self) -> None:
        digest = hashlib.sha256(json.dumps(self.fingerprint).encode()).hexdigest()
        self.model.record_intervention(f"pruned({self.options.method}, sha256:{digest[:16]})")


def _dense_matrices(model: OpenModel) -> Matrices:
    """Find the matrices of a model, and refuse one that was pruned or changed."""
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


def _attention_of(model: OpenModel) -> Attention | None:
    """Name the attention that is measured of an encoder-decoder of transformers; None of any other model."""
    if not getattr(getattr(model.root, "config", None), "is_encoder_decoder", False):
        return None
    return next((each for each in ATTENTIONS if each == model.source.attention), None)
