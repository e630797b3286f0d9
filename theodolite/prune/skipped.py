"""Matrices that a pruning leaves dense because they were named."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from theodolite.errors import UsageError
from theodolite.models import OpenModel
from theodolite.models.block_matrices import Matrix

Matrices = list[list[Matrix]]
"""Of every block."""


def without_skipped(
    model: OpenModel, matrices: Matrices, skip: Sequence[str], whole_for: str | None
) -> Matrices:
    """The matrices that are left to prune.

    Args:
        skip: globs of names, each in its block ("mlp.down_proj", "q", "mlp.*") or in the model
            ("model.layers.0.*", "lm_head").
        whole_for: the option that takes a layer's matrices all together or leaves all dense, if one does.

    Raises:
        UsageError: a glob is of nothing, nothing is left to prune, or a layer would be in part dense.
    """
    for glob in skip:
        of_matrix = any(_is_called(matrix, glob) for block in matrices for matrix in block)
        if not of_matrix and not any(fnmatchcase(name, glob) for name, _ in model.root.named_modules()):
            raise UsageError(f"--skip {glob}: no matrix or module of {model.id} is called so")
    left = [
        [matrix for matrix in block if not any(_is_called(matrix, glob) for glob in skip)]
        for block in matrices
    ]
    if not any(left):
        raise UsageError(f"--skip {','.join(skip)}: nothing is left to prune")
    if whole_for is not None:
        pruned = {matrix.parameter for block in left for matrix in block}
        kept = {id(matrix) for block in left for matrix in block}
        for matrix in (matrix for block in matrices for matrix in block):
            if matrix.parameter in pruned and id(matrix) not in kept:
                raise UsageError(
                    f"{matrix.key} of block {matrix.layer} is a part of {matrix.parameter}, which {whole_for} "
                    "keeps as a whole: skip all of its parts, or none"
                )
    return left


def _is_called(matrix: Matrix, glob: str) -> bool:
    module = matrix.parameter.removesuffix(".weight")
    names = (matrix.name, matrix.key, matrix.parameter, module, f"{matrix.layer}.{matrix.name}")
    return any(fnmatchcase(name, glob) for name in names)
