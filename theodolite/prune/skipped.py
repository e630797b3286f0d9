"""Matrices that a pruning leaves dense because they were named."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from itertools import chain

from theodolite.errors import UsageError
from theodolite.models import OpenModel
from theodolite.models.block_matrices import Matrix
from theodolite.prune.names import Names

Matrices = list[list[Matrix]]
"""Of every block."""


def without_skipped(
    model: OpenModel, matrices: Matrices, skip: Mapping[str, str], whole_for: str | None
) -> Matrices:
    """The matrices that are left to prune.

    Args:
        skip: globs of names of `Names`, or of a module outside the blocks ("lm_head"), and by what each was given.
        whole_for: the option that takes a layer's matrices all together or leaves all dense, if one does.

    Raises:
        UsageError: a glob is of nothing, nothing is left to prune, or a layer would be in part dense.
    """
    names = Names(model)
    every = list(chain(*matrices))
    skipped: set[int] = set()
    for glob, given_by in skip.items():
        fitting = {id(matrix) for matrix in every if names.fit(matrix, glob)}
        if not fitting and not any(fnmatchcase(name, glob) for name in names.outside):
            known = ", ".join(matrix.key for matrix in next(filter(None, matrices)))
            raise UsageError(
                f"{given_by} {glob}: no matrix of {model.id} is called so, and none is in a module of that name; "
                f"those of a block are {known}"
            )
        skipped |= fitting
    left = [[matrix for matrix in block if id(matrix) not in skipped] for block in matrices]
    if not any(left):
        by = " and ".join(dict.fromkeys(skip.values()))
        raise UsageError(f"{by} {','.join(skip)}: nothing is left to prune")
    if whole_for is not None:
        pruned = {matrix.parameter for matrix in chain(*left)}
        for matrix in every:
            if matrix.parameter in pruned and id(matrix) in skipped:
                raise UsageError(
                    f"{matrix.key} of block {matrix.layer} is a part of {matrix.parameter}, which {whole_for} "
                    "keeps as a whole: skip all of its parts, or none"
                )
    return left
