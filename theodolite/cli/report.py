"""`theodolite report`: the page of a run folder, rewritten."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from theodolite.cli.options import AsJson, finish, finish_trace
from theodolite.cli.screen import one_line_errors
from theodolite.errors import UsageError
from theodolite.system.run_folders import OUTPUTS, TRACE, check_run


def report_command(
    run: Annotated[Path, typer.Argument(help="A run folder.", show_default=False)],
    csv: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Also write the tables as CSV files into FOLDER, one each."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Rewrite the report of a run folder, and export its tables.

    Example: theodolite report runs/gpt2 --csv gpt2-tables
    """
    with one_line_errors(saves=False):
        check_run(run)

        from theodolite.passes.run import Run
        from theodolite.report.page import write_report

        loaded = Run.load(run)
        if loaded.kind == OUTPUTS:
            raise UsageError(
                f"{run} holds head outputs, which `theodolite compare` reads together with the survey"
            )
        if csv is not None:
            loaded.write_csv(csv)
        if loaded.kind == TRACE:
            finish_trace(loaded, run, as_json)
            return
        finish(loaded, write_report(loaded, run / "report"), as_json)
