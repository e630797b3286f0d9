"""How a number is judged against a criterion: the verdict on a claim, and its evidence.

A verdict always carries its number, the number's standard error where the run has one, and the criterion with
where it comes from. Nothing here reads a run, draws or writes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from theodolite.system.wording import number, visible, with_error

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

SIGMAS = 2.0
"""A number within so many standard errors of its criterion decides nothing."""


@dataclass(frozen=True)
class Verdict:
    """A claim of the paper, in its words where they are short, the answer, and the numbers behind it."""

    claim: str
    answer: Answer
    evidence: str


@dataclass(frozen=True)
class Criterion:
    """A limit, the side of it on which the claim holds, and where the limit comes from.

    "More than" and "less than" are for claims that one thing is larger than another: a tie decides neither.
    """

    side: Literal["at most", "at least", "more than", "less than"]
    limit: float
    source: str

    def met(self, values: Floats | float) -> Floats:
        """Whether each value is on the right side."""
        signed = np.asarray(values, dtype=np.float64) - self.limit
        signed = -signed if self.side in ("at most", "less than") else signed
        return np.asarray(signed > 0 if self._strict else signed >= 0)

    def near(self, values: Floats | float, errors: Floats | float) -> Floats:
        """Whether each value decides nothing: within `SIGMAS` standard errors (NaN: none known), or a tie."""
        distance = np.abs(np.asarray(values, dtype=np.float64) - self.limit)
        tied = distance == 0 if self._strict else np.zeros(distance.shape, dtype=bool)
        return np.asarray((distance < SIGMAS * np.nan_to_num(errors)) | tied)

    @property
    def _strict(self) -> bool:
        return self.side in ("more than", "less than")

    def __str__(self) -> str:
        return f"criterion: {self.side} {number(self.limit)}, {self.source}"


def harmless(text: str, limit: int | None = None) -> str:
    """A sentence that may quote names from files, its control and direction characters made visible."""
    return visible(
        text.replace("\u00a0", " "), limit
    )  # non-breaking spaces that theodolite puts between a number and its unit


def reading_order(name: str) -> tuple[str, bool, str, int]:
    """A key that sorts names as one reads them: tables, figures in the order of their numbers, then the rest."""
    group, _, short_name = name.rpartition("/")
    kind = short_name.rstrip("0123456789")
    is_numbered = kind in ("table", "figure")
    return (
        group,
        not is_numbered,
        {"table": "", "figure": " "}.get(kind, short_name),
        int(short_name[len(kind) :] or 0),
    )


def judge(claim: str, what: str, value: float, criterion: Criterion, error: float = math.nan) -> Verdict:
    """Compare one number with its criterion; within `SIGMAS` standard errors of it, or at a tie, nothing is decided.

    Args:
        claim: the paper's.
        what: name of the number, with what it is taken over ("mean rank of 13 layers").
        value, error: the number and its standard error (NaN: the run has none).
        criterion: the limit.
    """
    if not math.isfinite(value):
        return Verdict(claim, UNTESTABLE, f"{what}: no number in this run; {criterion}")
    has_error = math.isfinite(error)
    evidence = f"{what}: {with_error(value, error)}{'' if has_error else ' (no standard error)'}; {criterion}"
    if criterion.near(value, error):
        near = f"within {SIGMAS:g} standard errors of it" if value != criterion.limit else "equal to it"
        return Verdict(claim, UNDECIDED, f"{evidence}; {near}")
    return Verdict(claim, HOLDS if criterion.met(value) else FAILS, evidence)


def error_of_share(count: float) -> float:
    """The largest standard error that a share of `count` independent trials can have, that of one half.

    Against a criterion of one half this is the score test; and 0 or n of few trials do not look certain.
    """
    return 0.5 / math.sqrt(count) if count > 0 else math.nan


def judge_layers(
    claim: str, what: str, values: Floats, criterion: Criterion, errors: Floats | None = None
) -> Verdict:
    """Compare one number per layer with a criterion that more than half of the layers must meet.

    A layer within `SIGMAS` standard errors of the limit counts for neither side.
    """
    errors = np.full(len(values), np.nan) if errors is None else errors
    finite = np.isfinite(values)
    if not finite.any():
        return Verdict(claim, UNTESTABLE, f"{what}: no number in this run; {criterion}")
    near = finite & criterion.near(values, errors)
    met, total = finite & criterion.met(values) & ~near, int(finite.sum())
    meeting, failing = int(met.sum()), int((finite & ~near & ~met).sum())
    spread = f"from {number(np.nanmin(values))} to {number(np.nanmax(values))}"
    has_errors = np.isfinite(errors).any()
    error = (
        f", standard errors up to {number(np.nanmax(errors), 2)}" if has_errors else ", no standard errors"
    )
    evidence = f"{what}: in {meeting} of {total} layers ({spread}{error}); {criterion}, in more than half of the layers"
    if near.any():
        evidence += f"; {int(near.sum())} within {SIGMAS:g} standard errors of it"
    if 2 * meeting > total:
        return Verdict(claim, HOLDS, evidence)
    return Verdict(claim, FAILS if 2 * failing >= total else UNDECIDED, evidence)


def bracketed(mean: float, deviation: float, digits: int = 3) -> str:
    """`11.4 (1.86)`: mean and standard deviation over layers, as in Table 1."""
    return f"{number(mean, digits)} ({number(deviation, digits)})" if math.isfinite(mean) else number(mean)
