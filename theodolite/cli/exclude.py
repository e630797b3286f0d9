"""`theodolite exclude`: the sinks and outliers of a run as rules."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from theodolite.cli.screen import one_line_errors, screen
from theodolite.errors import UsageError
from theodolite.system.files import check_target
from theodolite.system.run_folders import check_run


def exclude_command(
    run: Annotated[Path, typer.Argument(help="Folder of a survey or a trace.", show_default=False)],
    out: Annotated[Path, typer.Option("--out", "-o", help="JSON file to write.")] = Path("exclusions.json"),
    least_share: Annotated[
        float,
        typer.Option(
            help="Least share of contexts (sinks, massive activations) or tokens (outliers) for a rule."
        ),
    ] = 0.01,
    as_json: Annotated[bool, typer.Option("--json", help="Print only the rules, as JSON.")] = False,
) -> None:
    """Write the sinks and outliers of a run as rules: what to leave out of autoencoders, quantisation or pruning.

    Example: theodolite exclude runs/gpt2 --out gpt2-exclusions.json
    """
    with one_line_errors(saves=False):
        check_run(run)
        check_target(out)

        from theodolite.passes.run import Run
        from theodolite.sinks.exclusions import Exclusions

        exclusions = Exclusions.of(Run.load(run), least_share)
        if out.exists() and Exclusions.load(out) != exclusions:
            raise UsageError(f"{out} exists already, with other rules: choose another --out or remove it")
        exclusions.save(out)
        if as_json:
            print(out.read_text(encoding="utf-8"), end="")
        (screen if as_json else Console(soft_wrap=True)).print(
            f"{len(exclusions.rules)} rules: {out}", highlight=False
        )
