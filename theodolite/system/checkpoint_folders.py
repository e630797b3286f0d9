"""What a checkpoint's folder must hold, looked at before any library of models is imported."""

from __future__ import annotations

import json
import os
from pathlib import Path

from theodolite.errors import UsageError, first_line
from theodolite.system.checksums import CorruptFile, check_headers
from theodolite.system.run_folders import is_run

INDEX = "model.safetensors.index.json"
"""Which file each tensor is in, where there are several (as `transformers` has it)."""


def at_home(source: str | Path) -> str | Path:
    """Replace ~ by the home folder, which the libraries that load models do not."""
    return source.expanduser() if isinstance(source, Path) else os.path.expanduser(source)


def local_folder(source: str | Path) -> Path | None:
    """Return the folder of a checkpoint, or None for a hub name; refuse folders without safetensors."""
    folder = Path(source).expanduser()
    if not folder.exists():
        if isinstance(source, Path) or str(source).startswith((".", "/", "~")) or str(source).count("/") > 1:
            raise UsageError(f"no checkpoint at {source}: give a folder with config.json, or a hub name")
        return None
    if not folder.is_dir() or not (folder / "config.json").is_file():
        what = "theodolite needs a folder with config.json in it"
        if is_run(folder):
            what = "it is a run folder, so give the model"
        elif (folder / "adapter_config.json").is_file():
            what = "it holds an adapter alone, so merge it into its model, or open_model(PeftModel.from_pretrained(…))"
        raise UsageError(f"{source} is no checkpoint: {what}")
    refuse_index(folder)
    if not weight_files(folder):
        pickled = sorted(p.name for p in folder.iterdir() if p.suffix in {".bin", ".pt", ".pth", ".ckpt"})
        if pickled:
            raise UsageError(
                f"{source} holds pickled weights ({pickled[0]}), which can run code when read; convert them "
                "where you trust them: AutoModel.from_pretrained(PATH).save_pretrained(NEW_PATH)"
            )
        raise UsageError(f"{source} holds no weights: theodolite needs .safetensors files beside config.json")
    return folder


def weight_files(folder: Path) -> list[Path]:
    """List the weight files of a checkpoint by name.

    Raises:
        UsageError: what has such a name is a pipe, a device or a folder, and reading it might never end; or they list
            more tensors than any model has, and reading that alone would.
    """
    files = sorted(folder.glob("*.safetensors"))
    no_file = next((path for path in files if not path.is_file()), None)
    if no_file:
        raise UsageError(f"{no_file} is no file: a checkpoint's weights are files of its folder")
    try:
        check_headers(files)
    except (OSError, CorruptFile) as error:
        raise UsageError(f"cannot open {folder}: {first_line(error)}") from error
    return files


def refuse_index(folder: Path) -> None:
    """Raise `UsageError` where the index of a folder names pickles, or weights that lie elsewhere."""
    index = folder / INDEX
    if not index.is_file():
        return
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise UsageError(
            f"{index} cannot be read ({first_line(error)}): it names the file of each tensor"
        ) from error
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise UsageError(
                f"{index} names {str(name)!r}: weights are .safetensors files of the same folder"
            )
