"""`theodolite spectra`: query-key spectra from the weights alone."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from theodolite.cli.options import AsJson, Model, Opening, finish
from theodolite.cli.screen import bars, one_line_errors, say_stopping, screen
from theodolite.system.interrupt import interruptible
from theodolite.system.run_folders import check_out


def spectra_command(
    *,
    model: Model = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Also write a run folder with a report.")
    ] = None,
    as_json: AsJson = False,
    opening: Opening,
) -> None:
    """Query-key spectra of every head, from the weights alone: needs no text, and the model need not fit in memory.

    Weights are read layer by layer on the CPU; with --device or --device-map the whole model is opened there.

    Example: theodolite spectra gpt2 --json
    """
    with one_line_errors(saves=False), interruptible(say_stopping) as stopped:
        opening.check(model)
        check_out(out)

        from theodolite.passes.survey import spectra
        from theodolite.report.page import write_report

        if opening.device is None and opening.device_map is None:
            opened = opening.open_weights(model, stopped)
        else:
            opened = opening.open(model)
        with bars(stopped) as show:
            run = spectra(opened, out, show_progress=show)
        with screen.status("writing the report"):
            page = None if out is None else write_report(run, out / "report")
        finish(run, page, as_json)
