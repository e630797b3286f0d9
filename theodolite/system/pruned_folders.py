"""Where a pruned checkpoint may be written, asked before any library of models is imported."""

from __future__ import annotations

import json
from pathlib import Path

from theodolite.errors import UsageError
from theodolite.system.files import check_target

SETTINGS = "pruning.json"
"""The file that tells a pruned checkpoint."""

ADAPTER = "adapter"
"""The folder in it of the adapter that holds the low-rank parts, where they are apart."""

ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
"""What PEFT calls the files of an adapter."""


def adapter_in(folder: Path) -> Path | None:
    """Where a pruned checkpoint has its low-rank parts as an adapter, or None; `UsageError` where it has lost them."""
    try:
        form = json.loads((folder / SETTINGS).read_text(encoding="utf-8"))["pruning"]["format"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None
    if form != ADAPTER:
        return None
    # Without the second, PEFT would look for pickled weights, and then for a model of this name on the hub.
    if not all((folder / ADAPTER / name).is_file() for name in ADAPTER_FILES):
        raise UsageError(f"{folder} lacks its low-rank parts ({ADAPTER}/): prune again")
    return folder / ADAPTER


def exists_already(out: Path) -> UsageError:
    """Return the error for an OUT that holds something else."""
    return UsageError(f"{out} exists already: choose another --out or remove it")


def refuse_inside(out: Path, source: str | None) -> None:
    """Raise `UsageError` where a checkpoint would be written inside another one, or where nothing can be written."""
    check_target(out)
    for folder in out.absolute().parents:
        if (folder / SETTINGS).is_file():
            raise UsageError(f"{out} lies inside the pruned checkpoint {folder}: choose another --out")
        if (
            (folder / "config.json").is_file()
            and source
            and folder.resolve() == Path(source).expanduser().resolve()
        ):
            raise UsageError(
                f"{out} lies in the folder of the model that it is made of: choose another --out"
            )
