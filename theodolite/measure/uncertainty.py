"""Sampling errors of arrays by balanced halves of the contexts, from sums kept by group of contexts."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from scipy.linalg import hadamard
from torch import Tensor

from theodolite.accumulate.sums import State
from theodolite.corpus.groups import GROUPS
from theodolite.measure.column import WITHOUT, Array, gives
from theodolite.measure.position import SCREENOT_RANK, directions_of_gram, positions_read
from theodolite.system.processor import parallel_map

SPARE, ITERATIONS = 10, 2
"""Directions beyond those that are wanted, and steps, of a subspace iteration."""


def balanced_halves() -> Float[Tensor, "halves groups"]:
    """Return 14 halves of the 8 groups as weights 0 and 1: rows of Hadamard's matrix of order 8, and their complements.

    Any two groups are together in as many halves as they are apart: so for a mean over equal groups the spread of
    the halves is exactly what independent groups would give (McCarthy 1969).
    """
    rows = torch.from_numpy(hadamard(GROUPS)[1:])
    return (torch.cat([rows, -rows]) > 0).double()


def half_sample_error(values: Float[Tensor, "halves ..."]) -> Float[Tensor, " ..."]:
    """Compute the root mean square of the halves about their own mean, in the unit of the values; NaN where any is NaN.

    A half has as much noise again as the whole, so the spread of halves is the standard error of the whole. For a
    mean over G = 8 equal groups it is s/√8, s² the sample variance of the group means. It has 7 degrees of freedom:
    the standard error is itself known to about 27 %.
    """
    return (values - values.mean(dim=0)).square().mean(dim=0).sqrt()


@gives(
    Array(
        f"positional_directions{WITHOUT}",
        "(8, N, ≤ 20, d)",
        "Leading directions of the positional basis without each of 8 groups of contexts, in float16.",
    ),
)
def positional_directions(
    means: State, pos: Float[Tensor, "layers positions width"], leading: int = 1
) -> State:
    """Find the leading directions of the positional basis without each group of contexts; NaN below eight contexts.

    Args:
        means, leading: as for `measure.geometry.pictures`.
        pos: the positional basis of all contexts, as `decomposed_means` has it; positions behind the last are ignored.
    """
    text = slice(leading, positions_read(means))
    known = 1.0 if (means["contexts"] > 0).all() else math.nan
    layers = [
        _without_groups(*layer)
        for layer in zip(
            pos[:, text], means["position_sum"][:, :, text], means["readers"][:, :, text], strict=True
        )
    ]
    return {f"positional_directions{WITHOUT}": torch.stack(layers, dim=1).half() * known}


def _without_groups(
    basis: Float[Tensor, "positions width"],
    sums: Float[Tensor, "groups positions width"],
    readers: Float[Tensor, "groups positions"],
) -> Float[Tensor, "groups directions width"]:
    """Find one layer's leading directions without each group; `basis`: of all contexts."""
    most = min(SCREENOT_RANK, *basis.shape)
    # As a start: small eigenvalues of a Gram matrix are not exact.
    directions = leading_directions(basis, directions_of_gram(basis, min(most + SPARE, *basis.shape)))
    whole, all_readers = sums.sum(dim=0), readers.sum(dim=0)

    def without(group: int) -> Tensor:
        counts = all_readers - readers[group]
        means = (whole - sums[group]) / counts.clamp_min(1)[:, None]
        centred = means - counts @ means / counts.sum()
        return leading_directions(centred[counts > 0], directions)[:, :most].T

    return torch.stack(parallel_map(without, list(range(len(sums)))))


def leading_directions(
    matrix: Float[Tensor, "rows width"], start: Float[Tensor, "width directions"]
) -> Float[Tensor, "width directions"]:
    """Find the leading right singular vectors by subspace iteration from `start`, near them (Saad 2011, ch. 5)."""
    for _ in range(ITERATIONS):
        start = torch.linalg.qr(matrix.T @ (matrix @ start)).Q
    return start @ torch.linalg.svd(matrix @ start, full_matrices=False).Vh.T
