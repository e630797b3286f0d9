"""What the matrices of a model are called, by which `--skip` and recipes name them."""

from __future__ import annotations

from fnmatch import fnmatchcase

from theodolite.models import OpenModel
from theodolite.models.block_matrices import Matrix


class Names:
    """Of the matrices of a model: in its block ("mlp.down_proj", "q", "mlp"), behind the block's number ("0.q") and in
    the model ("model.layers.0"); each of the matrix, or of a module that it is in.
    """

    def __init__(self, model: OpenModel) -> None:
        name_of = {module: name for name, module in model.root.named_modules()}
        self._blocks = [name_of[block] for block in model.structure.blocks]
        inside = tuple(f"{block}." for block in self._blocks)
        self.outside = [name for name in name_of.values() if not f"{name}.".startswith(inside)]

    def fit(self, matrix: Matrix, glob: str) -> bool:
        """Whether a glob is of one of its names."""
        return any(fnmatchcase(name, glob) for name in self._of(matrix))

    def _of(self, matrix: Matrix) -> list[str]:
        module = matrix.parameter.removesuffix(".weight")
        inner = module.removeprefix(f"{self._blocks[matrix.layer]}.")
        whole = (matrix.key, f"{matrix.layer}.{matrix.key}", module, inner)
        above = [
            ".".join(parts[:end])
            for parts in (name.split(".") for name in whole)
            for end in range(1, len(parts))
        ]
        return [*whole, matrix.name, f"{matrix.layer}.{matrix.name}", matrix.parameter, *above]
