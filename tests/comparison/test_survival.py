"""The rule of halves, chance and counts; oracles: cases by hand, all permutations, algebra."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats

from theodolite.comparison.audit import Audit
from theodolite.comparison.parts import kept_places
from theodolite.comparison.survival import (
    Change,
    Joined,
    Pair,
    Survival,
    by_halves,
    decided,
    expected_by_chance,
    join,
    statuses,
)
from theodolite.judging import Criterion
from theodolite.passes.run import Run
from theodolite.theory.unbiased import Jackknifed

T7 = stats.t.ppf(0.975, 7)
"""Errors on either side of the 95 % interval from eight groups."""


def joined(before: torch.Tensor, after: torch.Tensor) -> Joined:
    """Units with numbers by group, (8, units) each, of which a unit's number is the mean."""
    pair = (Jackknifed(of.mean(0), (of.sum(0) - of) / 7) for of in (before, after))
    return Joined(pd.DataFrame({"unit": range(before.shape[1])}), {"value": tuple(pair)})


def one_unit(before: float, after: float, error: float) -> Pair:
    """A unit, and the error of what is after."""
    signs = torch.tensor([1.0, -1] * 4, dtype=torch.float64)[:, None]
    old, new = torch.tensor([[before], [after]], dtype=torch.float64)
    return Jackknifed.constant(old, 8), Jackknifed(new, new + signs * error / 7**0.5)


@pytest.mark.parametrize(
    ("before", "after", "error", "fate"),
    [
        (0.4, 0.4, 0.0, "survived"),
        (0.4, 0.2, 0.0, "survived"),  # just half
        (0.4, 0.19, 0.0, "lost"),
        (0.4, 0.19, 0.2, "undecided"),  # less than half, but within the interval
        (0.4, 0.0, 0.08, "lost"),
        (0.4, 0.0, 0.09, "undecided"),  # half of it is within 2.36 errors of nothing
        (0.4, 0.3, 0.09, "undecided"),  # more than half, but within the interval of half
        (0.4, 0.9, 0.0, "survived"),
        (0.012, 0.007, 0.0, "survived"),  # half is left, though it is below the least
        (0.0, 0.4, 0.0, "new"),
        (0.0, 0.4, 0.18, "undecided"),
        (0.009, 0.4, 0.0, "new"),
        (0.009, 0.012, 0.0, "undecided"),  # there all the time, and never clearly
        (0.4, 0.0, np.nan, "undecided"),  # nobody knows the error
    ],
)
def test_fates_by_hand(before, after, error, fate):
    assert statuses(one_unit(before, after, error), 0.01)["status"].tolist() == [fate]


def test_what_few_contexts_show_is_no_unit():
    """In one, two or three of eight groups: the number is 1, 1.53 and 2.05 times its error."""
    groups = (torch.arange(8)[:, None] < torch.arange(1, 4)).double()
    units = joined(groups, 0 * groups)
    assert by_halves(units, 0.01, 8)["unit"].tolist() == [2]
    assert (statuses(units.numbers["value"], 0.01)["least"][:2] == np.inf).all()


