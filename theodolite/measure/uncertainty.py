"""Sampling errors of arrays by balanced halves of the contexts, from sums kept by group of contexts."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from scipy.linalg import hadamard
from torch import Tensor
from torch.nn import functional

from theodolite.accumulate.means import decomposed
from theodolite.accumulate.sums import State
from theodolite.corpus.groups import GROUPS
from theodolite.measure.column import Array, gives
from theodolite.measure.position import SCREENOT_RANK, positions_read
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
        "outlier_share_by_group", "(N, 8, d)", "`outlier_share` of each of 8 groups of neighbouring contexts."
    ),
    Array(
        "subspace_error",
        "(N, ≤ 20)",
        "How far sampling moves P's k leading directions: 1 − mean squared cosine of the angles between those of "
        "halves and of all contexts.",
    ),
    Array("subspace_of_half", "(N, 7, ≤ 20, d)", "These directions of one half of each pair, in float16."),
)
def array_errors(
    means: State, outliers: State, pos: Float[Tensor, "layers positions width"], leading: int = 1
) -> State:
    """Compute the sampling errors of the arrays by balanced halves; NaN below eight contexts.

    The shares of the groups have the mean of the corpus, up to what groups differ in size. `subspace_error` of k
    directions, k at most `SCREENOT_RANK`, is 1 − ‖VᵀV′‖_F²/k of those of a half (′) and of all, in the mean of the
    halves: a half differs from the whole by as much as the whole from the truth.

    Args:
        means, outliers, leading: as for `measure.geometry.pictures`.
        pos: the positional basis of all contexts, as `decomposed_means` has it; positions behind the last are ignored.
    """
    readers = means["readers"]
    is_known = bool((means["contexts"] > 0).all())
    halves = balanced_halves() if is_known else torch.ones(1, GROUPS, dtype=torch.float64)
    known = 1.0 if is_known else math.nan
    tokens = readers[:, :, leading:].sum(dim=2)
    read = positions_read(means)
    read_by = pos[:, :read], means["position_sum"][:, :, :read], readers[:, :, :read]
    layers = [_subspaces(*layer, halves, leading) for layer in zip(*read_by, strict=True)]
    errors, directions = zip(*layers, strict=True)
    return {
        "outlier_share_by_group": (outliers["outlier"] / tokens[:, :, None]).float(),
        "subspace_error": torch.stack(errors) * known,
        "subspace_of_half": torch.stack(directions) * known,
    }


def _subspaces(
    whole: Float[Tensor, "positions width"],
    sums: Float[Tensor, "groups positions width"],
    readers: Float[Tensor, "groups positions"],
    halves: Float[Tensor, "halves groups"],
    leading: int,
) -> tuple[Float[Tensor, " directions"], Float[Tensor, "pairs directions width"]]:
    """Compute one layer's `subspace_error` and `subspace_of_half`; `whole`: all contexts' positional basis."""
    basis = whole[leading:]
    most = min(SCREENOT_RANK, *basis.shape)
    # Of the smaller Gram matrix, as a start: its small eigenvalues are not exact.
    start = torch.linalg.eigh(
        basis @ basis.T if len(basis) < basis.shape[1] else basis.T @ basis
    ).eigenvectors
    start = start.flip(1)[:, : most + SPARE]
    directions = leading_directions(basis, basis.T @ start if len(basis) < basis.shape[1] else start)

    def of_half(chosen: Float[Tensor, " groups"]) -> Tensor:
        counts = chosen @ readers
        _, pos, _ = decomposed(
            torch.tensordot(chosen, sums, dims=1),
            counts,
            *(whole.new_zeros(2, 0, whole.shape[1]), whole.new_zeros(2, 0)),
            slice(leading, len(whole)),
        )
        # Where all contexts of a half are short, it has the first positions only.
        reached = slice(leading, min(len(whole), int((counts > 0).sum())))
        found = leading_directions(pos[reached], directions)[:, :most]
        return functional.pad(found, (0, most - found.shape[1])).T

    found = torch.stack(parallel_map(of_half, list(halves)))
    kept = (found @ directions[:, :most]).square().cumsum(1).cumsum(2).diagonal(dim1=1, dim2=2)
    error = (1 - kept / torch.arange(1, most + 1)).mean(dim=0).clamp_min(0)
    return error, found[: len(halves) // 2].half()


def leading_directions(
    matrix: Float[Tensor, "rows width"], start: Float[Tensor, "width directions"]
) -> Float[Tensor, "width directions"]:
    """Find the leading right singular vectors by subspace iteration from `start`, near them (Saad 2011, ch. 5)."""
    for _ in range(ITERATIONS):
        start = torch.linalg.qr(matrix.T @ (matrix @ start)).Q
    return start @ torch.linalg.svd(matrix @ start, full_matrices=False).Vh.T
