"""The rule of halves, chance and counts; oracles: cases by hand, all permutations, algebra."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from theodolite.comparison.audit import summarise
from theodolite.comparison.survival import Survival, expected_by_chance, statuses

SHARES = st.floats(0, 1, width=32)
CONTEXTS = 10_000
"""As many as make Student's t a normal one."""


@pytest.mark.parametrize(
    ("before", "after", "error", "fate"),
    [
        (0.4, 0.4, 0.0, "survived"),
        (0.4, 0.2, 0.0, "survived"),  # just half
        (0.4, 0.19, 0.0, "lost"),
        (0.4, 0.19, 0.2, "undecided"),  # less than half, but within two errors
        (0.4, 0.0, 0.19, "lost"),
        (0.4, 0.9, 0.0, "survived"),
        (0.012, 0.007, 0.0, "survived"),  # half is left, though it is below the least
        (0.0, 0.4, 0.0, "new"),
        (0.0, 0.4, 0.21, "undecided"),
        (0.009, 0.4, 0.0, "new"),
        (0.009, 0.012, 0.0, "undecided"),  # there all the time, and never clearly
        (0.4, 0.0, np.nan, "lost"),  # no error: every difference is certain
    ],
)
def test_fates_by_hand(before, after, error, fate):
    table = pd.DataFrame({"before": [before], "after": [after], "se": [error]})
    assert statuses(table, 0.01, CONTEXTS).tolist() == [fate]


def test_without_errors_every_difference_is_certain():
    table = pd.DataFrame({"before": [0.4, 0.0], "after": [0.19, 0.4]})
    assert statuses(table, 0.01).tolist() == ["lost", "new"]


@given(SHARES, SHARES, st.floats(0, 1, width=32))
def test_fates_mirror_each_other(before, after, error):
    """What one direction calls lost the other calls new, above the least."""
    there = statuses(pd.DataFrame({"before": [before], "after": [after], "se": [error]}), 0.01, CONTEXTS)[0]
    back = statuses(pd.DataFrame({"before": [after], "after": [before], "se": [error]}), 0.01, CONTEXTS)[0]
    if before >= 0.01 and after < 0.01:
        assert (there == "lost") == (back == "new")
    if before == after >= 0.01:
        assert there == back == "survived"


def test_chance_is_the_mean_over_all_orders():
    holds = np.random.default_rng(0).random((5, 5)) < 0.4
    kept = [
        sum(holds[i, order[i]] for i in range(5)) for order in map(list, itertools.permutations(range(5)))
    ]
    assert expected_by_chance(holds) == pytest.approx(np.mean(kept))
    assert expected_by_chance(np.zeros((0, 0), dtype=bool)) == 0


def part(outcomes: list[str], weights: list[float] | None = None, by_chance: float = 0.0) -> Survival:
    table = pd.DataFrame({"status": outcomes, "before": weights or [1.0] * len(outcomes)})
    return Survival("sinks", "sink", "", table, str, "before" if weights else "", by_chance)


def test_what_is_left():
    some = part(["survived", "lost", "lost", "new", "undecided"], [0.6, 0.1, 0.1, 9.0, 9.0])
    assert some.left == pytest.approx(0.6 / 0.8)
    assert (
        some.counts()
        == "1 of 3 sinks survives (75\u00a0% by weight), 1 new, 1 undecided (within the 95 % interval)"
    )
    assert part(["survived"] * 3 + ["lost"], by_chance=2.0).left == pytest.approx((3 - 2) / (4 - 2))
    assert part(["survived", "lost", "lost"], by_chance=2.0).left == 0  # worse than chance
    assert part(["survived", "lost"], by_chance=2.0).left == 0  # by chance all of them would
    assert part(["survived", "new"]).left == 1
    assert part(["lost"]).left == 0
    assert np.isnan(part(["new", "undecided"]).left)
    assert part(["survived", "lost"], by_chance=0.5).counts() == "1 of 2 sinks survives (0.5 by chance)"


def test_where_nothing_is_decided_nothing_is_said_to_survive():
    undecided = part(["undecided", "new"])
    undecided = replace(undecided, table=undecided.table.assign(layer=0, head=0))
    assert summarise((undecided,), "b").startswith("Whether anything survives is not decided. ")
