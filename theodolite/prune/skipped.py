"""Matrices that a pruning leaves dense because they were named."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from itertools import chain

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
        skip: globs of names, each in its block ("mlp.down_proj", "q", "mlp") or in the model ("model.layers.0",
            "lm_head"): of a matrix, of a module that it is in, or of a module outside the blocks.
        whole_for: the option that takes a layer's matrices all together or leaves all dense, if one does.

    Raises:
        UsageError: a glob is of nothing, nothing is left to prune, or a layer would be in part dense.
    """
    name_of = {module: name for name, module in model.root.named_modules()}
    blocks = [name_of[block] for block in model.structure.blocks]
    called = {id(matrix): _names(matrix, blocks[matrix.layer]) for block in matrices for matrix in block}
    outside = [name for name in name_of.values() if not f"{name}.".startswith(tuple(f"{b}." for b in blocks))]
    for glob in skip:
        if not any(fnmatchcase(name, glob) for name in chain(outside, *called.values())):
            known = ", ".join(matrix.key for matrix in next(filter(None, matrices)))
            raise UsageError(
                f"--skip {glob}: no matrix of {model.id} is called so, and none is in a module of that name; those of "
                f"a block are {known}"
            )
    left = [
        [m for m in block if not any(fnmatchcase(name, glob) for name in called[id(m)] for glob in skip)]
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


def _names(matrix: Matrix, block: str) -> list[str]:
    """What a matrix is called in the block and in the model, and the modules that it is in."""
    module = matrix.parameter.removesuffix(".weight")
    whole = (matrix.key, f"{matrix.layer}.{matrix.key}", module, module.removeprefix(f"{block}."))
    above = [
        ".".join(parts[:end]) for parts in (name.split(".") for name in whole) for end in range(1, len(parts))
    ]
    return [*whole, matrix.name, f"{matrix.layer}.{matrix.name}", matrix.parameter, *above]
