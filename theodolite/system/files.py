"""Write files and folders as a whole, and report disk errors in one line."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import safetensors

from theodolite.errors import UsageError, WorkError

TEMPORARY = ".writing"
"""Suffix of a file or folder that is not complete yet."""


MOST_BYTES = 200
"""Of the name of what is written: file systems take 255, and what is unfinished or locked has a suffix."""


def check_target(target: Path | None) -> None:
    """Refuse a place where nothing can be written, before anything is computed for it; None is no place.

    Raises:
        UsageError: it is not the name of something new, too long, not UTF-8, or behind a link to nothing.
    """
    if target is None:
        return
    name = (target.name or str(target)).encode("utf-8", "backslashreplace").decode()
    shown = f"'{name if len(name) <= 60 else name[:60] + '…'}'"
    if target.name in ("", ".."):
        raise UsageError(f"{shown} is no name of its own: choose an --out such as runs/NAME")
    try:
        str(target).encode()
        broken = next((p for p in (target, *target.parents) if p.is_symlink() and not p.exists()), None)
        too_long = len(os.fsencode(target.name)) > MOST_BYTES
        target.exists()
    except UnicodeEncodeError as error:
        raise UsageError(f"{shown} is no name in UTF-8: choose another --out") from error
    except OSError as error:
        raise UsageError(f"{shown} cannot be written ({error.strerror}): choose another --out") from error
    if too_long:
        raise UsageError(f"{shown} is longer than {MOST_BYTES} bytes: choose a shorter --out")
    if broken:
        raise UsageError(f"{broken} is a link to nothing: remove it, or choose another --out")


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` write to a temporary name, then rename: a file at `path` is always complete.

    The temporary name is fixed, so that the next attempt overwrites what a killed process left; concurrent writers of
    the same file need a lock.
    """
    temporary = path.with_name(path.name + TEMPORARY)
    try:
        write(temporary)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def json_text(value: Any, indent: int | None = None) -> str:
    """Return a value as JSON, with null for NaN and infinities."""
    return json.dumps(_with_nulls(value), indent=indent, ensure_ascii=False, allow_nan=False)


def _with_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _with_nulls(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_with_nulls(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_text(path: Path, text: str) -> None:
    """Write a UTF-8 text atomically."""
    write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


@contextmanager
def folder_written_atomically(folder: Path, *, replace: bool = False) -> Iterator[Path]:
    """Yield an empty folder that is renamed to `folder` at the end: what is at `folder` is always complete.

    Args:
        folder: where it goes. replace: in the place of what is there.

    Raises:
        WorkError: as `disk_errors`; nothing is left behind.
    """
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
    """Turn disk errors into one line that names the target, and where the disk is full what to do.

    Raises:
        WorkError: in place of the error raised inside.
    """
    try:
        yield
    except (FileExistsError, NotADirectoryError) as error:
        raise WorkError(f"cannot write {target}: {error.filename} is a file, not a folder") from error
    except (OSError, safetensors.SafetensorError) as error:  # as either, a full disk may be reported
        why = str(getattr(error, "strerror", None) or error)
        full = next((said for said in FULL if said in why), None)
        remedy = ": free space there and rerun to go on from what is saved, or choose another --out"
        raise WorkError(f"cannot write {target}: {full + remedy if full else why}") from error
