"""A pruned model on disk, and the state from which an interrupted pruning resumes.

While unfinished, `OUT.partial` holds a file per finished block. The finished `OUT` is a checkpoint: merged, with dense
matrices that `transformers` opens, or with an adapter (`adapter.py`), or factored, in the format of
`models/factored.py`; `pruning.json` and `pruning.parquet` are next to the weights. Nothing is pruned here.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from io import BytesIO
from itertools import chain
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow
from torch import Tensor

from theodolite.errors import UsageError
from theodolite.models import OpenModel, open_model
from theodolite.models.block_matrices import Matrix
from theodolite.models.factored import (
    BLOCK,
    DENSE,
    PrunedMatrix,
    is_factored,
    read_matrices,
    write_dense,
    write_matrices,
)
from theodolite.models.loading import without_progress_bars
from theodolite.passes.run import Workspace
from theodolite.prune.adapter import sparse_parts_alone, write_adapter
from theodolite.sinks.interventions import Factors
from theodolite.system.checksums import (
    CHECKSUMS,
    bytes_digest,
    read_bytes_checked,
    read_checked,
    read_json_checked,
    write_checked,
    write_json_checked,
)
from theodolite.system.files import disk_errors, folder_written_atomically, write_atomically, write_text
from theodolite.system.locks import locked
from theodolite.system.pruned_folders import ADAPTER, SETTINGS, exists_already, refuse_inside
from theodolite.system.run_folders import differences

TABLE = "pruning.parquet"

LOW_RANK = "low_rank/factors.safetensors"
"""In a folder of its own: a server takes whatever safetensors lie beside the weights for weights."""

LowRank = dict[tuple[int, str], tuple[Tensor, Tensor]]
"""(block, name of the matrix) → left (outputs, rank) and right (rank, inputs), in the model's dtype."""

TableRows = list[dict[str, Any]]


