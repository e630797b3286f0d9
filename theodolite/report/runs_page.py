"""The page that lists the runs of a folder. What is on it was read by others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from theodolite.report.page import rendered
from theodolite.system.files import disk_errors, write_text
from theodolite.system.wording import visible


def write_runs(rows: Sequence[Mapping[str, Any]], pages: Mapping[str, str | None], folder: Path) -> Path:
    """Write `folder`/index.html, and return its path.

    Args:
        rows: one run each, with the same columns; `folder` is the name of its folder.
        pages: the page of each, relative to `folder`, if it has one.
        folder: where the runs lie.

    Raises:
        WorkError: it cannot be written.
    """
    shown = [
        {
            "cells": ["–" if value is None else visible(str(value), 80) for value in row.values()],
            "page": pages[row["folder"]],
        }
        for row in rows
    ]
    headings = [name.replace("_", " ") for name in rows[0]]
    page = rendered("runs.html.j2", {"headings": headings, "rows": shown, "folder": visible(folder.name, 80)})
    with disk_errors(folder):
        write_text(folder / "index.html", page)
    return folder / "index.html"
