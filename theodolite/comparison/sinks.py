"""Which sinks and tags of one run survive in another, on the same text (Zhang et al. 2025)."""

from __future__ import annotations

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from theodolite.comparison.outputs import PLACE, SINK_PLACES
from theodolite.comparison.survival import (
    HALF,
    LOST,
    NEW,
    SURVIVED,
    UNDECIDED,
    Flags,
    Survival,
    changes,
    direction_margins,
    share_error,
    statuses,
)
from theodolite.corpus.groups import GROUPS
from theodolite.judging import Criterion, Estimate
from theodolite.measure.ratios import ratio_by_context
from theodolite.measure.uncertainty import balanced_halves
from theodolite.passes.run import Run
from theodolite.report.data import Floats
from theodolite.report.drawing.sinks import sink_name
from theodolite.sinks.exclusions import LEAST_SHARE
from theodolite.system.wording import counted, number, percent

KEY = ["layer", "head", "kind", "token_id"]  # of a sink; which token comes first does not matter
TAGGED = 0.1  # a sink tags if its grouping explains so much of the variance of the head's output
ALONG = Criterion("at least", HALF**0.5, "half of the squared length (ours)")
NO_GROUPS = torch.empty(0, GROUPS, 1)
TAG_COLUMNS = (
    *("token", "share_before", "share_after", "before", "after", "difference", "se"),
    *("cosine", "cosine_margin", "released_before", "released_after", "released_difference", "released_se"),
    *("tagged_before", "tagged_after", "status"),
)


def sinks(reference: Run, other: Run, places: tuple[Run, Run] | None = None) -> Survival:
    """Sinks by layer, head, kind and token: share of contexts before and after.

    Args:
        places: of both, from `comparison.read_outputs`, which says where each context's sinks are: the whole family is
            then judged by the share of sinks that the other model has at the same place, paired by context.
    """
    table = _outer_join(_shares(reference), _shares(other), ["share"])
    table = table[(table["share_before"] >= LEAST_SHARE) | (table["share_after"] >= LEAST_SHARE)]
    contexts = reference.provenance["corpus"]["contexts"]
    left = _sinks_left(table["share_before"], table["share_after"], contexts)
    table = table[[*KEY, "token"]].reset_index(drop=True).join(left)
    order = ["before", "after", *KEY]
    table = table.sort_values(order, ascending=[False] * 2 + [True] * 4, ignore_index=True)
    paired = None if places is None else kept_places(*places)
    together = "; all of them together by the share that is at the same place of the same context"
    return Survival(
        "sinks",
        "sink",
        f"a sink of a head in at least {percent(LEAST_SHARE)} of the contexts; it survives where at least half of "
        "that is left, and is lost where less is, each with the whole 95 % interval (contexts taken as independent)"
        + ("" if paired is None else together),
        table,
        _sinks_sentence,
        weight="before",
        least=LEAST_SHARE,
        paired=paired,
        contexts=contexts,
    )


def kept_places(reference: Run, other: Run, layer: int | None = None) -> Estimate | None:
    """The share of the reference's sinks (of one layer, or all) that the other has at the same place of a context.

    With the standard error of a ratio of means over contexts, a few of which may be alike by chance
    (`Estimate.floored`). Exact where every head writes the very same. None: not known of both, or no sinks.
    """
    if SINK_PLACES not in reference.arrays or SINK_PLACES not in other.arrays:
        return None
    places, others = (
        pd.DataFrame(run.arrays[SINK_PLACES].numpy(), columns=PLACE) for run in (reference, other)
    )
    if layer is not None:
        places = places[places["layer"] == layer].reset_index(drop=True)
    if not len(places):
        return None
    if torch.equal(reference.arrays["written"], other.arrays["written"]):
        return Estimate.exact(1.0)
    kept = places.merge(others, "left", PLACE, indicator=True)["_merge"] == "both"
    contexts = len(reference.arrays["loss"])
    counts = [np.bincount(places["context"], each, contexts) for each in (kept, np.ones(len(places)))]
    share, error = ratio_by_context(*map(torch.from_numpy, counts))
    if contexts == 1:
        return Estimate(float(share), n=1, of="contexts")
    return Estimate(float(share), float(error), contexts, "contexts").floored()


def _sinks_left(before: pd.Series, after: pd.Series, contexts: int) -> pd.DataFrame:
    """The change of shares of contexts, its error, and the status of each sink."""
    change = changes(before, after)
    change["se"] = np.hypot(*(share_error(change[side], contexts) for side in ("before", "after")))
    return change.assign(status=statuses(change, LEAST_SHARE, contexts))


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


def _sinks_sentence(part: Survival) -> str:
    table = part.table
    if not part.of_reference:
        clauses = ["The reference has no sinks in this text"]
    elif part.exact:
        return f"All {counted(len(table), 'sink')} survive, in the same number of contexts."
    else:
        clauses = [part.counts()]
        if part.paired is not None:
            clauses.append(f"the share that is at the same place of the same context is {part.paired}")
    clauses += part.named(LOST, _share_change) + part.named(NEW, _share_change, -table["after"])
    return "; ".join(clauses) + "."


def _share_change(row: pd.Series) -> str:
    return f"{sink_name(row)} ({percent(row['before'])} → {percent(row['after'])} of contexts)"


