"""What survives of each head: attention entropy, roles, spectrum of W_QK."""

from __future__ import annotations

from functools import partial

import numpy as np
import pandas as pd

from theodolite.comparison.survival import (
    HALF,
    LOST,
    NEW,
    SURVIVED,
    Flags,
    Survival,
    changes,
    clear,
    expected_by_chance,
    looks_of,
    margins,
    share_error,
    status_of,
    statuses,
)
from theodolite.judging import Criterion
from theodolite.logits.attribution import scored_sequences
from theodolite.measure.head_roles import INDUCTION, PATTERN_ROLES, SINK_ROLES, UNIFORM_ATTENTION, HeadRole
from theodolite.passes.run import Run
from theodolite.report.data import Floats, column, entropy_share
from theodolite.report.health import ENTROPY_COLLAPSE
from theodolite.system.wording import counted, head_name, listed, number, percent

TENTH = 0.1  # an entropy survives that changes by at most this share of the maximum (ours)
A_TENTH = Criterion("within", TENTH, "ours")
RANGES = np.array(["collapsed", "", "uniform"])  # below `ENTROPY_COLLAPSE`, above `UNIFORM_ATTENTION`
ROLES = (*PATTERN_ROLES, *SINK_ROLES)


def entropies(reference: Run, other: Run) -> Survival:
    """Mean attention entropy of every head, its share of the maximum, and propagation."""
    table = reference.heads[["layer", "head"]].reset_index(drop=True)
    before, after = (_values(run, "entropy") for run in (reference, other))
    table = table.join(changes(before, after))
    table["se"] = np.hypot(_values(reference, "entropy_se"), _values(other, "entropy_se"))
    for run, side in ((reference, "before"), (other, "after")):
        share = entropy_share(run)
        table[f"share_{side}"] = np.nan if share is None else share
    propagation_changes = changes(_values(reference, "propagation"), _values(other, "propagation"))
    table = table.join(propagation_changes.add_prefix("propagation_"))
    before, after = (range_of(table[f"share_{side}"]) for side in ("before", "after"))
    table["left_range"] = np.where(before != after, RANGES[after], "")
    contexts = reference.provenance["corpus"]["contexts"]
    looks = looks_of(int(table["difference"].notna().sum()))
    shares = table["share_before"].to_numpy(), table["share_after"].to_numpy()
    errors = entropy_share_error(reference), entropy_share_error(other)
    kept, lost = similar_entropies(shares, errors, contexts, looks)
    table["status"] = status_of(kept, lost)
    table = table[table["difference"].notna()].reset_index(drop=True)
    first, second = table["share_before"].to_numpy(), table["share_after"].to_numpy()
    ranges = range_of(first)[:, None] == range_of(second)
    holds: Flags = (np.abs(first[:, None] - second) <= TENTH) & ranges
    return Survival(
        "entropies",
        "head",
        f"of a head: survives where it changes by at most {percent(TENTH)} of the maximum, and the head neither "
        f"becomes nor ceases to be collapsed (below {percent(ENTROPY_COLLAPSE.limit)} of the maximum) or uniform "
        f"(above {percent(UNIFORM_ATTENTION.threshold)}), and is lost where not, each with whole 95 % intervals",
        table,
        partial(_entropies_sentence, contexts=contexts),
        by_chance=expected_by_chance(holds),
        contexts=contexts,
    )


def similar_entropies(
    shares: tuple[Floats, Floats], errors: tuple[Floats, Floats], contexts: int, looks: int
) -> tuple[Flags, Flags]:
    """Whether entropies survive or are lost, with whole intervals: by the change, and by where in `RANGES` they lie."""
    kept, lost = A_TENTH.decided(shares[1] - shares[0], margins(np.hypot(*errors), contexts, looks))
    ends = [
        [range_of(share + sign * margins(error, contexts, looks)) for sign in (-1, 1)]
        for share, error in zip(shares, errors, strict=True)
    ]
    (low, high), (new_low, new_high) = ends
    return kept & (low == new_high) & (high == new_low), lost | (high < new_low) | (new_high < low)


