"""Heads of two models that differ in shape or tokenizer, matched by what they do: their roles, entropy, propagation."""

from __future__ import annotations

from functools import partial

import numpy as np
import pandas as pd
from scipy.optimize import linear_sum_assignment
from scipy.spatial.distance import cdist

from theodolite.comparison.heads import (
    ROLES,
    TENTH,
    entropy_share_error,
    independent_scores,
    range_of,
    score_error,
    similar_entropies,
)
from theodolite.comparison.survival import (
    HALF,
    LEFT,
    LOST,
    SURVIVED,
    Flags,
    Survival,
    looks_of,
    margins,
    status_of,
)
from theodolite.errors import UsageError
from theodolite.measure.rank_correlation import rank_correlation
from theodolite.passes.run import Run
from theodolite.report.data import Floats, column, entropy_share
from theodolite.system.wording import counted, head_name, listed, number, percent

NAME = "matched heads"
ENTROPY = "entropy_share"  # of a head: its entropy over the maximum
SHUFFLES = 20  # of what the other model's heads do, for what a matching finds by chance


def matched_heads(reference: Run, other: Run) -> Survival:
    """Each head of the reference with that of the other model which does the most similar things.

    Heads are described by shares between 0 and 1: their score in each role, their entropy over its maximum, and the
    share of keys that propagate. The pairs, min(N, M) of them, are those with the least sum of squared distances
    (`scipy.optimize.linear_sum_assignment`). A head without a partner is lost. By chance: as many as survive, in the
    mean, where each of these shares is shuffled among the other model's heads and they are matched in the same way.

    Args:
        reference, other: surveys with N and M heads.

    Raises:
        UsageError: a run that lacks entropies.
    """
    names, first, second = _what_heads_do(reference, other)
    places, partners = matches(first, second)
    sides = ((reference, places), (other, partners))
    blocks = [run.heads["layer"].to_numpy(dtype=np.float64)[of] for run, of in sides]
    table = reference.heads[["layer", "head"]].reset_index(drop=True)
    table["match"] = ""
    table["depth_before"], table["depth_after"], table["difference"] = _depth(reference), np.nan, np.nan
    of_partners = other.heads.iloc[partners]
    table.loc[places, "match"] = [head_name(row.layer, row.head) for row in of_partners.itertuples()]
    table.loc[places, "depth_after"] = _depth(other)[partners]
    table.loc[places, "difference"] = np.linalg.norm(first[places] - second[partners], axis=1)
    for place, name in enumerate(names):
        table[f"{name}_before"], table[f"{name}_after"] = first[:, place], np.nan
        table.loc[places, f"{name}_after"] = second[partners, place]
    table["status"] = LOST
    table.loc[places, "status"] = _statuses(names, first, second, (reference, other), (places, partners))
    return Survival(
        NAME,
        "head",
        "a head and its partner in the other model, matched by their roles, entropy and propagation: survives where at "
        f"least half of the score is left in each role that the head has, and the entropy differs by at most "
        f"{percent(TENTH)} of the maximum, and is lost where one of these is not so, each with the whole 95 % interval",
        table,
        partial(
            _sentence, unmatched=len(second) - len(partners), correlation=float(rank_correlation(*blocks))
        ),
        by_chance=_by_chance(names, first, second),
        contexts=reference.provenance["corpus"]["contexts"],
    )


def _what_heads_do(reference: Run, other: Run) -> tuple[list[str], Floats, Floats]:
    """What both runs have of scores, entropy share and propagation: its names (K), (N, K) and (M, K); NaN: unknown."""
    names, columns = [], []
    for name in (ENTROPY, *(role.column for role in ROLES), "propagation"):
        first, second = (
            entropy_share(run) if name == ENTROPY else column(run.heads, name) for run in (reference, other)
        )
        if first is not None and second is not None:
            names.append(name)
            columns.append((first, second))
    if ENTROPY not in names:
        raise UsageError("heads are matched by entropy too, which one of these runs lacks: survey it again")
    first, second = (np.stack(side, axis=1) for side in zip(*columns, strict=True))
    return names, first, second


