"""The command line: parsing, and which function does the work. Nothing is measured here.

Heavy imports happen inside the commands, so that `theodolite --help` answers at once.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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
    short_name,
)
from theodolite.comparing_cli import compare_command
from theodolite.errors import UsageError
from theodolite.evaluating_cli import evaluate_command
from theodolite.interrupt import interruptible
from theodolite.pruning_cli import prune_command
from theodolite.screen import one_line_errors, progress, say_stopping, screen, show_tracebacks
from theodolite.training_cli import training

if TYPE_CHECKING:
    from theodolite.models import OpenModel
    from theodolite.run import Run

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
    out: Annotated[Path | None, typer.Option(help="Also write a run folder with a report.")] = None,
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
    out: RunFolder = None,
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
    out: Annotated[Path, typer.Option(help="JSON file to write.")] = Path("mask.json"),
    least_share: Annotated[
        float,
        typer.Option(
            help="Share of contexts (sinks, massive activations) or tokens (outliers) below which there is no rule."
        ),
    ] = 0.01,
) -> None:
    """Write the sinks and outliers of a run as rules: what to leave out of autoencoders, quantisation, pruning.

    Example: theodolite mask runs/gpt2 --out gpt2-mask.json
    """
    with one_line_errors():
        from theodolite.mask import Mask
        from theodolite.run import Run

        mask = Mask.of(Run.load(run), least_share)
        mask.save(out)
        Console(soft_wrap=True).print(f"{len(mask.rules)} rules: {out}", highlight=False)


app.command("prune")(prune_command)
app.command("compare")(compare_command)
app.command("evaluate")(evaluate_command)


@app.command("report")
def report_command(
    run: Annotated[Path, typer.Argument(help="A run folder.", show_default=False)],
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
            finish_trace(loaded, run, False)
            return
        finish(loaded, write_report(loaded, run / "report"), False)


@app.command("reproduce")
def reproduce_command(
    name: Annotated[
        str | None,
        typer.Argument(
            help="geometry, localization, geometry/table1, …; several with commas. Without a name: the list."
        ),
    ] = None,
    model: Model = None,
    corpus: CorpusSpec = None,
    other: Annotated[
        str | None, typer.Option(help="Second text, for geometry/table2 [default: random tokens].")
    ] = None,
    prompt: Annotated[
        str | None,
        typer.Option(
            help="Text for geometry/figure6 and figure30 [default: random tokens, twice], and for sinks/figure2 and "
            "figure7 to figure11 [default: one that comes with each]."
        ),
    ] = None,
    layer: Annotated[
        int | None,
        typer.Option(
            help="Block of the head shown there, or disturbed by sinks/causal, from 0 [default: the heads found; of "
            "sinks/…, the one that tags most]."
        ),
    ] = None,
    head: Annotated[int | None, typer.Option(help="The head in that block, from 0.")] = None,
    length: Length = None,
    contexts: Contexts = DEFAULT_CONTEXTS,
    seed: Seed = 0,
    out: RunFolder = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the results as JSON and nothing else.")
    ] = False,
    text_column: TextColumnName = "text",
    dtype: Dtype = "auto",
    device: Device = None,
    device_map: DeviceMap = None,
    revision: Revision = None,
) -> None:
    """Make published tables and figures again for a model, with a verdict on each claim.

    The survey is made, or reused where it is finished; the pages go to its folder, under reproduce/. Figures of
    theory (localization/figure1 to figure5, and monitor) need no model; their pages go to runs/localization. Figures
    of one head on a prompt (sinks/figure2, figure7 to figure11) need no survey, and make none. Those of
    trainings with LocAteR (figure6 to figure12) take the folder of `theodolite train locater` as MODEL.

    Example: theodolite reproduce geometry gpt2 --corpus notes.txt --out runs/gpt2
    """
    with one_line_errors(), interruptible(say_stopping) as stopped:
        from theodolite.experiments import Study, find
        from theodolite.experiments.command import list_as_json, list_experiments, run_experiments
        from theodolite.experiments.folders import made_by, trainings_at
        from theodolite.experiments.registry import check_options, on_prompts, stand_alone
        from theodolite.experiments.study import Focus, model_run, theory_run
        from theodolite.report.page import write_report
        from theodolite.surveyor import survey

        if name is None:
            print(json.dumps(list_as_json(), ensure_ascii=False)) if as_json else list_experiments(Console())
            return
        experiments, focus = find(name), Focus(prompt, layer, head)
        options = {"other": other, "prompt": prompt, "layer": layer, "head": head}
        check_options(experiments, [option for option, value in options.items() if value is not None])

        def say(line: str) -> None:
            if stopped():
                raise KeyboardInterrupt
            screen.print(line, style="dim", markup=False, highlight=False)

        unread: dict[str, object] = {"--corpus": corpus, "--length": length, "--device": device}
        unread |= {"--device-map": device_map, "--revision": revision}
        trainings, command = model and trainings_at(model), made_by(experiments)
        if model is not None and trainings:
            refuse_unread(f"{name} of a folder of trainings reads no other text or model", unread)
            study, pages = Study(trainings.run(Path(model)), say=say), out or Path(model) / "reproduce"
        elif command is not None:
            raise UsageError(f"{name} is read from trainings: give the folder that `{command}` wrote")
        elif stand_alone(experiments):
            refuse_unread(f"{name} reads no model and no text", {"MODEL": model} | unread)
            pages = out or Path("runs") / experiments[0].name.partition("/")[0]
            study = Study(theory_run(seed), say=say)
        elif on_prompts(experiments):
            refuse_unread(f"{name} reads its prompt and no text", {"--corpus": corpus, "--length": length})
            opened = opened_model(model, dtype, device, device_map, revision)
            pages = (out or Path("runs") / f"{short_name(opened.id)}-prompts") / "reproduce"
            study = Study(model_run(opened, seed), opened, focus=focus, say=say)
        else:
            opened = opened_model(model, dtype, device, device_map, revision)
            read = read_corpus(opened, corpus, length, contexts, seed, text_column)
            second = other and read_corpus(opened, other, read.contexts.shape[1], contexts, seed, text_column)
            folder = out or default_folder(opened, read)
            pages = folder / "reproduce"

            def surveyed(a_model: OpenModel, text: Any, place: Path | None) -> Run:
                with progress(f"surveying {short_name(text.name)}", "contexts", stopped) as show:
                    return survey(a_model, text, place, seed=seed, show_progress=show)

            run = surveyed(opened, read, folder)
            if not (folder / "report" / "index.html").is_file():
                write_report(run, folder / "report")
            study = Study(
                run, opened, read, second or None, folder=pages, survey=surveyed, focus=focus, say=say
            )
        page = run_experiments(
            experiments, study, pages, screen if as_json else Console(), as_json=as_json, stopped=stopped
        )
        (screen if as_json else Console(soft_wrap=True)).print(f"Page: {page}", highlight=False)


def main() -> None:
    """The entry point of the `theodolite` command."""
    keep_pages()
    app(prog_name="theodolite")
