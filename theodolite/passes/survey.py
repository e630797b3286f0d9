"""The survey: a model measured on a text, on random sequences and by its own weights.

It can be interrupted at any moment, and the same call resumes it to the same result. A text is read in chunks, which
follow from the corpus and the batch alone: each is summed from zero, and the sums are merged in order. So the result
has the same bytes whether one process reads them one after the other or many read some each, a shard, and leave the
sums in `OUT.partial`, with the text and how the model was opened.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, overload

import torch
from torch import Tensor

from theodolite.accumulate.means import means_of_halves
from theodolite.accumulate.sums import State, joined, part_of
from theodolite.corpus.corpus import Corpus
from theodolite.errors import UsageError
from theodolite.jobs.job import Job, Stage, States, Steps, Unfinished
from theodolite.logits.attribution import PatternPass
from theodolite.logits.shares import SharesPass, sample_of
from theodolite.measure.extra import Extra, check_extra
from theodolite.models import OpenModel, open_model
from theodolite.models.guard import measures
from theodolite.models.texts import text_of_tokens
from theodolite.models.weights.head_weights import NO_MATRIX, no_head_matrix
from theodolite.passes.corpus_pass import batch_of, check_fit, fingerprint_of_tables
from theodolite.passes.run import Run, describe_corpus, describe_model, describe_pass, finished_run, run_into
from theodolite.passes.survey_pass import EXAMPLES, HeadsPass, SurveyPass, choose_sample
from theodolite.passes.sweep import SweptStages, SweptText, folder_of
from theodolite.passes.tabulate import added_columns, means_of_text, tabulate
from theodolite.passes.weights_pass import weights_pass
from theodolite.system import embedded
from theodolite.system.choices import check_whole
from theodolite.system.files import locked
from theodolite.system.progress import Progress, ShowStage
from theodolite.system.run_folders import is_run

CHUNKS = 64
"""Chunks of a text at most, and so processes that can share it; their states lie on disk until they are merged."""

TEXT, TEXT_TITLE = "corpus", "reading contexts"
WEIGHTS_TITLE, PATTERNS_TITLE = "reading weights", "scoring head types"

SURVEYED = "surveyed"  # the part of unfinished work that holds the text, and how the model was opened


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
            `merge(out)` makes the run when all n are there, with the bytes of one process.
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
        The run, in `folder`, with the bytes of `survey` in one process. From disk, if it is there already.

    Raises:
        UsageError: shards are missing, or model or accumulators are not theirs, or the model was in memory only.
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
        how = dict(notes["opening"])
        name = how.pop("id")
        model = replace(open_model(how.pop("source"), **how), id=name)
    return SurveyPlan(model, corpus, notes["batch"], notes["seed"], extra).run(folder, show_progress)


class SurveyPlan:
    """A survey as a list of stages, each made from the states of those before it, and its tables."""

    def __init__(
        self, model: OpenModel, corpus: Corpus, batch: int | None, seed: int, extra: Sequence[Extra]
    ) -> None:
        check_fit(model, corpus)
        if model.streamed is not None and model.streamed.unswept is not None:
            raise UsageError(
                f"{model.id} cannot be surveyed block by block ({model.streamed.unswept}): leave out --stream"
            )
        model.check_weights()
        check_extra(extra)
        self.model, self.corpus, self.seed, self.extra = model, corpus, seed, extra
        self.batch = batch_of(corpus, batch)
        self.trailing = corpus.trailing(model.tokenizer)
        streamed = {} if model.streamed is None else {"streamed": True}
        text = {"corpus": corpus.sha256, "batch": self.batch, "seed": seed}
        added = {"extra": [one.name for one in extra]} if extra else {}
        self.fingerprint = {**fingerprint_of_tables(model), **text, **added, **streamed}

    def new_pass(self) -> SurveyPass:
        """Return a pass that has read nothing yet."""
        return SurveyPass(self.model, self.corpus, self.seed, self.batch, self.extra)

    @functools.cached_property
    def directions(self) -> Tensor:
        """The directions of the sketches, which every chunk must look along: those of the first batch."""
        first = self.new_pass()
        first.read(0, min(first.batch, first.total))
        return first.sketches.state()["directions"]

    def stages(self) -> list[Stage]:
        """List all stages in order; only the first one's cost grows with the text."""
        model, corpus, seed = self.model, self.corpus, self.seed

        def shares(states: States) -> SharesPass:
            if model.streamed is None:
                added_columns(states, self.extra)  # those that do not fit are refused now, and not at the end
            means, streams = states.of(f"{TEXT}.means"), states.of(f"{TEXT}.streams")
            return SharesPass(model, corpus, seed, means, streams["stream"])

        def weights(states: States) -> Steps:
            means = means_of_text(states, self.trailing)
            grid = None if corpus.grid is None else corpus.grid.shape
            return weights_pass(model, states.of(f"{TEXT}.inputs"), means, corpus.leading, grid)

        def patterns(states: States) -> PatternPass:
            apart = {"trailing": self.trailing, "leading": corpus.leading}
            of_halves = functools.partial(means_of_halves, states.of(f"{TEXT}.means"), **apart)
            return PatternPass(model, corpus.contexts.shape[1], seed, of_halves)

        later = [
            Stage("shares", "splitting logits", shares),
            Stage("weights", WEIGHTS_TITLE, weights),
            Stage("patterns", PATTERNS_TITLE, patterns),
        ]
        if model.streamed is None:
            return [Stage(TEXT, TEXT_TITLE, lambda states: TextInChunks(self.new_pass, states.work)), *later]

        def text(states: States) -> SweptText:
            return SweptText(model, corpus, seed, self.batch, self.extra, folder_of(states.work))

        stages = [Stage(TEXT, TEXT_TITLE, text), *later]

        def together(states: States) -> SweptStages:
            return SweptStages(model, stages, states.work)

        return [Stage(f"{TEXT}-by-block", TEXT_TITLE, together, tuple(stage.name for stage in stages))]

    @measures("self.model")
    def run(self, out: str | Path | None, show_progress: ShowStage) -> Run:
        """Run all stages and make the tables; errors are those of `run_into`."""
        described = describe_corpus(self.corpus)
        return run_into(
            self.stages(), self.tables, out, self.fingerprint, corpus=described, show_progress=show_progress
        )

    def tables(self, states: States) -> Run:
        """Make the run from the states of all stages."""
        model, corpus, seed = self.model, self.corpus, self.seed
        provenance = describe_model(model) | describe_pass(model, corpus, seed, self.fingerprint)
        sample = choose_sample(model, corpus, self.trailing, seed)
        counts = {"sampled_contexts": sample.size, "split_contexts": len(sample_of(corpus, seed))}
        provenance["counts"] |= counts
        examples = corpus.contexts[:EXAMPLES]
        if model.structure.cross and corpus.sources is not None:  # what they receive is of keys
            examples = corpus.sources[:EXAMPLES]
        facts = {"text": text_of_tokens(model, corpus), "sample": sample, "examples": examples}
        return tabulate(states, provenance, corpus, self.extra, **facts)

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
        in_shard = chunks_of_shard(chunks_of(len(self.corpus.contexts), self.batch), shard)
        work = Unfinished(out, self.fingerprint, describe_corpus(self.corpus))
        if finished_run(work) is not None:
            return
        work.check()
        work.save_once(SURVEYED, lambda: self._surveyed(shard[1]))
        if (shards := work.notes(SURVEYED)["shards"]) != shard[1]:
            raise UsageError(
                f"{work.folder} holds shards of {shards}: give --shard K/{shards}, or remove it to begin again"
            )
        begin, total = in_shard[0].first, in_shard[-1].last - in_shard[0].first
        for chunk in in_shard:
            if is_read(work, chunk):
                continue

            def show(title: str, done: int, of: int, before: int = chunk.first - begin) -> None:
                show_progress(title, before + done, total)

            stage = Stage(chunk.name, TEXT_TITLE, lambda _: ChunkPass(self, chunk))  # noqa: B023
            with locked(work.folder / chunk.name, "another shard or another --out"):
                job = Job([stage], work, show)
                job.run()
                job.save()

    def _surveyed(self, shards: int) -> tuple[State, dict[str, Any]]:
        """Return what `merge` needs to make the same plan."""
        corpus = self.corpus
        tensors = {"contexts": corpus.contexts, "labels": corpus.labels}
        tensors |= {} if corpus.lengths is None else {"lengths": corpus.lengths}
        tensors |= {} if corpus.sources is None else {"sources": corpus.sources}
        text = {name: getattr(corpus, name) for name in ("name", "label_names", "seed", "selection")}
        how = {"batch": self.batch, "seed": self.seed, "shards": shards}
        return tensors, {"text": text, "opening": opening_of(self.model), **how}


