"""The survey: passes of a model over a corpus, random sequences and its own weights, and then its tables.

It can be interrupted at any moment: progress is saved at intervals, and the same call resumes it to the same result.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from theodolite.accumulate.sums import State, joined, part_of
from theodolite.corpus.corpus import Corpus
from theodolite.corpus.ragged import NO_TOKEN
from theodolite.logits.attribution import AttributionPass, PatternPass
from theodolite.logits.shares import SharesPass, sample_of
from theodolite.measure.catalogue import taken
from theodolite.measure.extra import Extra, check_extra
from theodolite.models import OpenModel
from theodolite.models.guard import measures
from theodolite.models.token_texts import text_of_tokens
from theodolite.models.weights.head_weights import NO_MATRIX, no_head_matrix
from theodolite.passes.corpus_pass import batch_of, check_fit, fingerprint_of
from theodolite.passes.provenance import describe_corpus, describe_model, describe_pass
from theodolite.passes.run import Run
from theodolite.passes.stages import Pass, Stage, States, run_into
from theodolite.passes.survey_pass import HeadsPass, SurveyPass, choose_sample
from theodolite.passes.tabulate import added_columns, survey_means, tabulate, trailing_tokens
from theodolite.passes.weights_pass import WeightsPass
from theodolite.system.progress import Progress, ShowStage

TITLES = {
    "corpus": "reading contexts",
    "shares": "splitting logits",
    "weights": "reading weights",
    "patterns": "scoring head types",
    "attribution": "attributing patterns",
}
"""What is said while each pass runs."""


@measures("model")
def survey(
    model: OpenModel,
    corpus: Corpus,
    out: str | Path | None = None,
    *,
    batch: int | None = None,
    seed: int = 0,
    extra: Sequence[Extra] = (),
    checkpoint_seconds: float = 60.0,
    show_progress: ShowStage = lambda what, done, total: None,
) -> Run:
    """Measure a model on a corpus.

    Args:
        model: from `open_model`.
        corpus: from a `Corpus` constructor, with the model's own tokenizer or `image_reader` of it.
        out: the run folder to write; None keeps the run in memory. Interrupted, the same call resumes.
        batch: contexts a forward pass; None: 4096 tokens' worth.
        seed: of the kept sample and of the random sequences for induction.
        extra: accumulators of your own, whose columns are added to the tables.
        checkpoint_seconds: how often progress is saved, and so what a kill costs at most.
        show_progress: told (what is being done, steps done, steps in all), again and again. It may raise to stop the
            survey; progress is saved then.

    Returns:
        The run; from disk, if `out` already holds just this survey.

    Raises:
        UsageError: the corpus does not fit the model, an accumulator or its columns do not fit the survey, or `out`
            holds something else.
        WorkError: hidden states became NaN or infinite, or the disk refused.
    """
    check_fit(model, corpus)
    model.check_weights()
    batch = batch_of(corpus, batch)
    fingerprint = survey_fingerprint(model, corpus, batch, seed, extra)

    def later(name: str) -> Stage:
        return Stage(
            name, TITLES[name], lambda states: later_pass(name, model, corpus, seed, given(name, states))
        )

    return run_into(
        [
            Stage("corpus", TITLES["corpus"], lambda _: SurveyPass(model, corpus, seed, batch, extra)),
            survey_facts(model, corpus, seed, fingerprint, extra),
            *map(later, LATER),
        ],
        lambda states: tabulate(states, extra),
        out,
        fingerprint,
        corpus=describe_corpus(corpus),
        checkpoint_seconds=checkpoint_seconds,
        show_progress=show_progress,
    )


@measures("model")
def survey_heads(
    model: OpenModel,
    corpus: Corpus,
    *,
    seed: int = 0,
    show_progress: ShowStage = lambda what, done, total: None,
) -> Run:
    """What `survey` says of heads alone, in memory: a third of its time.

    The numbers are those of `survey` on the same contexts; the tables of layers, sinks, outliers and shares are empty,
    and so are the columns of heads that need them.

    Args and errors are as for `survey`.
    """
    check_fit(model, corpus)
    model.check_weights()
    batch = batch_of(corpus, None)
    fingerprint = {**fingerprint_of(model), "corpus": corpus.sha256, "heads": True}

    def weights(states: States) -> Pass:
        return WeightsPass(model, inputs=states.of("corpus.inputs"))

    stages = [
        Stage("corpus", TITLES["corpus"], lambda states: HeadsPass(model, corpus, seed, batch)),
        _facts(describe_model(model) | describe_pass(model, corpus, seed, fingerprint)),
        Stage("weights", TITLES["weights"], weights),
        Stage(
            "patterns", TITLES["patterns"], lambda states: PatternPass(model, corpus.contexts.shape[1], seed)
        ),
    ]
    return run_into(stages, tabulate, None, fingerprint, checkpoint_seconds=0, show_progress=show_progress)


@measures("model")
def spectra(
    model: OpenModel,
    out: str | Path | None = None,
    *,
    show_progress: ShowStage = lambda what, done, total: None,
) -> Run:
    """The weight-only part of a survey: spectra, moments and regimes of every head; no text is read.

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

    def tables(states: States) -> Run:
        if set(states.notes["weights"]["spectrum_of"]) == {NO_MATRIX}:
            raise no_head_matrix(model.id)
        return tabulate(states)

    model.check_weights()
    fingerprint = fingerprint_of(model)
    return run_into(
        [
            _facts(describe_model(model) | {"fingerprint": fingerprint}),
            Stage("weights", TITLES["weights"], lambda states: WeightsPass(model)),
        ],
        tables,
        out,
        fingerprint,
        checkpoint_seconds=60.0,
        show_progress=show_progress,
    )


