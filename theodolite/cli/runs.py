"""`theodolite runs`, `report` and `exclude`: what is made of run folders. Nothing heavy is imported."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from theodolite.cli.options import AsJson, finish, finish_trace, option
from theodolite.cli.screen import one_line_errors, print_json, say_dimly, screen
from theodolite.errors import UsageError
from theodolite.system import run_folders
from theodolite.system.files import check_target
from theodolite.system.wording import counted, model_name

ALWAYS = ("folder", "kind", "model", "corpus", "date")


def runs_command(
    folder: Annotated[Path, typer.Argument(help="Folder whose subfolders are runs.")] = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """List the runs of a folder: kind, model, text, date, and every option that is not the same in all of them.

    Example: theodolite runs runs
    """
    with one_line_errors(saves=False):
        runs = []
        for path in sorted(folder.glob(f"*/{run_folders.RUN}")):
            try:
                runs.append(described(path.parent))
            except UsageError as error:
                say_dimly(str(error))
        if not runs:
            what = "no run in" if folder.is_dir() else "no folder"
            raise UsageError(f"{what} {folder}: give a folder that holds run folders, such as runs")
        names = dict.fromkeys(name for run in runs for name in run)
        unlike = [name for name in names if any(run.get(name) != runs[0].get(name) for run in runs)]
        columns = [name for name in names if name in ALWAYS or name in unlike]
        if as_json:
            print_json([{name: run.get(name) for name in columns} for run in runs])
            return
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for name in columns:
            table.add_column(name.replace("_", " "))
        for run in runs:
            run = run | {"model": model_name(run["model"])}  # a path would take the width of the screen
            values = (run.get(name) for name in columns)
            table.add_row(*("–" if value is None else escape(str(value)) for value in values))
        Console(width=1000, soft_wrap=True).print(table)  # the terminal breaks what is wider than it


def described(folder: Path) -> dict[str, Any]:
    """Describe one run by folder, kind, model, corpus, date and every option; `UsageError` where it is damaged."""
    provenance = run_folders.provenance_at(folder)
    run_folders.check_tables(folder, provenance)
    model, corpus = provenance["model"], provenance.get("corpus") or {}
    fingerprint = provenance.get("fingerprint") or {}
    recorded = fingerprint | corpus | model | provenance  # where several know an option, as the last says it
    written = datetime.fromtimestamp((folder / run_folders.RUN).stat().st_mtime)
    return {
        "folder": folder.name,
        "kind": run_folders.kind_of(provenance),
        "model": model.get("id"),
        "corpus": corpus.get("name"),
        "date": f"{written:%Y-%m-%d %H:%M}",
        **{option: recorded.get(option) for option in run_folders.OPTIONS},
        "text": str(corpus.get("sha256") or "")[:8] or None,
        "revision": model.get("revision"),
        "weights": str(model.get("sha256") or "")[:8] or None,
        "interventions": ", ".join(fingerprint.get("interventions") or []) or None,
        "schema": provenance.get("schema_version"),
        **(provenance.get("versions") or {}),
    }


def report_command(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    as_json: AsJson = False,
) -> None:
    """Rewrite the report of a run folder, and show its tables.

    Example: theodolite report runs/gpt2 --json
    """
    with one_line_errors(saves=False):
        run_folders.check_run(run)

        from theodolite.passes.run import Run

        loaded = Run.load(run)
        if loaded.kind == run_folders.OUTPUTS:
            raise UsageError(f"{run} holds head outputs, which `theodolite compare` reads")
        show = finish_trace if loaded.kind == run_folders.TRACE else finish
        show(loaded, run, as_json)


def exclude_command(
    run: Annotated[Path, typer.Argument(help="Folder of a survey or a trace.")],
    out: Path = option("JSON file to write.", Path("exclusions.json"), "--out", "-o"),
    least_share: float = option("Least share of contexts (of outliers: of tokens) for a rule.", 0.01),
    as_json: AsJson = False,
) -> None:
    """Write the sinks and outliers of a run as rules: what to leave out of autoencoders, quantisation or pruning.

    Example: theodolite exclude runs/gpt2 --out gpt2-exclusions.json
    """
    with one_line_errors(saves=False):
        run_folders.check_run(run)
        check_target(out)

        from theodolite.passes.run import Run
        from theodolite.sinks.exclusions import Exclusions

        exclusions = Exclusions.of(Run.load(run), least_share)
        if out.exists() and Exclusions.load(out) != exclusions:
            raise UsageError(f"{out} exists already, with other rules: choose another --out or remove it")
        exclusions.save(out)
        if as_json:
            print(out.read_text(encoding="utf-8"), end="")
        said = f"{counted(len(exclusions.rules), 'rule')}, {counted(len(exclusions.occurrences), 'occurrence')}: {out}"
        for name, of in exclusions.accuracy.items():
            said += f"\n`{name}` on this text: precision {of['precision']:.2f}, recall {of['recall']:.2f}"
        (screen if as_json else Console(soft_wrap=True)).print(said, highlight=False)
