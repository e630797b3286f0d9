"""`theodolite survey`: a model measured on a text."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from theodolite.cli.options import (
    AsJson,
    Batch,
    Models,
    Opening,
    RunFolder,
    Text,
    default_folder,
    finish,
    say_where,
)
from theodolite.cli.screen import bars, one_line_errors, say_dimly, say_stopping, screen
from theodolite.errors import UsageError
from theodolite.system.allocator import keep_pages
from theodolite.system.choices import refuse_unread
from theodolite.system.files import check_target
from theodolite.system.interrupt import interruptible
from theodolite.system.run_folders import UNTRAINED, check_out
from theodolite.system.wording import visible

if TYPE_CHECKING:
    from theodolite.passes.run import Run

Baseline = Annotated[
    str | None,
    typer.Option(
        metavar=UNTRAINED,
        help="untrained: survey the same architecture with random weights (of --seed) as well, and show its numbers "
        "beside.",
    ),
]


@dataclass(frozen=True)
class Cluster:
    """Options of the Ray cluster whose workers run the model, if one does."""

    ray: Annotated[
        str | None,
        typer.Option(
            metavar="[ADDRESS]",
            help="Run on a Ray cluster at ADDRESS (auto for the one on this machine, or HOST:PORT); without an "
            "address, start a local one (needs theodolite[ray]).",
        ),
    ] = None
    actors: Annotated[
        int | None, typer.Option(help="Maximum number of --ray workers [default: all that fit].")
    ] = None

    def opening(self, given: Opening) -> Opening:
        """How the model is opened here: with workers, which have devices of their own, on the CPU."""
        if self.ray is None:
            refuse_unread("without --ray there are no workers", {"--actors": self.actors})
            return given
        devices = {"--device": given.device, "--device-map": given.device_map}
        refuse_unread("--ray: each worker has one device", devices)
        return replace(given, device="cpu")


def survey_command(
    *,
    models: Models = None,
    text: Text,
    out: RunFolder = None,
    as_json: AsJson = False,
    batch: Batch = None,
    baseline: Baseline = None,
    opening: Opening,
    cluster: Cluster,
) -> None:
    """Measure a model on a text: tables, arrays and a report. Of several models, also a page with curves over training.

    Example: theodolite survey gpt2 --corpus notes.txt --length 256 --out runs/gpt2
    """
    with one_line_errors(), interruptible(say_stopping) as stopped:
        keep_pages()
        if baseline not in (None, UNTRAINED):
            raise UsageError(f"there is no baseline {visible(baseline, 40)}: use --baseline {UNTRAINED}")
        opening = cluster.opening(opening)
        if cluster.ray is not None:
            refuse_unread("--ray: an untrained model is no checkpoint", {"--baseline": baseline})
        opening.check(*(models or ()))
        text.check()
        check_target(out)
        if models is None or len(models) < 2:
            check_out(out)
        survey_one = functools.partial(
            _survey_one, text=text, batch=batch, opening=opening, cluster=cluster, stopped=stopped
        )
        if models is None or len(models) < 2:
            run, page = survey_one(models[0] if models else None, out, baseline=baseline)
            finish(run, page, as_json)
        else:
            refuse_unread("several models: survey an untrained one by itself", {"--baseline": baseline})
            _survey_series(models, out or Path("runs") / "series", survey_one, as_json)


def _survey_series(
    models: list[str], out: Path, survey_one: Callable[..., tuple[Run, Path]], as_json: bool
) -> None:
    """Survey each model into a folder of its own below `out`, and write table and curves of them all."""
    from theodolite.comparison.series import names_of, write_series
    from theodolite.report.data import records

    runs = {}
    for model, name in names_of(models).items():
        runs[name], _ = survey_one(model, out / name, of=name)
    table, page = write_series(runs, out)
    if as_json:
        print(json.dumps({"models": records(table)}, ensure_ascii=False, allow_nan=False))
    else:
        shown = table[["name", "step", "rank", "entropy_share", "propagation", "sink_first"]].round(3)
        Console(soft_wrap=True).print(shown.to_string(index=False), highlight=False, markup=False)
    say_where(page, as_json)


def _survey_one(
    model: str | None,
    out: Path | None,
    *,
    text: Text,
    batch: int | None,
    opening: Opening,
    cluster: Cluster,
    stopped: Callable[[], bool],
    baseline: str | None = None,
    of: str = "",
) -> tuple[Run, Path]:
    """One model's run and its report; `of`: what the bars call it."""
    from theodolite.report.page import write_report

    opened = opening.open(model, text)
    corpus = text.read(opened, stopped)
    folder = out or default_folder(opened, corpus)
    with bars(stopped, of=of) as show:
        if cluster.ray is None:
            from theodolite.passes.survey import survey

            run = survey(opened, corpus, folder, batch=batch, seed=text.seed, show_progress=show)
        else:
            from theodolite.passes.ray_survey import survey_on_ray

            run = survey_on_ray(
                opened,
                corpus,
                folder,
                address=cluster.ray,
                actors=cluster.actors,
                batch=batch,
                seed=text.seed,
                show_progress=show,
                say=say_dimly,
            )
    if baseline is not None:
        from theodolite.models.open import untrained

        with bars(stopped, of=baseline) as show:
            beside, model_beside = folder / UNTRAINED, untrained(opened, text.seed)
            survey(model_beside, corpus, beside, batch=batch, seed=text.seed, show_progress=show)
    with screen.status("writing the report"):
        return run, write_report(run, folder / "report")
