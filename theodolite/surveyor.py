"""The survey: one pass of a model over a corpus, from contexts to a run.

It can be interrupted at any moment: progress is saved at intervals, and the same call goes on from there to
the same result.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from theodolite.corpus import Corpus
from theodolite.errors import UsageError
from theodolite.models import OpenModel
from theodolite.onepass import OnePass, ShowProgress
from theodolite.result import spectra_result, survey_result, versions
from theodolite.run import SCHEMA_VERSION, Run, Workspace

TOKENS_A_BATCH = 4096
"""Default batch: as many contexts as give this many tokens."""


def survey(
    model: OpenModel,
    corpus: Corpus,
    out: str | Path | None = None,
    *,
    batch: int | None = None,
    seed: int = 0,
    checkpoint_seconds: float = 60.0,
    show_progress: ShowProgress = lambda done, total: None,
) -> Run:
    """Measure a model on a corpus, in one pass.

    Args:
        model: from `open_model`.
        corpus: from a `Corpus` constructor, with the model's own tokenizer.
        out: the run folder to write; None keeps the run in memory. Interrupted, the same call resumes.
        batch: contexts a forward pass; None: 4096 tokens' worth.
        seed: of the kept sample and of the random sequences for induction.
        checkpoint_seconds: how often progress is saved, and so what an interruption costs at most.
        show_progress: told (done, total) contexts before each batch and at the end. It may raise to stop the
            survey; progress is saved then.

    Returns:
        The run; from disk, if `out` already holds just this survey.

    Raises:
        UsageError: the corpus does not fit the model, or `out` holds something else.
        WorkError: hidden states became NaN or infinite, or the disk refused.
    """
    _check_fit(model, corpus)
    if batch is not None and batch < 1:
        raise UsageError(f"a batch of {batch} contexts reads nothing: use --batch 1 or more")
    batch = batch or max(1, TOKENS_A_BATCH // corpus.contexts.shape[1])
    fingerprint = {**_fingerprint(model), "corpus": corpus.sha256, "batch": batch, "seed": seed}
    if out is None:
        started, one_pass = time.monotonic(), OnePass(model, corpus, seed)
        one_pass.run(batch, 0, show_progress, lambda done, must: None)
        return survey_result(one_pass, fingerprint, time.monotonic() - started)
    workspace = Workspace(Path(out), fingerprint)
    with workspace.locked():
        finished = workspace.finished()
        if finished is not None:
            return finished
        one_pass = OnePass(model, corpus, seed)
        return _resumed(workspace, one_pass, batch, checkpoint_seconds, show_progress)


def spectra(
    model: OpenModel,
    out: str | Path | None = None,
    *,
    show_progress: ShowProgress = lambda done, total: None,
) -> Run:
    """The weight-only part of a survey: spectra, moments and regimes of every head; no text is read.

    Args:
        model: from `open_model`.
        out: the run folder to write; None keeps the run in memory.
        show_progress: told (done, total) layers.

    Returns:
        The run; from disk, if `out` already holds just these spectra.

    Raises:
        UsageError: no head of the model has a query-key matrix, or `out` holds something else.
        WorkError: the disk refused.
    """
    fingerprint = _fingerprint(model)
    if out is None:
        return spectra_result(model, fingerprint, show_progress)
    workspace = Workspace(Path(out), fingerprint)
    with workspace.locked():
        finished = workspace.finished()
        return finished or workspace.finish(spectra_result(model, fingerprint, show_progress))


def _resumed(
    workspace: Workspace,
    one_pass: OnePass,
    batch: int,
    checkpoint_seconds: float,
    show_progress: ShowProgress,
) -> Run:
    started, done = time.monotonic(), 0
    progress = workspace.load_progress()
    if progress is not None:
        notes, tensors = progress
        done = notes["contexts"]
        started -= notes["seconds"]
        one_pass.restore(tensors)
    saved = time.monotonic()

    def save(contexts: int, must: bool) -> None:
        nonlocal saved
        if must or time.monotonic() - saved >= checkpoint_seconds:
            notes = {"contexts": contexts, "seconds": time.monotonic() - started}
            workspace.save_progress(notes, one_pass.state())
            saved = time.monotonic()

    one_pass.run(batch, done, show_progress, save)
    seconds = time.monotonic() - started
    return workspace.finish(survey_result(one_pass, workspace.fingerprint, seconds))


def _check_fit(model: OpenModel, corpus: Corpus) -> None:
    contexts, length = corpus.contexts.shape
    if model.vocabulary is None:
        raise UsageError(
            f"{model.id} reads {model.hf.main_input_name}, not text: only `theodolite spectra` can measure it"
        )
    if model.longest is not None and length > model.longest:
        raise UsageError(
            f"contexts of {length} tokens are longer than the {model.longest} that {model.id} has positions "
            f"for: use --length {model.longest} or less"
        )
    largest = int(corpus.contexts.max())
    if largest >= model.vocabulary or int(corpus.contexts.min()) < 0:
        raise UsageError(
            f"token id {largest} does not fit the {model.vocabulary} tokens of {model.id}: the tokenizer "
            "belongs to another model"
        )
    if length < 4 or contexts < 2:
        raise UsageError(
            f"{contexts} contexts of {length} tokens are too few: a survey needs 2 contexts of 4 tokens"
        )


def _fingerprint(model: OpenModel) -> dict[str, Any]:
    """What decides every byte of the result, but for the text and how it is read."""
    return {
        "versions": versions(),
        "schema_version": SCHEMA_VERSION,
        "model": model.sha256 or model.revision or model.id,
        "dtype": str(model.hf.dtype),
        "device": model.device.type,
    }
