"""A pruned model on disk (`docs/pruning.md`): its record, the unfinished work, and the finished checkpoint."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow
import torch
from huggingface_hub import snapshot_download
from safetensors.torch import save_file
from torch import Tensor

from theodolite.errors import UsageError
from theodolite.jobs.job import Unfinished
from theodolite.models import OpenModel
from theodolite.models.stored import factored
from theodolite.models.stored.checkpoint_tensors import save_config, save_model
from theodolite.models.stored.factored import PrunedMatrix
from theodolite.models.stored.loading import without_progress_bars
from theodolite.models.weights.block_matrices import Matrix
from theodolite.sinks.interventions import Factors
from theodolite.system import embedded, files
from theodolite.system.checkpoint_folders import ADAPTER, ADAPTER_FILES, SETTINGS, exists_already
from theodolite.system.run_folders import differences

TABLE = "pruning.parquet"
NAME = Path(factored.BLOCK).stem  # a finished block's, in unfinished work

# In a folder of their own: a server takes whatever safetensors lie beside the weights for weights.
LOW_RANK = "low_rank/" + factored.BLOCK

# Copied from beside a checkpoint's weights; by number, the modules that sentence-transformers runs after the model.
COMPANIONS = (
    "*.json *.jinja vocab* merges* *.md *.model *.tiktoken LICENSE* NOTICE* README* "
    "additional_chat_templates/*.jinja [0-9]_*/*"
)

# But for these, which are of the weights that they lie beside, or of their training.
LEFT = "config.json *.index.json adapter_*.json *quant*.json trainer_state.json *_results.json"

# (block, name of the matrix) → left (outputs, rank) and right (rank, inputs), in the model's dtype
LowRank = dict[tuple[int, str], tuple[Tensor, Tensor]]
TableRows = list[dict[str, Any]]


@dataclass(frozen=True, repr=False)
class Pruned:
    """The record of a pruned model.

    Attributes:
        table: one row per matrix; `docs/pruning.md` lists the columns.
        provenance: versions, model, text, settings.
        folder: where it was written, if it was.
    """

    table: pd.DataFrame
    provenance: dict[str, Any]
    _low_rank_of: Callable[[int], LowRank]
    folder: Path | None = None

    def __repr__(self) -> str:
        pruning = self.provenance["pruning"]
        return f"Pruned({self.provenance['model']['id']} by {pruning['method']}: {len(self.table)} matrices)"

    @property
    def low_rank(self) -> LowRank:
        """The low-rank part of each matrix that has one."""
        blocks = map(self._low_rank_of, self.table["layer"].unique().tolist())
        return {at: factors for block in blocks for at, factors in block.items()}

    def factors(self, layer: int) -> Factors:
        """Give a block's low-rank parts of W_Q, W_K, W_V, for `without_low_rank`; `UsageError` where there are none."""
        parts = self._low_rank_of(layer) if (self.table["layer"] == layer).any() else {}
        factors = {name: parts[layer, name] for name in "qkv" if (layer, name) in parts}
        if not factors:
            raise UsageError(f"W_Q, W_K and W_V of block {layer} have no low-rank part")
        return factors

    @classmethod
    def load(cls, folder: str | Path) -> Pruned:
        """Read the record from the folder of a pruned checkpoint, whose weights `open_model` opens; or `UsageError`."""
        folder = Path(folder)
        if not (folder / SETTINGS).is_file():
            raise UsageError(f"no pruned checkpoint at {folder}: give a folder that `theodolite prune` wrote")
        try:
            provenance = files.read_json_checked(folder / SETTINGS)
            sums = provenance.pop(files.CHECKSUMS, None) or {}
            table = pd.read_parquet(BytesIO(files.read_bytes_checked(folder / TABLE, sums)))
            for layer in table["layer"].unique().tolist():
                _read_low_rank(folder, sums, layer)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, pyarrow.ArrowException) as error:
            raise UsageError(
                f"{folder} is incomplete or damaged ({error}): remove it, then prune again"
            ) from error
        return cls(table, provenance, partial(_read_low_rank, folder, sums), folder)


def low_rank_of(layer: int, matrices: Sequence[PrunedMatrix]) -> LowRank:
    """Collect the low-rank parts of a block's matrices."""
    return {
        (layer, matrix.key): (matrix.left.cpu(), matrix.right.cpu())
        for matrix in matrices
        if matrix.left is not None and matrix.right is not None
    }


