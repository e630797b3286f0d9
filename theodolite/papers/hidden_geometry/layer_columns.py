"""What experiments share: columns with their standard errors, the smoothness verdict, exhibits made from a figure."""

from __future__ import annotations

import numpy as np

from theodolite.judging import UNTESTABLE, Criterion, Estimate, Verdict, judge
from theodolite.papers.hidden_geometry import criteria
from theodolite.passes.run import Run
from theodolite.report import published
from theodolite.report.data import Floats, error_of, mean_over_layers, need, provenance, value_of


def quotient(over: Floats, errors: Floats, under: Floats, under_errors: Floats) -> tuple[Floats, Floats]:
    """over/under with its standard error, as if both were independent.

    Of similarities within and between labels, which rise and fall with the same contexts, the error is rather less.
    """
    ratio = over / under
    error: Floats = ratio * np.hypot(errors / over, under_errors / under)
    return ratio, error


def closest_model(run: Run) -> str:
    """The published model that this one is shown beside."""
    return published.closest(provenance(run, "model", "family"), provenance(run, "model", "positions"))


def smooth_verdict(
    run: Run, claim: str, criterion: Criterion = criteria.SMOOTH, least: int = criteria.LEAST_POSITIONS
) -> Verdict:
    """Judge the mean share of energy in the 10 × 10 lowest frequencies; below `least` positions it says nothing."""
    positions = need(run, "positional_basis").shape[1] - 1
    mean, _, error = mean_over_layers(value_of(run, "low_frequency_10"), error_of(run, "low_frequency_10"))
    chance = (10 / positions) ** 2
    if positions < least:
        why = f"share of energy at K = 10: {mean:.3f}, but {positions} positions have only {positions} frequencies"
        return Verdict(claim, UNTESTABLE, f"{why}: use contexts of {least + 1} tokens or more")
    what = f"share of energy at K = 10, mean over {len(run.layers)} layers (positions in random order: {chance:.2g})"
    return judge(claim, what, Estimate(mean, error), criterion)
