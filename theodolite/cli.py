"""The command line: parsing, progress bars and short tables. Nothing is measured here.

Heavy imports happen inside the commands, so that `theodolite --help` answers at once.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from theodolite import __version__
from theodolite.errors import TheodoliteError, UsageError

if TYPE_CHECKING:
    from theodolite.models import OpenModel
    from theodolite.run import Run

DEFAULT_CONTEXTS = 256
DEFAULT_LENGTH = 512
"""Context length where the model has positions for more, and where it sets no limit."""

app = typer.Typer(
    help="Survey the geometry of attention: where position and context live, which heads localize or collapse, "
    "which tokens are sinks.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # else "[default: …]" would be taken for markup, and vanish
)
_screen = Console(stderr=True)
_debug = False

Model = Annotated[
    str | None,
    typer.Argument(
        help="Folder or hub name of a checkpoint; the embedded model if left out.", show_default=False
    ),
]
Length = Annotated[int | None, typer.Option(help="Tokens a context [default: the model's, at most 512].")]
Seed = Annotated[int, typer.Option(help="Of every random choice.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the tables as JSON and nothing else.")]
Dtype = Annotated[
    str, typer.Option(help="auto (the checkpoint's own), float32, bfloat16, float16 or float64.")
]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, … [default: cuda if there is one].")]
DeviceMap = Annotated[
    str | None, typer.Option(help="auto spreads the model over devices (needs theodolite[accelerate]).")
]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit on the hub.")]


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
    global _debug
    _debug = debug
    # A survey must not draw on the network without being asked for a hub name, nor chat on the way.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@app.command("survey")
def survey_command(
    model: Model = None,
    corpus: Annotated[
        str | None,
        typer.Option(
            help="A file or folder of .txt .md .jsonl .parquet; docs, code or random; or hf:NAME[:CONFIG[:SPLIT]] "
            "[default: docs, the text inside every Python]."
        ),
    ] = None,
    length: Length = None,
    contexts: Annotated[int, typer.Option(help="Contexts to read at most.")] = DEFAULT_CONTEXTS,
    seed: Seed = 0,
    out: Annotated[
        Path | None, typer.Option(help="Run folder to write [default: runs/MODEL-CORPUS].")
    ] = None,
    as_json: AsJson = False,
    batch: Annotated[int | None, typer.Option(help="Contexts a forward pass [default: 4096 tokens].")] = None,
    text_column: Annotated[
        str, typer.Option(help="Column of .jsonl and .parquet that holds the text.")
    ] = "text",
    dtype: Dtype = "auto",
    device: Device = None,
    device_map: DeviceMap = None,
    revision: Revision = None,
) -> None:
    """Measure a model on a text: tables, arrays and a report.

    Example: theodolite survey gpt2 --corpus notes.txt --length 256 --out runs/gpt2
    """
    with _one_line_errors(), _interruptible() as stopped:
        from theodolite.report.page import write_report
        from theodolite.surveyor import survey

        opened = _open(model, dtype, device, device_map, revision)
        read = _read_corpus(opened, corpus, length, contexts, seed, text_column)
        folder = out or Path("runs") / f"{_short(opened.id)}-{_short(read.name)}"
        with _progress("surveying", "contexts", stopped) as show:
            run = survey(opened, read, folder, batch=batch, seed=seed, show_progress=show)
        page = write_report(run, folder / "report")
        _finish(run, page, as_json)


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
    """Query-key spectra of every head, from the weights alone: seconds, no text.

    Example: theodolite spectra gpt2 --json
    """
    with _one_line_errors(), _interruptible() as stopped:
        from theodolite.report.page import write_report
        from theodolite.surveyor import spectra

        opened = _open(model, dtype, device, device_map, revision)
        with _progress("reading weights", "layers", stopped) as show:
            run = spectra(opened, out, show_progress=show)
        page = None if out is None else write_report(run, out / "report")
        _finish(run, page, as_json)


@app.command("report")
def report_command(
    run: Annotated[Path, typer.Argument(help="A run folder.", show_default=False)],
) -> None:
    """Write the report of a run folder again.

    Example: theodolite report runs/gpt2
    """
    with _one_line_errors():
        from theodolite.report.page import write_report
        from theodolite.run import Run

        loaded = Run.load(run)
        _finish(loaded, write_report(loaded, run / "report"), False)


@app.command("train")
def train_command(
    out: Annotated[Path, typer.Option(help="Folder for the model and its tokenizer.")],
    steps: Annotated[
        int | None, typer.Option(help="Training steps [default: those of the embedded model].")
    ] = None,
    seed: Seed = 0,
    threads: Annotated[int, typer.Option(help="Processor cores to use.")] = 2,
) -> None:
    """Train the small embedded model again, on the text inside every Python.

    Example: theodolite train --out my-model --seed 0
    """
    with _one_line_errors():
        from dataclasses import replace

        from theodolite.train.tiny import TinyConfig, train_tiny

        config = TinyConfig(seed=seed)
        config = config if steps is None else replace(config, steps=steps)
        result = train_tiny(out, config=config, threads=threads, console=_screen)
        for source, loss in result.validation_loss.items():
            bigram = result.bigram_loss[source]
            print(f"{source}: validation loss {loss:.3f} nats a token (bigram model {bigram:.3f})")
        print(result.folder)


def _open(
    model: str | None, dtype: str, device: str | None, device_map: str | None, revision: str | None
) -> OpenModel:
    import transformers

    from theodolite.models import open_model

    transformers.utils.logging.disable_progress_bar()
    with _screen.status(f"opening {model or 'the embedded model'}"):
        return open_model(model, dtype=dtype, device=device, device_map=device_map, revision=revision)


def _read_corpus(
    model: OpenModel, spec: str | None, length: int | None, contexts: int, seed: int, text_column: str
) -> Any:
    from theodolite.corpus import make_corpus

    tokenizer: Any = model.tokenizer
    if tokenizer is None:
        raise UsageError(f"{model.id} has no tokenizer beside its weights: save one there to read a text")
    if seed < 0:
        raise UsageError(f"seed {seed} is negative: use --seed 0 or more")
    chosen = min(DEFAULT_LENGTH, model.longest or DEFAULT_LENGTH) if length is None else length
    with _screen.status("reading the text"):
        return make_corpus(spec, tokenizer, chosen, contexts, seed, text_column)


def _finish(run: Run, page: Path | None, as_json: bool) -> None:
    from theodolite.report.terminal import show_run, tables_as_json

    if as_json:
        print(json.dumps(tables_as_json(run), ensure_ascii=False, allow_nan=False))
    else:
        show_run(run, Console())
    if page is not None:
        (_screen if as_json else Console(soft_wrap=True)).print(f"Report: {page}", highlight=False)


@contextmanager
def _one_line_errors() -> Iterator[None]:
    try:
        yield
    except TheodoliteError as error:
        if _debug:
            raise
        _say_error(str(error))
        raise typer.Exit(error.exit_status) from None
    except KeyboardInterrupt:
        _say_error("interrupted; run the same command again to go on")
        raise typer.Exit(130) from None
    except MemoryError:
        _say_error("out of memory: use a smaller --batch or --length")
        raise typer.Exit(1) from None
    except Exception as error:
        if _debug:
            raise
        first = (str(error).strip().splitlines() or [""])[0]
        _say_error(f"{type(error).__name__}: {first} (run theodolite --debug … for the traceback)")
        raise typer.Exit(1) from None


def _say_error(message: str) -> None:
    print(f"error: {' '.join(message.split())}", file=sys.stderr)


@contextmanager
def _interruptible() -> Iterator[Callable[[], bool]]:
    """Let the first Ctrl-C finish the batch and save progress; a second one stops at once."""
    pressed = False

    def note(*_: Any) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True
        _screen.print("stopping after this batch; press Ctrl-C again to stop at once")

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _progress(title: str, unit: str, stopped: Callable[[], bool]) -> Iterator[Callable[[int, int], None]]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
    )
    bar = Progress(*columns, console=_screen)
    task = bar.add_task(title, rate="", total=None)
    begun: list[tuple[float, int]] = []  # when the work began, and how much was done before

    def show(done: int, total: int) -> None:
        if stopped():
            raise KeyboardInterrupt
        if not begun:
            bar.start()  # not before: what is wrong with the call is said without a bar
            begun.append((time.monotonic(), done))
        started, before = begun[0]
        seconds = time.monotonic() - started
        rate = f"{(done - before) / seconds:.1f} {unit}/s" if done > before and seconds > 0 else unit
        bar.update(task, completed=done, total=total, rate=rate)

    try:
        yield show
    finally:
        if begun:
            bar.stop()


def _short(name: str) -> str:
    return Path(name).name or name


def main() -> None:
    """The entry point of the `theodolite` command."""
    app(prog_name="theodolite")
