"""`theodolite runs`: what lies in a folder of runs, and what differs between them. Only `run.json` is read."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from theodolite.cli.options import say_where
from theodolite.cli.screen import one_line_errors, say_dimly
from theodolite.errors import UsageError
from theodolite.system.run_folders import OPTIONS, RUN, kind_of, provenance_at

ALWAYS = ("folder", "kind", "model", "corpus", "date")

PAGES = ("report/index.html", "reproduce/index.html")
"""Pages of a run, of which the first that is there is linked."""


def runs_command(
    folder: Annotated[
        Path, typer.Argument(help="Folder whose subfolders are runs.", show_default=True)
    ] = Path("runs"),
    as_json: Annotated[bool, typer.Option("--json", help="Print only the runs, as JSON.")] = False,
) -> None:
    """List the runs of a folder: kind, model, text, date, and every option that is not the same in all of them.

    The same list is written as a page, FOLDER/index.html, with a link to each report.

    Example: theodolite runs runs
    """
    with one_line_errors(saves=False):
        if not folder.is_dir():
            raise UsageError(f"no folder {folder}: give one that holds run folders, such as runs")
        runs = []
        for path in sorted(folder.glob(f"*/{RUN}")):
            try:
                runs.append(described(path.parent))
            except UsageError as error:
                say_dimly(str(error))
        if not runs:
            raise UsageError(f"no run in {folder}: give a folder that holds run folders, such as runs")
        rows = with_differences(runs)
        if as_json:
            print(json.dumps(rows, ensure_ascii=False, allow_nan=False))
        else:
            Console(soft_wrap=True).print(_table(rows))

        from theodolite.report.page import write_runs

        pages = {row["folder"]: page_of(folder / row["folder"]) for row in rows}
        say_where(write_runs(rows, pages, folder), as_json)


def described(folder: Path) -> dict[str, Any]:
    """Describe one run by folder, kind, model, corpus, date and every option."""
    provenance = provenance_at(folder)
    model, corpus = provenance["model"], provenance.get("corpus") or {}
    fingerprint = provenance.get("fingerprint") or {}
    recorded = fingerprint | corpus | model | provenance  # where several know an option, as the last says it
    written = datetime.fromtimestamp((folder / RUN).stat().st_mtime)
    return {
        "folder": folder.name,
        "kind": kind_of(provenance),
        "model": model.get("id"),
        "corpus": corpus.get("name"),
        "date": f"{written:%Y-%m-%d %H:%M}",
        **{option: recorded.get(option) for option in OPTIONS if option != "name"},
        "text": str(corpus.get("sha256") or "")[:8] or None,
        "revision": model.get("revision"),
        "weights": str(model.get("sha256") or "")[:8] or None,
        "edits": ", ".join(fingerprint.get("edits") or []) or None,
        "schema": provenance.get("schema_version"),
        **(provenance.get("versions") or {}),
    }


def with_differences(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The runs with the columns of `ALWAYS`, and of the others those whose values differ."""
    names = dict.fromkeys(name for run in runs for name in run)
    columns = [
        name for name in names if name in ALWAYS or any(run.get(name) != runs[0].get(name) for run in runs)
    ]
    return [{name: run.get(name) for name in columns} for run in runs]


def page_of(folder: Path) -> str | None:
    """The page of a run, relative to the folder of all runs."""
    return next((f"{folder.name}/{page}" for page in PAGES if (folder / page).is_file()), None)


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in rows[0]:
        table.add_column(name.replace("_", " "), overflow="fold")
    for row in rows:
        table.add_row(*("–" if value is None else escape(str(value)) for value in row.values()))
    return table
