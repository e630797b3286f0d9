"""What columns and arrays mean: the rows of docs/run-folder.md that a page of a measurement names under "Code"."""

from __future__ import annotations

import re

_NAME = re.compile(r"`([A-Za-z_0-9]+)`")


def quoted_columns(page: str, run_folder: str) -> str:
    """A table to put at the end of a page in docs/measurements; empty where it names no column.

    `Columns …` before a link to a section are columns of its table, names after `array` are arrays.
    """
    _, _, code = page.partition("\n## Code\n")
    of_tables, _, of_arrays = code.partition("array")
    sections = set(re.findall(r"run-folder\.md#(\w+)", code))
    rows = [row for section in sorted(sections) for row in _rows(run_folder, section, of_tables)]
    rows += _rows(run_folder, "arrays", of_arrays)
    if not rows:
        return ""
    lines = ["", "", "As the page of the [run folder](../run-folder.md) has it:", ""]
    return "\n".join([*lines, "| column or array | meaning |", "| --- | --- |", *rows]) + "\n"


def _rows(run_folder: str, section: str, text: str) -> list[str]:
    """The rows of a section's table in which one of the text's names comes first."""
    wanted = set(_NAME.findall(text))
    _, _, found = run_folder.partition(f"\n## {section.capitalize()}\n")
    table = re.findall(r"^\| (?!column|name|---).*$", found.partition("\n## ")[0], re.MULTILINE)
    rows = [row for row in table if wanted & set(_names(row))]
    return [re.sub(r"\]\((?=[\w-]+\.md)", "](../", row) for row in rows]


def _names(row: str) -> list[str]:
    """The names that a row explains: `incoherence_mean`, `_max` are two with one beginning."""
    names: list[str] = _NAME.findall(row.split(" | ")[0])
    ends = [name for name in names if name.startswith("_")]
    begun = [stem + end for end in ends for stem in (names[0], names[0].rpartition("_")[0])]
    return [*(name for name in names if name not in ends), *begun]