@dataclass(frozen=True, repr=False)
class Pruned:
    """The record of a pruned model.

    Attributes:
        table: one row per matrix; `docs/pruning.md` lists the columns.
        provenance: versions, model, text, settings.
        low_rank: the low-rank part of each matrix that has one.
        folder: where it was written, if it was.
    """

    table: pd.DataFrame
    provenance: dict[str, Any]
    low_rank: LowRank
    folder: Path | None = None

    def __repr__(self) -> str:
        pruning = self.provenance["pruning"]
        return f"Pruned({self.provenance['model']['id']} by {pruning['method']}: {len(self.table)} matrices)"

    def factors(self, layer: int) -> Factors:
        """The low-rank parts of W_Q, W_K, W_V of a block, as `interventions.without_low_rank(factors=…)` takes them.

        Raises:
            UsageError: there are none: a method other than OATS, rank 0, or no such block.
        """
        factors = {name: self.low_rank[layer, name] for name in "qkv" if (layer, name) in self.low_rank}
        if not factors:
            raise UsageError(f"W_Q, W_K and W_V of block {layer} have no low-rank part")
        return factors

    @classmethod
    def load(cls, folder: str | Path) -> Pruned:
        """Read it from the folder of a pruned checkpoint, whose weights `open_model` opens.

        Raises:
            UsageError: the folder holds none, or it is damaged.
        """
        folder = Path(folder)
        if not (folder / SETTINGS).is_file():
            raise UsageError(f"no pruned checkpoint at {folder}: give a folder that `theodolite prune` wrote")
        try:
            provenance = read_json_checked(folder / SETTINGS)
            sums = provenance.pop(CHECKSUMS, None) or {}
            table = pd.read_parquet(BytesIO(read_bytes_checked(folder / TABLE, sums)))
            low_rank = _read_low_rank(folder / LOW_RANK, sums.get(LOW_RANK))
            layers = int(provenance["model"]["layers"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError, pyarrow.ArrowException) as error:
            raise UsageError(f"{folder} is incomplete or damaged ({error}): prune again") from error
        for layer in range(layers if is_factored(folder) else 0):
            low_rank |= low_rank_of(layer, read_matrices(folder / BLOCK.format(layer))[0])
        return cls(table, provenance, low_rank, folder)


WriteExtras = Callable[[Pruned, Path], object]
"""Writes further files into the folder of a pruned checkpoint, before the folder is renamed to its final name."""


def low_rank_of(layer: int, matrices: Sequence[PrunedMatrix]) -> LowRank:
    """The low-rank parts of a block's matrices."""
    return {
        (layer, matrix.key): (matrix.left.cpu(), matrix.right.cpu())
        for matrix in matrices
        if matrix.left is not None and matrix.right is not None
    }


def load_factored(folder: str | Path, **options: Any) -> OpenModel:
    """Open a factored checkpoint, with the `options` of `open_model`.

    Raises:
        UsageError: the checkpoint is not factored, or as `open_model`.
        WorkError: as `open_model`.
    """
    if not is_factored(Path(folder)):
        raise UsageError(
            f"{folder} is not a factored checkpoint: write one with `theodolite prune --format factored`"
        )
    return open_model(folder, **options)


class UnfinishedPruning:
    """The finished blocks of a pruning in `OUT.partial`, and how they become `OUT`.

    Args:
        out: folder of the checkpoint.
        fingerprint: everything that determines the result.
        corpus: what provenance says of the corpus, to say what differs where it does not match.
    """

    def __init__(self, out: Path, fingerprint: dict[str, Any], corpus: dict[str, Any]) -> None:
        self.out = out
        self._fingerprint, self._corpus = fingerprint, corpus
        self._workspace = Workspace(out, fingerprint)
        self._seconds = self._workspace.folder / "seconds.json"

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """Lock the folder against other processes.

        Raises:
            UsageError: another process holds it, the folder holds something else or lies in a pruned checkpoint, or it
                has an unfinished pruning with other settings.
        """
        refuse_inside(self.out)
        with locked(self.out):
            if self.out.is_dir() and not any(self.out.iterdir()):
                self.out.rmdir()
            if self.out.exists():
                self._check_written()
            for path in sorted(self._workspace.folder.glob("*.safetensors"))[:1]:
                self._read(path)
            yield

    def block(self, layer: int) -> tuple[list[PrunedMatrix], TableRows] | None:
        """The matrices of a finished block and their rows of the table; None if it is not finished.

        Raises:
            UsageError: it belongs to another pruning.
        """
        return self._read(self._block(layer)) if self._block(layer).is_file() else None

    def _read(self, path: Path) -> tuple[list[PrunedMatrix], TableRows]:
        matrices, notes = read_matrices(path)
        if notes["fingerprint"] != self._fingerprint:
            raise UsageError(
                f"{path.parent} holds an unfinished pruning of another model, text or settings: choose another "
                "--out or remove it"
            )
        return matrices, notes["rows"]

    def _check_written(self) -> None:
        """Refuse an `OUT` that is not of this same pruning."""
        try:
            provenance = read_json_checked(self.out / SETTINGS)
            there = _options(provenance["fingerprint"])
        except (ValueError, KeyError, TypeError):
            raise exists_already(self.out) from None
        now = _options(self._fingerprint)
        if there != now:
            differs = differences(there, now, provenance.get("corpus"), self._corpus)
            raise UsageError(
                f"{self.out} holds a pruning of another model, text or settings ({differs}): choose another --out or "
                "remove it"
            )

    def finished(self, form: str) -> Pruned | None:
        """The record of this pruning where `OUT` has it; what a process killed as it finished has left is removed.

        Raises:
            UsageError: `OUT` is in the other format, or damaged.
        """
        if not self.out.exists():
            return None
        written = Pruned.load(self.out)
        there = written.provenance["pruning"]["format"]
        if there != form:
            raise UsageError(
                f"{self.out} holds this pruning in another format (--format {there} there, {form} now): choose "
                "another --out or remove it"
            )
        shutil.rmtree(self._workspace.folder, ignore_errors=True)
        return written

    @property
    def seconds(self) -> float:
        """Seconds spent on the finished blocks."""
        try:
            return float(json.loads(self._seconds.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return 0.0

    def save(self, layer: int, matrices: Sequence[PrunedMatrix], rows: TableRows, seconds: float) -> None:
        """Save a finished block atomically."""
        notes = {"fingerprint": self._fingerprint, "rows": rows}
        with disk_errors(self._workspace.folder):
            self._workspace.folder.mkdir(parents=True, exist_ok=True)
            write_atomically(self._block(layer), lambda path: write_matrices(path, matrices, notes))
            write_text(self._seconds, json.dumps(seconds))

    def finish(
        self,
        model: OpenModel,
        matrices: Sequence[Sequence[Matrix]],
        pruned: Pruned,
        form: str,
        write_extras: WriteExtras,
    ) -> Pruned:
        """Write `OUT` atomically and remove the progress; returns the record with folder and sizes."""
        with folder_written_atomically(self.out) as temporary, without_progress_bars():
            if form == "factored":
                self._write_factored(temporary, model, pruned)
            elif form == ADAPTER:
                self._write_with_adapter(temporary, model, matrices, pruned.low_rank)
            else:
                model.hf.save_pretrained(temporary)
            if model.tokenizer is not None:
                model.tokenizer.save_pretrained(temporary)
            sums = {}
            if pruned.low_rank and form != "factored":
                (temporary / LOW_RANK).parent.mkdir()
                sums[LOW_RANK] = write_checked(temporary / LOW_RANK, _by_name(pruned.low_rank))
            pruned = _with_bytes(temporary, model, pruned, form)
            pruned.table.to_parquet(temporary / TABLE, index=False)
            sums[TABLE] = bytes_digest((temporary / TABLE).read_bytes())
            write_json_checked(temporary / SETTINGS, pruned.provenance | {CHECKSUMS: sums})
            for path in temporary.rglob("*.safetensors"):  # written readable by their owner only
                shutil.copymode(temporary / SETTINGS, path)
            write_extras(pruned, temporary)
        shutil.rmtree(self._workspace.folder, ignore_errors=True)
        return replace(pruned, folder=self.out)

    def _write_factored(self, folder: Path, model: OpenModel, pruned: Pruned) -> None:
        config = copy.deepcopy(model.hf.config)
        config.architectures = [type(model.hf).__name__]
        config.save_pretrained(folder)
        if model.hf.can_generate():
            model.hf.generation_config.save_pretrained(folder)
        write_dense(folder / DENSE, model.hf, set(pruned.table["parameter"]))
        for layer in range(model.layers):
            shutil.copyfile(self._block(layer), folder / BLOCK.format(layer))

    def _write_with_adapter(
        self, folder: Path, model: OpenModel, matrices: Sequence[Sequence[Matrix]], low_rank: LowRank
    ) -> None:
        blocks = [
            [_with_low_rank(matrix, low_rank.get((layer, matrix.key))) for matrix in block]
            for layer in range(model.layers)
            for block in [self._read(self._block(layer))[0]]
        ]
        pairs = list(zip(chain(*matrices), chain(*blocks), strict=True))
        with sparse_parts_alone(pairs):
            model.hf.save_pretrained(folder)
        write_adapter(folder / ADAPTER, model, [pruned for _, pruned in pairs], self.out)

    def _block(self, layer: int) -> Path:
        return self._workspace.folder / BLOCK.format(layer)


def _with_low_rank(matrix: PrunedMatrix, factors: tuple[Tensor, Tensor] | None) -> PrunedMatrix:
    """With a low-rank part that may have been trained since the block was saved."""
    return replace(matrix, left=factors[0], right=factors[1]) if factors else matrix


def _options(fingerprint: dict[str, Any]) -> dict[str, Any]:
    """A fingerprint with each setting under its own name."""
    return {name: value for name, value in fingerprint.items() if name != "pruning"} | fingerprint["pruning"]


def _by_name(low_rank: LowRank) -> dict[str, Tensor]:
    return {
        f"{layer}/{name}/{side}": factor.contiguous()
        for (layer, name), factors in low_rank.items()
        for side, factor in zip(("left", "right"), factors, strict=True)
    }


def _read_low_rank(path: Path, sha256: str | None) -> LowRank:
    """What a merged checkpoint has of them; a method without any writes no file.

    Raises:
        ValueError, KeyError: the file is missing, damaged or another one.
    """
    if sha256 is None and not path.is_file():
        return {}
    tensors, _ = read_checked(path, sha256)
    sides = {tuple(name.rsplit("/", 1)): factor for name, factor in tensors.items()}
    return {
        (int(name.partition("/")[0]), name.partition("/")[2]): (left, sides[name, "right"])
        for (name, side), left in sides.items()
        if side == "left"
    }


def _with_bytes(folder: Path, model: OpenModel, pruned: Pruned, form: str) -> Pruned:
    """With the sizes in bytes of the written and of the dense weights."""
    weights = [*folder.glob("*.safetensors"), *(folder / ADAPTER).glob("*.safetensors")]
    written = sum(path.stat().st_size for path in weights)
    dense = sum(p.numel() * p.element_size() for p in model.hf.parameters())
    pruning = pruned.provenance["pruning"] | {"format": form, "bytes": written, "dense_bytes": dense}
    return replace(pruned, provenance=pruned.provenance | {"pruning": pruning})
