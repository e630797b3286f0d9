"""`theodolite survey`, `merge`, `spectra` and `trace`: what makes run folders. Nothing heavy is imported."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from theodolite.cli import options
from theodolite.cli.options import option
from theodolite.cli.screen import bars, print_json, say_dimly, stoppable
from theodolite.errors import UsageError
from theodolite.system.choices import refuse_unread
from theodolite.system.files import check_target
from theodolite.system.run_folders import check_out, is_run
from theodolite.system.wording import names_of, visible

if TYPE_CHECKING:
    from theodolite.corpus.corpus import Corpus
    from theodolite.models import OpenModel
    from theodolite.passes.run import Run


def survey_command(
    *,
    models: options.Models = None,
    text: options.PairedText,
    out: options.RunFolder = None,
    as_json: options.AsJson = False,
    batch: options.Batch = None,
    shard: str | None = option(
        "Read only the K-th of N parts of the text, in a process of its own; `theodolite merge FOLDER` makes the run "
        "when all N, with the same --out FOLDER, are done.",
        metavar="K/N",
    ),
    stream: options.Stream = False,
    layers: options.Layers = None,
    opening: options.Opening,
) -> None:
    """Measure a model on a text: tables, arrays and a report. Of several models, also a page with curves over training.

    Example: theodolite survey gpt2 --corpus notes.txt --length 256 --out runs/gpt2
    """
    with stoppable() as stopped:
        names: list[Any] = list(models or []) or [None]  # None: the embedded model
        if len(names) > 1:
            refuse_unread("several models: survey one in shards by itself", {"--shard": shard})
        if stream:
            refuse_unread("--stream: one process reads the files, for all of the text", {"--shard": shard})
        if shard is not None:
            refuse_unread("--shard: `theodolite merge` makes the report, of all layers", {"--layers": layers})
        part, chosen = None if shard is None else shard_of(shard), options.numbers_of(layers, "--layers")
        opening.check(*names)
        text.check()
        if len(names) > 1:
            check_target(out)
        else:
            check_out(out)

        from theodolite.passes.survey import survey
        from theodolite.system.processor import keep_pages

        if not stream:  # which is for those who have no memory to spare
            keep_pages()

        def survey_one(model: str | None, out: Path | None, of: str = "") -> Run | None:
            """Survey one model, called `of` in the progress bars; None for a shard."""
            corpus = opening.read_first(model, text, stopped, batch)
            opened = opening.open_streamed(model, stopped) if stream else opening.open(model, text)
            opened = opened.only(chosen)
            corpus = corpus or text.read(opened, stopped)
            folder = out or options.default_folder(opened, corpus)
            how: dict[str, Any] = {"batch": batch, "seed": text.seed}
            with bars(stopped, of=of) as show:
                if part is None:
                    return survey(opened, corpus, folder, show_progress=show, **how)
                survey(opened, corpus, folder, shard=part, show_progress=show, **how)
            if is_run(folder):
                say_dimly(f"{folder} is finished: nothing is left to read or to merge")
            else:
                say_dimly(f"shard {shard} is read; when all are: theodolite merge {folder}")
            return None

        if len(names) > 1:
            _survey_series(names, out or Path("runs") / "series", survey_one, as_json)
        elif run := survey_one(names[0], out):
            options.finish(run, run.folder, as_json)


def shard_of(given: str) -> tuple[int, int]:
    """Parse K/N as two numbers; `UsageError` where it is something else."""
    number, slash, count = given.partition("/")
    if not (slash and number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise UsageError(f"--shard {visible(given, 40)}: give K/N, such as 1/8 to 8/8")
    return int(number), int(count)


def _survey_series(models: list[str], out: Path, survey_one: Callable[..., Any], as_json: bool) -> None:
    """Survey each model into a folder of its own below `out`, and write table and curves of them all."""
    from theodolite.comparison.page import write_series
    from theodolite.report.data import records

    runs: dict[str, Run] = {}
    for model, name in zip(models, names_of(models), strict=True):
        runs[name] = survey_one(model, out / name, name)
        options.written_report(runs[name], out / name)
    table, page = write_series(runs, out)
    if as_json:
        print_json({"models": records(table)})
    else:
        shown = table[["name", "step", "rank", "entropy_share", "propagation", "sink_first"]].round(3)
        Console(soft_wrap=True).print(shown.to_string(index=False), highlight=False, markup=False)
    options.say_where(page, as_json)


def merge_command(
    folder: Annotated[Path, typer.Argument(help="The --out of `theodolite survey … --shard K/N`.")],
    as_json: options.AsJson = False,
) -> None:
    """Make the run and its report of a survey in shards, with the same tables as one process would.

    The model is opened as the shards opened it; what is left to do does not grow with the text.

    Example: theodolite merge runs/gpt2
    """
    with stoppable() as stopped:
        check_out(folder)

        from theodolite.models.stored.loading import hide_progress_bars
        from theodolite.passes.survey import merge
        from theodolite.system.processor import keep_pages

        keep_pages()
        hide_progress_bars()
        with bars(stopped) as show:
            run = merge(folder, show_progress=show)
        options.finish(run, folder, as_json)


def spectra_command(
    *,
    model: options.Model = None,
    out: Path | None = option("Also write a run folder with a report.", None, "--out", "-o"),
    as_json: options.AsJson = False,
    opening: options.Opening,
) -> None:
    """Compute query-key spectra of every head from the weights alone: no text, and the model need not fit in memory.

    Weights are read block by block on the CPU; with --device or --device-map the whole model is opened there.

    Example: theodolite spectra gpt2 --json
    """
    with stoppable(saves=False) as stopped:
        opening.check(model)
        check_out(out)

        from theodolite.passes.survey import spectra

        if opening.device is None and opening.device_map is None:
            opened = opening.open_streamed(model, stopped, device="cpu")
        else:
            opened = opening.open(model)
        with bars(stopped) as show:
            run = spectra(opened, out, show_progress=show)
        options.finish(run, out, as_json)


def trace_command(
    *,
    model: options.Model = None,
    text: options.PairedText,
    local_sinks: bool = option("Also local sinks, which dominate a span only.", False, "--local-sinks"),
    generate: int | None = option("Tokens that the model writes behind every context, and that are traced."),
    layers: options.Layers = None,
    out: Path | None = option("Run folder to write [default: runs/MODEL-CORPUS-sinks].", None, "--out", "-o"),
    as_json: options.AsJson = False,
    batch: options.Batch = None,
    opening: options.Opening,
) -> None:
    """Trace every attention sink of a text: the heads it captures, the tag written there, how far the tag persists.

    With --generate, contexts are of the text and of what the model writes on: attention as it is while it writes.

    Example: theodolite trace gpt2 --corpus notes.txt --length 256 --out runs/gpt2-sinks
    """
    with stoppable() as stopped:
        opening.check(model)
        text.check()
        check_out(out)
        chosen = options.numbers_of(layers, "--layers")

        from theodolite.corpus.sampling import LEAST_LENGTH
        from theodolite.models import continued
        from theodolite.sinks.trace import trace_sinks
        from theodolite.system.processor import keep_pages

        keep_pages()

        def check(known: OpenModel, _: Corpus | None) -> None:
            if generate is not None:
                known.check_writes(text.length or LEAST_LENGTH, generate)

        corpus = opening.read_first(model, text if generate is None else None, stopped, batch, check)
        opened = opening.open(model, text)
        opened = opened.only(chosen)
        if generate is not None:
            text = replace(text, length=text.length_for(opened, generate))
        corpus = corpus or text.read(opened, stopped)
        kind = ("-local-sinks" if local_sinks else "-sinks") + ("" if generate is None else "-written")
        folder = out or options.default_folder(opened, corpus, kind)
        with bars(stopped) as show:
            if generate is not None:
                corpus = continued(opened, corpus, generate, batch, functools.partial(show, "writing on"))
            run = trace_sinks(
                opened, corpus, folder, local_sinks=local_sinks, batch=batch, show_progress=show
            )
        options.finish_trace(run, folder, as_json)
