"""A pruned model on disk, and the state from which an interrupted pruning resumes.

While unfinished, `OUT.partial` holds a file per finished block. The finished `OUT` is a checkpoint: merged, with dense
matrices that `transformers` opens, or with an adapter (`adapter.py`), or factored, in the format of
`models/factored.py`; `pruning.json` and `pruning.parquet` are next to the weights. Nothing is pruned here.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from theodolite.errors import UsageError
from theodolite.jobs.unfinished import Unfinished
from theodolite.models import OpenModel
from theodolite.models.stored.checkpoint_tensors import save_config
from theodolite.models.stored.factored import (
    BLOCK,
    DENSE,
    PrunedMatrix,
    dense_tensors,
    packed_block,
    unpacked_block,
)
from theodolite.models.stored.lazy_weights import save_checkpoint
from theodolite.models.stored.loading import without_progress_bars
from theodolite.models.weights.block_matrices import Matrix
from theodolite.prune.adapter import has_layer, write_adapter
from theodolite.prune.pruned import (
    LOW_RANK,
    TABLE,
    LowRank,
    LowRankOfFiles,
    Pruned,
    TableRows,
    low_rank_of,
    reader_of_low_rank,
)
from theodolite.system.checksums import (
    CHECKSUMS,
    bytes_digest,
    read_json_checked,
    write_checked,
    write_json_checked,
)
from theodolite.system.files import folder_written_atomically
from theodolite.system.pruned_folders import ADAPTER, SETTINGS, exists_already
from theodolite.system.run_folders import differences

WEIGHTS = "weights"
"""Beside the checksums of single files: that of the weights and the adapter together."""

SECONDS = "seconds"
"""The part of unfinished work that says how long the blocks took: their own files are the same whoever made them."""

WriteExtras = Callable[[Pruned, Path], object]
"""Writes further files into the folder of a pruned checkpoint, before the folder is renamed to its final name."""


def write_block(
    matrices: Sequence[Matrix], pruned: Sequence[PrunedMatrix], *, sparse_alone: bool = False
) -> None:
    """Write the pruned matrices of a block that is present into it; `sparse_alone`: without what an adapter holds."""
    for own, approximation in zip(matrices, pruned, strict=True):
        alone = sparse_alone and has_layer(approximation)
        own.write(approximation.sparse if alone else approximation.merged(own.holder.device))


class UnfinishedPruning:
    """The finished blocks of a pruning in `OUT.partial`, and how they become `OUT`; arguments as of `Unfinished`."""

    def __init__(self, out: Path, fingerprint: dict[str, Any], corpus: dict[str, Any] | None) -> None:
        self._work = Unfinished(out, _options(fingerprint), corpus, "pruning")
        self.out = self._work.out or out
        self.folder = self._work.folder

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """Lock the folder against other processes.

        Raises:
            UsageError: another process holds it, or the folder holds something else.
        """
        with self._work.claimed():
            if self.out.is_dir() and not any(self.out.iterdir()):
                self.out.rmdir()
            if self.out.exists():
                self._check_written()
            yield

    def block(self, layer: int) -> tuple[list[PrunedMatrix], TableRows] | None:
        """The matrices of a finished block and their rows of the table, or None; `UsageError` where it is damaged."""
        part = self._work.load(_name(layer))
        if part is None:
            return None
        matrices, notes = unpacked_block(*part)
        return matrices, notes["rows"]

    def _check_written(self) -> None:
        """Refuse an `OUT` that is not of this same pruning."""
        try:
            provenance = read_json_checked(self.out / SETTINGS)
            there = _options(provenance["fingerprint"])
        except (ValueError, KeyError, TypeError):
            raise exists_already(self.out) from None
        if there != self._work.fingerprint:
            differs = differences(there, self._work.fingerprint, provenance.get("corpus"), self._work.corpus)
            raise UsageError(
                f"{self.out} holds a pruning of another model, text or settings ({differs}): choose another --out or "
                "remove it"
            )

    def finished(self, form: str) -> Pruned | None:
        """The record of this pruning where `OUT` has it; what a process killed as it finished has left is removed.

        Raises:
            UsageError: `OUT` is in the other format, or damaged; or `OUT.partial` holds another pruning.
        """
        if not self.out.exists():
            self._work.begin()
            return None
        written = Pruned.load(self.out)
        there = written.provenance["pruning"]["format"]
        if there != form:
            raise UsageError(
                f"{self.out} holds this pruning in another format (--format {there} there, {form} now): choose "
                "another --out or remove it"
            )
        sums = read_json_checked(self.out / SETTINGS).get(CHECKSUMS) or {}
        if sums.get(WEIGHTS) not in (None, _weights_digest(self.out)):
            raise UsageError(
                f"{self.out} is incomplete or damaged (its weights are not those that were written): remove it, and "
                "prune again"
            )
        self._work.remove()
        return written

    @property
    def seconds(self) -> float:
        """Seconds spent on the finished blocks."""
        return float(self._work.notes(SECONDS).get(SECONDS, 0.0))

    def save(self, layer: int, matrices: Sequence[PrunedMatrix], rows: TableRows, seconds: float) -> None:
        """Save a finished block atomically."""
        self._work.save(_name(layer), *packed_block(matrices, {"rows": rows}))
        self._work.save(SECONDS, {}, {SECONDS: seconds})

    def low_rank(self, rows: TableRows) -> LowRank:
        """The low-rank parts of the finished blocks, whose rows of the table these are."""
        with_one = [row for row in rows if row["rank"]]
        keys = [
            (row["layer"], row["matrix"] if row["expert"] < 0 else f"{row['matrix']}.{row['expert']}")
            for row in with_one
        ]
        return LowRankOfFiles(keys, lambda layer: low_rank_of(layer, self._matrices(layer)))

    @contextmanager
    def written_into(
        self, model: OpenModel, matrices: Sequence[Sequence[Matrix]], *, sparse_alone: bool = False
    ) -> Iterator[None]:
        """While open, the model has its pruned matrices: a streamed one, too, as its blocks are read."""

        def write(layer: int, sparse_alone: bool) -> None:
            write_block(matrices[layer], self._matrices(layer), sparse_alone=sparse_alone)

        if model.streamed is not None:
            with model.streamed.edited(lambda layer: write(layer, sparse_alone)):
                yield
            return
        layers = range(model.layers if sparse_alone else 0)
        for layer in layers:
            write(layer, True)
        try:
            yield
        finally:
            for layer in layers:
                write(layer, False)

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
            else:
                with self.written_into(model, matrices, sparse_alone=form == ADAPTER):
                    save_checkpoint(model, temporary)
            if form == ADAPTER:
                blocks = map(self._matrices, range(model.layers))
                write_adapter(temporary / ADAPTER, model, blocks, self.out)
            if model.tokenizer is not None:
                model.tokenizer.save_pretrained(temporary)
            sums = {} if form == "factored" else self._write_low_rank(temporary, pruned)
            pruned = _with_bytes(temporary, model, pruned, form)
            pruned.table.to_parquet(temporary / TABLE, index=False)
            sums[TABLE] = bytes_digest((temporary / TABLE).read_bytes())
            sums[WEIGHTS] = _weights_digest(temporary)
            write_json_checked(temporary / SETTINGS, pruned.provenance | {CHECKSUMS: sums})
            for path in temporary.rglob("*.safetensors"):  # written readable by their owner only
                shutil.copymode(temporary / SETTINGS, path)
            write_extras(pruned, temporary)
        self._work.remove()
        low_rank = LowRankOfFiles(pruned.low_rank, reader_of_low_rank(self.out, sums))
        return replace(pruned, low_rank=low_rank, folder=self.out)

    def _write_low_rank(self, folder: Path, pruned: Pruned) -> dict[str, str]:
        """Write the low-rank parts, a file of each block that has some; the checksums of the files."""
        sums: dict[str, str] = {}
        for layer in sorted({layer for layer, _ in pruned.low_rank}):
            (folder / LOW_RANK).parent.mkdir(exist_ok=True)
            name = LOW_RANK.format(layer)
            sums[name] = write_checked(folder / name, _by_name(low_rank_of(layer, self._matrices(layer))))
        return sums

    def _write_factored(self, folder: Path, model: OpenModel, pruned: Pruned) -> None:
        save_config(model.hf, folder)
        names = set(pruned.table["parameter"])
        tensors = dense_tensors(model.hf, names)
        if model.streamed is not None:
            for layer in range(model.layers):
                tensors |= model.streamed.tensors(layer, names)
        save_file(tensors, folder / DENSE, {"format": "pt"})
        for layer in range(model.layers):
            shutil.copyfile(self._work.path(_name(layer)), folder / BLOCK.format(layer))

    def _matrices(self, layer: int) -> list[PrunedMatrix]:
        """Of a finished block."""
        block = self.block(layer)
        assert block is not None
        return block[0]


def _name(layer: int) -> str:
    return Path(BLOCK.format(layer)).stem


def _options(fingerprint: dict[str, Any]) -> dict[str, Any]:
    """A fingerprint with each setting under its own name."""
    return {name: value for name, value in fingerprint.items() if name != "pruning"} | fingerprint["pruning"]


def _by_name(low_rank: LowRank) -> dict[str, Tensor]:
    return {
        f"{layer}/{name}/{side}": factor.contiguous()
        for (layer, name), factors in low_rank.items()
        for side, factor in zip(("left", "right"), factors, strict=True)
    }


def _weight_files(folder: Path) -> list[Path]:
    """Of the model and its adapter, in order."""
    return [*sorted(folder.glob("*.safetensors")), *sorted((folder / ADAPTER).glob("*.safetensors"))]


def _weights_digest(folder: Path) -> str:
    digests = []
    for path in _weight_files(folder):
        with path.open("rb") as file:
            digests.append(f"{path.name} {hashlib.file_digest(file, 'sha256').hexdigest()}")
    return hashlib.sha256("\n".join(digests).encode()).hexdigest()


def _with_bytes(folder: Path, model: OpenModel, pruned: Pruned, form: str) -> Pruned:
    """With the sizes in bytes of the written and of the dense weights."""
    written = sum(path.stat().st_size for path in _weight_files(folder))
    dense = sum(p.numel() * p.element_size() for p in model.hf.parameters())
    pruning = pruned.provenance["pruning"] | {"format": form, "bytes": written, "dense_bytes": dense}
    return replace(pruned, provenance=pruned.provenance | {"pruning": pruning})
