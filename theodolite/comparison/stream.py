"""What survives of the residual stream's geometry: outliers, massive activations, positional basis."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from theodolite.comparison.survival import (
    HALF,
    LOST,
    NAMED,
    NEW,
    SURVIVED,
    UNDECIDED,
    Survival,
    changes,
    direction_margins,
    statuses,
    within_errors,
)
from theodolite.corpus.groups import GROUPS
from theodolite.corpus.patches import grid_described
from theodolite.judging import Criterion
from theodolite.measure.geometry import OUTLIER_SHARE
from theodolite.measure.uncertainty import balanced_halves, half_sample_error
from theodolite.passes.run import Run
from theodolite.report.data import Floats, error_of, mean_over_layers, need, provenance, value_of
from theodolite.system.wording import counted, listed, number, percent

A_HALF = Criterion("at least", HALF, "ours")


def outlier_dimensions(reference: Run, other: Run) -> Survival:
    """Outlier dimensions by residual layer: share of tokens with |x| ≥ 6 before and after."""
    before, after = (need(run, "outlier_share").astype(np.float64) for run in (reference, other))
    layer, dimension = np.nonzero((before >= OUTLIER_SHARE) | (after >= OUTLIER_SHARE))
    change = changes(before[layer, dimension], after[layer, dimension])
    table = pd.DataFrame({"layer": layer, "dimension": dimension}).join(change)
    first, second = (_in_halves(run, layer, dimension) for run in (reference, other))
    table["se"] = half_sample_error(second - first).numpy()
    pairs = ((second, first), (first, second))
    errors = [half_sample_error(one - HALF * two).numpy() for one, two in pairs]
    table["status"] = statuses(table, OUTLIER_SHARE, GROUPS, (errors[0], errors[1]))
    return Survival(
        "outlier dimensions",
        "outlier dimension",
        f"a dimension of a residual layer with |x| of 6 or more in at least {percent(OUTLIER_SHARE)} of the tokens "
        "past the first; it survives where at least half of that share is left, and is lost where less is, each with "
        "the whole 95 % interval",
        table,
        partial(_dimensions_sentence, noun="outlier dimension", same="shares"),
        weight="before",
        least=OUTLIER_SHARE,
        contexts=reference.provenance["corpus"]["contexts"],
    )


def massive_activations(reference: Run, other: Run) -> Survival:
    """Massive activations by residual layer, dimension, and place: their number before and after."""
    keys = ["layer", "dimension", "position"]
    counts = [_massive(run) for run in (reference, other)]
    table = counts[0].merge(counts[1], "outer", keys, suffixes=("_before", "_after")).sort_values(keys)
    # A dimension that has none in one model has none in any of its halves.
    filled = table.reset_index(drop=True).fillna(dict.fromkeys(table.columns.drop(keys), 0.0))
    change = changes(filled["count_before"], filled["count_after"])
    table = filled[keys].join(change)
    table["se"] = np.hypot(filled["se_before"], filled["se_after"]).replace(np.inf, np.nan)
    table["status"] = statuses(table, 1, GROUPS)
    return Survival(
        "massive activations",
        "massive dimension",
        "a dimension of a residual layer, at the first token or later, with values above 100 and 1000 times the "
        "median; it survives where it has at least half as many, and is lost where it has fewer, each with the whole "
        "95 % interval",
        table,
        partial(_dimensions_sentence, noun="massive activation", same="numbers"),
        least=1,
        contexts=reference.provenance["corpus"]["contexts"],
    )


def _massive(run: Run) -> pd.DataFrame:
    """How many massive activations each dimension of a layer has at the first and at later tokens, and their errors."""
    table = run.outliers
    parts = [
        table[["layer", "dimension"]].assign(
            position=position,
            count=table[name],
            # Infinite where it is not known: a missing row has none.
            se=table[f"{name}_se"].fillna(np.inf) if f"{name}_se" in table else np.inf,
        )
        for name, position in (("massive_first", "first"), ("massive", "later"))
    ]
    counts = pd.concat(parts, ignore_index=True).query("count > 0")
    # pyarrow's texts cannot be merged where there are none; a table without rows knows no numbers.
    return counts.astype({"position": object, "se": float})


def _in_halves(run: Run, layer: np.ndarray, dimension: np.ndarray) -> Float[Tensor, "halves units"]:
    """Shares of tokens in balanced halves of the contexts; NaN where a run of an older schema, or of few, has none."""
    by_group = run.arrays.get("outlier_share_by_group")
    if by_group is None:
        return torch.full((1, len(layer)), torch.nan, dtype=torch.float64)
    return balanced_halves() @ by_group[layer, :, dimension].T.double() / (GROUPS // 2)


def _dimensions_sentence(part: Survival, noun: str, same: str) -> str:
    table = part.table
    if not len(table):
        return f"Neither model has {'an' if noun[0] in 'aeiou' else 'a'} {noun}."
    if part.exact:
        layers_by_dimension = table.groupby("dimension")["layer"].count()
        return (
            f"All {counted(len(table), part.unit)} survive, with the same {same} "
            f"(dimensions {listed([str(d) for d in layers_by_dimension.index], NAMED)})."
        )
    clauses = [part.counts() if part.of_reference else f"The reference has no {noun}"]
    for status in (LOST, NEW):
        layers = table[table["status"] == status].groupby("dimension")["layer"].nunique()
        layers = layers.sort_values(ascending=False, kind="stable")
        names = [f"dimension {dimension} in {counted(many, 'layer')}" for dimension, many in layers.items()]
        clauses += [f"{status}: {listed(names, NAMED)}"] if names else []
    return "; ".join(clauses) + "."


def positions(reference: Run, other: Run) -> Survival:
    """The positional basis by residual layer: rank, relative norm, directions, and the curve in any directions."""
    table = pd.DataFrame({"layer": reference.layers["layer"].to_numpy(dtype=int)})
    for name in ("rank", "relative_norm", "low_frequency_10"):
        change = changes(value_of(reference, name), value_of(other, name)).add_prefix(f"{name}_")
        table = table.join(change)
        table[f"{name}_se"] = np.hypot(error_of(reference, name), error_of(other, name))
    cosines = squared_cosines(reference, other)
    table["overlap"] = [c.mean() for c in cosines]
    table["overlap_margin"] = overlap_margins(cosines, reference, other)
    table["curve"] = _curves(reference, other)
    norm = changes(table["relative_norm_before"], table["relative_norm_after"])
    norm = statuses(norm.assign(se=table["relative_norm_se"]), 0.0, GROUPS)
    kept, turned = A_HALF.decided(table["overlap"], table["overlap_margin"])
    table["status"] = np.where(kept & (norm == SURVIVED), SURVIVED, UNDECIDED)
    table.loc[turned | (norm == LOST), "status"] = LOST
    return Survival(
        "positional basis",
        "layer",
        "of a residual layer: survives where at least half of its leading directions, as many as the rank, are left "
        "(overlap: mean squared cosine of the principal angles) and at least half of its relative norm, and is lost "
        "where less of one is, each with the whole 95 % interval; curve: similarity of the positions' Gram matrices "
        "(linear CKA), which is invariant to rotation",
        table,
        partial(_positions_sentence, chance=_chance(cosines, reference)),
        directions="overlap",
        contexts=reference.provenance["corpus"]["contexts"],
    )


def _curves(reference: Run, other: Run) -> Floats:
    """⟨PPᵀ, P′P′ᵀ⟩ over the product of their norms, a layer; NaN where a basis is zero."""
    similarities = []
    for p, q in zip(*_bases(reference, other), strict=True):
        norms = torch.linalg.matrix_norm(p.T @ p) * torch.linalg.matrix_norm(q.T @ q)
        product = torch.linalg.matrix_norm(p.T @ q).square()
        similarities.append(float(product / norms) if norms > 0 else math.nan)
    return np.array(similarities)


def _positions_sentence(part: Survival, chance: float) -> str:
    table = part.table
    if part.exact:
        return f"The positional basis survives in all {counted(len(table), 'layer')}, unchanged."
    clauses = [
        f"The positional basis survives in {part.count(SURVIVED)} of {counted(len(table), 'layer')}{part.and_undecided}"
        f": mean rank {_moved(table, 'rank')}, mean relative norm {_moved(table, 'relative_norm')}",
        f"overlap of its leading directions {number(float(table['overlap'].mean()), 2)} (random: {number(chance, 2)}), "
        f"similarity of its Gram matrix (linear CKA) {number(float(table['curve'].mean()), 2)}",
    ]
    lost = [str(layer) for layer in table.loc[table["status"] == LOST, "layer"]]
    if 0 < len(lost) < len(table):
        clauses.append(f"lost in {'layer' if len(lost) == 1 else 'layers'} {listed(lost, NAMED)}")
    return "; ".join(clauses) + "."


def _moved(table: pd.DataFrame, name: str) -> str:
    """`3.1 → 3.4 (within the 95 % interval)`: means over layers. The layers share contexts, so errors add up."""
    before, after, error = (
        mean_over_layers(table[f"{name}_{part}"].to_numpy())[0] for part in ("before", "after", "se")
    )
    return f"{number(before)} → {number(after)}{within_errors(after - before, error)}"


def _bases(*runs: Run) -> list[Float[Tensor, "layers positions width"]]:
    """Without position 0, or the tokens before an image's patches."""
    grids = [grid_described(provenance(run, "corpus") or {}) for run in runs]
    return [
        torch.from_numpy(need(run, "positional_basis")[:, 1 if grid is None else grid.leading :]).double()
        for run, grid in zip(runs, grids, strict=True)
    ]


