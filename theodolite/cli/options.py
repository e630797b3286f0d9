"""What the commands share: options, opening models, reading texts, showing results. Nothing is measured here.

Heavy imports happen inside the functions, so that `theodolite --help` answers at once.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperCommand

from theodolite.cli.screen import progress, screen
from theodolite.errors import UsageError
from theodolite.system import embedded

if TYPE_CHECKING:
    from theodolite.corpus.corpus import Corpus
    from theodolite.models import OpenModel
    from theodolite.passes.run import Run

DEFAULT_CONTEXTS = 256
DEFAULT_LENGTH = 512
"""Context length where the model has positions for more, and where it sets no limit."""

Model = Annotated[
    str | None,
    typer.Argument(
        help="Folder or hub name of a checkpoint (NAME or NAME@REVISION); the embedded model if left out.",
        show_default=False,
    ),
]
CorpusSpec = Annotated[
    str | None,
    typer.Option(
        help="A file or folder of .txt .md .jsonl .parquet; docs, code, random, addition or few-shot; or "
        "hf:NAME[:CONFIG[:SPLIT]] [default: docs, the text inside every Python]."
    ),
]
Contexts = Annotated[int, typer.Option(help="Maximum number of contexts.")]
Batch = Annotated[int | None, typer.Option(help="Contexts per forward pass [default: 4096 tokens].")]
RunFolder = Annotated[
    Path | None, typer.Option("--out", "-o", help="Run folder to write [default: runs/MODEL-CORPUS].")
]
TextColumnName = Annotated[str, typer.Option(help="Text column of .jsonl and .parquet files.")]
Length = Annotated[
    int | None, typer.Option(help="Tokens per context [default: the model's maximum, up to 512].")
]
Seed = Annotated[int, typer.Option(help="Random seed.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print only the tables, as JSON.")]
Dtype = Annotated[str, typer.Option(help="auto (the checkpoint's), float32, bfloat16, float16 or float64.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, … [default: cuda if there is one].")]
DeviceMap = Annotated[
    str | None, typer.Option(help="auto spreads the model over devices (needs theodolite[accelerate]).")
]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit on the hub.")]
Ray = Annotated[
    str | None,
    typer.Option(
        metavar="[ADDRESS]",
        help="Run on a Ray cluster at ADDRESS (auto for the one on this machine, or HOST:PORT); without an address, "
        "start a local one (needs theodolite[ray]).",
    ),
]
Actors = Annotated[int | None, typer.Option(help="Maximum number of --ray workers [default: all that fit].")]


class RayCommand(TyperCommand):
    """A command whose `--ray` takes an optional address, which Typer does not support."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Turn a `--ray` without an address into `--ray=local`."""
        following = [*args, "--"][1:]
        bare = [
            word == "--ray" and after.startswith("-") for word, after in zip(args, following, strict=True)
        ]
        return super().parse_args(
            ctx, ["--ray=local" if alone else word for word, alone in zip(args, bare, strict=True)]
        )


def opened_model(
    model: str | None, dtype: str, device: str | None, device_map: str | None, revision: str | None
) -> OpenModel:
    """Open the model, saying so on the screen; the embedded one where none is named.

    `embedded` names it too, where no file is called so.

    A hub name may carry its revision, NAME@REVISION, so that several models can each have one.
    """
    import transformers

    from theodolite.models import open_model

    transformers.utils.logging.disable_progress_bar()
    model, revision = _without_revision(model, revision)
    with screen.status(f"opening {model or 'the embedded model'}"):
        return open_model(model, dtype=dtype, device=device, device_map=device_map, revision=revision)


def _without_revision(model: str | None, revision: str | None) -> tuple[str | None, str | None]:
    if model is None or Path(model).exists():
        return model, revision
    name, at, name_revision = model.partition("@")
    if at and revision is not None:
        raise UsageError(f"{model} has a revision, and so has --revision: give one")
    return None if name == embedded.ARGUMENT else name, name_revision or revision


