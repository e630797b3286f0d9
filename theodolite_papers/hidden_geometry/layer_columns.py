"""What several tables and figures share: quotients of columns, shares of heads, smoothness."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import pandas as pd

from theodolite import Run
from theodolite.estimates import SIGMAS, Estimate
from theodolite.judging import HOLDS, OPEN, Criterion, Verdict, judge, unless_explained, untestable
from theodolite.report.data import Floats, layer_average, layer_estimates, need, value_of
from theodolite_papers.experiment import Study
from theodolite_papers.hidden_geometry import criteria
from theodolite_papers.hidden_geometry.resampling import grouped_basis
from theodolite_papers.hidden_geometry.without_noise import (
    estimated,
    low_frequency_without_noise,
    norms_beyond_noise,
)


def quotient(over: Floats, errors: Floats, under: Floats, under_errors: Floats) -> tuple[Floats, Floats]:
    """over/under with its standard error, as if both were independent.

    Of similarities within and between labels, which rise and fall with the same contexts, the error is rather less.
    """
    ratio = over / under
    error: Floats = ratio * np.hypot(errors / over, under_errors / under)
    return ratio, error


def columns_with_errors(run: Run, names: Iterable[str]) -> pd.DataFrame:
    """Columns of the layers table, each with its standard errors, by layer; NaN what the run lacks."""
    return pd.DataFrame(
        {"layer": range(len(run.layers))}
        | {f"{name}{end}": value_of(run, f"{name}{end}") for name in names for end in ("", "_se")}
    )


def share_of_heads(are_so: Iterable[bool], criterion: Criterion) -> Estimate:
    """The share of a model's heads that are so, with the error that it has where the criterion's limit is the truth.

    √(p(1 − p)/H) at the limit p (the score test), and half a head added to the interval (Yates's correction): heads are
    what is drawn, as if independently. With fewer than six, a limit of one half decides nothing.
    """
    values = np.array(list(are_so), dtype=bool)
    if not len(values):
        return Estimate(math.nan)
    error = math.sqrt(criterion.limit * (1 - criterion.limit) / len(values)) + 0.5 / len(values) / SIGMAS
    return Estimate(float(values.mean()), error, len(values), "heads", by_chance=True)


def beyond_random_order(
    lowest: Floats, constant: Floats, positions: int, errors: tuple[Floats, Floats] | None = None
) -> tuple[Floats, Floats]:
    """How far a share of low frequencies lies from the most that random order has on average (0) to all energy (1).

    1 − (1 − r_10)/((1 − r_1)(1 − 9/(n − 1))): in random order the constant frequency keeps its energy r_1, and of the
    rest at most 9 of n − 1 parts are expected within the ten lowest: so many where it is all in the means of rows or of
    columns, else fewer, and 0 is a bound. Constant matrices, whose order does not matter, are NaN.

    Args:
        lowest, constant: r_10 and r_1. errors: their standard errors, which add up at most, as both are of one text.

    Returns:
        the numbers, and their standard errors; NaN without `errors`.
    """
    rest = np.where(constant < 1, 1 - constant, np.nan)
    factor = 1 / (1 - min(1.0, 9 / (positions - 1)))
    beyond: Floats = 1 - (1 - lowest) / rest * factor
    if errors is None:
        return beyond, np.full(np.shape(beyond), np.nan)
    error: Floats = factor * (errors[0] / rest + (1 - lowest) / rest**2 * errors[1])
    return beyond, error


def few_positions(run: Run, least: int = criteria.LEAST_POSITIONS) -> str | None:
    """Why low frequencies of so few positions say nothing; None: they do."""
    positions = need(run, "positional_basis").shape[1] - 1
    if positions >= least:
        return None
    return (
        f"{positions} positions have only {positions} frequencies: use contexts of {least + 1} tokens or more"
    )


def smooth_verdict(
    study: Study,
    run: Run,
    claim: str,
    criterion: Criterion = criteria.SMOOTH,
    least: int = criteria.LEAST_POSITIONS,
) -> Verdict:
    """Judge the normalised Gram matrix by its mean share of energy in the 10 × 10 lowest frequencies.

    Sampling noise lowers it, or raises it where it is alike at neighbouring positions, as a document's drift is. Where
    the answer would be another one without it, it is not decided; a layer of which nothing is known without noise
    counts for the other answer. The text is read again where something is decided.
    """
    positions = need(run, "positional_basis").shape[1] - 1
    mean, _ = layer_average(run, "low_frequency_10")
    chance = (10 / positions) ** 2
    if why := few_positions(run, least):
        return untestable(claim, f"share of energy at K = 10: {mean.value:.3f}, but {why}")
    what = f"share of energy at K = 10, mean over {len(run.layers)} layers (positions in random order: {chance:.2g})"
    verdict = judge(claim, what, mean, criterion)
    if verdict.answer in OPEN or (basis := grouped_basis(study, run)) is None:
        return verdict
    unknown = float(bool(criterion.met(mean.value)) != bool(criterion.met(1.0)))
    without_noise = estimated(
        basis, lambda each: float(np.nan_to_num(low_frequency_without_noise(each), nan=unknown).mean())
    )
    return unless_noise(verdict, run, without_noise, criterion)


def significant_verdict(study: Study, claim: str) -> Verdict:
    """Judge the relative norms of all layers.

    The sampling noise of C contexts alone has one of about 1/√C, so that little text would make any basis significant:
    where the claim does not hold of what is left without it, it is not decided. The text is read again for that.
    """
    norms = layer_estimates(study.run, "relative_norm")
    verdict = judge(claim, "relative norm", norms, criteria.SIGNIFICANT)
    if verdict.answer != HOLDS or (basis := grouped_basis(study)) is None:
        return verdict
    left = judge(claim, "", norms_beyond_noise(norms, basis), criteria.SIGNIFICANT)
    contexts = study.run.provenance["corpus"]["contexts"]
    holding = sum(row.answer == HOLDS for row in left.parts)
    noisy = f"in {holding} of them without the sampling noise of {contexts} contexts"
    return unless_explained(verdict, HOLDS, "" if left.answer == HOLDS else noisy)


def unless_noise(verdict: Verdict, run: Run, without_noise: Estimate, criterion: Criterion) -> Verdict:
    """The verdict, but undecided where its number without the text's sampling noise does not give the same answer."""
    contexts = run.provenance["corpus"]["contexts"]
    noisy = f"{without_noise} without the sampling noise of {contexts} contexts"
    same = judge(verdict.claim, noisy, without_noise, criterion).answer == verdict.answer
    return unless_explained(verdict, verdict.answer, "" if same else noisy)