def tags(reference: Run, other: Run) -> Survival:
    """Tags of the sinks of two traces: η² in the head's output, direction, and the largest η² after the head."""
    values = [
        "share",
        "contexts",
        "row",
        "tag",
        "tag_se",
        "direction_se",
        "tagged",
        "released",
        "released_se",
    ]
    table = _outer_join(_tagging(reference), _tagging(other), values)
    sides = ("before", "after")
    was, is_now = (table[f"tag_{s}"].ge(TAGGED) & table[f"share_{s}"].ge(LEAST_SHARE) for s in sides)
    table = table[was | is_now].reset_index(drop=True)
    table = table.join(changes(table["tag_before"], table["tag_after"]))
    table["se"] = np.hypot(table["tag_se_before"], table["tag_se_after"]).replace(np.inf, np.nan)
    rows = ((reference, table["row_before"]), (other, table["row_after"]))
    directions = [_rows(run.arrays["tag_direction"], of) for run, of in rows]
    table["cosine"] = torch.cosine_similarity(directions[0], directions[1], dim=1, eps=0).numpy()
    table["released_difference"] = table["released_after"] - table["released_before"]
    table["released_se"] = np.hypot(table["released_se_before"], table["released_se_after"])
    contexts = reference.provenance["corpus"]["contexts"]
    seen = table[["contexts_before", "contexts_after"]].replace(0, np.nan).min(axis=1)
    status = statuses(table, TAGGED, seen)
    sinks_left = _sinks_left(table["share_before"], table["share_after"], contexts)
    gone = (status == LOST) & (table["cosine"].notna() | (sinks_left["status"] == LOST))
    by_group = [_rows(run.arrays.get("tag_by_group", NO_GROUPS), of) for run, of in rows]
    table["cosine_margin"], kept, turned = kept_directions(table, by_group[0], by_group[1])
    table["status"] = np.where((status == SURVIVED) & ~kept | (status == LOST), UNDECIDED, status)
    table.loc[gone | turned & (table["tag_before"] >= TAGGED), "status"] = LOST
    order = ["tagged_before", "tagged_after", *KEY]
    table = table.sort_values(order, ascending=[False] * 2 + [True] * 4, ignore_index=True)
    return Survival(
        "tags",
        "tag",
        f"a sink in at least {percent(LEAST_SHARE)} of the contexts whose grouping explains at least "
        f"{percent(TAGGED)} of the variance of the head's output (η²); its tag survives where at least half of η² is "
        "left, and at least half of the new direction's squared length lies along the old one (cosine at least "
        f"{HALF**0.5:.2f}), and is lost where one of them is less, each with the whole 95 % interval; of a sink "
        "that is gone, if the sink is lost",
        table[[*KEY, *TAG_COLUMNS]],
        _tags_sentence,
        weight="tagged_before",
        directions="cosine",
        least=TAGGED,
        contexts=contexts,
    )


def _tagging(run: Run) -> pd.DataFrame:
    """Sinks that write something, with their row in the arrays counted from 1."""
    rows = run.traces.assign(row=np.arange(1.0, len(run.traces) + 1))
    # Where a tag has no number, all tokens of a context are caught or none: it tells none apart.
    absent = dict.fromkeys(("tag", "tag_se", "released", "released_se", "tagged"), 0.0)
    # A tag whose error is not known, as of one context or in an older trace, is not certain.
    rows["tag_se"] = rows["tag_se"].where(rows["tag"].isna() | rows["tag_se"].notna(), np.inf)
    rows["direction_se"] = rows["direction_se"].fillna(np.inf) if "direction_se" in rows else np.inf
    return rows[rows["kind"] != "learned"].fillna(absent)


def kept_directions(
    table: pd.DataFrame, before: Float[Tensor, "tags groups width"], after: Float[Tensor, "tags groups width"]
) -> tuple[Floats, Flags, Flags]:
    """Half the width of the 95 % interval of `cosine`, and whether at least half of the square is kept, or is not.

    `before` and `after` are sums along the directions by group of contexts; NaN of a tag that has none.
    """
    halves = balanced_halves() @ before, balanced_halves() @ after
    owed = (table["direction_se_before"] ** 2 + table["direction_se_after"] ** 2) / 2
    cosines = torch.cosine_similarity(halves[0], halves[1], dim=2, eps=0)
    margin = direction_margins(cosines.T, owed.replace(np.inf, np.nan).to_numpy())
    return margin, *ALONG.decided(table["cosine"].to_numpy(), margin)


def _rows(stored: Tensor, rows: pd.Series) -> Tensor:
    """Rows of an array, counted from 1; NaN for 0, and behind its end."""
    padded = torch.cat([stored.double().new_full((1, *stored.shape[1:]), torch.nan), stored.double()])
    number = torch.from_numpy(rows.to_numpy().astype(np.int64))
    return padded[torch.where(number < len(padded), number, 0)]


def _tags_sentence(part: Survival) -> str:
    table = part.table
    if not part.of_reference:
        clauses = ["No sink of the reference tags the tokens that it catches"]
    elif part.exact:
        return f"All {counted(len(table), 'tag')} survive, with the same strength and direction."
    else:
        own = table[table["before"] >= part.least]
        weights = own["tagged_before"]
        sides = ("before", "after", "released_before", "released_after")
        means = [number(float(np.average(own[name], weights=weights))) for name in sides]
        cosines = own["cosine"].dropna()
        clauses = [
            part.counts(),
            f"η² in the head's output {means[0]} → {means[1]} on average, its maximum in later layers {means[2]} → "
            f"{means[3]}",
        ]
        if len(cosines):
            clauses[-1] += f", median cosine of the directions {number(float(cosines.median()))}"
    clauses += part.named(LOST, _tag_change) + part.named(NEW, _tag_change, -table["tagged_after"])
    return "; ".join(clauses) + "."


def _tag_change(row: pd.Series) -> str:
    if row["status"] == LOST and row["after"] >= HALF * row["before"]:
        return f"{sink_name(row)} (rotated, cosine {number(row['cosine'])})"
    return f"{sink_name(row)} (η² {number(row['before'])} → {number(row['after'])})"
