"""The limits that verdicts go by, each with the table or sentence of Song & Zhong 2024 that it is from, or "ours"."""

from __future__ import annotations

import math

from theodolite.judging import Criterion
from theodolite.report import published


def _largest(table: published.Rows, first_layer: int = 0) -> float:
    return max(max(row[first_layer:]) for rows in table.values() for row in rows)


RANK = Criterion("at most", _largest(published.RANK), "the largest rank of Table 4")
STABLE_RANK = Criterion(
    "at most", _largest(published.STABLE_RANK, 1), "the largest stable rank after layer 0 in Table 5"
)
SIGNIFICANT = Criterion("at least", 0.10, "section 3.1: “most numbers bigger than 10%”")
SMOOTH = Criterion(
    "at least",
    min(published.LOW_FREQUENCY_OTHER_TEXT.values()),
    "the lowest share of Table 2, where the structure is still called similar",
)
"""Of the normalised Gram matrix, which Table 2 is about."""

MOSTLY = Criterion(
    "at least",
    0.5,
    "“mostly in the low-frequency components” (section 3.2) read as: half of the way to all from the most that random "
    "order has on average (ours)",
)
UNLIKE_LANGUAGE = Criterion(
    "at most", 0.6, "section 4.3: “around 50%, … much less than 99%”; the tenth of leeway is ours"
)
SEPARATION = Criterion(
    "at least",
    min(row.within[0] / row.between[0] for row in published.TABLE_1 if not math.isnan(row.within[0])),
    "the lowest ratio of intra- to inter-cluster similarity in Table 1",
)
RANK_CHANGE = Criterion(
    "within",
    max(abs(row.rank[0] - row.trained_rank) for row in published.TABLE_2),
    "the largest change between Table 1 and Table 2",
)
WITHIN_RANK = Criterion(
    "at least", 0.9, "a rank is one of P only if so many directions hold nearly all (ours)"
)
ADDS = Criterion("at least", 0.9, "a model that adds; the paper's is “above 99%” (ours)")
DOMINANT = Criterion("at least", 0.5, "“dominant” read as: more than half (ours)")
CONTINUOUS = Criterion("at most", 0.1, "where positions in random order give 1 (ours)")
SPIRAL_TURNS = Criterion(
    "at least",
    1.0,
    "a whole turn about the centre: a random walk's first two principal components make about two thirds (ours)",
)
TENFOLD = Criterion("at least", 10.0, "“dramatically” and “significantly” read as: tenfold (ours)")
DEEPENS = Criterion("more than", 0.0, "“progressively” read as: rising with depth (ours)")
CLUSTERS = Criterion(
    "at least",
    min(row.within[0] - row.between[0] for row in published.TABLE_1 if not math.isnan(row.within[0])),
    "the smallest difference of intra- and inter-cluster similarity in Table 1",
)
LARGER = Criterion("more than", 0.0, "the learned basis has more")
SMALLER = Criterion("less than", 0.0, "the learned basis has less")

UNRELATED = Criterion("within", 0.1, "“close to 0” read as section 5's “random baseline is about 0.1”")


def above_chance(groups: int) -> Criterion:
    """Ask that one of several groups is the largest in more heads than chance would give."""
    return Criterion(
        "more than", 1 / groups, f"“often dominant” read as: more often than one of {groups} groups by chance"
    )


LEAST_RANKED = 42
"""Rows and columns below which ScreeNOT's upper bound of 20 has no room (it needs 2·20 + 1 values below it)."""

LEAST_POSITIONS = 32
"""Positions below which the 10 × 10 lowest frequencies are more than a tenth of all, and smoothness says little."""

LEAST_UNSMOOTH_POSITIONS = 20
"""The same where a low share is claimed: above it, positions in random order reach a quarter."""