def opening_of(model: OpenModel) -> dict[str, Any] | None:
    """Return what opens the same model in another process; None of one in memory only, or changed since."""
    in_memory = model.sha256 is None and model.revision is None
    if in_memory or model.interventions or model.weights().changed:
        return None
    # Other processes may know a folder by another relative path.
    source = str(Path(model.id).resolve()) if Path(model.id).is_dir() else model.id
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


@dataclass(frozen=True)
class Chunk:
    """The contexts `first … last − 1`, whole batches of them, and the name of their part of unfinished work."""

    name: str
    first: int
    last: int


def chunks_of(contexts: int, batch: int) -> list[Chunk]:
    """Cut a text into chunks of whole batches, at most `CHUNKS` of them."""
    size = batch * math.ceil(contexts / (CHUNKS * batch))
    firsts = range(0, contexts, size)
    return [
        Chunk(f"chunk-{number:03d}", first, min(first + size, contexts))
        for number, first in enumerate(firsts)
    ]


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


class ChunkPass(SurveyPass):
    """The pass over one chunk of a survey's text, of which no other has been read."""

    def __init__(self, plan: SurveyPlan, chunk: Chunk) -> None:
        super().__init__(plan.model, plan.corpus, plan.seed, plan.batch, plan.extra)
        self.total, self._chunk = chunk.last - chunk.first, chunk
        if chunk.first:
            self.sketches.look_along(plan.directions)

    def run(self, progress: Progress) -> None:
        """Read the contexts that are left."""
        first, last = self._chunk.first, self._chunk.last
        progress.checkpoint(progress.done)
        self.read(first + progress.done, last, lambda done: progress.checkpoint(done - first))

    def state(self) -> State:
        """Return the sums, packed."""
        return packed(super().state())

    def restore(self, state: State) -> None:
        """Continue from what `state` gave."""
        super().restore(unpacked(state))


