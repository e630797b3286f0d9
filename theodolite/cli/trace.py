"""`theodolite trace`: every attention sink of a text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from theodolite.cli.options import AsJson, Batch, Model, Opening, Text, default_folder, finish_trace
from theodolite.cli.screen import bars, one_line_errors, say_stopping
from theodolite.system.allocator import keep_pages
from theodolite.system.interrupt import interruptible
from theodolite.system.run_folders import check_out


def trace_command(
    *,
    model: Model = None,
    text: Text,
    stretches: Annotated[
        bool, typer.Option("--stretches", help="Also local sinks, which dominate a contiguous span only.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", help="Run folder to write [default: runs/MODEL-CORPUS-sinks, or -stretches]."
        ),
    ] = None,
    as_json: AsJson = False,
    batch: Batch = None,
    opening: Opening,
) -> None:
    """Trace every attention sink of a text: the heads it captures, the tag written there, how far the tag persists.

    Example: theodolite trace gpt2 --corpus notes.txt --length 256 --out runs/gpt2-sinks
    """
    with one_line_errors(), interruptible(say_stopping) as stopped:
        keep_pages()
        opening.check(model)
        text.check()
        check_out(out)

        from theodolite.sinks.trace import trace_sinks

        opened = opening.open(model, text)
        corpus = text.read(opened, stopped)
        folder = out or default_folder(opened, corpus, "-stretches" if stretches else "-sinks")
        with bars(stopped) as show:
            run = trace_sinks(opened, corpus, folder, stretches=stretches, batch=batch, show_progress=show)
        finish_trace(run, folder, as_json)
