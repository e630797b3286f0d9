"""Files and folders written as a whole, one process at a time, that say whether they are still what was written."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors
from filelock import FileLock, Timeout

from theodolite.errors import UsageError, WorkError, first_line

if TYPE_CHECKING:
    from torch import Tensor

TEMPORARY = ".writing"  # suffix of a file or folder that is not complete yet


def check_target(target: Path | None) -> None:
    """Raise `UsageError`, before anything is computed for it, where a place has no name of its own."""
    if target is not None and target.name in ("", ".."):
        raise UsageError(f"'{target}' is no name of its own: choose an --out such as runs/NAME")


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` write to a temporary name, always the same, then rename: a file at `path` is always complete."""
    temporary = path.with_name(path.name + TEMPORARY)
    try:
        write(temporary)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def json_text(value: Any, indent: int | None = None) -> str:
    """Return a value as JSON, with null for NaN and infinities."""
    with_nulls = json.loads(json.dumps(value), parse_constant=lambda _: None)
    return json.dumps(with_nulls, indent=indent, ensure_ascii=False)


def write_text(path: Path, text: str) -> None:
    """Write a UTF-8 text atomically."""
    write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


@contextmanager
def folder_written_atomically(folder: Path, *, replace: bool = False) -> Iterator[Path]:
    """Yield an empty folder that is renamed to `folder` at the end, with `replace` in place of what is there."""
    temporary, old = (folder.with_name(folder.name + suffix) for suffix in (TEMPORARY, ".old"))
    with disk_errors(folder):
        for stale in (temporary, old) if replace else (temporary,):
            shutil.rmtree(stale, ignore_errors=True)
        temporary.mkdir(parents=True)
        try:
            yield temporary
            if replace and folder.exists():
                os.replace(folder, old)
            os.replace(temporary, folder)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        if replace:
            shutil.rmtree(old, ignore_errors=True)


FULL = {os.strerror(number) for number in (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC))}
"""What the system says of a disk, or a quota, that is full."""


@contextmanager
def disk_errors(target: Path) -> Iterator[None]:
    """Turn disk errors into one `WorkError` line that names the target, and where the disk is full what to do."""
    try:
        yield
    except (FileExistsError, NotADirectoryError) as error:
        raise WorkError(
            f"cannot write {target}: {error.filename} is a file, not a folder: choose another --out"
        ) from error
    except (OSError, safetensors.SafetensorError) as error:  # as either, a full disk may be reported
        why = str(getattr(error, "strerror", None) or error)
        full = next((said for said in FULL if said in why), None)
        remedy = "free space there and rerun to go on from what is saved, or " if full else ""
        raise WorkError(f"cannot write {target}: {full or why}: {remedy}choose another --out") from error


def removed_if_empty(folder: Path) -> bool:
    """Remove a folder that holds nothing, so that a result takes its name; True if it was there and empty."""
    with disk_errors(folder):  # of a mount point
        if empty := folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()
    return empty