class TextInChunks:
    """Steps that read a survey's text: every chunk whose sums no other process has left in `work`.

    State: the sums of the chunks so far, and under `chunk` those of the chunk that is being read.
    """

    def __init__(self, new_pass: Callable[[], SurveyPass], work: Unfinished) -> None:
        self._new_pass, self._work = new_pass, work
        self._whole = new_pass()
        self._part: SurveyPass | None = None
        self.total = self._whole.total
        self.notes: dict[str, Any] = {}

    def run(self, progress: Progress) -> None:
        """Read or merge the chunks that are left, in order."""
        done = progress.done
        progress.checkpoint(done)
        for chunk in chunks_of(self.total, self._whole.batch):
            if chunk.last <= done:
                continue
            state, notes = (self._work.load(chunk.name) if done <= chunk.first else None) or ({}, {})
            if notes.get("finished"):  # by another process
                with self._work.same_sums():
                    self._whole.merge(unpacked(state))
            else:
                self._read(chunk, max(chunk.first, done), progress)
            self._part = None
            progress.checkpoint(chunk.last)

    def _read(self, chunk: Chunk, first: int, progress: Progress) -> None:
        def checkpoint(done: int) -> None:
            if done < chunk.last:  # the end of a chunk is one when it is merged
                progress.checkpoint(done)

        if chunk.first and self._part is None:
            self._part = self._new_pass()
            self._part.sketches.look_along(self._whole.sketches.state()["directions"])
        # The first, merged with nothing, is what it is.
        (self._part or self._whole).read(first, chunk.last, checkpoint)
        if self._part is not None:
            self._whole.merge(self._part.state())

    def state(self) -> State:
        """Return the sums so far."""
        part = {} if self._part is None else joined({"chunk": self._part.state()})
        return self._whole.state() | part

    def restore(self, state: State) -> None:
        """Continue from what `state` gave."""
        self._whole.restore(state)
        if part := part_of(state, "chunk"):
            self._part = self._new_pass()
            self._part.restore(part)