def test_what_both_models_owe_to_the_contexts_is_no_error():
    """Oracle: s/√8 of the groups' differences; a share that varies much between contexts, and is halved in each."""
    before = torch.rand(8, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 0.1
    for factor, fate in ((0.6, "survived"), (0.4, "lost")):
        table = by_halves(joined(before, factor * before), 0.01, 8)
        expected = (1 - factor) * before.std(0) / 8**0.5
        np.testing.assert_allclose(table["se"], expected)
        clear = T7 * 0.1 * before.std(0) / 8**0.5 < 0.1 * before.mean(0)
        assert clear.all()
        assert (table["status"] == fate).all()


def test_it_is_said_how_many_contexts_would_decide():
    """Oracle: an interval as long as 1/√n, and one of 64 contexts that is twice as long as the distance to half."""
    needed = statuses(one_unit(0.4, 0.3, 0.1 * 2 / T7 * 0.99), 0.01, contexts=64)["contexts_needed"]
    assert needed.tolist() == [251]  # 64 · (2 · 0.99)² = 250.9
    assert np.isnan(statuses(one_unit(0.4, 0.3, 0.11), 0.01, contexts=64)["contexts_needed"]).all()


def test_of_what_is_decided_one_in_twenty_is_wrong():
    """Oracle: 200 families of 40 numbers, half of them at the limit itself, where each answer is wrong."""
    generator = np.random.default_rng(0)
    truth = np.repeat([0.0, 2.0], 20)
    wrong = []
    for _ in range(200):
        groups = torch.from_numpy(truth + generator.normal(size=(8, 40)))
        numbers = Jackknifed(groups.mean(0), (groups.sum(0) - groups) / 7)
        holds, fails, _ = decided(Criterion("at least", 0.0, ""), numbers)
        wrong.append((holds | fails)[:20].sum() / max((holds | fails).sum(), 1))
        assert holds[20:].mean() > 0.7
    assert np.mean(wrong) <= 0.05


def test_a_join_has_every_key_of_either_table_once():
    """Oracle: dictionaries by key; a missing row is 0."""
    before = {(1, "a"): 0.5, (0, "b"): np.nan}
    after = {(1, "a"): 0.25, (2, "c"): 1.0}
    key = ["layer", "kind"]

    def units(rows):
        frame = pd.DataFrame(list(rows), columns=key).assign(text="text")
        values = torch.tensor(list(rows.values()), dtype=torch.float64)
        return frame, {"value": Jackknifed(values, values + torch.arange(8)[:, None])}

    both = join(key, units(before), units(after))
    table = both.table()
    assert list(table[key].itertuples(index=False, name=None)) == sorted({*before, *after})
    for place, row in enumerate(table.to_dict("records")):
        v, w = (side.get((row["layer"], row["kind"]), 0.0) for side in (before, after))
        np.testing.assert_array_equal([row[end] for end in ("before", "after", "difference")], [v, w, w - v])
        for values, side, number in zip((before, after), both.numbers["value"], (v, w), strict=True):
            is_there = (row["layer"], row["kind"]) in values
            np.testing.assert_array_equal(side.without[3, place], number + 3 * is_there)
        assert (row["text_before"] == "text") == ((row["layer"], row["kind"]) in before)
    frame, numbers = units(after)
    empty = (frame.iloc[:0].astype(object), {"value": numbers["value"][[]]})
    none = join(key, units(before), empty).table()
    assert none["after"].eq(0).all()
    assert none["text_after"].isna().all()


def test_chance_is_the_mean_over_all_orders():
    holds = np.random.default_rng(0).random((5, 5)) < 0.4
    kept = [
        sum(holds[i, order[i]] for i in range(5)) for order in map(list, itertools.permutations(range(5)))
    ]
    assert expected_by_chance(holds) == pytest.approx(np.mean(kept))
    assert expected_by_chance(np.zeros((0, 0), dtype=bool)) == 0


def part(outcomes: list[str], weights: list[float] | None = None, by_chance: float = 0.0) -> Survival:
    table = pd.DataFrame({"status": outcomes, "before": weights or [1.0] * len(outcomes)})
    weight = "before" if weights else ""
    moved = Change("sinks", 1, 1)
    return Survival("sinks", "sink", "", table, moved, weight=weight, by_chance=by_chance, contexts=400)


def test_what_is_left():
    some = part(["survived", "lost", "lost", "new", "undecided"], [0.6, 0.1, 0.1, 9.0, 0.2])
    family = some.family
    # What weighs how much is known from 400 contexts: the score test's interval of a share at nine tenths.
    sample = 1.96 * (0.9 * 0.1 / 400) ** 0.5 + 0.5 / 400
    ends = family.value - family.margin, family.value + family.margin
    assert ends == pytest.approx((0.6 - sample, 0.6 + 0.2 + sample), abs=1e-5)
    assert (
        some.counts()
        == "1 of 4 sinks survives (60\u00a0% by weight), 1 new, 1 undecided (within the 95 % interval)"
    )

    def left(*given, **options):
        return part(*given, **options).family.value

    assert left(["survived"] * 3 + ["lost"], by_chance=2.0) == pytest.approx((3 - 2) / (4 - 2))
    assert left(["survived", "lost", "lost"], by_chance=2.0) == 0  # worse than chance
    assert np.isnan(left(["survived", "lost"], by_chance=2.0))  # by chance all of them would
    assert left(["survived", "new"]) == 1
    assert left(["lost"]) == 0
    assert np.isnan(left(["new"]))
    assert part(["survived", "lost"], by_chance=0.5).counts() == "1 of 2 sinks survives (0.5 by chance)"
    undecided = part(["undecided", "new"])
    undecided = replace(undecided, table=undecided.table.assign(layer=0, head=0))
    assert Audit("a", "b", (undecided,)).summary.startswith("Not decided: sinks (0 of 1). ")


@pytest.mark.parametrize(
    ("survived", "lost", "undecided", "by_chance", "expected"),
    [
        (38, 0, 0, 0, "holds"),
        (95, 5, 0, 0, "holds"),  # a larger model may lose a few
        (29, 0, 9, 0, "not decided"),  # nothing is known to be lost, and a quarter may be
        (29, 9, 0, 0, "in part"),
        (1, 30, 1, 0, "fails"),
        (1, 20, 9, 0, "not decided"),
        (95, 5, 0, 50, "holds"),  # 45 of 50 beyond chance
        (94, 6, 0, 50, "in part"),
        (0, 0, 1, 0, "not decided"),
        (0, 0, 0, 0, "not testable here"),
    ],
)
def test_a_part_is_judged_by_the_share_that_is_left(survived, lost, undecided, by_chance, expected):
    """Oracle: by hand: nine tenths or more hold, a tenth or less fails, from all undecided lost to all survived."""
    statuses = ["survived"] * survived + ["lost"] * lost + ["undecided"] * undecided + ["new"]
    some = part(statuses, by_chance=by_chance)
    assert some.answer == expected


def places_of(kept: list[int], sinks: int) -> tuple[Run, Run]:
    """Outputs of two models: `sinks` sinks of a head in each context, so many of which the other model has."""
    rows = [[c, 0, 0, p] for c in range(len(kept)) for p in range(sinks)]
    left = [[c, 0, 0, p] for c, many in enumerate(kept) for p in range(many)] + [[0, 1, 1, 5]]
    arrays = [
        {
            "sink_places": torch.tensor(places),
            "loss": torch.zeros(len(kept)),
            "written": torch.tensor(written),
        }
        for places, written in ((rows, 1.0), (left, 2.0))
    ]
    return tuple(Run(arrays=of_model, provenance={}) for of_model in arrays)  # type: ignore[return-value]


def test_the_family_of_sinks_is_paired_over_contexts():
    """Oracle: of as many sinks in every context, the ratio is a mean of shares, its error that of a mean over √n."""
    kept = [4, 3, 4, 1, 2, 4, 4, 3] * 6
    estimate = kept_places(*places_of(kept, 4))
    shares = np.array(kept) / 4
    assert (estimate.value, estimate.n, estimate.of) == (pytest.approx(shares.mean()), 48, "contexts")
    assert estimate.error == pytest.approx(shares.std(ddof=1) / 48**0.5)
    same, other = places_of([4, 4], 4)
    assert kept_places(same, same).is_exact
    assert not kept_places(same, other).is_exact


@pytest.mark.parametrize("contexts", [2, 35])
def test_a_loss_makes_the_answer_no_better(contexts):
    """In few contexts no loss at all is not decided: nor is one sink lost, in one of them or in each."""
    for kept in ([40] * (contexts - 1) + [39], [39] * contexts, [20] * contexts):
        family = kept_places(*places_of(kept, 40))
        assert family.margin >= 1 - 0.025 ** (1 / contexts) - 1e-12
        assert replace(part(["survived", "undecided"]), paired=family).answer != "holds"


def test_no_loss_in_few_contexts_is_no_proof():
    """Oracle: Clopper & Pearson's bound by scipy; nine tenths are sure from 36 contexts on, 0.025^{1/36} > 0.9."""
    for contexts, expected in ((3, "not decided"), (35, "not decided"), (36, "holds")):
        family = kept_places(*places_of([4] * contexts, 4))
        low = stats.binomtest(contexts, contexts).proportion_ci(0.95, "exact").low
        assert family.value - family.margin == pytest.approx(low)
        assert replace(part(["survived", "undecided"]), paired=family).answer == expected


def family_of(before: np.ndarray, after: np.ndarray, **options) -> Survival:
    """Of units that are in these contexts, (contexts, units) of 0 and 1."""
    contexts, units = before.shape
    sides = (torch.from_numpy(one.reshape(8, -1, units).mean(1)) for one in (before, after))
    units = joined(*sides)
    table = units.table().assign(**statuses(units.numbers["value"], 0.01))
    return replace(part(["lost"]), table=table, contexts=contexts, **options)


@pytest.mark.parametrize(("contexts", "together"), [(8, True), (8, False), (64, True)])
def test_what_lost_most_of_its_units_hardly_ever_keeps_them(contexts, together):
    """A unit in half of the contexts, of 12; of two 40 % is left, so that 83 % survive: "holds" in one case of 20.

    Of one unit too, both where units are independent and where they all lie in the same contexts.
    """
    generator = np.random.default_rng(contexts)
    true = np.array([[0.5] * 12, [0.2] * 2 + [0.5] * 10])
    holds, survived, trials = 0, 0, 200
    for _ in range(trials):
        draws = generator.random((2, contexts, 1 if together else 12))
        draws = np.broadcast_to(draws, (2, contexts, 12))
        family = family_of(*(draws < true[:, None]).astype(float))
        survived += family.table["status"][0] == "survived"
        holds += family.answer == "holds"
    assert holds <= 0.05 * trials
    assert survived <= 0.05 * trials


@pytest.mark.parametrize(("contexts", "rare", "share"), [(8, 12, 0.012), (32, 25, 0.012), (128, 40, 0.015)])
def test_one_heavy_unit_does_not_keep_what_rare_ones_lose(contexts, rare, share):
    """A unit in all contexts is kept, and all rare ones are lost, of which few contexts show few: never "holds"."""
    generator = np.random.default_rng(contexts + rare)
    true = np.array([1.0] + [share] * rare)
    assert 1 / true.sum() < 0.9  # what is left
    holds, trials = 0, 100
    for _ in range(trials):
        before = (generator.random((contexts, rare + 1)) < true).astype(float)
        after = np.where(np.arange(rare + 1) == 0, before, 0.0)
        seen = before.mean(axis=0) >= 0.01
        holds += family_of(before[:, seen], after[:, seen], weight="before").answer == "holds"
    assert holds <= 0.05 * trials


def test_what_chance_would_keep_as_well_is_not_testable():
    for outcomes in (["survived"] * 16, ["survived"] * 15 + ["lost"]):
        assert part(outcomes, by_chance=15.0).answer == "not testable here"
    # No cliff: one more that is lost changes the share by what it weighs.
    shares = [part(["survived"] * (20 - n) + ["lost"] * n, by_chance=10.0).family.value for n in range(5)]
    assert np.diff(shares) == pytest.approx([-0.1] * 4)
