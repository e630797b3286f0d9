"""How a number is judged against a criterion: the verdict on a claim, and its evidence.

A verdict always carries its number, the number's standard error where the run has one, and the criterion with
where it comes from. Nothing here reads a run, draws or writes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
from scipy import stats

from theodolite.system.wording import counted, number, with_error

Floats = npt.NDArray[np.float64]

Answer = Literal["holds", "in part", "fails", "not decided", "not testable here"]
HOLDS: Answer = "holds"
IN_PART: Answer = "in part"
FAILS: Answer = "fails"
UNDECIDED: Answer = "not decided"
"""The number is too close to its criterion."""
UNTESTABLE: Answer = "not testable here"
"""The run has no such number."""
OPEN = (UNDECIDED, UNTESTABLE)

CONFIDENCE = 0.95
SIGMAS = float(stats.norm.ppf((1 + CONFIDENCE) / 2))
"""Standard errors on either side of the 95 % interval, where the error is no estimate itself; else Student's t."""
RESTS_ON_NOTHING = "a standard error needs the number of independent things that it rests on"
INTERVAL = f"the {CONFIDENCE:.0%} interval".replace("%", "\u00a0%")


@dataclass(frozen=True)
class Estimate:
    """A number with its standard error (NaN: none known) and what the error rests on.

    Attributes:
        n: how many independent things the error rests on. of: what they are ("seeds").
        by_chance: the error follows from n, as that of a share of n trials does, and is no estimate from their spread.
    """

    value: float
    error: float = math.nan
    n: int = 0
    of: str = ""
    by_chance: bool = False

    def __post_init__(self) -> None:
        if math.isfinite(self.error) and not self.n:
            raise ValueError(RESTS_ON_NOTHING)

    @classmethod
    def share(cls, share: float, count: float, of: str) -> Estimate:
        """A share of `count` independent trials, with the largest standard error that such a share can have.

        That is one half's: against a criterion of one half this is the score test; and 0 or n of few trials do not
        look certain.
        """
        return cls(share, 0.5 / math.sqrt(count), max(1, round(count)), of, by_chance=True)

    @classmethod
    def mean(cls, values: npt.ArrayLike, of: str) -> Estimate:
        """The mean of independent values, its error s/√n with s² the unbiased variance; one value has none."""
        values = np.asarray(values, dtype=np.float64)
        error = float(values.std(ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else math.nan
        return cls(float(values.mean()), error, len(values), of)

    @property
    def margin(self) -> float:
        """Half the width of the 95 % interval; NaN where no error is known."""
        return (SIGMAS if self.by_chance else _sigmas(self.n)) * self.error

    def __str__(self) -> str:
        shown = with_error(self.value, self.error)
        if self.n == 1 or math.isfinite(self.error):
            return f"{shown} ({counted(self.n, self.of.removesuffix('s'))})"
        return f"{shown} (no standard error)"


@dataclass(frozen=True)
class Estimates:
    """One number a layer, (N,), with their standard errors (N,) and what these rest on, as of an `Estimate`."""

    values: Floats
    errors: Floats | None = None
    n: int = 0
    of: str = ""

    def __post_init__(self) -> None:
        if self.errors is not None and np.isfinite(self.errors).any() and not self.n:
            raise ValueError(RESTS_ON_NOTHING)

    @property
    def margins(self) -> Floats:
        """Half the widths of the 95 % intervals; NaN where no error is known."""
        errors = np.full(np.shape(self.values), np.nan) if self.errors is None else self.errors
        return _sigmas(self.n) * errors


def _sigmas(n: int) -> float:
    return float(stats.t.ppf((1 + CONFIDENCE) / 2, n - 1)) if n > 1 else math.nan


@dataclass(frozen=True)
class Verdict:
    """A claim of the paper, in its words where they are short, the answer, and the numbers behind it."""

    claim: str
    answer: Answer
    evidence: str


@dataclass(frozen=True)
class Criterion:
    """A limit, the side of it on which the claim holds, and where the limit comes from.

    "More than" and "less than" are for claims that one thing is larger than another: a tie decides neither. "within" is
    for claims that two things are similar: their difference is at most the limit in size, its whole interval included.
    Beyond the limit by less than `negligible` is no difference: a claim of one fails where the interval is so close.
    """

    side: Literal["at most", "at least", "more than", "less than", "within"]
    limit: float
    source: str
    negligible: float = 0.0

    def met(self, values: Floats | float) -> npt.NDArray[np.bool_]:
        """Whether each value is on the right side."""
        beyond = self._beyond(values)
        return np.asarray(beyond > 0 if self._strict else beyond >= 0)

    def decided(self, values: Floats | float, margins: Floats | float) -> tuple[np.ndarray, np.ndarray]:
        """Of each value whether the claim holds, and whether it fails; neither within its margin, or at a tie."""
        beyond, margin = self._beyond(values), np.nan_to_num(margins)
        low, high = beyond - margin, beyond + margin
        holds = (low > 0 if self._strict else low >= 0) & (beyond >= self.negligible)
        is_negligible = np.maximum(np.abs(low), np.abs(high)) < self.negligible
        return holds, ((high <= 0) & (beyond < 0)) | is_negligible

    def _beyond(self, values: Floats | float) -> Floats:
        """How far each value is on the right side of the limit."""
        values = np.asarray(values, dtype=np.float64)
        if self.side == "within":
            return np.asarray(self.limit - np.abs(values))
        return np.asarray(
            self.limit - values if self.side in ("at most", "less than") else values - self.limit
        )

    @property
    def _strict(self) -> bool:
        return self.side in ("more than", "less than")

    def __str__(self) -> str:
        beyond = f" by {number(self.negligible)} at least" if self.negligible else ""
        return f"criterion: {self.side} {number(self.limit)}{beyond}, {self.source}"


def independent(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """The verdicts without those that an earlier one's number decides: a number in two claims' evidence counts once."""
    numbers: set[tuple[str, str]] = set()
    first = []
    for verdict in verdicts:
        number_judged = verdict.answer, verdict.evidence
        if verdict.answer == UNTESTABLE or number_judged not in numbers:
            first.append(verdict)
        numbers.add(number_judged)
    return first


def judge(claim: str, what: str, estimate: Estimate | Estimates | float, criterion: Criterion) -> Verdict:
    """Compare a number with its criterion, or one a layer, more than half of which must then meet it.

    Within the margin of the criterion, or at a tie, nothing is decided; such a layer counts for neither side. A mean
    that rests on one thing alone (one seed) has no margin, and says nothing.

    Args:
        claim: the paper's.
        what: name of the number, with what it is taken over ("mean rank of 13 layers").
        estimate: the number; a float has no error.
    """
    if isinstance(estimate, Estimates):
        return _judge_layers(claim, what, estimate, criterion)
    if not isinstance(estimate, Estimate):
        estimate = Estimate(estimate)
    if not math.isfinite(estimate.value):
        return Verdict(claim, UNTESTABLE, f"{what}: no number in this run; {criterion}")
    evidence = f"{what}: {estimate}; {criterion}"
    if estimate.n == 1:
        return Verdict(claim, UNTESTABLE, f"{evidence}; an interval needs two {estimate.of} or more")
    holds, fails = criterion.decided(estimate.value, estimate.margin)
    if not (holds or fails):
        near = f"within {INTERVAL} of it" if estimate.value != criterion.limit else "equal to it"
        return Verdict(claim, UNDECIDED, f"{evidence}; {near}")
    return Verdict(claim, HOLDS if holds else FAILS, evidence)


def _judge_layers(claim: str, what: str, layers: Estimates, criterion: Criterion) -> Verdict:
    values, errors = np.where(np.isfinite(layers.values), layers.values, np.nan), layers.errors
    if not np.isfinite(values).any():
        return Verdict(claim, UNTESTABLE, f"{what}: no number in this run; {criterion}")
    if layers.n == 1 and errors is not None:
        return Verdict(claim, UNTESTABLE, f"{what}; {criterion}; an interval needs two {layers.of} or more")
    holds, fails = criterion.decided(values, layers.margins)
    meeting, failing, total = int(holds.sum()), int(fails.sum()), int(np.isfinite(values).sum())
    spread = f"from {number(np.nanmin(values))} to {number(np.nanmax(values))}"
    error = ", no standard errors"
    if errors is not None and np.isfinite(errors).any():
        error = f", standard errors up to {number(np.nanmax(errors), 2)}"
    evidence = f"{what}: in {meeting} of {total} layers ({spread}{error}); {criterion}, in more than half of the layers"
    if undecided := total - meeting - failing:
        evidence += f"; {undecided} within {INTERVAL} of it"
    if 2 * meeting > total:
        return Verdict(claim, HOLDS, evidence)
    return Verdict(claim, FAILS if 2 * failing >= total else UNDECIDED, evidence)


def untestable(claim: str, why: str) -> Verdict:
    """What no number of this run can answer."""
    return Verdict(claim, UNTESTABLE, why)


def yes_or_no(claim: str, is_so: bool, evidence: str) -> Verdict:
    """Of what is so or not, with no number whose interval could leave it open."""
    return Verdict(claim, HOLDS if is_so else FAILS, evidence)


def unless_explained(verdict: Verdict, answer: Answer, explanation: str) -> Verdict:
    """The verdict, but undecided where its answer is one that something else would give as well.

    Args:
        answer: which. explanation: what else, in words that end the evidence; empty: nothing.
    """
    if verdict.answer != answer or not explanation:
        return verdict
    return Verdict(verdict.claim, UNDECIDED, f"{verdict.evidence}; {explanation}")


def all_hold(answers: Iterable[Answer]) -> Answer:
    """Of several parts that must all hold: a single one that fails decides, then one that is open."""
    order = (FAILS, IN_PART, UNTESTABLE, UNDECIDED, HOLDS)
    return min(answers, key=order.index, default=UNTESTABLE)


def opposite(answer: Answer) -> Answer:
    """Of the claim that it is not so."""
    return {HOLDS: FAILS, FAILS: HOLDS}.get(answer, answer)


def combined(answers: Iterable[Answer]) -> Answer:
    """Of several parts together: what all that are decided agree on, else in part; what is open does not count."""
    answers = set(answers)
    decided = answers - set(OPEN)
    if len(decided) > 1:
        return IN_PART
    return next(iter(decided), UNDECIDED if UNDECIDED in answers else UNTESTABLE)
