"""Which sinks and tags of one run survive in another, on the same text (Zhang et al. 2025)."""

from __future__ import annotations

import numpy as np
import pandas as pd
import torch

from theodolite.comparison.outputs import PLACE, SINK_PLACES
from theodolite.comparison.survival import (
    HALF,
    LOST,
    NEW,
    SURVIVED,
    UNDECIDED,
    Survival,
    changes,
    clear,
    statuses,
)
from theodolite.judging import Estimate
from theodolite.measure.tags import ratio
from theodolite.passes.run import Run
from theodolite.report.data import Floats
from theodolite.report.drawing.sinks import sink_name
from theodolite.sinks.exclusions import LEAST_SHARE
from theodolite.system.wording import counted, number, percent

KEY = ["layer", "head", "kind", "token_id"]
"""What identifies a sink; which token comes first does not matter."""

TAGGED = 0.1
"""A sink tags if its grouping explains so much of the variance of the head's output (that of `sinks/trace`)."""

TAG_COLUMNS = (
    *("token", "share_before", "share_after", "before", "after", "difference", "se", "cosine"),
    *(
        "released_before",
        "released_after",
        "released_difference",
        "released_se",
        "tagged_before",
        "tagged_after",
    ),
    "status",
)


def sinks(reference: Run, other: Run, places: tuple[Run, Run] | None = None) -> Survival:
    """Sinks by layer, head, kind and token: share of contexts before and after.

    Args:
        places: of both, from `comparison.read_outputs`, which says where each context's sinks are: the whole family is
            then judged by the share of sinks that the other model has at the same place, paired by context.
    """
    table = _outer_join(_shares(reference), _shares(other), ["share"])
    table = table[(table["share_before"] >= LEAST_SHARE) | (table["share_after"] >= LEAST_SHARE)]
    change = changes(table["share_before"], table["share_after"])
    contexts = reference.provenance["corpus"]["contexts"]
    table = table[[*KEY, "token"]].reset_index(drop=True).join(change)
    table["se"] = _error(change["before"], change["after"], contexts)
    table["status"] = statuses(table, LEAST_SHARE, contexts)
    order = ["before", "after", *KEY]
    table = table.sort_values(order, ascending=[False] * 2 + [True] * 4, ignore_index=True)
    return Survival(
        "sinks",
        "sink",
        f"a sink of a head in at least {percent(LEAST_SHARE)} of the contexts; it survives where at least half of "
        "that is left, and is lost where less is, by more than the 95 % interval of the difference (contexts taken as "
        "independent)",
        table,
        _sinks_sentence,
        weight="before",
        least=LEAST_SHARE,
        paired=None if places is None else kept_places(*places),
    )


def kept_places(reference: Run, other: Run) -> Estimate | None:
    """The share of the reference's sinks (layer, head, position of a context) that are sinks of the other, too.

    With the standard error of a ratio of means over contexts, of which a few may be alike by chance
    (`Estimate.floored`). What did not happen in three contexts may in the fourth.
    Exact where every head writes the very same. None: not known of both, or there are no sinks.
    """
    if SINK_PLACES not in reference.arrays or SINK_PLACES not in other.arrays:
        return None
    places, others = (
        pd.DataFrame(run.arrays[SINK_PLACES].numpy(), columns=PLACE) for run in (reference, other)
    )
    if not len(places):
        return None
    if torch.equal(reference.arrays["written"], other.arrays["written"]):
        return Estimate.exact(1.0)
    kept = places.merge(others, "left", PLACE, indicator=True)["_merge"] == "both"
    contexts = range(len(reference.arrays["loss"]))
    counts = (
        pd.DataFrame({"kept": kept, "all": 1})
        .groupby(places["context"])
        .sum()
        .reindex(contexts, fill_value=0)
    )
    b, t = (counts[name].to_numpy(np.float64) for name in ("kept", "all"))
    sums = [b.sum(), t.sum(), b @ b, b @ t, t @ t]
    share, error = ratio(torch.tensor(sums, dtype=torch.float64))
    if len(b) == 1:
        return Estimate(float(share), n=1, of="contexts")
    return Estimate(float(share), float(error), len(b), "contexts").floored()


def _shares(run: Run) -> pd.DataFrame:
    """How often each sink occurs, per context."""
    rows = run.sinks.assign(kind=np.where(run.sinks["first"].astype(bool), "first", "later"))
    rows.loc[rows["kind"] == "first", ["token_id", "token"]] = (-1, "")
    return rows.groupby(KEY, as_index=False).agg(token=("token", "first"), share=("share", "sum"))


def _outer_join(before: pd.DataFrame, after: pd.DataFrame, columns: list[str]) -> pd.DataFrame:
    """Rows of either, by `KEY`; the columns 0 where a sink is none."""
    names = [*KEY, "token", *columns]
    # An empty column of pyarrow's texts cannot be merged with another.
    sides = [frame[names].astype({"kind": object, "token": object}) for frame in (before, after)]
    table = sides[0].merge(sides[1], "outer", KEY, suffixes=("_before", "_after"))
    table["token"] = table["token_before"].where(table["token_before"].notna(), table["token_after"])
    filled = [f"{name}_{side}" for name in columns for side in ("before", "after")]
    table[filled] = table[filled].fillna(0.0)
    return table


def _error(before: pd.Series, after: pd.Series, contexts: int) -> Floats:
    """Of the difference of two shares of contexts, binomial, as if of two texts."""
    variance = (before * (1 - before) + after * (1 - after)) / contexts
    return np.asarray(np.sqrt(variance.clip(lower=0)))  # a sum of shares may be a rounding above 1