def packed(state: State) -> State:
    """Leave out the rows along dimension 1 that are zero in all layers: most of a chunk's groups and sampled places."""
    tensors: State = {}
    for name, tensor in state.items():
        tensors[name] = tensor
        if tensor.ndim > 2:
            rows = (tensor != 0).flatten(2).any(dim=2).any(dim=0).nonzero().flatten()
            if len(rows) < tensor.shape[1]:
                tensors[name] = tensor[:, rows]
                tensors[f"{name} rows"], tensors[f"{name} size"] = rows, torch.tensor(tensor.shape[1])
    return tensors


def unpacked(state: State) -> State:
    """Return the state that `packed` was given."""
    tensors = {name: tensor for name, tensor in state.items() if not name.endswith((" rows", " size"))}
    for name, tensor in tensors.items():
        if f"{name} rows" in state:
            size = (tensor.shape[0], int(state[f"{name} size"]), *tensor.shape[2:])
            tensors[name] = tensor.new_zeros(size)
            tensors[name][:, state[f"{name} rows"]] = tensor
    return tensors


@measures("model")
def survey_heads(
    model: OpenModel,
    corpus: Corpus,
    *,
    seed: int = 0,
    show_progress: ShowStage = lambda what, done, total: None,
) -> Run:
    """Survey the heads alone, in memory: a third of the time of `survey`, and the same numbers; arguments are its own.

    All other tables are empty, and so are the columns of heads that need them.
    """
    check_fit(model, corpus)
    model.check_weights()
    fingerprint = {**fingerprint_of_tables(model), "corpus": corpus.sha256, "heads": True}
    provenance = describe_model(model) | describe_pass(model, corpus, seed, fingerprint)
    batch, length = batch_of(corpus, None), corpus.contexts.shape[1]
    stages = [
        Stage(TEXT, TEXT_TITLE, lambda states: HeadsPass(model, corpus, seed, batch)),
        Stage("weights", WEIGHTS_TITLE, lambda states: weights_pass(model, states.of(f"{TEXT}.inputs"))),
        Stage("patterns", PATTERNS_TITLE, lambda states: PatternPass(model, length, seed)),
    ]

    def tables(states: States) -> Run:
        return tabulate(states, provenance, corpus)

    return run_into(stages, tables, None, fingerprint, show_progress=show_progress)


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
        out, show_progress: as for `survey`.

    Raises:
        UsageError: no head of the model has a query-key matrix, or `out` holds something else.
        WorkError: a layer's weights are not there or are no numbers, or the disk refused.
    """
    model.check_weights()
    fingerprint: dict[str, Any] = fingerprint_of_tables(model)

    def tables(states: States) -> Run:
        if set(states.notes["weights"]["spectrum_of"]) == {NO_MATRIX}:
            raise no_head_matrix(model.id)
        return tabulate(states, describe_model(model) | {"fingerprint": fingerprint})

    stages = [Stage("weights", WEIGHTS_TITLE, lambda states: weights_pass(model))]
    return run_into(stages, tables, out, fingerprint, show_progress=show_progress)