def entropy_share_error(run: Run) -> Floats:
    """Of the entropy of each head as a share of the maximum."""
    entropy, share = _values(run, "entropy"), entropy_share(run)
    with np.errstate(divide="ignore", invalid="ignore"):
        maximum = np.full(len(entropy), np.nan) if share is None else entropy / share
    # A head whose entropy is 0 in every context has no error either, and no maximum that could be seen.
    return np.where(entropy > 0, _values(run, "entropy_se") / maximum, _values(run, "entropy_se"))


def _values(run: Run, name: str) -> Floats:
    values = column(run.heads, name)
    return np.full(len(run.heads), np.nan) if values is None else values


def range_of(share: Floats | pd.Series) -> np.ndarray:
    """The place in `RANGES` of each entropy, as a share of the maximum."""
    return np.digitize(np.asarray(share), [ENTROPY_COLLAPSE.limit, UNIFORM_ATTENTION.threshold])


def _entropies_sentence(part: Survival, contexts: int) -> str:
    table = part.table
    if part.exact:
        return f"The entropy of all {counted(len(table), 'head')} is unchanged."
    near = (~clear(table["difference"], table["se"], contexts)).sum()
    survived = part.count(SURVIVED)
    clauses = [
        f"{survived} of {counted(len(table), 'head')} {'keeps its' if survived == 1 else 'keep their'} entropy "
        f"({part.by_chance:.1f} by chance){part.and_undecided}, {near} differ by less than the 95 % interval; mean "
        f"{number(table['before'].mean())} → {number(table['after'].mean())} nats, propagation "
        f"{percent(table['propagation_before'].mean())} → {percent(table['propagation_after'].mean())}"
    ]
    clauses += part.named(LOST, _entropy_change, -table["difference"].abs(), "largest changes")
    return "; ".join(clauses) + "."


def _entropy_change(row: pd.Series) -> str:
    entered = f", now {row['left_range']}" if row["left_range"] else ""
    change = f"{number(row['before'])} → {number(row['after'])}{entered}"
    return f"{head_name(row['layer'], row['head'])} ({change})"


def head_types(reference: Run, other: Run) -> Survival:
    """Heads that follow a pattern or attend to sinks, by the report's thresholds."""
    tables = []
    roles = [role for role in ROLES if role.column in reference.heads or role.column in other.heads]
    for role in roles:
        least = role.threshold
        change = changes(_values(reference, role.column), _values(other, role.column)).fillna(0.0)
        table = reference.heads[["layer", "head"]].reset_index(drop=True).assign(type=role.title, least=least)
        table = table.join(change).assign(
            se=np.hypot(*(score_error(run, role) for run in (reference, other))),
            n=independent_scores(reference, role),
        )
        tables.append(table[(table["before"] >= least) | (table["after"] >= least)])
    table = pd.concat(tables, ignore_index=True)
    contexts = reference.provenance["corpus"]["contexts"]
    table["status"] = statuses(table, table["least"].to_numpy(), table.pop("n"))
    return Survival(
        "head types",
        "head role",
        "; ".join(f"{role.title}: score of at least {role.threshold:g}" for role in roles)
        + "; survives where at least half of the score is left, and is lost where less is, each with the whole 95 % "
        "interval",
        table,
        _types_sentence,
        contexts=contexts,
    )


def score_error(run: Run, role: HeadRole) -> Floats:
    """Of each head's score in a role: the survey's own, or at most that of a share of the contexts."""
    if role in PATTERN_ROLES:
        return _values(run, f"{role.column}_se")
    return share_error(_values(run, role.column), run.provenance["corpus"]["contexts"])


def independent_scores(run: Run, role: HeadRole) -> int:
    """How many contexts, or random sequences, a score is the mean of."""
    corpus = run.provenance["corpus"]
    return scored_sequences(corpus["length"]) if role == INDUCTION else int(corpus["contexts"])


