"""Files that are whole or not there, and disks that say no in one line."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import safetensors

from theodolite.errors import WorkError

TEMPORARY = ".writing"
"""What the name of a file ends with until it is whole."""


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` make the file under another name and rename it: what has the name is whole.

    The other name is always the same, so that the next try takes away what a kill leaves; several processes that may
    write the same file need a lock.
    """
    temporary = path.with_name(path.name + TEMPORARY)
    try:
        write(temporary)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    """Write a UTF-8 text, whole or not at all."""
    write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


@contextmanager
def disk_errors(target: Path) -> Iterator[None]:
    """Turn what a disk says into one line that names the target.

    Raises:
        WorkError: in place of what was raised inside.
    """
    try:
        yield
    except safetensors.SafetensorError as error:  # how safetensors reports a full disk
        raise WorkError(f"cannot write {target}: {error}") from error
    except (FileExistsError, NotADirectoryError) as error:
        raise WorkError(f"cannot write {target}: {error.filename} is a file, not a folder") from error
    except OSError as error:
        raise WorkError(f"cannot write {target}: {error.strerror or error}") from error
