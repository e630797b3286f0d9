"""Files of tensors that say whether they are still what was written: safetensors, with a checksum in the header.

A disk may return other bytes than it was given, and a file may be cut or overwritten; what is read then is refused
rather than measured. Nothing here knows what the tensors mean.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors

if TYPE_CHECKING:
    from torch import Tensor

HEADER = "sealed"
"""The one entry of the header: safetensors writes several in any order, and the same run is to be the same bytes."""


class CorruptFile(ValueError):
    """A file is corrupt; the message says how."""


def write_checked(path: Path, tensors: Mapping[str, Tensor], notes: Mapping[str, Any] | None = None) -> None:
    """Write tensors, and notes that JSON can hold."""
    from safetensors.torch import save_file

    whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    entry = {"notes": dict(notes or {}), "sha256": digest(whole)}
    save_file(whole, path, {HEADER: json.dumps(entry)})


def read_checked(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What `write_checked` wrote: tensors and notes. Files without a checksum are taken as they are.

    Raises:
        CorruptFile: it has changed since.
    """
    with _opened(path) as (file, notes, sha256):
        # Copied: in the file a tensor begins anywhere, and where it begins changes the last bits of its sums.
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 (not a dict)
    if sha256 is not None and sha256 != digest(tensors):
        raise CorruptFile("its bytes are not those that were written")
    return tensors, notes


def read_notes(path: Path) -> dict[str, Any]:
    """The notes alone, without reading the tensors.

    Raises:
        CorruptFile: the file cannot be read.
    """
    with _opened(path) as (_, notes, _sha256):
        return notes


@contextmanager
def _opened(path: Path) -> Iterator[tuple[Any, dict[str, Any], str | None]]:
    try:
        with safetensors.safe_open(path, "pt") as file:
            header = file.metadata() or {}
            entry: Any = json.loads(header[HEADER]) if HEADER in header else {"notes": header, "sha256": None}
            yield file, entry["notes"], entry["sha256"]
    except (OSError, safetensors.SafetensorError, KeyError, TypeError, ValueError) as error:
        raise CorruptFile(str(error)) from error


def digest(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of names, types, shapes and bytes."""
    import torch

    hasher = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        hasher.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        hasher.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return hasher.hexdigest()
