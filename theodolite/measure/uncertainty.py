"""Standard errors of the layers table by resampling contexts, from sums kept by group of contexts.

Nothing is run again: the accumulators hold eight groups' sums apart (`accumulate.sums.Groups`), and every number is
taken anew from balanced halves of the groups, with the definitions of `geometry.py`. This module adds no number of
its own.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int
from scipy.linalg import hadamard
from torch import Tensor
from torch.nn import functional

from theodolite.accumulate.means import Sample, decomposed
from theodolite.accumulate.second_moments import low_rank
from theodolite.accumulate.sums import State
from theodolite.corpus.groups import GROUPS, Groups
from theodolite.measure.clusters import clusters
from theodolite.measure.column import Array, gives
from theodolite.measure.geometry import (
    LAYER_COLUMNS,
    SCREENOT_RANK,
    Columns,
    contextual,
    positional,
    positions_read,
    residual_columns,
    screenot_bound,
)
from theodolite.system.processor import parallel_map
from theodolite.theory.singular import screenot_threshold
from theodolite.theory.smoothness import Grid

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


@gives(*LAYER_COLUMNS)
def standard_errors(
    means: State,
    sketches: State,
    outliers: State,
    sample: Sample,
    labels: Int[Tensor, " sampled"],
    context_cluster: Int[Tensor, "layers sampled"],
    leading: int = 1,
    grid: Grid | None = None,
) -> Columns:
    """Compute `<column>_se` for every column of `geometry.geometry`: contexts are what is drawn anew.

    Contexts are resampled in eight groups of neighbours, so documents that fill a few contexts, and not single
    contexts, may be what is independent. Statistics that do not move smoothly with the data (rank, counts of
    dimensions, maxima) have a standard error too, but a coarse one; it can be 0 where all halves agree. k-means
    goes on from the whole sample's clusters in each half: another start would add its own luck. Constants have 0.
    `relative_norm_se` is an estimate itself: the largest eigenvalue of a half is that of a sketch of 32 directions,
    which may miss a part of it (on a real encoder 0.0233, where d×d moments by group give 0.0148).

    Args:
        means, sketches, outliers: states of `Means`, `MomentSketches` and `Outliers`.
        sample, labels, leading, grid: as for `geometry`.
        context_cluster: the clusters that k-means found on the whole sample, −1 for contexts in none.

    Returns:
        NaN in every row with fewer than eight contexts, and where a half has no such number.
    """
    halves = balanced_halves()
    # Below eight contexts some groups are empty: the names are still those of a row, the numbers none.
    drawn = halves if len(sample.slot) >= GROUPS else torch.ones(1, GROUPS, dtype=torch.float64)
    columns: Columns = {}
    for layer in range(len(means["contexts"])):
        known = means, sketches, outliers, sample, labels, context_cluster[layer]
        rows = statistics(*known, layer, drawn, leading, grid)
        table = torch.tensor([list(row.values()) for row in rows], dtype=torch.float64)
        errors = half_sample_error(table) if len(drawn) > 1 else torch.full_like(table[0], math.nan)
        for name, error in zip(rows[0], errors.tolist(), strict=True):
            columns.setdefault(f"{name}_se", []).append(error)
    return columns


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
    """Compute the sampling errors of the arrays by balanced halves, as of `standard_errors`; NaN below eight contexts.

    The shares of the groups have the mean of the corpus, up to what groups differ in size. `subspace_error` of k
    directions, k at most `SCREENOT_RANK`, is 1 − ‖VᵀV′‖_F²/k of those of a half (′) and of all, in the mean of the
    halves: a half differs from the whole by as much as the whole from the truth.

    Args:
        means, outliers, leading: as for `standard_errors`.
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
            *(whole.new_zeros(0, whole.shape[1]), counts[:0]),
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


def statistics(
    means: State,
    sketches: State,
    outliers: State,
    sample: Sample,
    labels: Int[Tensor, " sampled"],
    found: Int[Tensor, " sampled"],
    layer: int,
    halves: Float[Tensor, "halves groups"],
    leading: int = 1,
    grid: Grid | None = None,
) -> list[dict[str, float]]:
    """Compute every column of one layer, for each row of weights 0 and 1 of the groups; as `standard_errors`.

    The definitions are those of `geometry`; singular values come from the smaller Gram matrix, which is several
    times faster and loses only those below 1e-8 of the largest, and cosines are taken in float32.
    """
    end = positions_read(means)
    groups = Groups(len(sample.slot)).of(sample.kept)
    context_means, tokens = means["context_mean"][layer], means["context_tokens"][layer]
    most = min(end - leading, context_means.shape[1])

    def of_half(chosen: Float[Tensor, " groups"]) -> tuple[dict[str, float], Tensor]:
        """Compute all columns but the rank, and the squares of the positional basis' singular values."""
        sums, readers = (
            torch.tensordot(chosen, means[name][layer], dims=1) for name in ("position_sum", "readers")
        )
        kept = chosen[groups] > 0
        text = slice(leading, len(sums))
        _, pos, ctx = decomposed(sums, readers, context_means[kept], tokens[kept], text)
        # Where all contexts of a half are short, it has the first positions only.
        reached = slice(leading, min(end, int((readers > 0).sum())))
        largest = _largest({name: values[layer] for name, values in sketches.items()}, chosen)
        row, squares = positional(pos[reached], readers[reached], largest, grid)
        row |= contextual(pos[reached].float(), ctx.float(), labels[kept])
        row |= dict.fromkeys(("incoherence_random", "incoherence_max_random"), 0.0)  # no data in them
        row |= residual_columns(means, outliers, layer, chosen, leading)
        contexts = means["contexts"][layer]
        for name in (name for name in row if name.startswith("massive_activations")):  # of the whole corpus
            row[name] *= float(contexts.sum() / (chosen @ contexts))
        row |= clusters(ctx, labels[kept], found[kept])[0]
        return row, functional.pad(squares, (0, most - len(squares)))

    rows, squares = zip(*parallel_map(of_half, list(halves)), strict=True)
    ranks = _screenot_ranks(torch.stack(squares).sqrt(), means["position_sum"][layer, 0, leading:end])
    return [{"rank": rank} | row for rank, row in zip(ranks, rows, strict=True)]


def _largest(sketches: State, chosen: Float[Tensor, " groups"]) -> float:
    """Find the largest eigenvalue of the chosen groups' centred second moment, by their sketches of one layer."""
    mean, directions = sketches["mean"], sketches["directions"]
    weight = chosen * sketches["count"]
    difference = mean - weight @ mean / weight.sum()
    between = difference.T @ (weight[:, None] * (difference @ directions))
    factor = low_rank(torch.tensordot(chosen, sketches["sketch"], dims=1) + between, directions)
    return float(torch.linalg.eigvalsh(factor.T @ factor)[-1])


def _screenot_ranks(values: Float[Tensor, "halves values"], p: Tensor) -> list[float]:
    """Compute ScreeNOT's ranks from singular values that are exact to √ε of the largest; of matrices shaped as `p`."""
    rounding = math.sqrt(torch.finfo(torch.float64).eps * max(p.shape)) * values[:, 0]
    rows, columns = p.shape
    threshold = torch.maximum(screenot_threshold(values, (rows, columns), screenot_bound(p)), rounding)
    return (values > threshold[:, None]).sum(dim=1).double().tolist()
