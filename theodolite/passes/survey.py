"""The survey: a model measured on a text, on random sequences and by its own weights.

It can be interrupted at any moment: progress is saved at intervals, and the same call resumes it to the same result.
Many processes can read a part of the text each, a shard; all write to `OUT.partial` the sums of their chunks, and once
the text and how the model was opened, of which one of them makes the run.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, overload

from torch import Tensor

from theodolite.accumulate.means import means_of_halves
from theodolite.corpus.corpus import Corpus
from theodolite.errors import UsageError
from theodolite.jobs.job import Job, Stage, States
from theodolite.jobs.unfinished import Unfinished
from theodolite.logits.attribution import PatternPass
from theodolite.logits.shares import SharesPass, sample_of
from theodolite.measure.catalogue import taken
from theodolite.measure.extra import Extra, check_extra
from theodolite.models import OpenModel, open_model
from theodolite.models.guard import measures
from theodolite.models.token_texts import text_of_tokens
from theodolite.models.weights.head_weights import NO_MATRIX, no_head_matrix
from theodolite.passes.chunks import CHUNKS, Chunk, ChunkPass, TextInChunks, chunks_of
from theodolite.passes.corpus_pass import batch_of, check_fit, fingerprint_of_tables
from theodolite.passes.run import Run, describe_corpus, describe_model, describe_pass, finished_run, run_into
from theodolite.passes.survey_pass import EXAMPLES, HeadsPass, SurveyPass, choose_sample
from theodolite.passes.sweep import SweptText, check_swept, folder_of, swept
from theodolite.passes.tabulate import Facts, added_columns, means_of_text, tabulate
from theodolite.passes.weights_pass import WeightsPass
from theodolite.system import embedded
from theodolite.system.choices import check_whole
from theodolite.system.files import locked
from theodolite.system.progress import ShowStage
from theodolite.system.run_folders import is_run

TEXT, TEXT_TITLE = "corpus", "reading contexts"
WEIGHTS_TITLE, PATTERNS_TITLE = "reading weights", "scoring head types"
"""What is said while stages run that other jobs have too."""

SURVEYED = "surveyed"
"""The part of unfinished work that holds the text, and how the model was opened."""


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
        show_progress: told (what is being done, steps done, steps in all), again and again. It may raise to stop the
            survey; progress is saved then.

    Returns:
        The run; from disk, if `out` already holds just this survey. None of a shard.

    Raises:
        UsageError: the corpus does not fit the model, an accumulator or its columns do not fit the survey, `out`
            holds something else, or there is no such shard, or `out` has shards of another n.
        WorkError: hidden states became NaN or infinite, or the disk refused.
    """
    plan = SurveyPlan(model, corpus, batch, seed, extra)
    if shard is None:
        return plan.run(out, show_progress)
    plan.read_shard(out, shard, show_progress)
    return None


