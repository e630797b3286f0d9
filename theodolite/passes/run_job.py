"""Jobs whose result is a run folder: a survey, spectra, a trace, head outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from theodolite.errors import UsageError
from theodolite.jobs.job import CHECKPOINT_SECONDS, Job, Stage, States
from theodolite.jobs.unfinished import Unfinished
from theodolite.passes.run import SCHEMA_VERSION, Run
from theodolite.system.progress import ShowStage
from theodolite.system.run_folders import check_out, differences

TABLES_TITLE = "making tables"
"""What is said after the stages, while the tables are made."""


def run_into(
    stages: Sequence[Stage],
    tables: Callable[[States], Run],
    out: str | Path | None,
    fingerprint: dict[str, Any],
    *,
    corpus: dict[str, Any] | None = None,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
    show_progress: ShowStage = lambda what, done, total: None,
) -> Run:
    """Run all stages and make the tables; with a run folder `out`, resume what an interrupted call left there.

    Args:
        stages: in order.
        tables: the run from the states of all stages.
        out: the run folder to write; None keeps the run in memory.
        fingerprint: what decides every byte of the result.
        corpus: what provenance says of the corpus, to say what differs from what `out` holds.
        checkpoint_seconds: how often progress is saved.
        show_progress: it may raise to stop; all that is whole is saved then.

    Raises:
        UsageError: `out` holds something else.
        WorkError: hidden states became NaN or infinite, or the disk refused.
    """
    work = Unfinished(out, fingerprint, corpus)
    with work.claimed():
        finished = finished_run(work)
        if finished is not None:
            return finished
        job = Job(stages, work, checkpoint_seconds, show_progress)
        states = job.run()
        try:
            show_progress(TABLES_TITLE, 0, 1)
            run = tables(states)
            show_progress(TABLES_TITLE, 1, 1)
        except BaseException:
            job.save()
            raise
        if work.out is not None:
            run = run.save(work.out)
        work.remove()
        return run


def finished_run(work: Unfinished) -> Run | None:
    """The run that the work becomes, if it is there already.

    Raises:
        UsageError: something else has its name: another run, one of an older theodolite, or no run.
    """
    out = work.out
    if out is None or not out.exists():
        return None
    if out.is_dir() and not any(out.iterdir()):
        out.rmdir()
        return None
    check_out(out)
    run = Run.load(out)
    if run.provenance["schema_version"] != SCHEMA_VERSION:
        raise UsageError(
            f"{out} holds a run of an older theodolite (schema {run.provenance['schema_version']}, now "
            f"{SCHEMA_VERSION}): choose another --out, or remove it to survey again"
        )
    there = run.provenance.get("fingerprint") or {}
    if there != work.fingerprint:
        differs = differences(there, work.fingerprint, run.provenance.get("corpus"), work.corpus)
        raise UsageError(
            f"{out} holds a run of another model, corpus or options ({differs}): choose another --out or remove it"
        )
    work.remove()  # left when the process was killed as it finished
    return run
