"""Join the units of two runs by key, decide which survive, and sum that up for one part of the mechanism."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from scipy.special import stdtr
from torch import Tensor

from theodolite.corpus.groups import GROUPS
from theodolite.estimates import CONFIDENCE, SIGMAS, Estimate, Floats, sigmas
from theodolite.judging import Answer, Criterion, Verdict, judge, mix_of, untestable
from theodolite.report.drawing.heads import sink_name
from theodolite.system.wording import counted, head_name, listed, number, percent, with_error
from theodolite.theory.unbiased import Jackknifed, combined

SURVIVED, LOST, NEW, UNDECIDED = "survived", "lost", "new", "undecided"
HALF = 0.5  # what survives retains at least this share (ours)
NEARLY_ALL = Criterion("at least", 0.9, "“keeps” read as: nine tenths are left (ours)")
MORE_THAN_HARDLY_ANY = Criterion("more than", 0.1, "“loses” read as: a tenth is left, or less (ours)")
BY_HALVES = "survives where at least half of that is left, and is lost where less is, each with the whole 95 % interval"
# One that few contexts show says nothing of the model.
ABOVE_NOISE = "and more often than by twice its standard error"
LEFT = Criterion("at least", 0.0, "ours")  # of what is left beyond the half that survives
NAMED = 4  # units that a sentence names
SIDES = ("before", "after")
ENDS = (*SIDES, "difference", "se")

Flags = npt.NDArray[np.bool_]
Units = tuple[pd.DataFrame, dict[str, Jackknifed]]  # of a run: a row each, and numbers of all by name
Pair = tuple[Jackknifed, Jackknifed]  # of every unit before and after, from the same groups of contexts


@dataclass(frozen=True)
class Joined:
    """The units of two runs, joined by key: a row each, and numbers of all by name."""

    rows: pd.DataFrame
    numbers: dict[str, Pair]

    def where(self, chosen: Flags) -> Joined:
        """Choose some of the units."""
        index = torch.from_numpy(np.flatnonzero(chosen))
        numbers = {name: (before[index], after[index]) for name, (before, after) in self.numbers.items()}
        return Joined(self.rows[chosen].reset_index(drop=True), numbers)

    def table(self) -> pd.DataFrame:
        """Tabulate the numbers as `NAME_before`, `NAME_after`, `NAME_difference` and `NAME_se`, its standard error.

        Of `value` without the name.
        """
        columns: dict[str, npt.NDArray[np.float64]] = {}
        for name, (before, after) in self.numbers.items():
            difference = combined(torch.sub, after, before)
            ends = (before.value, after.value, difference.value, difference.error)
            prefix = "" if name == "value" else f"{name}_"
            columns |= {f"{prefix}{end}": of.numpy() for end, of in zip(ENDS, ends, strict=True)}
        return self.rows.assign(**columns)


def join(key: Sequence[str], before: Units, after: Units) -> Joined:
    """Join the units of two runs by `key`, columns of both: every key of either. Numbers are 0 where a run lacks it.

    All other columns become `COLUMN_before` and `COLUMN_after`.
    """
    frames = []
    for units, _ in (before, after):
        # Columns of pyarrow's texts cannot be merged where one of them is empty.
        texts = dict.fromkeys(units.select_dtypes(exclude="number"), object)
        frames.append(units.astype(texts).assign(place=np.arange(len(units))))
    rows = frames[0].merge(frames[1], "outer", list(key), suffixes=("_before", "_after"), sort=True)
    old, new = (torch.tensor(rows.pop(f"place_{side}").fillna(-1).to_numpy(np.int64)) for side in SIDES)
    numbers = {name: (_taken(of, old), _taken(after[1][name], new)) for name, of in before[1].items()}
    return Joined(rows, numbers)


def _taken(of_units: Jackknifed, places: Tensor) -> Jackknifed:
    """Take the numbers at some places; 0 at place −1."""
    parts = (of_units.value, of_units.without)
    value, without = (torch.cat([part, part.new_zeros(*part.shape[:-1], 1)], dim=-1) for part in parts)
    return Jackknifed(value[places], without[:, places])


@dataclass(frozen=True)
class Change:
    """A number of both models, with the standard error of the difference over groups of contexts; NaN: not known."""

    name: str
    before: float
    after: float
    error: float = math.nan

    @classmethod
    def of(cls, name: str, reduce: Callable[[Tensor], Tensor], *sides: Jackknifed) -> Change:
        """Compute a sum or mean over units before and after, with the error of the difference."""
        before, after = (combined(reduce, side) for side in sides)
        error = combined(torch.sub, before, after).error
        return cls(name, float(before.value), float(after.value), float(error))

    @property
    def told(self) -> tuple[str, float, float, str]:
        """The name, the numbers, and the difference with its error in words, where there is one."""
        change = self.after - self.before
        words = with_error(change, self.error) if math.isfinite(change) else ""
        return self.name, self.before, self.after, words

    def __str__(self) -> str:
        within = self.error > 0 and abs(self.after - self.before) <= sigmas(GROUPS) * self.error
        words = f"{self.name} {number(self.before)} → {number(self.after)}"
        return f"{words} (within the 95 % interval)" if within else words


@dataclass(frozen=True)
class Survival:
    """The survival of one part of the mechanism."""

    name: str  # of the part: `sinks`, `tags`, …
    unit: str  # what is counted, in the singular
    criterion: str  # what makes a unit, and when it survives
    # One row per unit, with `status`; `before`, `after`, `difference`, `se` if it has them; `least`, what makes a unit
    # (infinite: it is none of the reference), where some are units of the other model alone.
    table: pd.DataFrame
    moved: Change  # the part in one number
    verb: tuple[str, str] = ("survives", "survive")  # what a unit that survives does, of one and of several
    details: tuple[str | Change, ...] = ()  # further clauses of the sentence
    weight: str = ""  # the column by which units count; empty: each counts once
    by_chance: float = 0.0  # how many units would survive if heads were matched at random; 0: none
    paired: Estimate | None = None  # share of the whole family left, over contexts; None: read off the units
    further: tuple[Verdict, ...] = ()  # verdicts on more than what survives
    # That the units' errors rest on; 0: no other text would say anything else, as of weights.
    contexts: int = 0

    def count(self, status: str) -> int:
        """Count the units with this status."""
        return int((self.table["status"] == status).sum())

    def _of_reference(self, weight: str = "") -> list[float]:
        """Count the units of the reference that survive, are lost, and are undecided; or sum their weights."""
        one_each = pd.Series(1.0, self.table.index)
        status = self.table["status"].where(np.isfinite(self.table.get("least", one_each)), NEW)
        weights = self.table[weight] if weight else one_each
        return [float(weights[status == each].sum()) for each in (SURVIVED, LOST, UNDECIDED)]

    @property
    def undecided(self) -> int:
        """Units of the reference of which it is not known whether they survive."""
        return int(self._of_reference()[2])

    @property
    def of_reference(self) -> int:
        """Units of the reference."""
        return int(sum(self._of_reference()))

    @property
    def family(self) -> Estimate:
        """The share of the reference's units that is left, over all: `paired`, or counted from their statuses.

        Then the interval goes from where all undecided ones are lost to where all of them survive, and what chance
        would keep is taken off both the units and those that survive. What units weigh is itself known from these
        contexts only: for that, the score test's interval of a share of so many contexts at nine tenths is added,
        √(0.9 · 0.1/n) with half a context (Yates).
        """
        if self.paired is not None:
            return self.paired
        survived, lost, unknown = self._of_reference(self.weight)
        could = survived + lost + unknown - self.by_chance
        kept = (survived, survived + unknown)
        low, high = (max(each - self.by_chance, 0.0) / could if could > 0 else math.nan for each in kept)
        if not self.contexts:
            return Estimate.exact(low)
        error = (high - low) / 2 / SIGMAS
        if self.weight:
            limit = NEARLY_ALL.limit
            error += math.sqrt(limit * (1 - limit) / self.contexts) + 0.5 / self.contexts / SIGMAS
        return Estimate((low + high) / 2, error, self.contexts, "contexts", by_chance=True)

    def verdict(self, claim: str) -> Verdict:
        """Judge whether nearly all of the part is left, hardly any (it fails), or neither (in part).

        Where chance would keep nearly all as well, nothing can be told.
        """
        if self.by_chance >= NEARLY_ALL.limit * max(self.of_reference, 1):
            return untestable(claim, f"by chance {self.by_chance:.1f} of {self.of_reference} would survive")
        what, limits = f"share of the {self.name} that is left", (NEARLY_ALL, MORE_THAN_HARDLY_ANY)
        return mix_of(claim, [judge(claim, what, self.family, limit) for limit in limits])

    @property
    def answer(self) -> Answer:
        """The answer of `verdict`."""
        return self.verdict("").answer

    @property
    def sentence(self) -> str:
        """The result in words."""
        if not len(self.table):
            return f"Neither model has any {self.unit} on this text."
        clauses = [self.counts() if self.of_reference else f"The reference has no {self.unit}"]
        clauses += map(str, (self.moved, *self.details))
        for status in (LOST, NEW):  # those that changed most first
            rows = self.table[self.table["status"] == status]
            if "difference" in rows:
                rows = rows.sort_values("difference", key=lambda of: -of.abs(), kind="stable")
            if names := self._named(rows):
                clauses.append(f"{status}: {listed(names, NAMED)}")
        return "; ".join(clauses) + "."

    def _named(self, rows: pd.DataFrame) -> list[str]:
        """Name lost or new units: dimensions, layers, or heads and sinks with their numbers before and after."""
        if "dimension" in rows:
            layers = rows.groupby("dimension")["layer"].nunique().sort_values(ascending=False, kind="stable")
            return [f"dimension {name} in {counted(many, 'layer')}" for name, many in layers.items()]
        if "head" not in rows:
            return [f"layer {layer}" for layer in rows["layer"]]
        names = []
        for _, row in rows.iterrows():
            name = sink_name(row) if "kind" in row else head_name(row["layer"], row["head"])
            name += f" as {row['type'].removesuffix(' head')}" if "type" in row else ""
            ends = [number(row[side]) for side in SIDES if side in row]
            turned = f", cosine {number(row['cosine'])}" if "cosine" in row else ""
            names.append(f"{name} ({' → '.join(ends)}{turned})" if ends else name)
        return names

    def counts(self) -> str:
        """Say how many units survive, `31 of 34 sinks survive`, are new, and are undecided.

        And how many contexts would decide half of these, where that is known.
        """
        survived, total = self.count(SURVIVED), self.of_reference
        text = f"{survived} of {counted(total, self.unit)} {self.verb[0 if survived == 1 else 1]}"
        if self.by_chance:
            text += f" ({self.by_chance:.1f} by chance)"
        elif self.weight and 0 < survived < total:
            weights = self._of_reference(self.weight)
            text += f" ({percent(weights[0] / sum(weights))} by weight)"
        text += f", {new} new" if (new := self.count(NEW)) else ""
        if not self.undecided:
            return text
        text += f", {self.undecided} undecided (within the 95 % interval"
        if "contexts_needed" in self.table:
            needed = self.table.loc[self.table["status"] == UNDECIDED, "contexts_needed"].fillna(np.inf)
            half = needed.sort_values().iloc[(len(needed) - 1) // 2]
            if half < np.inf:
                text += f"; about {number(float(f'{half:.2g}'))} contexts would decide half of them"
        return f"{text})"


def decided(
    criterion: Criterion, numbers: Jackknifed, of: Flags | None = None, bias: Floats | float = 0.0
) -> tuple[Flags, Flags, Floats]:
    """Mark the units for which a criterion holds, and fails; with half the widths of their intervals.

    Intervals are those of Student's t of as many groups, wider than 95 % by the share of units that they decide, so
    that of all that is said to hold or fail one in twenty is wrong on average (Benjamini & Hochberg 1995; Benjamini &
    Yekutieli 2005). Where the error is not known, nothing is decided.

    Args:
        of: which units are a family; None: all. The others are not decided.
        bias: how far off a number may be besides, by which intervals are wider.
    """
    values, errors, n = numbers.value.numpy(), numbers.error.numpy(), len(numbers.without)
    of = np.ones(values.shape, dtype=bool) if of is None else of
    beyond = (np.abs(criterion.beyond(values)) - bias)[of]
    with np.errstate(divide="ignore", invalid="ignore"):
        distances = np.where(errors[of] == 0, np.inf, beyond.clip(min=0) / errors[of])
    chances = np.sort(2 * stdtr(n - 1, -np.nan_to_num(distances, posinf=np.inf)))
    enough = chances <= (1 - CONFIDENCE) * np.arange(1, len(chances) + 1) / max(len(chances), 1)
    share = (np.flatnonzero(enough)[-1] + 1) / len(chances) if enough.any() else 1 / max(len(chances), 1)
    margins = sigmas(n, 1 / share) * errors + bias
    holds, fails = criterion.decided(values, margins)
    return holds & of, fails & of, margins


def established(numbers: Jackknifed, least: float | Floats) -> Flags:
    """Mark what is at least `least`, and above twice its standard error where that is known."""
    return ((numbers.value >= torch.as_tensor(least)) & ~(numbers.value <= 2 * numbers.error)).numpy()


def statuses(pair: Pair, least: float | Floats, contexts: int = 0) -> dict[str, npt.NDArray[Any]]:
    """Decide by the rule of halves which units survive: the columns `status`, `contexts_needed` to decide it, `least`.

    A unit of the reference has at least `least` before, above twice its standard error; that of others is infinite. It
    survives where at least half of that is left, and is lost where less is, each with the whole interval of
    after − before/2; else it is undecided. What is a unit after only is new where there was less than half of it
    before, with the whole interval, else undecided. `contexts`: that both runs read.
    """
    before, after = pair
    is_unit = established(before, least)
    left, beyond = (
        combined(lambda one, other: one - HALF * other, *sides)
        for sides in ((after, before), (before, after))
    )
    kept, lost, margin = decided(LEFT, left, is_unit)
    _, is_new, _ = decided(LEFT, beyond, ~is_unit)
    status = np.where(is_unit, status_of(kept, lost), np.where(is_new, NEW, UNDECIDED))
    # Of a number within a standard error of the limit nobody knows on which side it will be.
    distance = np.where(left.value.abs() > left.error, left.value.abs(), np.nan)
    needed = np.where(is_unit & (status == UNDECIDED), contexts * np.square(margin / distance), np.nan)
    least = np.where(is_unit, least, np.inf)
    return {"status": status, "contexts_needed": np.ceil(needed), "least": least}


def by_halves(joined: Joined, least: float, contexts: int) -> pd.DataFrame:
    """Tabulate the units of either run, what has at least `least` as its `value`, with their `statuses`."""
    before, after = pair = joined.numbers["value"]
    table = joined.table().assign(**statuses(pair, least, contexts))
    return table[established(before, least) | established(after, least)].reset_index(drop=True)


def status_of(kept: Flags, lost: Flags) -> npt.NDArray[np.str_]:
    """Name the status of each unit of the reference by what its intervals decide."""
    return np.where(kept, SURVIVED, np.where(lost, LOST, UNDECIDED))


def with_directions(table: pd.DataFrame, kept: Flags, turned: Flags) -> pd.DataFrame:
    """Ask of units of the reference that their directions survive as well: what has either lost is lost."""
    status = table["status"]
    both = status_of(kept & (status == SURVIVED), turned | (status == LOST))
    return table.assign(status=np.where(np.isfinite(table["least"]), both, status))


def expected_by_chance(holds: Flags) -> float:
    """Compute how many of N units survive in the mean over all orders of those after; `holds`: which pairs match."""
    return float(holds.sum()) / len(holds) if len(holds) else 0.0
