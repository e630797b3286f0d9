"""Match the heads of models that differ in shape or tokenizer by what they do: roles, entropy, propagation."""

from __future__ import annotations

import numpy as np
import pandas as pd
from scipy.optimize import linear_sum_assignment
from scipy.spatial.distance import cdist

from theodolite.comparison.parts import (
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
    Change,
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
    """Match each head of the reference with the head of the other model that does the most similar things.

    Heads are described by shares between 0 and 1: their score in each role, their entropy over its maximum, and the
    share of keys that propagate. The pairs, min(N, M) of them, are those with the least sum of squared distances
    (`scipy.optimize.linear_sum_assignment`). A head without a partner is lost. By chance: as many as survive, in the
    mean, where each of these shares is shuffled among the other model's heads and they are matched in the same way.

    Args:
        reference, other: surveys with N and M heads.

    Raises:
        UsageError: a run that lacks entropies.
    """
    first, second = _what_heads_do(reference, other)
    places, partners = matches(first.to_numpy(), second.to_numpy())
    table = reference.heads[["layer", "head"]].reset_index(drop=True)
    pairs = pd.DataFrame(
        {"match": "", "depth_after": np.nan, "difference": np.nan, "status": LOST}, table.index
    )
    pairs.loc[places, "match"] = [
        head_name(*of) for of in other.heads[["layer", "head"]].iloc[partners].to_numpy()
    ]
    pairs.loc[places, "depth_after"] = _depth(other)[partners]
    before, after = first.iloc[places].reset_index(drop=True), second.iloc[partners].reset_index(drop=True)
    pairs.loc[places, "difference"] = np.linalg.norm(before - after, axis=1)
    pairs.loc[places, "status"] = _statuses(before, after, (reference, other), (places, partners), len(first))
    table = table.assign(match=pairs["match"], depth_before=_depth(reference))
    table = table.join(pairs[["depth_after", "difference"]])
    for name in first:
        table[f"{name}_before"] = first[name]
        table[f"{name}_after"] = after[name].set_axis(places).reindex(table.index)
    blocks = table.loc[places, "layer"], other.heads["layer"].iloc[partners]
    correlation = float(rank_correlation(*(of_side.to_numpy(dtype=np.float64) for of_side in blocks)))
    unmatched = len(second) - len(partners)
    details = (
        [f"rank correlation of the blocks of partners {number(correlation)}"]
        if np.isfinite(correlation)
        else []
    )
    details += [f"{counted(unmatched, 'head')} of the other model without a partner"] if unmatched else []
    return Survival(
        NAME,
        "head",
        "a head and its partner in the other model, matched by their roles, entropy and propagation: survives where at "
        f"least half of the score is left in each role that the head has, and the entropy differs by at most "
        f"{percent(TENTH)} of the maximum, and is lost where one of these is not so, each with the whole 95 % interval",
        table.assign(status=pairs["status"]),
        Change("mean entropy over its maximum", first[ENTROPY].mean(), second[ENTROPY].mean()),
        verb=("has a partner that does the same", "have a partner that does the same"),
        details=(*details, *_roles(table)),
        by_chance=_by_chance(first, second),
        contexts=reference.provenance["corpus"]["contexts"],
    )


def _what_heads_do(*runs: Run) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Scores, entropy share and propagation of each head, as far as both runs have them; NaN: unknown."""
    first, second = (
        pd.DataFrame(
            {ENTROPY: entropy_share(run)}
            | {name: column(run.heads, name) for name in (*(role.column for role in ROLES), "propagation")}
        ).dropna(axis=1, how="all")
        for run in runs
    )
    names = [name for name in first if name in second]
    if ENTROPY not in names:
        raise UsageError("heads are matched by entropy too, which one of these runs lacks: survey it again")
    return first[names].astype(np.float64), second[names].astype(np.float64)


def matches(first: Floats, second: Floats) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows of `first`, ascending, and those of their partners in `second`; NaN counts as 0."""
    distances = cdist(np.nan_to_num(first), np.nan_to_num(second), "sqeuclidean")
    places, partners = linear_sum_assignment(distances)
    return places, partners


def _statuses(
    before: pd.DataFrame,
    after: pd.DataFrame,
    runs: tuple[Run, Run],
    at: tuple[np.ndarray, np.ndarray],
    units: int,
) -> np.ndarray:
    """Name the status of each pair of heads, by entropy and by every role that the first one has.

    The runs may be of other tokens of the text, so that the fewer contexts count.
    """
    contexts = min(run.provenance["corpus"]["contexts"] for run in runs)
    looks, sides = looks_of(units), list(zip(runs, at, strict=True))
    errors = [entropy_share_error(run)[of] for run, of in sides]
    shares = before[ENTROPY].to_numpy(), after[ENTROPY].to_numpy()
    kept, lost = similar_entropies(shares, (errors[0], errors[1]), contexts, looks)
    for role in ROLES:
        if role.column in before:
            error = np.hypot(*(score_error(run, role)[of] for run, of in sides))
            n = min(independent_scores(run, role) for run in runs)
            left = after[role.column] - HALF * before[role.column]
            enough, too_little = LEFT.decided(left, margins(error, n, looks))
            has = before[role.column].to_numpy() >= role.threshold
            kept, lost = kept & (enough | ~has), lost | (too_little & has)
    return status_of(kept, lost)


def _by_chance(first: pd.DataFrame, second: pd.DataFrame) -> float:
    """Count the heads that find a partner that does the same when each measure is shuffled among the other's heads."""
    generator = np.random.default_rng(0)
    counts = []
    for _ in range(SHUFFLES):
        shuffled = pd.DataFrame(generator.permuted(second.to_numpy(), axis=0), columns=second.columns)
        places, partners = matches(first.to_numpy(), shuffled.to_numpy())
        before, after = (
            first.iloc[places].reset_index(drop=True),
            shuffled.iloc[partners].reset_index(drop=True),
        )
        same = (before[ENTROPY] - after[ENTROPY]).abs() <= TENTH
        same &= range_of(before[ENTROPY]) == range_of(after[ENTROPY])
        for role in ROLES:
            if role.column in before:
                one, two = before[role.column], after[role.column]
                same &= ~(one >= role.threshold) | (two >= HALF * one)
        counts.append(same.sum())
    return float(np.mean(counts))


def _depth(run: Run) -> Floats:
    """The depth of each head: 0 before the first head of the first block, 1 after the last head of the last."""
    layer, head = (run.heads[name].to_numpy(dtype=np.float64) for name in ("layer", "head"))
    return (layer + (head + 0.5) / (head.max() + 1)) / (layer.max() + 1)


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
