"""What several tables and figures share: quotients of columns, the closest published model, the smoothness verdict."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pandas as pd

from theodolite.judging import Criterion, Verdict, judge, untestable
from theodolite.papers.hidden_geometry import criteria
from theodolite.passes.run import Run
from theodolite.report import published
from theodolite.report.data import Floats, layer_average, need, provenance, value_of


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


def closest_model(run: Run) -> str:
    """The published model that this one is shown beside."""
    return published.closest(provenance(run, "model", "family"), provenance(run, "model", "positions"))


def smooth_verdict(
    run: Run,
    claim: str,
    criterion: Criterion = criteria.SMOOTH,
    least: int = criteria.LEAST_POSITIONS,
    column: str = "low_frequency_10",
) -> Verdict:
    """Judge the mean share of energy in the 10 × 10 lowest frequencies; below `least` positions it says nothing."""
    positions = need(run, "positional_basis").shape[1] - 1
    mean, _ = layer_average(run, column)
    chance = (10 / positions) ** 2
    if positions < least:
        why = f"{positions} positions have only {positions} frequencies: use contexts of {least + 1} tokens or more"
        return untestable(claim, f"share of energy at K = 10: {mean.value:.3f}, but {why}")
    what = f"share of energy at K = 10, mean over {len(run.layers)} layers (positions in random order: {chance:.2g})"
    return judge(claim, what, mean, criterion)
