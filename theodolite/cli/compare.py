"""`theodolite compare`: parsing, and which function does the work. Nothing heavy is imported."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from theodolite.cli.options import AsJson, Batch, Opening, Text, option, say_where
from theodolite.cli.screen import bars, print_json, screen, stoppable
from theodolite.errors import UsageError
from theodolite.system import embedded
from theodolite.system.choices import refuse_unread
from theodolite.system.files import check_target
from theodolite.system.run_folders import is_run
from theodolite.system.wording import model_name, names_of

if TYPE_CHECKING:
    from theodolite.corpus.corpus import Corpus
    from theodolite.models import OpenModel


def compare_command(
    *,
    models: Annotated[
        list[str],
        typer.Argument(
            help="Two or more run folders, or folders, GGUF files or hub names of checkpoints "
            f"(`{embedded.NAME}`: the model inside the package); all are compared with the first."
        ),
    ],
    text: Text,
    out: Path | None = option("Folder to write [default: runs/FIRST-against-SECOND].", None, "--out", "-o"),
    as_json: AsJson = False,
    batch: Batch = None,
    opening: Opening,
) -> None:
    """Compare models' sinks, tags, outliers, positions, head outputs, entropies, head roles and W_QK.

    Run folders of the same text are compared as they are, with their traces (FOLDER-sinks) and head outputs
    (FOLDER-outputs) if all have them. Models are first surveyed and traced and their head outputs collected, in the
    --out folder; finished parts are reused.

    Example: theodolite compare gpt2 gpt2-oats gpt2-wanda --corpus notes.txt --length 256 --out runs/pruned
    """
    with stoppable() as stopped:
        if len(models) < 2:
            raise UsageError("one model cannot be compared: give two or more")
        folder = out or Path("runs") / f"{model_name(models[0])}-against-{model_name(models[1])}"
        check_target(folder)
        runs = [is_run(model) for model in models]
        if any(runs) and not all(runs):
            other = models[runs.index(False)]
            raise UsageError(f"{other} is no run folder but others are: give either runs or models")
        if all(runs):
            refuse_unread("run folders are compared without a model or a text", text.given())
            folders = models
        else:
            opening.check(*models)
            text.check()
            folders = _measured(models, folder, text, batch, opening, stopped)

        from theodolite.comparison import page
        from theodolite.comparison.audit import compare_folders

        audits = compare_folders(folders)
        with screen.status("writing the page"):
            content = page.outcome(audits)
            written, told = page.write(audits, content, folder)
        if as_json:
            print_json(told)
        else:
            page.show(audits, content, Console(soft_wrap=True))
        say_where(written, as_json)


def _measured(
    models: list[str], out: Path, text: Text, batch: int | None, opening: Opening, stopped: Callable[[], bool]
) -> list[str]:
    """Survey and trace each model and read what its heads write, in folders of `out` that can be resumed."""
    from theodolite.comparison.audit import refuse_unlike, shape_of
    from theodolite.comparison.outputs import read_outputs
    from theodolite.passes.survey import survey
    from theodolite.sinks.trace import trace_sinks

    described: dict[str, dict[str, object]] = {}

    def check(name: str, model: OpenModel, corpus: Corpus | None) -> None:
        if corpus is not None:
            described[name] = {**shape_of(model), "tokens": corpus.sha256}
            first = next(iter(described))
            refuse_unlike((first, name), described[first], described[name])

    sources = dict(zip(names_of(models), models, strict=True))
    corpora = {
        name: opening.read_first(source, text, stopped, batch, functools.partial(check, name))
        for name, source in sources.items()
    }
    parts: dict[str, Callable[..., object]] = {
        "": functools.partial(survey, seed=text.seed),
        "-sinks": trace_sinks,
        "-outputs": read_outputs,
    }
    for name, source in sources.items():
        model = opening.open(source, text)
        corpus = corpora[name] or text.read(model, stopped)
        check(name, model, corpus)
        for ending, read in parts.items():
            with bars(stopped, of=name) as show:
                read(model, corpus, out / f"{name}{ending}", batch=batch, show_progress=show)
        del model  # before the next one is opened
    return [str(out / name) for name in sources]
