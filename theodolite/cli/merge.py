"""`theodolite merge`: the run of a survey whose shards were read by many processes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from theodolite.cli.options import AsJson, finish
from theodolite.cli.screen import bars, one_line_errors, say_stopping, screen
from theodolite.system.allocator import keep_pages
from theodolite.system.interrupt import interruptible
from theodolite.system.run_folders import check_out


def merge_command(
    folder: Annotated[
        Path, typer.Argument(help="The --out of `theodolite survey … --shard K/N`.", show_default=False)
    ],
    as_json: AsJson = False,
) -> None:
    """Make the run and its report of a survey in shards, with the same tables as one process would.

    The model is opened as the shards opened it; what is left to do does not grow with the text.

    Example: theodolite merge runs/gpt2
    """
    with one_line_errors(), interruptible(say_stopping) as stopped:
        keep_pages()
        check_out(folder)

        from theodolite.models.stored.loading import hide_progress_bars
        from theodolite.passes.shards import merge
        from theodolite.report.page import write_report

        hide_progress_bars()
        with bars(stopped) as show:
            run = merge(folder, show_progress=show)
        with screen.status("writing the report"):
            page = write_report(run, folder / "report")
        finish(run, page, as_json)
