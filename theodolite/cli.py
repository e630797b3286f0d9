"""The command line: parsing, and which function does the work. Nothing is measured here.

Heavy imports happen inside the commands, so that `theodolite --help` answers at once.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from theodolite import __version__
from theodolite.allocator import give_back_pages, keep_pages
from theodolite.arguments import (
    DEFAULT_CONTEXTS,
    Actors,
    AsJson,
    BareRay,
    Batch,
    Contexts,
    CorpusSpec,
    Device,
    DeviceMap,
    Dtype,
    Length,
    Model,
    Ray,
    Revision,
    RunFolder,
    Seed,
    TextColumnName,
    default_folder,
    finish,
    finish_trace,
    opened_model,
    opened_weights,
    read_corpus,
    refuse_unread,
)
from theodolite.comparing_cli import compare_command
from theodolite.errors import UsageError
from theodolite.evaluating_cli import evaluate_command
from theodolite.exploring_cli import explore_command
from theodolite.interrupt import interruptible
from theodolite.pruning_cli import prune_command
from theodolite.reproducing_cli import reproduce_command
from theodolite.screen import one_line_errors, progress, say_stopping, screen, show_tracebacks
from theodolite.training_cli import training

app = typer.Typer(
    help="Survey the geometry of attention: where position and context live, which heads localize or collapse, "
    "which tokens are sinks.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # else "[default: …]" would be taken for markup, and vanish
)
app.add_typer(training, name="train")


def _print_version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


@app.callback()
def _options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    show_tracebacks(debug)
    # A survey must not draw on the network without being asked for a hub name, nor chat on the way.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@app.command("survey", cls=BareRay)
def survey_command(
    model: Model = None,
    corpus: CorpusSpec = None,
    length: Length = None,
    contexts: Contexts = DEFAULT_CONTEXTS,
    seed: Seed = 0,
    out: RunFolder = None,
    as_json: AsJson = False,
    batch: Batch = None,
    text_column: TextColumnName = "text",
    dtype: Dtype = "auto",
    device: Device = None,
    device_map: DeviceMap = None,
    revision: Revision = None,
    ray: Ray = None,
    actors: Actors = None,
) -> None:
    """Measure a model on a text: tables, arrays and a report.

    Example: theodolite survey gpt2 --corpus notes.txt --length 256 --out runs/gpt2
    """
    with one_line_errors(), interruptible(say_stopping) as stopped:
        from theodolite.distribute import survey_on_ray
        from theodolite.report.page import write_report
        from theodolite.surveyor import survey

        if ray is None:
            refuse_unread("without --ray there are no workers", {"--actors": actors})
        else:
            refuse_unread(
                "--ray: each worker has one device", {"--device": device, "--device-map": device_map}
            )
        opened = opened_model(model, dtype, device if ray is None else "cpu", device_map, revision)
        read = read_corpus(opened, corpus, length, contexts, seed, text_column)
        folder = out or default_folder(opened, read)
        with progress("surveying", "contexts", stopped) as show:
            if ray is None:
                run = survey(opened, read, folder, batch=batch, seed=seed, show_progress=show)
            else:
                run = survey_on_ray(
                    opened,
                    read,
                    folder,
                    address=ray,
                    actors=actors,
                    batch=batch,
                    seed=seed,
                    show_progress=show,
                    say=lambda line: screen.print(line, style="dim", markup=False, highlight=False),
                )
        page = write_report(run, folder / "report")
        finish(run, page, as_json)


@app.command("spectra")
def spectra_command(
    model: Model = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Also write a run folder with a report.")
    ] = None,
    as_json: AsJson = False,
    dtype: Dtype = "auto",
    device: Device = None,
    device_map: DeviceMap = None,
    revision: Revision = None,
) -> None:
    """Query-key spectra of every head, from the weights alone: no text, and no model that fits into memory.

    The weights are read a layer at a time, on the CPU; with --device or --device-map the whole model is opened there.

    Example: theodolite spectra gpt2 --json
    """
    with one_line_errors(), interruptible(say_stopping) as stopped:
        from theodolite.report.page import write_report
        from theodolite.surveyor import spectra

        give_back_pages()
        if device is None and device_map is None:
            opened = opened_weights(model, dtype, revision, stopped)
        else:
            opened = opened_model(model, dtype, device, device_map, revision)
        with progress("reading weights", "layers", stopped) as show:
            run = spectra(opened, out, show_progress=show)
        page = None if out is None else write_report(run, out / "report")
        finish(run, page, as_json)


@app.command("trace")
def trace_command(
    model: Model = None,
    corpus: CorpusSpec = None,
    length: Length = None,
    contexts: Contexts = DEFAULT_CONTEXTS,
    stretches: Annotated[
        bool, typer.Option("--stretches", help="Also sinks that catch a part of a context only.")
    ] = False,
    seed: Seed = 0,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Run folder to write [default: runs/MODEL-CORPUS-sinks]."),
    ] = None,
    as_json: AsJson = False,
    batch: Batch = None,
    text_column: TextColumnName = "text",
    dtype: Dtype = "auto",
    device: Device = None,
    device_map: DeviceMap = None,
    revision: Revision = None,
) -> None:
    """Trace every attention sink of a text: what it catches, the tag that it writes, where the tag lives on.

    Example: theodolite trace gpt2 --corpus notes.txt --length 256 --out runs/gpt2-sinks
    """
    with one_line_errors(), interruptible(say_stopping) as stopped:
        from theodolite.tracer import trace_sinks

        opened = opened_model(model, dtype, device, device_map, revision)
        read = read_corpus(opened, corpus, length, contexts, seed, text_column)
        folder = out or default_folder(opened, read, "-stretches" if stretches else "-sinks")
        with progress("tracing sinks", "contexts", stopped) as show:
            run = trace_sinks(opened, read, folder, stretches=stretches, batch=batch, show_progress=show)
        finish_trace(run, folder, as_json)


@app.command("mask")
def mask_command(
    run: Annotated[Path, typer.Argument(help="Folder of a survey or a trace.", show_default=False)],
    out: Annotated[Path, typer.Option("--out", "-o", help="JSON file to write.")] = Path("mask.json"),
    least_share: Annotated[
        float,
        typer.Option(
            help="Share of contexts (sinks, massive activations) or tokens (outliers) below which there is no rule."
        ),
    ] = 0.01,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the rules, as they are in the file, and nothing else.")
    ] = False,
) -> None:
    """Write the sinks and outliers of a run as rules: what to leave out of autoencoders, quantisation, pruning.

    Example: theodolite mask runs/gpt2 --out gpt2-mask.json
    """
    with one_line_errors():
        from theodolite.mask import Mask
        from theodolite.run import Run

        mask = Mask.of(Run.load(run), least_share)
        mask.save(out)
        if as_json:
            print(out.read_text(encoding="utf-8"), end="")
        (screen if as_json else Console(soft_wrap=True)).print(
            f"{len(mask.rules)} rules: {out}", highlight=False
        )


app.command("prune")(prune_command)
app.command("compare")(compare_command)
app.command("evaluate")(evaluate_command)
app.command("explore")(explore_command)
app.command("reproduce")(reproduce_command)


@app.command("report")
def report_command(
    run: Annotated[Path, typer.Argument(help="A run folder.", show_default=False)],
    as_json: AsJson = False,
) -> None:
    """Write the report of a run folder again.

    Example: theodolite report runs/gpt2
    """
    with one_line_errors():
        from theodolite.report.page import write_report
        from theodolite.run import Run

        loaded = Run.load(run)
        if loaded.is_outputs:
            raise UsageError(
                f"{run} holds outputs of heads: `theodolite compare` reads them, with the survey beside it"
            )
        if loaded.is_trace:
            finish_trace(loaded, run, as_json)
            return
        finish(loaded, write_report(loaded, run / "report"), as_json)


@app.command("explain")
def explain_command(
    what: Annotated[
        str | None,
        typer.Argument(
            help="A name from the list or a word of one, or a message. Without it: the list.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """What an error means, and what to do.

    Example: theodolite explain run-folders
    """
    with one_line_errors():
        from rich.markdown import Markdown

        from theodolite.explain import section_of, sections

        known = sections()
        if what is None:
            print("\n".join(known))
            return
        word = what.strip().lower()
        named = next((known[name] for name in known if word and word in name), None)
        section = section_of(what) or named
        if section is None:
            raise UsageError(f"nothing explains {what!r}: give one of {', '.join(known)}")
        Console().print(Markdown(f"## {section.title}\n{section.text}"))


def main() -> None:
    """The entry point of the `theodolite` command."""
    keep_pages()
    app(prog_name="theodolite")
