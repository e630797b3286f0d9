"""A survey in shards: many processes read a part of the text each, and one of them makes the run of what they left.

All write to `OUT.partial`: each chunk's sums, and once the text and how the model was opened.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from theodolite.accumulate.sums import State
from theodolite.corpus.corpus import Corpus
from theodolite.errors import UsageError
from theodolite.jobs.job import CHECKPOINT_SECONDS, Job, Stage
from theodolite.jobs.unfinished import Unfinished
from theodolite.measure.extra import Extra
from theodolite.models import OpenModel, open_model
from theodolite.passes.chunks import CHUNKS, Chunk, ChunkPass, chunks_of, first_directions
from theodolite.passes.provenance import describe_corpus
from theodolite.passes.run import Run
from theodolite.passes.run_job import finished_run
from theodolite.passes.survey_stages import TEXT_TITLE, SurveyPlan
from theodolite.system import embedded
from theodolite.system.choices import check_whole
from theodolite.system.locks import locked
from theodolite.system.progress import ShowStage
from theodolite.system.run_folders import is_run

SURVEYED = "surveyed"
"""The part of unfinished work that holds the text, and how the model was opened."""


def read_shard(
    plan: SurveyPlan,
    out: str | Path | None,
    shard: tuple[int, int],
    checkpoint_seconds: float,
    show_progress: ShowStage,
) -> None:
    """Read the chunks of a shard that are not read yet, and leave their sums beside `out`; as `survey(…, shard=)`."""
    if out is None:
        raise UsageError("a shard leaves its sums in a folder: say which, the same for all shards")
    if plan.corpus.images is not None:
        raise UsageError("shards are of text, not of images: survey them in one process")
    chunks = chunks_of(len(plan.corpus.contexts), plan.batch)
    own = chunks_of_shard(chunks, shard)
    work = Unfinished(out, plan.fingerprint, describe_corpus(plan.corpus))
    if finished_run(work) is not None:
        return
    work.check()
    work.save_once(SURVEYED, lambda: _surveyed(plan, shard[1]))
    total = own[-1].last - own[0].first if own else 0
    directions: Tensor | None = None
    for chunk in own:
        if is_read(work, chunk):
            continue
        if chunk.first and directions is None:
            directions = first_directions(plan.new_pass)

        def show(title: str, done: int, of: int, before: int = chunk.first - own[0].first) -> None:
            show_progress(title, before + done, total)

        stage = Stage(chunk.name, TEXT_TITLE, lambda _: ChunkPass(plan.new_pass, chunk, directions))  # noqa: B023
        with locked(work.folder / chunk.name):
            job = Job([stage], work, checkpoint_seconds, show)
            job.run()
            job.save()


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
    """Whether the sums of the whole chunk are there."""
    return bool(work.notes(chunk.name).get("finished"))


def _surveyed(plan: SurveyPlan, shards: int) -> tuple[State, dict[str, Any]]:
    corpus = plan.corpus
    tensors = {"contexts": corpus.contexts, "labels": corpus.labels}
    tensors |= {} if corpus.lengths is None else {"lengths": corpus.lengths}
    text = {name: getattr(corpus, name) for name in ("name", "label_names", "seed", "selection")}
    how = {"batch": plan.batch, "seed": plan.seed, "shards": shards}
    return tensors, {"text": text, "opening": opening_of(plan.model), **how}


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


def merge(
    folder: str | Path,
    model: OpenModel | None = None,
    *,
    extra: Sequence[Extra] = (),
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
    show_progress: ShowStage = lambda what, done, total: None,
) -> Run:
    """Make the run of a survey whose shards have all been read: what is left costs the same however long the text is.

    Args:
        folder: the `out` of `survey(…, shard=)`.
        model: as the shards surveyed it; None opens it as they did.
        extra: the accumulators that the shards were given.
        checkpoint_seconds, show_progress: as for `survey`.

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
    surveyed = work.load(SURVEYED)
    if surveyed is None:
        raise UsageError(f"no shards at {folder}: survey each with --shard K/N --out {folder} first")
    tensors, notes = surveyed
    corpus = Corpus(
        contexts=tensors["contexts"],
        labels=tensors["labels"],
        lengths=tensors.get("lengths"),
        **notes["text"],
    )
    _refuse_missing(work, chunks_of(len(corpus.contexts), notes["batch"]), notes["shards"])
    if model is None:
        if notes["opening"] is None:
            raise UsageError(f"the model of {folder} was in memory only: give it, merge(folder, model)")
        model = opened(notes["opening"])
    plan = SurveyPlan.of(model, corpus, notes["batch"], notes["seed"], extra)
    return plan.run(folder, checkpoint_seconds, show_progress)


def _refuse_missing(work: Unfinished, chunks: Sequence[Chunk], shards: int) -> None:
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
