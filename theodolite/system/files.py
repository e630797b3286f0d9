"""Atomic file writes, and disk errors in one line."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import safetensors

from theodolite.errors import WorkError

TEMPORARY = ".writing"
"""Suffix of a file that is not complete yet."""


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


def write_text(path: Path, text: str) -> None:
    """Write a UTF-8 text atomically."""
    write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


@contextmanager
def disk_errors(target: Path) -> Iterator[None]:
    """Turn disk errors into one line that names the target.

    Raises:
        WorkError: in place of the error raised inside.
    """
    try:
        yield
    except safetensors.SafetensorError as error:  # how safetensors reports a full disk
        raise WorkError(f"cannot write {target}: {error}") from error
    except (FileExistsError, NotADirectoryError) as error:
        raise WorkError(f"cannot write {target}: {error.filename} is a file, not a folder") from error
    except OSError as error:
        raise WorkError(f"cannot write {target}: {error.strerror or error}") from error
