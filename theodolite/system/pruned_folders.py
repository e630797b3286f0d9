"""Where a pruned checkpoint may be written, asked before any library of models is imported."""

from __future__ import annotations

from pathlib import Path

from theodolite.errors import UsageError
from theodolite.system.files import check_target

SETTINGS = "pruning.json"
"""The file that tells a pruned checkpoint."""


def exists_already(out: Path) -> UsageError:
    """What to raise where something else lies at OUT."""
    return UsageError(f"{out} exists already: choose another --out or remove it")


def refuse_inside(out: Path) -> None:
    """Refuse to write a checkpoint inside another one, or where nothing can be written.

    Raises:
        UsageError: it would be; the message names the other one, or what is wrong with the place.
    """
    check_target(out)
    for folder in out.absolute().parents:
        if (folder / SETTINGS).is_file():
            raise UsageError(f"{out} lies inside the pruned checkpoint {folder}: choose another --out")