def survey_fingerprint(
    model: OpenModel, corpus: Corpus, batch: int, seed: int, extra: Sequence[Extra]
) -> dict[str, Any]:
    """What decides every byte of a survey, whose added accumulators are checked."""
    check_extra(extra, taken)
    added = {"extra": [accumulator.name for accumulator in extra]} if extra else {}
    return {**fingerprint_of(model), "corpus": corpus.sha256, "batch": batch, "seed": seed, **added}


def survey_facts(
    model: OpenModel, corpus: Corpus, seed: int, fingerprint: dict[str, Any], extra: Sequence[Extra]
) -> Stage:
    """The stage that keeps what the tables say of the model and the text, and refuses columns that do not fit them."""

    def facts(states: States) -> Pass:
        added_columns(states, extra)
        return _facts_of_text(model, corpus, seed, fingerprint, states.of("corpus.attention"))

    return Stage("facts", "", facts)


LATER = ("shares", "weights", "patterns", "attribution")
"""The stages of a survey that follow the text, each of a fixed cost."""


def given(name: str, states: States) -> State:
    """What a later pass is given of the states of those before it: tensors, so that it can be run elsewhere."""
    mean, pos, _ = survey_means(states)
    means = {"mean": mean, "pos": pos.float()}  # as the run has it, so that its readers get the same parts
    if name == "shares":
        return means
    if name == "weights":
        text = slice(pos.shape[1] - trailing_tokens(states))
        normed = {"pos": means["pos"][:, text], "normed": states.of("shares")["normed"][:, text]}
        return means | normed | joined({"inputs": states.of("corpus.inputs")})
    if name == "attribution":
        return means | {"scores": states.of("patterns")["scores"]}
    return {}


def later_pass(name: str, model: OpenModel, corpus: Corpus, seed: int, tensors: State) -> Pass:
    """One of the passes of `LATER`, from what `given` gives."""
    if name == "shares":
        return SharesPass(model, corpus, seed, tensors["mean"], tensors["pos"])
    if name == "weights":
        means = {key: tensors[key] for key in ("mean", "pos", "normed")}
        grid = None if corpus.grid is None else corpus.grid.shape
        inputs = part_of(tensors, "inputs")
        return WeightsPass(model, inputs=inputs, leading=corpus.leading, grid=grid, **means)
    if name == "patterns":
        return PatternPass(model, corpus.contexts.shape[1], seed)
    return AttributionPass(model, seed, tensors["scores"], tensors["mean"], tensors["pos"])


class Facts:
    """What the tables say of the model and the text: no work, but kept with the states, so that they need neither."""

    total = 0

    def __init__(self, notes: dict[str, Any], tensors: State) -> None:
        self.notes = notes
        self._tensors = tensors

    def run(self, progress: Progress) -> None:
        """Nothing is left to do."""

    def state(self) -> State:
        """The tensors."""
        return self._tensors

    def restore(self, state: State) -> None:
        """Nothing is ever half done."""


def _facts(provenance: dict[str, Any]) -> Stage:
    return Stage("facts", "", lambda states: Facts({"provenance": provenance}, {}))


def _facts_of_text(
    model: OpenModel, corpus: Corpus, seed: int, fingerprint: dict[str, Any], attention: State
) -> Facts:
    described = describe_pass(model, corpus, seed, fingerprint)
    trailing = described["corpus"]["trailing_special_tokens"]
    sample = choose_sample(corpus, trailing, (model.layers + 1) * model.width, seed)
    examples = corpus.contexts[: attention["example_received"].shape[1]]
    split = len(sample_of(corpus, seed))
    described["counts"] |= {"sampled_contexts": sample.size, "split_contexts": split}
    text = text_of_tokens(model, corpus)
    named = torch.cat([attention["sink_tokens"][:, 2].long(), examples[examples != NO_TOKEN]]).unique()
    notes = {
        "provenance": describe_model(model) | described,
        "tokens": {str(token): text(token) for token in named.tolist()},
    }
    tensors = {
        "sample_slot": sample.slot,
        "sample_context": sample.token_context,
        "sample_position": sample.token_position,
        "labels": corpus.labels,
        "examples": examples.clone(),
    }
    if corpus.images is not None:
        tensors["pictures"] = corpus.images.reader.shown(corpus.images.pixels(slice(0, len(examples))))
    return Facts(notes, tensors)