def _read_low_rank(folder: Path, sums: Mapping[str, str], layer: int) -> LowRank:
    """Read a block's low-rank parts from a checkpoint; a block without any has no file."""
    if factored.is_factored(folder):
        return low_rank_of(layer, factored.read_matrices(folder / factored.BLOCK.format(layer))[0])
    name = LOW_RANK.format(layer)
    if name not in sums:
        return {}
    tensors, _ = files.read_checked(folder / name, sums[name])
    keys = dict.fromkeys(name.split("/", 1)[1].rpartition("/")[0] for name in tensors)
    return {(layer, key): (tensors[f"{layer}/{key}/left"], tensors[f"{layer}/{key}/right"]) for key in keys}


def write_block(
    matrices: Sequence[Matrix], pruned: Sequence[PrunedMatrix], *, sparse_alone: bool = False
) -> None:
    """Write the pruned matrices of a block that is present into it; `sparse_alone`: without what an adapter holds."""
    for matrix, approximation in zip(matrices, pruned, strict=True):
        alone = sparse_alone and _in_adapter(approximation)
        matrix.write(approximation.sparse if alone else approximation.merged(matrix.holder.device))


class UnfinishedPruning(Unfinished):
    """The finished blocks of a pruning in `OUT.partial`, and how they become `OUT`; arguments as of `Unfinished`."""

    out: Path

    def __init__(self, out: Path, fingerprint: dict[str, Any], corpus: dict[str, Any] | None) -> None:
        super().__init__(out, _options(fingerprint), corpus, "pruning")

    def finished(self, form: str) -> Pruned | None:
        """Give the record of this pruning where `OUT` has it; `UsageError` where it holds anything else."""
        if files.removed_if_empty(self.out) or not self.out.exists():
            self.begin()
            return None
        try:
            provenance = files.read_json_checked(self.out / SETTINGS)
            there = _options(provenance["fingerprint"]) | {"format": provenance["pruning"]["format"]}
        except (ValueError, KeyError, TypeError):
            raise exists_already(self.out) from None
        now = self.fingerprint | {"format": form}
        if there != now:
            differs = differences(there, now, provenance.get("corpus"), self.corpus)
            raise UsageError(
                f"{self.out} holds a pruning of another model, text or settings ({differs}): choose another --out or "
                "remove it"
            )
        written = Pruned.load(self.out)
        self.remove()
        return written

    def block(self, layer: int) -> tuple[list[PrunedMatrix], TableRows] | None:
        """Read the matrices of a finished block and their rows of the table, or None; `UsageError` if it is damaged."""
        part = self.load(NAME.format(layer))
        if part is None:
            return None
        matrices, notes = factored.unpacked_block(*part)
        return matrices, notes["rows"]

    def save_block(self, layer: int, matrices: Sequence[PrunedMatrix], rows: TableRows) -> None:
        """Save a finished block atomically."""
        self.save(NAME.format(layer), *factored.packed_block(matrices, {"rows": rows}))

    def matrices(self, layer: int) -> list[PrunedMatrix]:
        """Read the matrices of a finished block."""
        block = self.block(layer)
        assert block is not None
        return block[0]

    def _save_model(
        self, model: OpenModel, matrices: Sequence[Sequence[Matrix]], folder: Path, sparse_alone: bool
    ) -> None:
        """Save the pruned model; `sparse_alone`: without what an adapter holds, which stays in the model."""

        def write(layer: int, sparse_alone: bool = sparse_alone) -> None:
            write_block(matrices[layer], self.matrices(layer), sparse_alone=sparse_alone)

        if model.streamed is not None:
            with model.streamed.changed(write):
                model.streamed.save(folder)
            return
        layers = range(model.layers if sparse_alone else 0)
        for layer in layers:
            write(layer)
        try:
            save_model(model.hf, folder)
        finally:
            for layer in layers:
                write(layer, sparse_alone=False)

    def finish(
        self, model: OpenModel, matrices: Sequence[Sequence[Matrix]], pruned: Pruned, form: str
    ) -> Pruned:
        """Write `OUT` atomically, remove the progress, and read the record with folder and sizes."""
        sums: dict[str, str] = {}
        with files.folder_written_atomically(self.out) as folder, without_progress_bars():
            if form == "factored":
                save_config(model.hf, folder)
                names = set(pruned.table["parameter"])
                tensors = factored.dense_tensors(model.hf, names)
                for layer in range(model.layers):
                    if model.streamed is not None:
                        tensors |= model.streamed.tensors(layer, names)
                    shutil.copyfile(self.path(NAME.format(layer)), folder / factored.BLOCK.format(layer))
                save_file(tensors, folder / factored.DENSE, {"format": "pt"})
            else:
                self._save_model(model, matrices, folder, sparse_alone=form == ADAPTER)
                for layer in pruned.table.query("rank > 0")["layer"].unique():
                    name = LOW_RANK.format(layer)
                    (folder / name).parent.mkdir(exist_ok=True)
                    factors = {
                        f"{layer}/{key}/{side}": factor.contiguous()
                        for (_, key), both in low_rank_of(layer, self.matrices(layer)).items()
                        for side, factor in zip(("left", "right"), both, strict=True)
                    }
                    sums[name] = files.write_checked(folder / name, factors)
            if form == ADAPTER:
                blocks = map(self.matrices, range(model.layers))
                _write_adapter(folder / ADAPTER, model, blocks, self.out)
            _copy_companions(model, folder)
            weights = [*folder.glob("*.safetensors"), *(folder / ADAPTER).glob("*.safetensors")]
            sizes = {
                "format": form,
                "bytes": sum(path.stat().st_size for path in weights),
                "dense_bytes": sum(p.numel() * p.element_size() for p in model.hf.parameters()),
            }
            provenance = pruned.provenance | {"pruning": pruned.provenance["pruning"] | sizes}
            pruned.table.to_parquet(folder / TABLE, index=False)
            sums[TABLE] = files.bytes_digest((folder / TABLE).read_bytes())
            files.write_json_checked(folder / SETTINGS, provenance | {files.CHECKSUMS: sums})
            for path in folder.rglob("*.safetensors"):  # written readable by their owner only
                shutil.copymode(folder / SETTINGS, path)
        self.remove()
        return Pruned.load(self.out)


