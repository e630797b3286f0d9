"""A recipe: settings by matrix in a small YAML file.

    skip: ["0.*", mlp.down_proj]
    sparsity: {"mlp.*": 0.6, "11.*": 0.3}
    rank_ratio: {q: 0.5, k: 0.5}

A name is a glob, as of `--skip` (`names.py`). Of several that fit a matrix, the last one counts; where none does, what
the command says.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from theodolite.errors import UsageError, first_line
from theodolite.models.block_matrices import Matrix
from theodolite.prune.names import Names

SETTINGS_OF_MATRICES = ("sparsity", "rank_ratio")

_GIVE = "give skip, sparsity or rank_ratio"


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
        path = Path(path)
        given = _parsed(path)
        if not isinstance(given, dict):
            raise UsageError(f"{path} is no recipe: {_GIVE}")
        unknown = [name for name in given if name not in ("skip", *SETTINGS_OF_MATRICES)]
        if unknown:
            raise UsageError(f"{path}: a recipe has skip, sparsity and rank_ratio, and no {unknown[0]}")
        skip = given.get("skip")
        skip = [] if skip is None else skip
        if not isinstance(skip, list) or not all(isinstance(glob, str) for glob in skip):
            raise UsageError(f'{path}: skip is a list of names, such as ["0.*", mlp.down_proj]')
        recipe = cls(
            path, tuple(skip), **{name: _numbers(path, name, given) for name in SETTINGS_OF_MATRICES}
        )
        if not (recipe.skip or recipe.sparsity or recipe.rank_ratio):
            raise UsageError(f"{path} is empty: {_GIVE}, or leave --recipe out")
        return recipe

    def settings(
        self, names: Names, matrices: Iterable[Iterable[Matrix]]
    ) -> dict[str, dict[tuple[int, str], float]]:
        """Of sparsity and rank_ratio: what the recipe says, of each (block, key of a matrix) of which it does.

        Raises:
            UsageError: a name is of no matrix that is to be pruned.
        """
        every = list(chain(*matrices))
        said: dict[str, dict[tuple[int, str], float]] = {}
        for setting in SETTINGS_OF_MATRICES:
            said[setting] = {}
            for glob, value in getattr(self, setting).items():
                fitting = {(matrix.layer, matrix.key): value for matrix in every if names.fit(matrix, glob)}
                if not fitting:
                    raise UsageError(f"{self.path}: no matrix that is to be pruned is called {glob}")
                said[setting] |= fitting
        return said


def _parsed(path: Path) -> Any:
    """What the YAML says; a name that a mapping has twice is refused, of which the parser would take the last."""
    import yaml

    try:
        text = path.read_text(encoding="utf-8")
        root = yaml.compose(text, yaml.SafeLoader)
        mappings = [root, *(value for _, value in root.value)] if isinstance(root, yaml.MappingNode) else []
        for mapping in mappings:
            names: set[str] = set()
            for name, _ in mapping.value if isinstance(mapping, yaml.MappingNode) else ():
                if isinstance(name, yaml.ScalarNode) and name.value in names:
                    line = name.start_mark.line + 1
                    raise UsageError(f"{path}, line {line}: {name.value} is there twice: keep one of them")
                names.add(str(name.value))
        return yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise UsageError(f"cannot read the recipe {path}: {line}{error.problem}") from error
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:  # ValueError: a wrong date, too
        raise UsageError(f"cannot read the recipe {path}: {first_line(error)}") from error


def _numbers(path: Path, name: str, given: Mapping[str, Any]) -> dict[str, float]:
    values = given.get(name)
    values = {} if values is None else values
    if not isinstance(values, dict) or not all(
        isinstance(value, int | float) and not isinstance(value, bool) for value in values.values()
    ):
        raise UsageError(f'{path}: {name} has a number for each name, such as {{"mlp.*": 0.5}}')
    return {str(glob): float(value) for glob, value in values.items()}
