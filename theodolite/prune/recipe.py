"""A recipe: settings by matrix in a small YAML file.

    skip: ["0.*", mlp.down_proj]
    sparsity: {"mlp.*": 0.6, "11.*": 0.3}
    rank_ratio: {q: 0.5, k: 0.5}

A name is a glob of what a matrix is called in its block ("q", "mlp.down_proj"), or of that behind the block's number
("11.mlp.*"). Of several that fit, the last one counts; where none does, what the command says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from theodolite.errors import UsageError, first_line
from theodolite.models.block_matrices import Matrix
from theodolite.prune.settings import RankRatio, Sparsity, ratio_at, share_at

Value = TypeVar("Value")

SETTINGS_OF_MATRICES = ("sparsity", "rank_ratio")


@dataclass(frozen=True)
class Recipe:
    """What a file says.

    Attributes:
        path: of the file.
        skip: globs of matrices that stay dense.
        sparsity, rank_ratio: by glob.
    """

    path: Path
    skip: tuple[str, ...] = ()
    sparsity: Mapping[str, float] = field(default_factory=dict)
    rank_ratio: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def read(cls, path: str | Path) -> Recipe:
        """Read a file.

        Raises:
            UsageError: it cannot be read, is not YAML, or holds anything else than a recipe.
        """
        import yaml

        path = Path(path)
        try:
            given = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise UsageError(f"cannot read the recipe {path}: {first_line(error)}") from error
        if not isinstance(given, dict) or not given:
            raise UsageError(f"{path} is no recipe: give skip, sparsity or rank_ratio")
        unknown = [name for name in given if name not in ("skip", *SETTINGS_OF_MATRICES)]
        if unknown:
            raise UsageError(f"{path}: a recipe has skip, sparsity and rank_ratio, and no {unknown[0]}")
        skip = given.get("skip") or []
        if not isinstance(skip, list) or not all(isinstance(glob, str) for glob in skip):
            raise UsageError(f'{path}: skip is a list of names, such as ["0.*", mlp.down_proj]')
        return cls(path, tuple(skip), **{name: _numbers(path, name, given) for name in SETTINGS_OF_MATRICES})

    def applied(
        self, sparsity: Sparsity, rank_ratio: RankRatio, matrices: Iterable[Sequence[Matrix]]
    ) -> tuple[Sparsity, RankRatio]:
        """The settings of a call, changed where the recipe says something.

        Raises:
            UsageError: a name is of no matrix that is to be pruned.
        """
        every = [matrix for block in matrices for matrix in block]
        for glob in (*self.sparsity, *self.rank_ratio):
            if not any(_fits(matrix.layer, matrix.name, glob) for matrix in every):
                raise UsageError(f"{self.path}: no matrix that is to be pruned is called {glob}")
        return (
            _changed(partial(share_at, sparsity), self.sparsity) if self.sparsity else sparsity,
            _changed(partial(ratio_at, rank_ratio), self.rank_ratio) if self.rank_ratio else rank_ratio,
        )


def _changed(
    setting: Callable[[int, str], Value], values: Mapping[str, float]
) -> Callable[[int, str], Value | float]:
    def changed(layer: int, name: str) -> Value | float:
        fitting = [value for glob, value in values.items() if _fits(layer, name, glob)]
        return fitting[-1] if fitting else setting(layer, name)

    return changed


def _fits(layer: int, name: str, glob: str) -> bool:
    return fnmatchcase(name, glob) or fnmatchcase(f"{layer}.{name}", glob)


def _numbers(path: Path, name: str, given: Mapping[str, Any]) -> dict[str, float]:
    values = given.get(name) or {}
    if not isinstance(values, dict) or not all(
        isinstance(value, int | float) and not isinstance(value, bool) for value in values.values()
    ):
        raise UsageError(f'{path}: {name} has a number for each name, such as {{"mlp.*": 0.5}}')
    return {str(glob): float(value) for glob, value in values.items()}
