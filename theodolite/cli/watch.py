"""`theodolite watch`: the page of a training run that is still going on. Parsing only; nothing heavy is imported."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from theodolite.cli.options import say_where
from theodolite.cli.screen import one_line_errors, say_dimly
from theodolite.errors import UsageError
from theodolite.system.choices import refuse_unread
from theodolite.system.files import check_target

EVERY = 5.0
LEAST, MOST = 0.2, 3600.0


def watch_command(
    run: Annotated[
        Path,
        typer.Argument(
            help="Folder of a GeometryMonitor, or output_dir of a Trainer; it need not exist yet.",
            show_default=False,
        ),
    ],
    port: Annotated[int | None, typer.Option(help="Port [default: the first free one from 7860].")] = None,
    every: Annotated[
        float | None, typer.Option(help=f"Seconds between two looks into the folder [default: {EVERY:g}].")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", metavar="PAGE", help="Write a page that stands alone, instead of serving one."
        ),
    ] = None,
) -> None:
    """Watch a training run: loss, entropy, ρ, logits, alarms and every head, on a page served to this machine only.

    It reads what GeometryMonitor or GeometryCallback writes, and redraws itself. The training is not touched.

    Example: theodolite watch out
    """
    with one_line_errors(saves=False):
        if every is not None and not LEAST <= every <= MOST:
            raise UsageError(f"--every is {every:g}: give {LEAST:g} to {MOST:g} seconds")
        if run.is_file():
            raise UsageError(
                f"{run} is a file: give the folder of a GeometryMonitor, or the output_dir of a Trainer"
            )
        if out is not None:
            refuse_unread("--out writes a file", {"--port": port, "--every": every})
            check_target(out)
            from theodolite.watch.page import write_page

            say_where(write_page(run, out), False)
            return

        from theodolite.system.listening import listen

        with listen(port) as listening:
            from theodolite.watch.record import TrainingRecord
            from theodolite.watch.server import WatchedRun, serve

            console = Console(soft_wrap=True)
            if not run.is_dir():
                say_dimly(f"{run} is not there yet: the page waits for the first look")
            serve(
                WatchedRun(TrainingRecord(run), EVERY if every is None else every),
                listening,
                lambda address: console.print(f"Watching: {address} (Ctrl-C ends it)", highlight=False),
            )
        say_dimly(f"{run} is watched no more; the training was not touched")