def merge(
    folder: str | Path,
    model: OpenModel | None = None,
    *,
    extra: Sequence[Extra] = (),
    show_progress: ShowStage = lambda what, done, total: None,
) -> Run:
    """Make the run of a survey whose shards have all been read: what is left costs the same however long the text is.

    Args:
        folder: the `out` of `survey(…, shard=)`.
        model: as the shards surveyed it; None opens it as they did.
        extra: the accumulators that the shards were given.
        show_progress: as for `survey`.

    Returns:
        The run, written to `folder`: the same bytes as of `survey` in one process. From disk, if it is there already.

    Raises:
        UsageError: there are no shards, some are missing, the model or the accumulators are not those of the shards, or
            the model was in memory only and is not given.
        WorkError: as `survey`.
    """
    folder = Path(folder)
    work = Unfinished(folder, {})
    if is_run(folder):
        with work.claimed():
            work.remove()  # left when the process was killed as it finished
        return Run.load(folder)
    work.described()  # without it no shard that is missing could be read
    surveyed = work.load(SURVEYED)
    if surveyed is None:
        raise UsageError(f"no shards at {folder}: survey each with --shard K/N --out {folder} first")
    tensors, notes = surveyed
    parts: dict[str, Any] = {**tensors, **notes["text"]}
    corpus = Corpus(**parts)
    chunks, shards = chunks_of(len(corpus.contexts), notes["batch"]), notes["shards"]
    missing = [
        f"{number}/{shards}"
        for number in range(1, shards + 1)
        if not all(is_read(work, chunk) for chunk in chunks_of_shard(chunks, (number, shards)))
    ]
    if missing:
        raise UsageError(
            f"{work.out} lacks {'shard' if len(missing) == 1 else 'shards'} {', '.join(missing)}: run what is missing "
            "with --shard, then merge"
        )
    if model is None:
        if notes["opening"] is None:
            raise UsageError(f"the model of {folder} was in memory only: give it, merge(folder, model)")
        model = opened(notes["opening"])
    plan = SurveyPlan(model, corpus, notes["batch"], notes["seed"], extra)
    return plan.run(folder, show_progress)


