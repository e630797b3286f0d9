"""A folder that one process at a time writes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from theodolite.errors import UsageError, WorkError
from theodolite.system.files import disk_errors


@contextmanager
def locked(out: Path) -> Iterator[None]:
    """Keep other processes out of what becomes `out`, by a file `OUT.lock` beside it.

    Raises:
        UsageError: another one is at work there.
        WorkError: nothing can be written there.
    """
    lock = FileLock(out.with_name(out.name + ".lock"), blocking=False)
    with disk_errors(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire()
        except Timeout:
            # To the lock, a place that takes no files looks like this.
            if not Path(lock.lock_file).exists():
                raise WorkError(f"cannot write {out}: no file can be made there") from None
            raise UsageError(f"another process is writing to {out}: wait for it or choose another") from None
    try:
        yield
    finally:
        Path(lock.lock_file).unlink(missing_ok=True)  # while it is held, so that nobody's lock is removed
        lock.release()
