"""Unfinished work on disk, in `OUT.partial`: its fingerprint (`job.json`), and parts (`NAME.safetensors`)."""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from theodolite.errors import UsageError
from theodolite.system.files import (
    TEMPORARY,
    CorruptFile,
    check_target,
    disk_errors,
    locked,
    read_checked,
    read_json_checked,
    read_notes_checked,
    write_atomically,
    write_checked,
    write_json_checked,
)
from theodolite.system.run_folders import differences

Tensors = dict[str, Tensor]
Notes = dict[str, Any]
Read = TypeVar("Read")

JOB = "job.json"


class Unfinished:
    """Parts of what becomes the folder `out`, in `OUT.partial` or another `folder`; without an `out` nothing is saved.

    The fingerprint decides every byte of the result; `corpus`, as of provenance, and `kind` are for messages.
    """

    def __init__(
        self,
        out: str | Path | None,
        fingerprint: Mapping[str, Any],
        corpus: Mapping[str, Any] | None = None,
        kind: str = "survey",
        folder: Path | None = None,
    ) -> None:
        # As JSON gives it back, so that what is read equals what was written.
        self.fingerprint: Notes = json.loads(json.dumps(dict(fingerprint)))
        self.corpus, self.kind = dict(corpus or {}), kind
        self.out: Path | None = None
        if out is not None:
            check_target(Path(out))
            # Folders are renamed to their final name, which would replace a link.
            self.out = Path(out).resolve() if Path(out).is_symlink() else Path(out)
            self.folder = folder or self.out.with_name(self.out.name + ".partial")

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """Keep other processes out; errors are those of `locked`."""
        with nullcontext() if self.out is None else locked(self.out):
            yield

    def begin(self) -> None:
        """Write into the folder what its work is of; errors are those of `check`."""
        self.check()
        if self.out is not None and not (self.folder / JOB).exists():
            description = {"fingerprint": self.fingerprint, "corpus": self.corpus}
            self._write_first(self.folder / JOB, lambda path: write_json_checked(path, description))
            self.check()

    def _write_first(self, path: Path, write: Callable[[Path], object]) -> None:
        """Write a file that several processes may write at once, unless it is there; all write the same."""
        temporary = path.with_name(f"{path.name}.{socket.gethostname()}-{os.getpid()}{TEMPORARY}")
        with disk_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            try:
                write(temporary)
                if not path.exists():
                    os.replace(temporary, path)
            finally:
                temporary.unlink(missing_ok=True)

    def described(self) -> tuple[Notes, Notes] | None:
        """Read what the folder's work is of (`read_job`); None where there is none, `UsageError` for parts alone."""
        if self.out is None or not self.folder.exists():
            return None
        if (self.folder / JOB).exists():
            return read_job(self.folder)
        names = [path.name for path in self.folder.iterdir()]
        if any(not name.endswith(("lock", TEMPORARY)) for name in names):
            raise UsageError(f"{self.folder} does not say what it holds: remove it to start afresh")
        return None

    def check(self) -> None:
        """Raise `UsageError` where the folder holds unfinished work of another fingerprint."""
        saved, corpus = self.described() or (self.fingerprint, {})
        if saved != self.fingerprint:
            differs = differences(saved, self.fingerprint, corpus, self.corpus)
            raise UsageError(
                f"{self.folder} holds an unfinished {self.kind} of another model, corpus or options ({differs}): "
                "choose another --out or remove it"
            )

    @contextmanager
    def same_sums(self) -> Iterator[None]:
        """Raise `UsageError` where a part that is read in here lacks a sum, or has one of another shape."""
        try:
            yield
        except (KeyError, RuntimeError) as error:
            raise UsageError(
                f"{self.folder} holds unfinished work of another version of theodolite, with other sums: remove it "
                "to start afresh"
            ) from error

    def path(self, name: str) -> Path:
        """Return the file of a part on disk."""
        return self.folder / f"{name}.safetensors"

    def names(self) -> list[str]:
        """Return the parts that are there, in order of their names."""
        return sorted(path.stem for path in self.folder.glob("*.safetensors"))

    def load(self, name: str) -> tuple[Tensors, Notes] | None:
        """Load a part's tensors and notes; None where it is not there, `UsageError` where it is damaged."""
        return self._read(name, read_checked)

    def notes(self, name: str) -> Notes:
        """Load a part's notes without its tensors; empty where it is not there. Errors are those of `load`."""
        return self._read(name, read_notes_checked) or {}

    def _read(self, name: str, read: Callable[[Path], Read]) -> Read | None:
        if self.out is None or not self.path(name).is_file():
            return None
        try:
            return read(self.path(name))
        except CorruptFile as error:
            raise UsageError(f"{self.path(name)} is damaged: remove it to redo what it held") from error

    def save(self, name: str, tensors: Tensors, notes: Mapping[str, Any]) -> None:
        """Write a part in the place of the one before, at once or not at all; `WorkError` where the disk refuses."""
        if not (self.folder / JOB).exists():
            self.begin()
        with disk_errors(self.folder):
            write_atomically(self.path(name), lambda path: write_checked(path, tensors, notes))

    def save_once(self, name: str, make: Callable[[], tuple[Tensors, Notes]]) -> None:
        """Write a part that several processes may write, by whichever comes first."""
        self.begin()
        if not self.path(name).is_file():
            tensors, notes = make()
            self._write_first(self.path(name), lambda path: write_checked(path, tensors, notes))

    def remove(self) -> None:
        """Forget the work: it is finished."""
        if self.out is not None:
            shutil.rmtree(self.folder, ignore_errors=True)


def read_job(folder: Path) -> tuple[Notes, Notes]:
    """Read the fingerprint of the work in a folder, and the notes on its text; `UsageError` where that is damaged."""
    try:
        description = read_json_checked(folder / JOB)
        return dict(description["fingerprint"]), dict(description["corpus"])
    except (CorruptFile, KeyError, TypeError, ValueError) as error:
        raise UsageError(f"{folder / JOB} is damaged: remove {folder} to start afresh") from error