class SurveyPlan:
    """A survey as a list of stages, each made from the states of those before it, and its tables.

    Arguments and errors are those of `survey`.
    """

    def __init__(
        self, model: OpenModel, corpus: Corpus, batch: int | None, seed: int, extra: Sequence[Extra]
    ) -> None:
        check_fit(model, corpus)
        check_swept(model)
        model.check_weights()
        check_extra(extra, taken)
        self.model, self.corpus, self.seed, self.extra = model, corpus, seed, extra
        self.batch = batch_of(corpus, batch)
        self.trailing = corpus.trailing(model.tokenizer)

    @property
    def fingerprint(self) -> dict[str, Any]:
        """The settings that decide every byte of the survey."""
        added: dict[str, Any] = {"extra": [one.name for one in self.extra]} if self.extra else {}
        added |= {} if self.model.streamed is None else {"streamed": True}
        text = {"corpus": self.corpus.sha256, "batch": self.batch, "seed": self.seed}
        return {**fingerprint_of_tables(self.model), **text, **added}

    def new_pass(self) -> SurveyPass:
        """Return a pass that has read nothing yet."""
        return SurveyPass(self.model, self.corpus, self.seed, self.batch, self.extra)

    @functools.cached_property
    def _directions(self) -> Tensor:
        """The directions of the sketches, which every chunk must look along: those of the first batch."""
        first = self.new_pass()
        first.read(0, min(first.batch, first.total))
        return first.sketches.state()["directions"]

    def chunk_pass(self, chunk: Chunk) -> ChunkPass:
        """Return the steps of one chunk, of which no other has been read."""
        return ChunkPass(self.new_pass, chunk, self._directions if chunk.first else None)

    def stages(self) -> list[Stage]:
        """List all stages in order; only the first one's cost grows with the text."""
        model, corpus, seed = self.model, self.corpus, self.seed

        def shares(states: States) -> SharesPass:
            if model.streamed is None:
                added_columns(states, self.extra)  # those that do not fit are refused now, and not at the end
            return SharesPass(
                model, corpus, seed, states.of(f"{TEXT}.means"), states.of(f"{TEXT}.streams")["stream"]
            )

        def weights(states: States) -> WeightsPass:
            return WeightsPass(
                model,
                inputs=states.of(f"{TEXT}.inputs"),
                means=means_of_text(states, self.trailing),
                leading=corpus.leading,
                grid=None if corpus.grid is None else corpus.grid.shape,
            )

        def patterns(states: States) -> PatternPass:
            means = states.of(f"{TEXT}.means")

            def of_halves(layer: int) -> tuple[Tensor, Tensor]:
                return means_of_halves(means, layer, self.trailing, corpus.leading)

            return PatternPass(model, corpus.contexts.shape[1], seed, of_halves)

        stages = [
            Stage(TEXT, TEXT_TITLE, lambda states: TextInChunks(self.new_pass, states.work)),
            Stage("shares", "splitting logits", shares),
            Stage("weights", WEIGHTS_TITLE, weights),
            Stage("patterns", PATTERNS_TITLE, patterns),
        ]
        if model.streamed is None:
            return stages

        def text(states: States) -> SweptText:
            return SweptText(model, corpus, seed, self.batch, self.extra, folder_of(states.work))

        return [swept(model, [Stage(TEXT, TEXT_TITLE, text), *stages[1:]])]

    def run(self, out: str | Path | None, show_progress: ShowStage) -> Run:
        """Run all stages and make the tables; errors are those of `run_into`."""
        return run_into(
            self.stages(),
            self.tables,
            out,
            self.fingerprint,
            corpus=describe_corpus(self.corpus),
            show_progress=show_progress,
        )

    def tables(self, states: States) -> Run:
        """Make the run from the states of all stages."""
        model, corpus, seed = self.model, self.corpus, self.seed
        provenance = describe_model(model) | describe_pass(model, corpus, seed, self.fingerprint)
        sample = choose_sample(model, corpus, self.trailing, seed)
        provenance["counts"] |= {
            "sampled_contexts": sample.size,
            "split_contexts": len(sample_of(corpus, seed)),
        }
        examples = corpus.contexts[:EXAMPLES]
        if model.structure.cross and corpus.sources is not None:  # what they receive is of keys
            examples = corpus.sources[:EXAMPLES]
        text = text_of_tokens(model, corpus)
        return tabulate(states, Facts(provenance, corpus, text, sample, examples), self.extra)

    def read_shard(self, out: str | Path | None, shard: tuple[int, int], show_progress: ShowStage) -> None:
        """Read the chunks of a shard that are not read yet, and leave their sums beside `out`."""
        if out is None:
            raise UsageError("a shard leaves its sums in a folder: say which, the same for all shards")
        if self.model.streamed is not None:
            raise UsageError(
                "a model that is read block by block reads all of a text: leave out --shard or --stream"
            )
        if self.corpus.images is not None or self.corpus.pictured is not None:
            raise UsageError("shards are of text, not of images: survey them in one process")
        chunks = chunks_of(len(self.corpus.contexts), self.batch)
        in_shard = chunks_of_shard(chunks, shard)
        work = Unfinished(out, self.fingerprint, describe_corpus(self.corpus))
        if finished_run(work) is not None:
            return
        work.check()
        work.save_once(SURVEYED, lambda: self._surveyed(shard[1]))
        if (shards := work.notes(SURVEYED)["shards"]) != shard[1]:
            raise UsageError(
                f"{work.folder} holds shards of {shards}: give --shard K/{shards}, or remove it to begin again"
            )
        total = in_shard[-1].last - in_shard[0].first
        for chunk in in_shard:
            if is_read(work, chunk):
                continue

            def show(title: str, done: int, of: int, before: int = chunk.first - in_shard[0].first) -> None:
                show_progress(title, before + done, total)

            stage = Stage(chunk.name, TEXT_TITLE, lambda _: self.chunk_pass(chunk))  # noqa: B023
            with locked(work.folder / chunk.name, "another shard or another --out"):
                job = Job([stage], work, show)
                job.run()
                job.save()

    def _surveyed(self, shards: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return what `merge` needs to make the same plan."""
        corpus = self.corpus
        tensors = {"contexts": corpus.contexts, "labels": corpus.labels}
        tensors |= {} if corpus.lengths is None else {"lengths": corpus.lengths}
        tensors |= {} if corpus.sources is None else {"sources": corpus.sources}
        text = {name: getattr(corpus, name) for name in ("name", "label_names", "seed", "selection")}
        how = {"batch": self.batch, "seed": self.seed, "shards": shards}
        return tensors, {"text": text, "opening": opening_of(self.model), **how}


def chunks_of_shard(chunks: Sequence[Chunk], shard: tuple[int, int]) -> Sequence[Chunk]:
    """Return the chunks of the k-th of n shards; `UsageError` where there is no such shard."""
    number, count = shard
    check_whole(shard=number, shards=count)
    if not 1 <= number <= count:
        raise UsageError(f"there is no shard {number} of {count}: give one of 1/{count} to {count}/{count}")
    if count > len(chunks):
        raise UsageError(
            f"{count} shards are too many: this text is cut into {len(chunks)} chunks of whole batches (at most "
            f"{CHUNKS}; --batch says how many contexts one has)"
        )
    return chunks[len(chunks) * (number - 1) // count : len(chunks) * number // count]


def is_read(work: Unfinished, chunk: Chunk) -> bool:
    """Tell whether the sums of the whole chunk are there."""
    return bool(work.notes(chunk.name).get("finished"))


def opening_of(model: OpenModel) -> dict[str, Any] | None:
    """Return what `opened` needs to open the same model in another process; None where it cannot.

    None where it was changed after it was opened, or is in memory only.
    """
    in_memory = model.sha256 is None and model.revision is None
    if in_memory or model.interventions or model.weights().changed:
        return None
    is_folder = Path(model.id).is_dir()  # which other processes may know by another relative path
    source = str(Path(model.id).resolve()) if is_folder else model.id
    spread = getattr(model.root, "hf_device_map", None) is not None  # by accelerate, over several devices
    return {
        "source": None if model.id == embedded.NAME else source,
        "dtype": str(model.source.dtype).removeprefix("torch."),
        "revision": model.revision,
        "attention": model.source.attention,
        "device": None if spread else model.device.type,
        "device_map": "auto" if spread else None,
        "id": model.id,
    }


def opened(opening: dict[str, Any]) -> OpenModel:
    """Open the model that `opening_of` described; errors are those of `open_model`."""
    how = {name: value for name, value in opening.items() if name not in ("source", "id")}
    return replace(open_model(opening["source"], **how), id=opening["id"])


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
    fingerprint = {**fingerprint_of_tables(model), "corpus": corpus.sha256, "heads": True}
    provenance = describe_model(model) | describe_pass(model, corpus, seed, fingerprint)

    stages = [
        Stage(TEXT, TEXT_TITLE, lambda states: HeadsPass(model, corpus, seed, batch)),
        Stage(
            "weights",
            WEIGHTS_TITLE,
            lambda states: WeightsPass(model, inputs=states.of(f"{TEXT}.inputs")),
        ),
        Stage(
            "patterns",
            PATTERNS_TITLE,
            lambda states: PatternPass(model, corpus.contexts.shape[1], seed),
        ),
    ]
    facts = Facts(provenance, corpus)
    return run_into(
        stages, lambda states: tabulate(states, facts), None, fingerprint, show_progress=show_progress
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
        model: from `open_streamed`, which reads a block at a time, or from `open_model`.
        out: the run folder to write; None keeps the run in memory. Interrupted, the same call resumes.
        show_progress: told (what is being done, steps done, steps in all).

    Returns:
        The run; from disk, if `out` already holds just these spectra.

    Raises:
        UsageError: no head of the model has a query-key matrix, or `out` holds something else.
        WorkError: a layer's weights are not there or are no numbers, or the disk refused.
    """
    model.check_weights()
    fingerprint: dict[str, Any] = fingerprint_of_tables(model)

    def tables(states: States) -> Run:
        if set(states.notes["weights"]["spectrum_of"]) == {NO_MATRIX}:
            raise no_head_matrix(model.id)
        return tabulate(states, Facts(describe_model(model) | {"fingerprint": fingerprint}))

    stages = [Stage("weights", WEIGHTS_TITLE, lambda states: WeightsPass(model))]
    return run_into(stages, tables, out, fingerprint, show_progress=show_progress)