@contextmanager
def locked(out: Path, another: str = "another --out") -> Iterator[None]:
    """Keep other processes out of what becomes `out`, by a file `OUT.lock` beside it, or raise `UsageError`."""
    lock = FileLock(out.with_name(out.name + ".lock"), blocking=False)
    with disk_errors(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire()
        except Timeout:
            # To the lock, a place that takes no files looks like this.
            if not Path(lock.lock_file).exists():
                raise WorkError(f"cannot write {out}: no file can be made there") from None
            raise UsageError(f"another process is writing to {out}: wait, or choose {another}") from None
    try:
        yield
    finally:
        Path(lock.lock_file).unlink(missing_ok=True)  # while it is held, so that nobody's lock is removed
        lock.release()


HEADER = "sealed"  # the one entry: safetensors writes several in any order, and the same run is to be the same bytes
SHA256 = "sha256"  # the entry of a JSON file that is the checksum of all others
SECONDS = "wall_seconds"  # the entry of provenance that says how long the work took
CHECKSUMS = "checksums"  # the entry of a JSON file that has the checksums of files beside it, by their names


class CorruptFile(ValueError):
    """A file is corrupt; the message says how."""


def write_checked(path: Path, tensors: Mapping[str, Tensor], notes: Mapping[str, Any] | None = None) -> str:
    """Write tensors, and notes that JSON can hold; return the checksum of the tensors."""
    from safetensors.torch import save_file

    whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    written: dict[str, Any] = json.loads(json.dumps(dict(notes or {})))
    sha256 = digest(whole)
    entry = {"notes": written, "sha256": sha256, "notes_sha256": json_digest(written)}
    save_file(whole, path, {HEADER: json.dumps(entry)})
    return sha256


def read_checked(path: Path, sha256: str | None = None) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read tensors and notes that `write_checked` wrote, with this `sha256` if it is known; `CorruptFile` otherwise."""
    with _opened(path) as (file, notes, inside):
        # Copied: in the file a tensor begins anywhere, and where it begins changes the last bits of its sums.
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 (not a dict)
    if not digest(tensors) == inside == (inside if sha256 is None else sha256):
        raise CorruptFile("its bytes are not those that were written")
    return tensors, notes


def read_notes_checked(path: Path) -> dict[str, Any]:
    """Read the notes without the tensors; `CorruptFile` where they have changed since."""
    with _opened(path) as (_, notes, _):
        return notes


@contextmanager
def _opened(path: Path) -> Iterator[tuple[Any, dict[str, Any], str]]:
    """Open a file; yield it, its checked notes, and the checksum of its tensors; or `CorruptFile`."""
    try:
        with safetensors.safe_open(path, "pt") as file:
            entry: Any = json.loads((file.metadata() or {}).get(HEADER, "{}"))
            if not entry:
                raise CorruptFile("it has no checksum")
            notes = entry["notes"]
            if entry["notes_sha256"] != json_digest(notes):
                raise CorruptFile("its notes are not those that were written")
            yield file, notes, entry["sha256"]
    except CorruptFile:
        raise
    except (OSError, safetensors.SafetensorError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise CorruptFile(str(error)) from error


def digest(tensors: Mapping[str, Tensor]) -> str:
    """Hash names, types, shapes and bytes (SHA-256)."""
    import torch

    hasher = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        hasher.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        hasher.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return hasher.hexdigest()


def bytes_digest(written: bytes) -> str:
    """Return the checksum that `read_bytes_checked` expects of a file with these bytes."""
    return hashlib.sha256(written).hexdigest()


def read_bytes_checked(path: Path, checksums: Mapping[str, str]) -> bytes:
    """Read a file's bytes; `CorruptFile` where its checksum is another."""
    written = path.read_bytes()
    if checksums.get(path.name) != bytes_digest(written):
        raise CorruptFile(f"{path.name}: its bytes are not those that were written")
    return written


def write_json_checked(path: Path, values: Mapping[str, Any], indent: int | None = 2) -> None:
    """Write values that JSON can hold, atomically, with a checksum of all but the time they took; NaN becomes null."""
    written: dict[str, Any] = json.loads(json_text(dict(values)))
    write_text(path, json_text(written | {SHA256: json_digest(_timeless(written))}, indent) + "\n")


def read_json_checked(path: Path) -> dict[str, Any]:
    """Read what `write_json_checked` wrote, or raise `CorruptFile`."""
    try:
        values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        changed = values.pop(SHA256, None) != json_digest(_timeless(values))
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptFile(f"{path.name}: {first_line(error)}") from error
    if changed:
        raise CorruptFile(f"{path.name} was changed after it had been written")
    return values


def _timeless(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _timeless(each) for key, each in value.items() if key != SECONDS}
    return [_timeless(each) for each in value] if isinstance(value, list) else value


def json_digest(values: Mapping[str, Any]) -> str:
    """Hash what JSON says, however its keys are ordered and its lines are broken (SHA-256)."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
