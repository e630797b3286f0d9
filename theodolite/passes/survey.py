"""The survey: one pass of a model over a corpus, from contexts to a run.

It can be interrupted at any moment: progress is saved at intervals, and the same call goes on from there to
the same result.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from theodolite.corpus.corpus import Corpus
from theodolite.models import OpenModel
from theodolite.passes.corpus_pass import ShowProgress, batch_of, check_fit, fingerprint_of, read_into_run
from theodolite.passes.run import Run, Workspace
from theodolite.passes.survey_pass import OnePass
from theodolite.passes.tabulate import spectra_result, survey_result


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
    check_fit(model, corpus)
    batch = batch_of(corpus, batch)
    return read_into_run(
        lambda: OnePass(model, corpus, seed),
        survey_result,
        out,
        batch=batch,
        fingerprint=survey_fingerprint(model, corpus, batch, seed),
        checkpoint_seconds=checkpoint_seconds,
        show_progress=show_progress,
    )


def survey_fingerprint(model: OpenModel, corpus: Corpus, batch: int, seed: int) -> dict[str, Any]:
    """What decides every byte of a survey."""
    return {**fingerprint_of(model), "corpus": corpus.sha256, "batch": batch, "seed": seed}


def spectra(
    model: OpenModel,
    out: str | Path | None = None,
    *,
    show_progress: ShowProgress = lambda done, total: None,
) -> Run:
    """The weight-only part of a survey: spectra, moments and regimes of every head; no text is read.

    Args:
        model: from `open_weights`, which reads a layer at a time, or from `open_model`.
        out: the run folder to write; None keeps the run in memory.
        show_progress: told (done, total) layers.

    Returns:
        The run; from disk, if `out` already holds just these spectra.

    Raises:
        UsageError: no head of the model has a query-key matrix, or `out` holds something else.
        WorkError: a layer's weights are not there or are no numbers, or the disk refused.
    """
    fingerprint = fingerprint_of(model)
    if out is None:
        return spectra_result(model, fingerprint, show_progress)
    workspace = Workspace(Path(out), fingerprint)
    with workspace.locked():
        finished = workspace.finished()
        workspace.load_progress()  # refuses what lies there unfinished: it is a survey's
        return finished or workspace.finish(spectra_result(model, fingerprint, show_progress))