def _sinks_sentence(part: Survival) -> str:
    table = part.table
    if not part.of_reference:
        clauses = ["The reference has no sinks in this text"]
    elif part.exact:
        return f"All {counted(len(table), 'sink')} survive, in the same number of contexts."
    else:
        decided = table[table["status"].isin([SURVIVED, LOST])]
        by_head = (decided["status"] == SURVIVED).groupby([decided["layer"], decided["head"]]).all()
        by_head_text = f"{int(by_head.sum())} of {counted(len(by_head), 'head')} with sinks keep theirs"
        clauses = [f"{part.counts()}; {by_head_text}"]
    clauses += part.named(LOST, _share_change) + part.named(NEW, _share_change, -table["after"])
    return "; ".join(clauses) + "."


def _share_change(row: pd.Series) -> str:
    return f"{sink_name(row)} ({percent(row['before'])} → {percent(row['after'])} of contexts)"


def tags(reference: Run, other: Run) -> Survival:
    """Tags of the sinks of two traces: η² in the head's output, direction, and the largest η² after the head."""
    values = ["share", "tag", "tag_se", "released", "released_se", "tagged", "row"]
    table = _outer_join(_tagging(reference), _tagging(other), values)
    are_tags = [
        (table[f"tag_{side}"] >= TAGGED) & (table[f"share_{side}"] >= LEAST_SHARE)
        for side in ("before", "after")
    ]
    table = table[are_tags[0] | are_tags[1]].reset_index(drop=True)
    table = table.join(changes(table["tag_before"], table["tag_after"]))
    table["se"] = np.hypot(table["tag_se_before"], table["tag_se_after"])
    table["cosine"] = _cosines(reference, other, table)
    table["released_difference"] = table["released_after"] - table["released_before"]
    table["released_se"] = np.hypot(table["released_se_before"], table["released_se_after"])
    contexts = reference.provenance["corpus"]["contexts"]
    status = statuses(table, TAGGED, contexts)
    rotated = (status == SURVIVED) & ~(table["cosine"] >= HALF**0.5)
    shares = table["share_before"], table["share_after"]
    moved = clear(shares[1] - shares[0], _error(*shares, contexts), contexts)
    undirected = table["cosine"].isna() & ~moved
    table["status"] = np.where(undirected, UNDECIDED, np.where(rotated, LOST, status))
    order = ["tagged_before", "tagged_after", *KEY]
    table = table.sort_values(order, ascending=[False] * 2 + [True] * 4, ignore_index=True)
    return Survival(
        "tags",
        "tag",
        f"a sink in at least {percent(LEAST_SHARE)} of the contexts whose grouping explains at least "
        f"{percent(TAGGED)} of the variance of the head's output (η²); its tag survives where at least half of η² is "
        "left, and at least half of the new direction's squared length lies along the old one (cosine at least "
        f"{HALF**0.5:.2f}); less η² than half counts as lost if by more than the 95 % interval of the difference, "
        "and a sink that is gone if its share of contexts fell by more than that",
        table[[*KEY, *TAG_COLUMNS]],
        _tags_sentence,
        weight="tagged_before",
        least=TAGGED,
    )


def _tagging(run: Run) -> pd.DataFrame:
    """Sinks that write something, with their row in the arrays counted from 1."""
    rows = run.traces.assign(row=np.arange(1.0, len(run.traces) + 1))
    # Where a tag has no number, all tokens of a context are caught or none: it tells none apart.
    absent = dict.fromkeys(("tag", "tag_se", "released", "released_se", "tagged"), 0.0)
    return rows[rows["kind"] != "learned"].fillna(absent)


def _cosines(reference: Run, other: Run, table: pd.DataFrame) -> Floats:
    """Of the directions of each tag before and after; NaN where one has none."""
    directions = []
    for run, side in ((reference, "row_before"), (other, "row_after")):
        stored = run.arrays["tag_direction"].double()
        if not len(stored):
            return np.full(len(table), np.nan)
        padded = torch.cat([torch.full_like(stored[:1], torch.nan), stored])
        rows = torch.from_numpy(table[side].to_numpy().astype(np.int64))
        directions.append(torch.nn.functional.normalize(padded[rows], dim=1))
    return (directions[0] * directions[1]).sum(dim=1).numpy()


def _tags_sentence(part: Survival) -> str:
    table = part.table
    if not part.decided:
        clauses = ["No sink of the reference tags the tokens that it catches"]
    elif part.exact:
        return f"All {counted(len(table), 'tag')} survive, with the same strength and direction."
    else:
        decided = table[table["status"].isin([SURVIVED, LOST])]
        weights = decided["tagged_before"]
        means = {
            name: float(np.average(decided[name], weights=weights))
            for name in ("before", "after", "released_before", "released_after")
        }
        cosines = decided["cosine"].dropna()
        clauses = [
            part.counts(),
            f"η² in the head's output {number(means['before'])} → {number(means['after'])} on average, its maximum in "
            f"later layers {number(means['released_before'])} → {number(means['released_after'])}",
        ]
        if len(cosines):
            clauses[-1] += f", median cosine of the directions {number(float(cosines.median()))}"
    clauses += part.named(LOST, _tag_change) + part.named(NEW, _tag_change, -table["tagged_after"])
    return "; ".join(clauses) + "."


def _tag_change(row: pd.Series) -> str:
    if row["status"] == LOST and row["after"] >= HALF * row["before"]:
        return f"{sink_name(row)} (rotated, cosine {number(row['cosine'])})"
    return f"{sink_name(row)} (η² {number(row['before'])} → {number(row['after'])})"
