"""What experiments share: columns with their standard errors, the smoothness verdict, exhibits made from a figure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import plotly.graph_objects as go

from theodolite.experiments import criteria
from theodolite.experiments.base import (
    UNTESTABLE,
    Criterion,
    Verdict,
    judge,
)
from theodolite.report import published
from theodolite.report.data import Floats, column, error_of, evenly, mean_over_layers, need, provenance
from theodolite.report.exhibit import Choice, Exhibit, Option
from theodolite.report.style import Patch
from theodolite.run import Run

GRID = 13  # residual layers drawn small, side by side: all of the twelve-block models of the paper


def value_of(run: Run, name: str) -> Floats:
    """A layer column, NaN where the run has none."""
    values = column(run.layers, name)
    return np.full(len(run.layers), np.nan) if values is None else values


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
    return judge(claim, what, mean, criterion, error)


def exhibit(
    key: str,
    title: str,
    figure: go.Figure,
    shows: str,
    look: str,
    source: str,
    *,
    choice: Choice | None = None,
    wide: bool = False,
) -> Exhibit:
    """An exhibit of a figure that is drawn already."""
    return Exhibit(key, "", title, (), lambda _: figure, shows, look, source, choice=choice, wide=wide)


def by_name(
    kind: str, names: Sequence[str], patch: Callable[[int], list[Patch]], *, grid: bool = False
) -> Choice:
    """A picker over numbered pictures, the first `GRID` of them, evenly chosen, also drawn small."""
    return Choice(
        kind,
        lambda _: [Option(str(place), name) for place, name in enumerate(names)],
        lambda _, key: patch(int(key)),
        grid=(lambda _: [str(place) for place in evenly(len(names), GRID)]) if grid else None,
    )


def by_layer(count: int, patch: Callable[[int], list[Patch]], *, grid: bool = False) -> Choice:
    """A picker over residual layers."""
    return by_name("layer", [f"layer {layer}" for layer in range(count)], patch, grid=grid)
