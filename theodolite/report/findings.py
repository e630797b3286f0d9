"""A finding: a sentence about a run, with the quantity that it is about and what it says of it.

Two findings about one quantity must not disagree. So what the page judges of a run is judged here, by one number and
one limit; health checks and the summary both word its answer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from theodolite.estimates import Estimate
from theodolite.judging import FAILS, HOLDS, UNDECIDED, Answer, Criterion, contexts_needed, judge
from theodolite.measure.rank_correlation import agreement, rank_correlation_of_heads
from theodolite.passes.run import Run
from theodolite.report.data import (
    AT_FLOOR,
    array,
    at_floor,
    column,
    layer_average,
    limit_of,
    provenance,
    value_of,
)
from theodolite.system.wording import counted, with_error
from theodolite.theory.regimes import UNDEFINED, regime_of_curve

CLUSTERED = Criterion("at least", 0.5, "adjusted Rand index: k-means finds most of the labels")
BY_CHANCE = Criterion("more than", 0.0, "κ: two namings of the heads agree no more often than by chance")
POSITIONS, SMOOTHNESS, ENTANGLEMENT, CLUSTERS = "positions", "smoothness", "entanglement", "clusters"
PROPAGATION, MASSIVE = "signal propagation", "massive activations"
"""Quantities that are judged in more than one place."""


@dataclass(frozen=True)
class Finding:
    """A sentence, the quantity that it is `about` (empty: it only gives numbers), and its `answer` to what is asked.

    Of a health check HOLDS is passed, FAILS flagged, and UNDECIDED neither: not decided, or not judged at all.
    """

    text: str
    about: str = ""
    answer: Answer | Literal[""] = ""

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Judged:
    """The answer to one question about a run, `open`: what follows where there is none; `of`: which layers it is of."""

    about: str
    answer: Answer
    estimate: Estimate
    open: str = ""
    of: str = ""

    def finding(self, holds: str, fails: str, whether: str, what: str) -> Finding:
        """Choose the claim that the answer allows, or say what would decide it; `what`: the numbers, in words."""
        claim = {HOLDS: holds, FAILS: fails}.get(self.answer, f"{whether} is {self.open}")
        numbers = f": {what}{self.of}" if math.isfinite(self.estimate.value) else ""
        return Finding(f"{claim}{numbers}.", self.about, self.answer)


def judged(run: Run, about: str, estimate: Estimate, criterion: Criterion) -> Judged | None:
    """Judge a number of the text by a criterion; None where the run has no such number."""
    if not math.isfinite(estimate.value):
        return None
    verdict = judge("", "", estimate, criterion)
    if verdict.answer != UNDECIDED:
        return Judged(about, verdict.answer, estimate)
    if math.isnan(estimate.margin):
        return Judged(about, UNDECIDED, estimate, "not decided, since its standard error is not known")
    more = contexts_needed(verdict, (provenance(run, "corpus") or {}).get("contexts", 0))
    return Judged(about, UNDECIDED, estimate, f"not decided; {more}" if more else "not decided")


def of_layers(run: Run, about: str, name: str, criterion: Criterion | None = None) -> Judged | None:
    """Judge the mean of a column over the layers that have it, by what is healthy: it is empty where noise hides it."""
    estimate, known = layer_average(run, name)[0], np.isfinite(value_of(run, name))
    if not known.any() and at_floor(run, name).any():
        return Judged(about, UNDECIDED, estimate, f"not judged: it is {AT_FLOOR} in every layer")
    answer = judged(run, about, estimate, criterion or limit_of("layers", name))
    of = "" if known.all() else f" (mean of {counted(int(known.sum()), 'layer')}, in the others {AT_FLOOR})"
    return answer and replace(answer, of=of)


@dataclass(frozen=True)
class RegimeAgreement:
    """How well the regimes that a spectrum predicts agree with the heads' measured curves, over heads.

    Attributes:
        kappa: of predicted and measured names; 0 is chance. correlation: of the ranks of mean ρ.
        holds: whether κ is above chance.
    """

    kappa: Estimate
    correlation: Estimate
    holds: bool

    def __str__(self) -> str:
        kappa, correlation = (with_error(one.value, one.error) for one in (self.kappa, self.correlation))
        return f"κ {kappa}, where 0 is chance; rank correlation with the measured ρ {correlation}"


def measured_regimes(run: Run) -> np.ndarray[Any, Any] | None:
    """Name the regime of every head by its measured curve; None where there is none."""
    curves = array(run, "propagation_by_position")
    if curves is None or not len(run.heads):
        return None
    return regime_of_curve(curves[run.heads["layer"], run.heads["head"]])


def regime_agreement(run: Run, suffix: str = "") -> RegimeAgreement | None:
    """Compare the regimes predicted from W_QK (`suffix` "_data": W_QK Σ̂) with measured curves; None without these."""
    names, measured = measured_regimes(run), column(run.heads, "propagation")
    predicted = array(run, f"propagation_predicted{suffix}")
    if names is None or predicted is None or measured is None or f"regime{suffix}" not in run.heads:
        return None
    layers, heads = run.heads["layer"].to_numpy(dtype=int), run.heads["head"].to_numpy(dtype=int)
    regimes = run.heads[f"regime{suffix}"].fillna(UNDEFINED).astype(str).to_numpy()
    with np.errstate(invalid="ignore"):
        expected = np.asarray(predicted[layers, heads], dtype=np.float64).mean(axis=1)
    kappa = agreement(regimes, names, layers)[0]
    correlation = rank_correlation_of_heads(expected, measured, layers)
    return RegimeAgreement(kappa, correlation, judge("", "", kappa, BY_CHANCE).answer == HOLDS)
