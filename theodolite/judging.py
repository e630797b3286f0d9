"""Judge a number against a criterion: the verdict on a claim, and its evidence.

A claim holds where the whole 95 % interval of its number is on the right side of the criterion, and fails where all of
it is on the other; else nothing is decided.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import pandas as pd

from theodolite.estimates import INTERVAL, Estimate, Estimates, Floats, sigmas
from theodolite.system.wording import number

Answer = Literal["holds", "in part", "fails", "not decided", "not testable here"]
HOLDS: Answer = "holds"
IN_PART: Answer = "in part"
FAILS: Answer = "fails"
UNDECIDED: Answer = "not decided"  # too close to the criterion, or nobody knows how far off it may be
UNTESTABLE: Answer = "not testable here"  # the run has no such number
NO_ERROR = "not decided: its standard error is not known"
NO_NUMBER = "no number in this run"

Rule = Literal["number", "most", "all", "mixed", ""]  # one number's answer, or by `most`, `all_of`, `mix_of`
Side = Literal["at most", "at least", "more than", "less than", "within"]
SIDES = get_args(Side)

OF_ESTIMATE, OF_CRITERION = ("value", "error", "n", "of"), ("side", "limit", "negligible")


@dataclass(frozen=True)
class Judged:
    """A number that was judged against a criterion by an interval that is one of `looks` to share the 5 %."""

    what: str
    answer: Answer
    estimate: Estimate
    criterion: Criterion
    looks: int = 1


@dataclass(frozen=True)
class Verdict:
    """A claim of the paper, the answer, and the numbers behind it.

    `rule` and `parts` say how the answer follows, and from what; `withheld` why it is not given after all;
    `experiment`, where verdicts of several are collected, which one judged it.
    """

    claim: str
    answer: Answer
    evidence: str
    rule: Rule = field(default="", compare=False, repr=False)
    parts: tuple[Judged | Verdict, ...] = field(default=(), compare=False, repr=False)
    withheld: str = field(default="", compare=False, repr=False)
    experiment: str = field(default="", compare=False)

    @property
    def words(self) -> dict[str, str]:
        """Claim, answer and evidence, without the numbers behind them; first the experiment, where it is named."""
        named = {"experiment": self.experiment} if self.experiment else {}
        return {**named, "claim": self.claim, "answer": self.answer, "evidence": self.evidence}


@dataclass(frozen=True)
class Criterion:
    """A limit, the side of it on which the claim holds, and where the limit comes from.

    Of "more than" and "less than", a tie decides neither. "within" is an equivalence test: a difference is at most the
    limit in size, its whole interval included. An interval must be on one side of what is `negligible` beyond a limit.
    """

    side: Side
    limit: float
    source: str
    negligible: float = 0.0

    def met(self, values: Floats | float) -> npt.NDArray[np.bool_]:
        """Mark the values on the right side."""
        beyond = self.beyond(values)
        return np.asarray(beyond > 0 if self._strict else beyond >= 0)

    def decided(self, values: Floats | float, margins: Floats | float) -> tuple[np.ndarray, np.ndarray]:
        """Mark the values for which the claim holds, and for which it fails; neither within the margin, or at a tie."""
        beyond, margin = self.beyond(values), np.asarray(margins, dtype=np.float64)
        low, high = beyond - margin, beyond + margin
        return low > 0 if self._strict else low >= 0, (high <= 0) & (beyond < 0)

    def beyond(self, values: Floats | float) -> Floats:
        """Measure how far each value is beyond the limit on the right side, less what is negligible."""
        values = np.asarray(values, dtype=np.float64)
        if self.side == "within":
            return np.asarray(self.limit - np.abs(values))
        beyond = self.limit - values if self.side in ("at most", "less than") else values - self.limit
        return np.asarray(beyond - self.negligible)

    @property
    def _strict(self) -> bool:
        return self.side in ("more than", "less than")

    def __str__(self) -> str:
        beyond = f" by {number(self.negligible)} at least" if self.negligible else ""
        return f"criterion: {self.side} {number(self.limit)}{beyond}, {self.source}"


def independent(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """Leave out verdicts that an earlier one's number decides: a number in two claims' evidence counts once."""
    numbers: set[tuple[str, str]] = set()
    first = []
    for verdict in verdicts:
        number_judged = verdict.answer, verdict.evidence
        if verdict.answer == UNTESTABLE or number_judged not in numbers:
            first.append(verdict)
        numbers.add(number_judged)
    return first


def judge(claim: str, what: str, estimate: Estimate | Estimates | float, criterion: Criterion) -> Verdict:
    """Compare a number with its criterion, or one a layer, more than half of which must then meet it (`most`).

    Within the margin of the criterion, at a tie, or without a standard error (as of a float), nothing is decided; such
    a layer counts for neither side. A mean that rests on one thing alone (one seed) has no margin, and says nothing.
    Intervals of layers are wider (`Estimates.looks`), so that chance among many decides no more often than with one.

    Args:
        what: name of the number, with what it is taken over ("mean rank of 13 layers").
    """
    if isinstance(estimate, Estimates):
        return _judge_layers(claim, what, estimate, criterion)
    if not isinstance(estimate, Estimate):
        estimate = Estimate(estimate)
    if not math.isfinite(estimate.value):
        return untestable(claim, f"{what}: {NO_NUMBER}; {criterion}")
    evidence = f"{what}: {estimate}; {criterion}"
    if estimate.n == 1:
        return untestable(claim, f"{evidence}; an interval needs two {estimate.of} or more")
    holds, fails = criterion.decided(estimate.value, estimate.margin)
    answer = HOLDS if holds else FAILS if fails else UNDECIDED
    if math.isnan(estimate.margin):
        evidence += f"; {NO_ERROR}"
    elif answer == UNDECIDED:
        evidence += f"; within {INTERVAL} of it" if estimate.value != criterion.limit else "; equal to it"
    return Verdict(claim, answer, evidence, "number", (Judged(what, answer, estimate, criterion),))


def _judge_layers(claim: str, what: str, layers: Estimates, criterion: Criterion) -> Verdict:
    values, margins = np.where(np.isfinite(layers.values), layers.values, np.nan), layers.shared_margins
    known = np.isfinite(values)
    if not known.any():
        return untestable(claim, f"{what}: {NO_NUMBER}; {criterion}")
    if layers.n == 1 and layers.errors is not None:
        return untestable(claim, f"{what}; {criterion}; an interval needs two {layers.of} or more")
    holds, fails = criterion.decided(values, margins)
    meeting, failing, total = int(holds.sum()), int(fails.sum()), int(known.sum())
    evidence = (
        f"{what}: in {meeting} of {total} {layers.each} ({_spread(layers)}); {criterion}, in more than half"
    )
    if failing and meeting:
        evidence += f"; {failing} on the other side"
    without = int((known & np.isnan(margins)).sum())
    if undecided := total - meeting - failing - without:
        evidence += f"; {undecided} within {INTERVAL} of it"
        evidence += f", which {layers.looks} of them share" if layers.looks > 1 else ""
    if without:
        evidence += f"; {'' if without == total else f'{without} '}{NO_ERROR}"
    one = layers.each.removesuffix("s")
    rows = []
    for place in np.flatnonzero(known).tolist():
        answer = HOLDS if holds[place] else FAILS if fails[place] else UNDECIDED
        rows.append(Judged(f"{one} {place}", answer, layers.at(place), criterion, layers.looks))
    return Verdict(claim, most([row.answer for row in rows]), evidence, "most", tuple(rows))


def _spread(layers: Estimates) -> str:
    judged = np.isfinite(layers.values)
    values, errors = layers.values[judged], None if layers.errors is None else layers.errors[judged]
    spread = f"from {number(values.min())} to {number(values.max())}"
    if layers.is_exact:
        return f"{spread}, exact"
    if errors is None or not np.isfinite(errors).any():
        return f"{spread}, no standard errors"
    return f"{spread}, standard errors up to {number(np.nanmax(errors), 2)} of {layers.n} {layers.of}"


def untestable(claim: str, why: str) -> Verdict:
    """Make the verdict on a claim that no number of this run can answer."""
    return Verdict(claim, UNTESTABLE, why)


def unless_explained(verdict: Verdict, answer: Answer, explanation: str) -> Verdict:
    """Leave a verdict undecided where something else explains its answer as well: in words that end the evidence."""
    if verdict.answer != answer or not explanation:
        return verdict
    evidence = f"{verdict.evidence}; {explanation}"
    return replace(verdict, answer=UNDECIDED, evidence=evidence, withheld=explanation)


def contexts_needed(verdict: Verdict, contexts: int) -> str:
    """Say how many contexts would decide what so many do not, if its number stays: the error falls as their root."""
    rows = [part for part in verdict.parts if isinstance(part, Judged)]
    of_contexts = contexts > 0 and all(row.estimate.of.endswith("contexts") for row in rows)
    if verdict.answer != UNDECIDED or verdict.withheld or not of_contexts:
        return ""
    sides: dict[bool, list[float]] = {True: [], False: []}
    for row in rows:
        estimate, beyond = row.estimate, float(row.criterion.beyond(row.estimate.value))
        if abs(beyond) > estimate.error:
            sides[beyond > 0].append((float(sigmas(estimate.n, row.looks)) * estimate.error / beyond) ** 2)
    for times in sides.values():
        if 2 * len(times) > len(rows):  # all of one number, more than half of several
            needed = max(1.0, sorted(times)[len(rows) // 2]) * contexts
            return f"about {number(float(f'{needed:.2g}'))} contexts would"
    return ""


def most(answers: Sequence[Answer]) -> Answer:
    """Return the answer of more than half of many like parts; in part where more than half are decided, but split."""
    counts = {answer: list(answers).count(answer) for answer in (HOLDS, FAILS)}
    for answer, count in counts.items():
        if 2 * count > len(answers):
            return answer
    return IN_PART if all(counts.values()) and 2 * sum(counts.values()) > len(answers) else UNDECIDED


def combined(answers: Iterable[Answer]) -> Answer:
    """Answer for parts that are true or not by themselves: in part where one holds and another fails."""
    answers = set(answers) - {UNTESTABLE}
    if IN_PART in answers or {HOLDS, FAILS} <= answers:
        return IN_PART
    return UNDECIDED if UNDECIDED in answers else next(iter(answers), UNTESTABLE)


def all_of(claim: str, parts: Sequence[Verdict]) -> Verdict:
    """Judge a claim whose parts must all hold, with the evidence of each: one that fails decides, then an open one."""
    order = (FAILS, IN_PART, UNTESTABLE, UNDECIDED, HOLDS)
    answer = min((part.answer for part in parts), key=order.index, default=UNTESTABLE)
    return _joined(claim, parts, "all", answer)


def mix_of(claim: str, parts: Sequence[Verdict]) -> Verdict:
    """Judge a claim whose parts are true or not by themselves (`combined`), with the evidence of each."""
    return _joined(claim, parts, "mixed", combined(part.answer for part in parts))


def _joined(claim: str, parts: Sequence[Verdict], rule: Rule, answer: Answer) -> Verdict:
    return Verdict(claim, answer, "; ".join(part.evidence for part in parts), rule, tuple(parts))


def table(verdicts: Sequence[Verdict]) -> pd.DataFrame:
    """Tabulate every verdict and every number behind it, from which the answers can be found again.

    `place`: "2" for the second verdict, "2.1" for the first thing that it follows from.
    """
    rows: list[dict[str, Any]] = []

    def add(place: str, part: Judged | Verdict, experiment: str) -> None:
        row: dict[str, Any] = {"place": place, "experiment": experiment, "answer": part.answer}
        if isinstance(part, Judged):
            estimate = part.estimate
            kind = "exact" if estimate.is_exact else "share" if estimate.by_chance else "estimate"
            row |= {"what": part.what, "rule": "", "withheld": "", "kind": kind, "looks": part.looks}
            row |= {name: getattr(estimate, name) for name in OF_ESTIMATE}
            rows.append(row | {name: getattr(part.criterion, name) for name in OF_CRITERION})
            return
        rows.append(row | {"what": part.claim, "rule": part.rule, "withheld": part.withheld})
        for number_of_part, inner in enumerate(part.parts, 1):
            add(f"{place}.{number_of_part}", inner, experiment)

    for number_of_verdict, verdict in enumerate(verdicts, 1):
        add(str(number_of_verdict), verdict, verdict.experiment)
    named = ["experiment"] if any(verdict.experiment for verdict in verdicts) else []
    first = ("place", *named, "what", "answer", "rule", "withheld")
    return pd.DataFrame(rows, columns=[*first, *OF_ESTIMATE, "kind", "looks", *OF_CRITERION])