def matches(first: Floats, second: Floats) -> tuple[np.ndarray, np.ndarray]:
    """Places in `first`, ascending, and of their partners in `second`; what was not measured counts as 0."""
    distances = cdist(np.nan_to_num(first), np.nan_to_num(second), "sqeuclidean")
    places, partners = linear_sum_assignment(distances)
    return places, partners


def _does_the_same(names: list[str], first: Floats, second: Floats) -> Flags:
    """(N, M): whether each head of the other model does what each of the reference does; not where it is unknown."""
    entropy = names.index(ENTROPY)
    one, two = first[:, None, entropy], second[None, :, entropy]
    same: Flags = (np.abs(one - two) <= TENTH) & (range_of(one) == range_of(two))
    for role in ROLES:
        if role.column in names:
            score = names.index(role.column)
            has = first[:, None, score] >= role.threshold
            same &= ~has | (second[None, :, score] >= HALF * first[:, None, score])
    return same


def _statuses(
    names: list[str], first: Floats, second: Floats, runs: tuple[Run, Run], at: tuple[np.ndarray, np.ndarray]
) -> np.ndarray:
    """Of each pair of heads, at places of either model: by entropy and by every role that the first one has.

    The runs may be of other tokens of the text, so that the fewer contexts count.
    """
    contexts = min(run.provenance["corpus"]["contexts"] for run in runs)
    looks = looks_of(len(first))
    before, after = first[at[0]], second[at[1]]
    entropy = names.index(ENTROPY)
    errors = entropy_share_error(runs[0])[at[0]], entropy_share_error(runs[1])[at[1]]
    kept, lost = similar_entropies((before[:, entropy], after[:, entropy]), errors, contexts, looks)
    for role in ROLES:
        if role.column in names:
            one, two = (side[:, names.index(role.column)] for side in (before, after))
            error = np.hypot(*(score_error(run, role)[of] for run, of in zip(runs, at, strict=True)))
            n = min(independent_scores(run, role) for run in runs)
            enough, too_little = LEFT.decided(two - HALF * one, margins(error, n, looks))
            has = one >= role.threshold
            kept, lost = kept & (enough | ~has), lost | (too_little & has)
    return status_of(kept, lost)


def _by_chance(names: list[str], first: Floats, second: Floats) -> float:
    generator = np.random.default_rng(0)
    counts = []
    for _ in range(SHUFFLES):
        shuffled = generator.permuted(second, axis=0)
        counts.append(_does_the_same(names, first, shuffled)[matches(first, shuffled)].sum())
    return float(np.mean(counts))


def _depth(run: Run) -> Floats:
    """Of each head among all: 0 before the first of the first block, 1 after the last of the last."""
    layer, head = (run.heads[name].to_numpy(dtype=np.float64) for name in ("layer", "head"))
    return (layer + (head + 0.5) / (head.max() + 1)) / (layer.max() + 1)


def _sentence(part: Survival, unmatched: int, correlation: float) -> str:
    table = part.table
    clauses = [
        f"{part.count(SURVIVED)} of {counted(len(table), 'head')} of the reference have a partner that does the same "
        f"({part.by_chance:.1f} by chance)"
    ]
    if np.isfinite(correlation):
        clauses.append(f"rank correlation of the blocks of partners {number(correlation)}")
    if unmatched:
        clauses.append(f"{counted(unmatched, 'head')} of the other model without a partner")
    return "; ".join(clauses + _roles(table)) + "."


def _roles(table: pd.DataFrame) -> list[str]:
    """`induction heads: L5H1 → L3H0 (0.61 → 0.58)`, for each role that a head of the reference has."""
    clauses = []
    for role in ROLES:
        before, after = f"{role.column}_before", f"{role.column}_after"
        if before in table and len(rows := table[table[before] >= role.threshold]):
            pairs = [
                f"{head_name(row['layer'], row['head'])} → {row['match'] or 'none'} "
                f"({number(row[before], 2)} → {number(row[after], 2)})"
                for _, row in rows.sort_values(before, ascending=False, kind="stable").iterrows()
            ]
            clauses.append(f"{role.plural}: {listed(pairs, 4)}")
    return clauses
