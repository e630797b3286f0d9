"""Check where a checkpoint lies, and where a pruned one may lie; no library of models is imported."""

from __future__ import annotations

import json
import re
from pathlib import Path
from urllib.parse import unquote

from theodolite.errors import UsageError, first_line
from theodolite.system.files import check_target
from theodolite.system.run_folders import is_run

SETTINGS = "pruning.json"  # the file that tells a pruned checkpoint
ADAPTER = "adapter"  # the folder in it of the adapter with the low-rank parts
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")  # as PEFT calls them
PART_OF_GGUF = re.compile(r"(.+)-\d{5}-of-(\d{5})\.gguf")  # a file of a split model

PAGE = re.compile(
    r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/(?!datasets/|spaces/)([\w.-]+(?:/[\w.-]+)?)"
    r"(?:/(?:tree|blob|resolve)/([^/?#]+)(?:/[^/?#]+\.(?:json|safetensors))?)?/?(?:[?#].*)?"
)
"""The address of a model's page on the hub: its name, and the revision where one is shown."""


def of_page(address: str) -> tuple[str, str | None] | None:
    """Return the name and revision of the model whose page on the hub has this address; None of anything else."""
    page = PAGE.fullmatch(address)
    return (page[1], page[2] and unquote(page[2])) if page else None


def local_checkpoint(source: str | Path) -> Path | None:
    """Return the folder of a checkpoint, or its (first) GGUF file; None for a hub name, `UsageError` for neither."""
    path = Path(source).expanduser()
    if not path.exists():
        named = isinstance(source, Path) or str(source).startswith((".", "/", "~")) or path.suffix == ".gguf"
        if named or str(source).count("/") > 1:
            raise UsageError(f"no checkpoint at {source}: give a folder, a GGUF file, or a hub name")
        return None
    if path.suffix == ".gguf" and path.is_file():
        return gguf_files(path)[0]
    if path.is_dir() and not any(path.glob("*.safetensors")) and any(path.glob("*.gguf")):
        models = sorted({gguf_files(file)[0] for file in path.glob("*.gguf")})
        if len(models) > 1:
            names = ", ".join(model.name for model in models)
            raise UsageError(f"{source} holds several GGUF models ({names}): give one of these files")
        return models[0]
    if not path.is_dir() or not (path / "config.json").is_file():
        what = "theodolite needs a folder with config.json in it, or a GGUF file"
        if is_run(path):
            what = "it is a run folder, so give the model"
        elif (path / "adapter_config.json").is_file():
            what = "it holds an adapter alone, so merge it into its model, or open_model(PeftModel.from_pretrained(…))"
        raise UsageError(f"{source} is no checkpoint: {what}")
    refuse_index(path)
    if not weight_files(path):
        pickled = sorted(p.name for p in path.iterdir() if p.suffix in {".bin", ".pt", ".pth", ".ckpt"})
        if pickled:
            raise UsageError(
                f"{source} holds pickled weights ({pickled[0]}), which can run code: convert them where you trust "
                "them: AutoModel.from_pretrained(PATH).save_pretrained(NEW_PATH)"
            )
        raise UsageError(f"{source} holds no weights: theodolite needs .safetensors files beside config.json")
    return path


def gguf_files(path: Path) -> list[Path]:
    """List the files of the GGUF model that a file is, or is a part of, in order; `UsageError` where one is missing."""
    files, part = [path], PART_OF_GGUF.fullmatch(path.name)
    if part:
        stem, count = part.groups()
        files = [path.with_name(f"{stem}-{n:05d}-of-{count}.gguf") for n in range(1, int(count) + 1)]
    for file in files:
        if not file.is_file():
            raise UsageError(f"{file} is missing: {path.name} is one of {len(files)} files of a model")
        with file.open("rb") as opened:
            if opened.read(4) != b"GGUF":
                raise UsageError(f"{file} is no GGUF file: it does not begin with the letters GGUF")
    return files


def is_gguf(source: str | Path) -> bool:
    """Tell whether a checkpoint's place is a GGUF file."""
    return Path(source).suffix == ".gguf" and Path(source).is_file()


def weight_files(folder: Path) -> list[Path]:
    """List the weight files of a checkpoint by name."""
    if is_gguf(folder):
        return gguf_files(folder)
    return sorted(path for path in folder.glob("*.safetensors") if path.is_file())


def refuse_index(folder: Path) -> None:
    """Raise `UsageError` where the index of a folder names pickles, or weights that lie elsewhere."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise UsageError(f"{index} cannot be read ({first_line(error)})") from error
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise UsageError(f"{index} names {str(name)!r}, not a .safetensors file of the same folder")


def adapter_in(folder: Path) -> Path | None:
    """Find the adapter with a pruned checkpoint's low-rank parts, or None; `UsageError` where it has lost them."""
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
        is_source = source and folder.resolve() == Path(source).expanduser().resolve()
        if is_source and (folder / "config.json").is_file():
            raise UsageError(f"{out} lies in the folder of the dense model: choose another --out")