def overlap(first: Run, second: Run) -> tuple[Floats, float]:
    """‖VᵀV′‖_F²/k of the k leading right singular vectors of both positional bases, k the first one's rank, a layer.

    And its mean for random directions, k/d.
    """
    cosines = squared_cosines(first, second)
    return np.array([c.mean() for c in cosines]), _chance(cosines, first)


def _chance(cosines: list[Floats], run: Run) -> float:
    return float(np.mean([len(c) for c in cosines])) / need(run, "positional_basis").shape[2]


def squared_cosines(first: Run, second: Run) -> list[Floats]:
    """Of the principal angles between the leading directions that `overlap` compares, k a layer."""
    ranks = np.maximum(np.nan_to_num(value_of(first, "rank")).astype(int), 1)
    bases = [torch.linalg.svd(basis, full_matrices=False).Vh for basis in _bases(first, second)]
    return [
        torch.linalg.svdvals(before[:k] @ after[:k].T).square().numpy()
        for before, after, k in zip(*bases, ranks, strict=True)
    ]


def overlap_margins(cosines: list[Floats], *runs: Run) -> Floats:
    """`direction_margins` of `overlap`, a layer: what directions owe to the contexts is their `subspace_error`.

    NaN where a run of an older schema, or of few contexts, has neither.
    """
    if not all("subspace_of_half" in run.arrays for run in runs):
        return np.full(len(cosines), np.nan)
    halves, owed = [], []
    for layer, k in enumerate(len(c) for c in cosines):
        one, two = (run.arrays["subspace_of_half"][layer, :, :k].double() for run in runs)
        halves.append((one @ two.mT).square().sum(dim=(1, 2)) / k)
        owed.append(sum(float(run.arrays["subspace_error"][layer, k - 1]) for run in runs) / 2)
    return direction_margins(torch.stack(halves, dim=1), np.array(owed))
