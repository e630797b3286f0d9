"""The survey: a model measured on a text, on random sequences and by its own weights.

It can be interrupted at any moment: progress is saved at intervals, and the same call resumes it to the same result.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, overload

from theodolite.corpus.corpus import Corpus
from theodolite.jobs.job import CHECKPOINT_SECONDS, Stage, States
from theodolite.logits.attribution import PatternPass
from theodolite.measure.extra import Extra
from theodolite.models import OpenModel
from theodolite.models.guard import measures
from theodolite.models.weights.head_weights import NO_MATRIX, no_head_matrix
from theodolite.passes.corpus_pass import batch_of, check_fit, fingerprint_of
from theodolite.passes.provenance import describe_model, describe_pass
from theodolite.passes.run import Run
from theodolite.passes.run_job import run_into
from theodolite.passes.shards import read_shard
from theodolite.passes.survey_pass import HeadsPass
from theodolite.passes.survey_stages import (
    PATTERNS_TITLE,
    TEXT,
    TEXT_TITLE,
    WEIGHTS_TITLE,
    SurveyPlan,
)
from theodolite.passes.tabulate import Facts, tabulate
from theodolite.passes.weights_pass import WeightsPass
from theodolite.system.progress import ShowStage


@overload
def survey(
    model: OpenModel,
    corpus: Corpus,
    out: str | Path | None = None,
    *,
    batch: int | None = None,
    seed: int = 0,
    extra: Sequence[Extra] = (),
    shard: None = None,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
    show_progress: ShowStage = ...,
) -> Run: ...


@overload
def survey(
    model: OpenModel,
    corpus: Corpus,
    out: str | Path,
    *,
    batch: int | None = None,
    seed: int = 0,
    extra: Sequence[Extra] = (),
    shard: tuple[int, int],
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
    show_progress: ShowStage = ...,
) -> None: ...


@measures("model")
def survey(
    model: OpenModel,
    corpus: Corpus,
    out: str | Path | None = None,
    *,
    batch: int | None = None,
    seed: int = 0,
    extra: Sequence[Extra] = (),
    shard: tuple[int, int] | None = None,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
    show_progress: ShowStage = lambda what, done, total: None,
) -> Run | None:
    """Measure a model on a corpus.

    Args:
        model: from `open_model`.
        corpus: from a `Corpus` constructor, with the model's own tokenizer or `image_reader` of it.
        out: the run folder to write; None keeps the run in memory. Interrupted, the same call resumes.
        batch: contexts a forward pass; None: 4096 tokens' worth.
        seed: of the kept sample and of the random sequences for induction.
        extra: accumulators of your own, whose columns are added to the tables.
        shard: (k, n) reads only the k-th of n parts of the corpus, k from 1, and leaves its sums in `OUT.partial`;
            `merge(out)` makes the run when all n are there. Its tables have the bytes of those of one process.
        checkpoint_seconds: how often progress is saved, and so what a kill costs at most.
        show_progress: told (what is being done, steps done, steps in all), again and again. It may raise to stop the
            survey; progress is saved then.

    Returns:
        The run; from disk, if `out` already holds just this survey. None of a shard.

    Raises:
        UsageError: the corpus does not fit the model, an accumulator or its columns do not fit the survey, `out`
            holds something else, or there is no such shard.
        WorkError: hidden states became NaN or infinite, or the disk refused.
    """
    plan = SurveyPlan.of(model, corpus, batch, seed, extra)
    if shard is not None:
        read_shard(plan, out, shard, checkpoint_seconds, show_progress)
        return None
    return plan.run(out, checkpoint_seconds, show_progress)


@measures("model")
def survey_heads(
    model: OpenModel,
    corpus: Corpus,
    *,
    seed: int = 0,
    show_progress: ShowStage = lambda what, done, total: None,
) -> Run:
    """Survey the heads alone, in memory: a third of the time of `survey`.

    The numbers are those of `survey` on the same contexts; the tables of layers, sinks, outliers and shares are empty,
    and so are the columns of heads that need them.

    Args and errors are as for `survey`.
    """
    check_fit(model, corpus)
    model.check_weights()
    batch = batch_of(corpus, None)
    fingerprint = {**fingerprint_of(model), "corpus": corpus.sha256, "heads": True}
    provenance = describe_model(model) | describe_pass(model, corpus, seed, fingerprint)

    def weights(states: States) -> WeightsPass:
        return WeightsPass(model, inputs=states.of(f"{TEXT}.inputs"))

    def patterns(states: States) -> PatternPass:
        return PatternPass(model, corpus.contexts.shape[1], seed)

    stages = [
        Stage(TEXT, TEXT_TITLE, lambda states: HeadsPass(model, corpus, seed, batch)),
        Stage("weights", WEIGHTS_TITLE, weights),
        Stage("patterns", PATTERNS_TITLE, patterns),
    ]
    return run_into(
        stages,
        lambda states: tabulate(states, Facts(provenance)),
        None,
        fingerprint,
        show_progress=show_progress,
    )


@measures("model")
def spectra(
    model: OpenModel,
    out: str | Path | None = None,
    *,
    show_progress: ShowStage = lambda what, done, total: None,
) -> Run:
    """Compute spectra, moments and regimes of every head from the weights alone; no text is read.

    Args:
        model: from `open_weights`, which reads a layer at a time, or from `open_model`.
        out: the run folder to write; None keeps the run in memory. Interrupted, the same call resumes.
        show_progress: told (what is being done, steps done, steps in all).

    Returns:
        The run; from disk, if `out` already holds just these spectra.

    Raises:
        UsageError: no head of the model has a query-key matrix, or `out` holds something else.
        WorkError: a layer's weights are not there or are no numbers, or the disk refused.
    """
    model.check_weights()
    fingerprint: dict[str, Any] = fingerprint_of(model)

    def tables(states: States) -> Run:
        if set(states.notes["weights"]["spectrum_of"]) == {NO_MATRIX}:
            raise no_head_matrix(model.id)
        return tabulate(states, Facts(describe_model(model) | {"fingerprint": fingerprint}))

    stages = [Stage("weights", WEIGHTS_TITLE, lambda states: WeightsPass(model))]
    return run_into(stages, tables, out, fingerprint, show_progress=show_progress)