def _types_sentence(part: Survival) -> str:
    table = part.table
    if part.exact and len(table):
        survivors = [
            counted(many, str(kind)) for kind, many in table["type"].value_counts(sort=False).items()
        ]
        return f"All head roles survive, unchanged: {listed(survivors, len(ROLES))}."
    none = "No head of the reference has a role: no score reaches its threshold"
    clauses = [part.counts() if part.of_reference else none]
    return "; ".join(clauses + part.named(LOST, _role_change) + part.named(NEW, _role_change)) + "."


def _role_change(row: pd.Series) -> str:
    change = f"{number(row['before'], 2)} → {number(row['after'], 2)}"
    return f"{head_name(row['layer'], row['head'])} as {row['type'].removesuffix(' head')} ({change})"


def spectra(reference: Run, other: Run) -> Survival:
    """W_QK of every head: trace, Frobenius norm, r, and the regime that they put it in."""
    table = reference.heads[["layer", "head"]].reset_index(drop=True)
    sizes = [np.sqrt(_values(run, "frobenius_squared")) for run in (reference, other)]
    table = table.join(changes(*sizes).add_prefix("frobenius_"))
    for name in ("trace", "r"):
        change = changes(_values(reference, name), _values(other, name))
        table = table.join(change.add_prefix(f"{name}_"))
    for name in ("regime", "regime_data"):
        if name in reference.heads and name in other.heads:
            table[f"{name}_before"] = reference.heads[name].to_numpy()
            table[f"{name}_after"] = other.heads[name].to_numpy()
    table = table[table["frobenius_difference"].notna()].reset_index(drop=True)
    first, second = (table[f"frobenius_{side}"].to_numpy() for side in ("before", "after"))
    same_regime = table["regime_before"].to_numpy()[:, None] == table["regime_after"].to_numpy()
    similar_norm = (second >= HALF * first[:, None]) & (first[:, None] >= HALF * second)
    holds: Flags = same_regime & similar_norm
    table["status"] = np.where(np.diagonal(holds), SURVIVED, LOST)
    return Survival(
        "spectra",
        "head",
        "W_QK of a head: survives where its Frobenius norm changes by at most a factor of two and its regime (from "
        "the weights alone) is the same",
        table,
        _spectra_sentence,
        by_chance=expected_by_chance(holds),
        certain=True,
    )


def _spectra_sentence(part: Survival) -> str:
    table = part.table
    if not len(table):
        return "No head has a W_QK to compare: queries and keys are not affine in the input."
    if part.exact:
        return f"W_QK of all {counted(len(table), 'head')} is unchanged."
    before = table["frobenius_before"]
    ratio = table["frobenius_after"] / before.where(before > 0)
    median_change = round(ratio.median() - 1, 4) + 0.0  # no −0 %
    zero = int((before == 0).sum())
    of_the_rest = f" (without {counted(zero, 'head')} of norm 0 before)" if zero else ""
    regimes = (table["regime_before"] == table["regime_after"]).sum()
    clauses = [
        f"W_QK of {part.count(SURVIVED)} of {counted(len(table), 'head')} keeps its norm and regime "
        f"({part.by_chance:.1f} by chance): median change of the Frobenius norm {percent(median_change)}"
        f"{of_the_rest}, mean trace "
        f"{number(table['trace_before'].mean())} → {number(table['trace_after'].mean())}, same regime in "
        f"{regimes}"
    ]
    if "regime_data_before" in table:
        same_with_data = (table["regime_data_before"] == table["regime_data_after"]).sum()
        clauses[0] += f" ({same_with_data} with the covariance of what the head reads)"
    return "; ".join(clauses + part.named(LOST, _spectrum_change, ratio)) + "."


def _spectrum_change(row: pd.Series) -> str:
    change = f"{number(row['frobenius_before'])} → {number(row['frobenius_after'])}"
    if row["regime_before"] != row["regime_after"]:
        change += f", {row['regime_before']} → {row['regime_after']}"
    return f"{head_name(row['layer'], row['head'])} ({change})"