def opened_weights(
    model: str | None, dtype: str, revision: str | None, stopped: Callable[[], bool]
) -> OpenModel:
    """Open the model for its weights only, with a bar while its files are hashed."""
    import transformers

    from theodolite.models import open_weights

    transformers.utils.logging.disable_progress_bar()
    model, revision = _without_revision(model, revision)
    megabytes = 1 << 20
    with progress("hashing weights", "MB", stopped) as show:
        return open_weights(
            model,
            dtype=dtype,
            revision=revision,
            say=lambda line: screen.print(line, style="dim", markup=False, highlight=False),
            show_progress=lambda done, total: show(done // megabytes, total // megabytes),
        )


def read_corpus(
    model: OpenModel, spec: str | None, length: int | None, contexts: int, seed: int, text_column: str
) -> Corpus:
    """Read the text for this model, saying so on the screen.

    Raises:
        UsageError: the model has no tokenizer, or the text gives no context.
    """
    from theodolite.corpus.named import make_corpus

    tokenizer: Any = model.tokenizer
    if tokenizer is None:
        raise UsageError(f"{model.id} has no tokenizer beside its weights: save one there to read a text")
    if seed < 0:
        raise UsageError(f"seed {seed} is negative: use --seed 0 or more")
    chosen = min(DEFAULT_LENGTH, model.longest or DEFAULT_LENGTH) if length is None else length
    with screen.status("reading the text"):
        return make_corpus(spec, tokenizer, chosen, contexts, seed, text_column)


@dataclass(frozen=True)
class Text:
    """The text options of a command that reads the text for several models."""

    corpus: str | None
    length: int | None
    contexts: int
    seed: int
    column: str

    def read(self, model: OpenModel) -> Corpus:
        """As `read_corpus`."""
        return read_corpus(model, self.corpus, self.length, self.contexts, self.seed, self.column)


def finish(run: Run, page: Path | None, as_json: bool) -> None:
    """Show a survey's tables, or print them as JSON, and say where its report is."""
    from theodolite.report.terminal import show_run

    if as_json:
        _print_tables(run)
    else:
        show_run(run, Console())
    if page is not None:
        say_where(page, as_json)


def finish_trace(run: Run, folder: Path, as_json: bool) -> None:
    """Write and show the page of a trace, or print its tables as JSON, and say where it is."""
    from theodolite.papers.catch_tag_release.traced_sinks import TRACE, traced_outcome
    from theodolite.papers.command import show_outcome
    from theodolite.report.outcome_page import write_outcome

    outcome = traced_outcome(run)
    page = write_outcome(TRACE, outcome, run, folder / "report")
    if as_json:
        _print_tables(run)
    else:
        show_outcome(TRACE, outcome, Console(soft_wrap=True))
    say_where(page, as_json)


def _print_tables(run: Run) -> None:
    from theodolite.report.terminal import tables_as_json

    print(json.dumps(tables_as_json(run), ensure_ascii=False, allow_nan=False))


def say_where(page: Path, as_json: bool) -> None:
    """Print where a page is: on standard error if JSON goes to standard output."""
    (screen if as_json else Console(soft_wrap=True)).print(f"Report: {page}", highlight=False)


def refuse_unread(who: str, given: Mapping[str, object]) -> None:
    """Refuse options that would be ignored.

    Raises:
        UsageError: one of them was given.
    """
    for what, value in given.items():
        if value is not None:
            raise UsageError(f"{who}: leave out {what}")


def default_folder(model: OpenModel, corpus: Corpus, kind: str = "") -> Path:
    """Where a result goes without --out."""
    return Path("runs") / f"{short_name(model.id)}-{short_name(corpus.name)}{kind}"


def short_name(name: str) -> str:
    """The last part of a path or a hub name."""
    return Path(name).name or name
