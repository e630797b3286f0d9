"""Read the record of a pruned model: its table, its provenance, and its low-rank parts, as they are asked for.

Nothing is pruned or written here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from io import BytesIO
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow
from torch import Tensor

from theodolite.errors import UsageError
from theodolite.models import OpenModel, open_model
from theodolite.models.stored.factored import BLOCK, PrunedMatrix, is_factored, read_matrices
from theodolite.sinks.interventions import Factors
from theodolite.system.checkpoint_folders import SETTINGS
from theodolite.system.checksums import CHECKSUMS, read_bytes_checked, read_checked, read_json_checked

TABLE = "pruning.parquet"

LOW_RANK = "low_rank/" + BLOCK
"""In a folder of their own: a server takes whatever safetensors lie beside the weights for weights."""

LowRank = Mapping[tuple[int, str], tuple[Tensor, Tensor]]
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
        """Give a block's low-rank parts of W_Q, W_K, W_V, for `interventions.without_low_rank(factors=…)`.

        Raises:
            UsageError: there are none: a method other than OATS, rank 0, or no such block.
        """
        factors = {name: self.low_rank[layer, name] for name in "qkv" if (layer, name) in self.low_rank}
        if not factors:
            raise UsageError(f"W_Q, W_K and W_V of block {layer} have no low-rank part")
        return factors

    @classmethod
    def load(cls, folder: str | Path) -> Pruned:
        """Read the record from the folder of a pruned checkpoint, whose weights `open_model` opens.

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
            read = reader_of_low_rank(folder, sums)
            keys = [key for layer in range(int(provenance["model"]["layers"])) for key in read(layer)]
        except (OSError, ValueError, KeyError, TypeError, AttributeError, pyarrow.ArrowException) as error:
            raise UsageError(f"{folder} is incomplete or damaged ({error}): prune again") from error
        return cls(table, provenance, LowRankOfFiles(keys, read), folder)


class LowRankOfFiles(LowRank):
    """Low-rank parts that are read as they are asked for; those of one block are in memory."""

    def __init__(self, keys: Iterable[tuple[int, str]], read: Callable[[int], LowRank]) -> None:
        self._keys = dict.fromkeys(keys)
        self._read = lru_cache(maxsize=1)(read)

    def __getitem__(self, key: tuple[int, str]) -> tuple[Tensor, Tensor]:
        if key not in self._keys:
            raise KeyError(key)
        return self._read(key[0])[key]

    def __iter__(self) -> Iterator[tuple[int, str]]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)


def low_rank_of(layer: int, matrices: Sequence[PrunedMatrix]) -> dict[tuple[int, str], tuple[Tensor, Tensor]]:
    """Collect the low-rank parts of a block's matrices."""
    return {
        (layer, matrix.key): (matrix.left.cpu(), matrix.right.cpu())
        for matrix in matrices
        if matrix.left is not None and matrix.right is not None
    }


def reader_of_low_rank(folder: Path, sums: Mapping[str, str]) -> Callable[[int], LowRank]:
    """Make a function that reads a block's low-rank parts from a checkpoint; a block without any has no file."""

    def read(layer: int) -> LowRank:
        if is_factored(folder):
            return low_rank_of(layer, read_matrices(folder / BLOCK.format(layer))[0])
        name = LOW_RANK.format(layer)
        if name not in sums and not (folder / name).is_file():
            return {}
        tensors, _ = read_checked(folder / name, sums.get(name))
        sides = {tuple(name.rsplit("/", 1)): factor for name, factor in tensors.items()}
        return {
            (int(name.partition("/")[0]), name.partition("/")[2]): (left, sides[name, "right"])
            for (name, side), left in sides.items()
            if side == "left"
        }

    return read


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