def _copy_companions(model: OpenModel, folder: Path) -> None:
    """Copy what the model's checkpoint has beside its weights, byte for byte but no code, and save the tokenizer."""
    source = embedded.FOLDER if model.id == embedded.NAME else Path(model.id).expanduser()
    if model.revision is not None:
        source = Path(snapshot_download(model.id, revision=model.revision, allow_patterns=COMPANIONS.split()))
    # Else its name may be that of any folder.
    of_files = (model.sha256 is not None or model.revision is not None) and source.is_dir()
    for path in (path for glob in COMPANIONS.split() if of_files for path in source.glob(glob)):
        name = path.relative_to(source)
        if path.is_file() and not any(fnmatchcase(name.as_posix(), glob) for glob in LEFT.split()):
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(path, folder / name)
    if model.tokenizer is not None:
        model.tokenizer.save_pretrained(folder)


def _options(fingerprint: dict[str, Any]) -> dict[str, Any]:
    """Return a fingerprint with each setting under its own name."""
    return {name: value for name, value in fingerprint.items() if name != "pruning"} | fingerprint["pruning"]


def _in_adapter(matrix: PrunedMatrix) -> bool:
    """Tell whether an adapter holds the low-rank part: experts have no layer that one goes around."""
    return matrix.left is not None and matrix.expert is None


def _write_adapter(folder: Path, model: OpenModel, blocks: Iterable[list[PrunedMatrix]], base: Path) -> None:
    """Write the low-rank parts as `PeftModel.from_pretrained(model, folder)` reads them; `base` has the sparse."""
    from peft import LoraConfig
    from peft.utils import TaskType

    tensors: dict[str, Tensor] = {}
    ranks: dict[str, int] = {}
    transposed = False
    for block in blocks:
        by_module: dict[str, list[PrunedMatrix]] = {}
        for matrix in filter(_in_adapter, block):
            by_module.setdefault(matrix.parameter.rpartition(".")[0], []).append(matrix)
        for name, parts in by_module.items():
            transposed |= parts[0].dimension == 1
            weight: Any = model.hf.get_submodule(name).weight
            a = torch.cat([part.right.cpu() for part in parts if part.right is not None])
            # Of W_Q, W_K and W_V in one module: the left factors side by side, each in the rows of its own outputs.
            b = torch.zeros(weight.shape[parts[0].dimension], len(a), dtype=a.dtype)
            columns = b.split([part.left.shape[1] for part in parts if part.left is not None], dim=1)
            for part, column in zip(parts, columns, strict=True):
                assert part.left is not None
                rows = torch.arange(len(b)) if part.rows is None else part.rows.cpu()
                column[rows] = part.left.cpu()
            ranks[name] = len(a)
            tensors[f"base_model.model.{name}.lora_A.weight"] = a
            tensors[f"base_model.model.{name}.lora_B.weight"] = b
    LoraConfig(
        r=max(ranks.values()),
        lora_alpha=max(ranks.values()),  # as the rank, so that what PEFT adds is B A itself
        rank_pattern=ranks,
        alpha_pattern=ranks,
        target_modules=sorted(ranks),
        fan_in_fan_out=transposed,
        base_model_name_or_path=str(base),
        task_type=TaskType.CAUSAL_LM if model.hf.can_generate() else None,
        inference_mode=True,
    ).save_pretrained(str(folder))
    save_file(tensors, folder / ADAPTER_FILES[1], {"format": "pt"})
