"""The run folder: the hinge between measuring and reporting. Written once, readable for years.

    run.json  layers.parquet  heads.parquet  sinks.parquet  outliers.parquet  examples.parquet
    constituents.parquet  attribution.parquet  traces.parquet  arrays.safetensors  report/

A run is written under a temporary name and renamed, so a folder by the run's own name is always whole. Nothing
here is ever pickled. This module measures nothing and draws nothing.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field, replace
from io import BytesIO
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow
from torch import Tensor

from theodolite.accumulate.sums import State
from theodolite.errors import UsageError
from theodolite.measure.catalogue import fault_of
from theodolite.system.checksums import (
    CHECKSUMS,
    CorruptFile,
    bytes_digest,
    read_bytes_checked,
    read_checked,
    write_checked,
    write_json_checked,
)
from theodolite.system.display import view_of
from theodolite.system.files import (
    check_target,
    disk_errors,
    folder_written_atomically,
    write_atomically,
    write_text,
)
from theodolite.system.run_folders import RUN, check_out, differences, provenance_at
from theodolite.system.wording import tokens_of

SCHEMA_VERSION = 5

ARRAYS = "arrays.safetensors"

TABLES_SINCE = {
    "layers": 1,
    "heads": 1,
    "sinks": 1,
    "outliers": 1,
    "examples": 1,
    "constituents": 2,
    "attribution": 2,
    "traces": 3,
}
"""The schema with which each table came; in a run of an older one it is empty."""

TABLES = tuple(TABLES_SINCE)


@dataclass(frozen=True, repr=False)
class Run:
    """The result of a survey: tables, arrays and where they come from.

    Attributes:
        layers: one row a residual layer (0 is the input of the first block), N = L + 1 rows.
        heads: one row a head, L · H rows.
        sinks: which tokens became sinks of which head, and how often.
        outliers: outlier dimensions of each layer, with their shares.
        examples: the tokens of a few contexts with the attention that they receive.
        constituents: the share of each head's logit variance that each pair of parts of query and key carries.
        attribution: which constituents the heads that follow a pattern owe it to.
        traces: every sink of every head: what it catches, the tag that it writes, where the tag lives on.
        arrays: name → tensor; `docs/run-folder.md` lists names and shapes.
        provenance: versions, model, corpus, seed, counts, wall time.
        folder: where it was loaded from or written to, if it was.
    """

    layers: pd.DataFrame
    heads: pd.DataFrame
    sinks: pd.DataFrame
    outliers: pd.DataFrame
    examples: pd.DataFrame
    arrays: dict[str, Tensor]
    provenance: dict[str, Any]
    constituents: pd.DataFrame = field(default_factory=pd.DataFrame)
    attribution: pd.DataFrame = field(default_factory=pd.DataFrame)
    traces: pd.DataFrame = field(default_factory=pd.DataFrame)
    folder: Path | None = field(default=None, compare=False)

    @property
    def is_trace(self) -> bool:
        """Whether it is the result of `trace_sinks`: its heads are those with a sink, and it has no layers."""
        return bool((self.provenance.get("fingerprint") or {}).get("trace"))

    @property
    def is_outputs(self) -> bool:
        """Whether it is the result of `comparison.read_outputs`: it has no tables."""
        return bool((self.provenance.get("fingerprint") or {}).get("outputs"))

    def __repr__(self) -> str:
        model, corpus = self.provenance["model"], self.provenance.get("corpus")
        text = f" on {corpus['contexts']} × {tokens_of(corpus)} tokens of {corpus['name']}" if corpus else ""
        return f"Run of {model['id']} ({model['layers']} layers × {model['heads']} heads){text}"

    def _repr_html_(self) -> str:
        """What a notebook shows of it: health, key numbers, the strongest heads."""
        return view_of("run")(self)

    @classmethod
    def load(cls, folder: str | Path) -> Run:
        """Read a run folder.

        Raises:
            UsageError: no run there, a damaged one, or one of a newer schema.
        """
        folder = Path(folder)
        provenance = provenance_at(folder, SCHEMA_VERSION)
        version = int(provenance["schema_version"])
        sums = provenance.pop(CHECKSUMS, None) or {}
        try:
            tables = {
                name: _read_table(folder / f"{name}.parquet", sums, provenance["model"])
                for name, since in TABLES_SINCE.items()
                if since <= version
            }
            arrays = _read_arrays(folder / ARRAYS, sums)
        except (OSError, ValueError, pyarrow.ArrowException) as error:
            raise UsageError(f"{folder} is incomplete or damaged ({error}): run the survey again") from error
        run = cls(**tables, arrays=arrays, provenance=provenance, folder=folder)
        if run.heads.empty and not (run.is_trace or run.is_outputs):
            raise UsageError(f"{folder} is incomplete or damaged (it has no heads): run the survey again")
        return run

    def save(self, folder: str | Path) -> Run:
        """Write to `folder`, which must not exist yet, and return the run as it is on disk.

        Raises:
            UsageError: the folder exists.
            WorkError: it cannot be written; nothing is left behind.
        """
        folder = Path(folder)
        if folder.exists():
            raise UsageError(f"{folder} exists already: choose another folder or remove it")
        with folder_written_atomically(folder) as temporary:
            for name in TABLES:
                table: pd.DataFrame = getattr(self, name)
                table.to_parquet(temporary / f"{name}.parquet", index=False, write_page_checksum=True)
            files = [f"{name}.parquet" for name in TABLES]
            sums = {name: bytes_digest((temporary / name).read_bytes()) for name in files}
            sums[ARRAYS] = write_checked(temporary / ARRAYS, self.arrays)
            write_json_checked(temporary / RUN, self.provenance | {CHECKSUMS: sums})
            # safetensors writes files that only their owner can read; a run is made to be shared.
            shutil.copymode(temporary / RUN, temporary / ARRAYS)
        return replace(self, folder=folder)

    def write_csv(self, folder: str | Path) -> list[Path]:
        """Write every table that has rows as `folder`/NAME.csv, numbers with all their digits, and return the files.

        Missing values are empty fields. Files of these names are replaced.

        Raises:
            WorkError: they cannot be written.
        """
        folder = Path(folder)
        files = []
        with disk_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            for name in TABLES:
                table: pd.DataFrame = getattr(self, name)
                if len(table):
                    files.append(folder / f"{name}.csv")
                    write_text(files[-1], table.to_csv(index=False, lineterminator="\n"))
        return files


def _read_table(path: Path, sums: dict[str, str], model: dict[str, Any]) -> pd.DataFrame:
    """A table that is what was written, and whose columns a reader can use; or `CorruptFile`."""
    written = read_bytes_checked(path, sums)  # a folder by that name would be taken for a table in parts
    table = pd.read_parquet(BytesIO(written), page_checksum_verification=True)
    if fault := fault_of(path.stem, table, model):
        raise CorruptFile(f"{path.name}: {fault}")
    return table


def _read_arrays(path: Path, sums: dict[str, str]) -> dict[str, Tensor]:
    """The arrays that were written, or `CorruptFile`."""
    try:
        return read_checked(path, sums.get(path.name))[0]
    except CorruptFile as error:
        raise CorruptFile(f"{path.name}: {error}") from error


class Workspace:
    """Where a survey keeps its progress until it is done: `OUT.partial`, beside the run folder.

    Args:
        out: the run folder to be.
        fingerprint: what decides the result (model, corpus, options); a resumed survey must match it.
        corpus: what provenance says of the corpus, to say what differs where it does not match.
    """

    def __init__(self, out: Path, fingerprint: dict[str, Any], corpus: dict[str, Any] | None = None) -> None:
        check_target(out)
        # Folders are renamed into their place, which a link would not be.
        self.out = out = out.resolve() if out.is_symlink() else out
        self.corpus = corpus
        self.folder = out.with_name(out.name + ".partial")
        self.fingerprint = fingerprint
        self._file = self.folder / "progress.safetensors"

    def finished(self) -> Run | None:
        """The run, if it is there already; `UsageError` where something else has its name."""
        if not self.out.exists():
            return None
        if self.out.is_dir() and not any(self.out.iterdir()):
            self.out.rmdir()
            return None
        check_out(self.out)
        run = Run.load(self.out)
        if run.provenance["schema_version"] != SCHEMA_VERSION:
            raise UsageError(
                f"{self.out} holds a run of an older theodolite (schema {run.provenance['schema_version']}, now "
                f"{SCHEMA_VERSION}): choose another --out, or remove it to survey again"
            )
        if run.provenance.get("fingerprint") != self.fingerprint:
            there = run.provenance.get("fingerprint") or {}
            differs = differences(there, self.fingerprint, run.provenance.get("corpus"), self.corpus)
            raise UsageError(
                f"{self.out} holds a run of another model, corpus or options ({differs}): choose another --out or "
                "remove it"
            )
        shutil.rmtree(self.folder, ignore_errors=True)  # left when the process was killed as it finished
        return run

    def load_progress(self) -> tuple[dict[str, Any], State] | None:
        """What an interrupted survey has left: (notes, tensors), or None; `UsageError` where it was another survey."""
        if not self._file.is_file():
            return None
        try:
            tensors, notes = read_checked(self._file)
        except CorruptFile as error:
            raise UsageError(f"{self._file} is damaged: remove {self.folder} to start afresh") from error
        there = notes.pop("fingerprint", None)
        if there != self.fingerprint:
            raise UsageError(
                f"{self.folder} holds an unfinished survey of another model, corpus or options "
                f"({differences(there or {}, self.fingerprint)}): choose another --out or remove it"
            )
        return notes, tensors

    def save_progress(self, notes: dict[str, Any], tensors: State) -> None:
        """Replace what was saved before, at once or not at all."""
        all_notes = {**notes, "fingerprint": self.fingerprint}
        with disk_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            write_atomically(self._file, lambda path: write_checked(path, tensors, all_notes))

    def finish(self, run: Run) -> Run:
        """Write the run and forget the progress."""
        saved = run.save(self.out)
        shutil.rmtree(self.folder, ignore_errors=True)
        return saved
