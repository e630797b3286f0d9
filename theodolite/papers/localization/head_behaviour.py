"""From spectrum to behaviour: what the spectra predict of every head, judged by what it does on the text."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from theodolite.judging import Criterion, Verdict, judge
from theodolite.papers.experiment import Study, experiment
from theodolite.papers.localization.head_predictions import (
    SOURCES,
    OverHeads,
    Prediction,
    agreement,
    curve_error,
    from_increments,
    from_survey,
    mean_of,
    others_mean,
    rank_correlation_of_heads,
    regime_of_curve,
    width_of,
)
from theodolite.passes.run import Run
from theodolite.report import style
from theodolite.report.data import Floats, evenly, head_labels, need, need_column
from theodolite.report.drawing import localization as drawing
from theodolite.report.drawing.localization import Line
from theodolite.report.drawing.theory import head_scatter
from theodolite.report.exhibit import Exhibit, by_name
from theodolite.report.measures import BAO
from theodolite.report.outcome import Outcome, Reading
from theodolite.system.wording import number, percent, with_error

LINES = (
    Line("measured", style.MEASURED, width=2.6),
    Line("from W_QK", style.PREDICTED, "dash"),
    Line("with Σ̂", style.PREDICTED),
    Line("with Σ̂ of increments", style.GREEN),
)
CURVE_POINTS = 128  # drawn a curve

ORDERS = Criterion(
    "at least", 0.5, "“a reasonable proxy” (section 6) read as: half of a perfect order (ours)"
)
CLOSE = Criterion("at most", 0.1, "a tenth of the range of a probability (ours)")
AGREES = Criterion("at least", 0.4, "“moderate” agreement beyond chance (Landis & Koch 1977; ours)")
OPPOSED = Criterion("less than", 0.0, "less of the one with more of the other")

COMPARED = (
    ("mean", "ρ", "mean ρ", "mean ρ"),
    ("mean", "entropy", "mean ρ", "entropy"),
    ("width", "width", "share of positions", "share of positions"),
    ("width", "entropy", "share of positions", "entropy"),
    ("eta", "entropy", "η", "entropy"),
)
"""Predicted number, measured number, and how both are called."""


def _predicted_numbers(prediction: Prediction) -> dict[str, Floats]:
    return {
        "mean": mean_of(prediction.curve),
        "width": width_of(prediction.curve),
        "eta": prediction.eta,
    }


@experiment(
    "localization/behaviour",
    "From spectrum to behaviour: predicted and measured propagation of every head",
    "The eigenspectrum of W_QK is “a reasonable proxy” for what attention localizes on (sections 4 to 6)",
    needs=(
        "model",
        "heads.entropy",
        "heads.propagation",
        "arrays.propagation_by_position",
        "arrays.propagation_predicted",
        "arrays.propagation_predicted_data",
    ),
)
def behaviour(study: Study, outcome: Outcome) -> None:
    run, seed = study.run, int(study.provenance["seed"])
    measured = need(run, "propagation_by_position").reshape(len(run.heads), -1).astype(np.float64)
    predictions = {name: from_survey(run, name) for name in ("weights", "text")}
    predictions["increments"] = from_increments(study)
    numbers = {
        "ρ": mean_of(measured),
        "width": width_of(measured),
        "entropy": need_column(run.heads, "entropy"),
    }
    heads = _heads(run, predictions, numbers, measured)
    correlations, correlation_of = _correlations(predictions, numbers, seed)
    errors = {name: curve_error(prediction.curve, measured, seed) for name, prediction in predictions.items()}
    errors["others"] = curve_error(others_mean(measured), measured, seed)
    regimes = {
        name: agreement(prediction.regime, heads["regime_measured"].to_numpy(dtype=str), seed)
        for name, prediction in predictions.items()
    }
    localized = rank_correlation_of_heads(numbers["width"], numbers["entropy"], seed)
    verdicts = [
        *_order_verdicts(correlation_of),
        *_curve_verdicts(errors),
        *_regime_verdicts(regimes),
        *_entropy_verdicts(correlation_of, localized),
    ]
    figures = [
        _scatter(run, predictions, numbers["ρ"]),
        _curves(run, predictions, measured),
        _bars(correlation_of),
    ]
    readings = _readings(correlation_of, errors, regimes)
    outcome.readings += readings
    outcome.verdicts += verdicts
    outcome.tables |= {"heads": heads, "correlations": correlations}
    outcome.exhibits += figures


def _heads(
    run: Run, predictions: dict[str, Prediction], numbers: dict[str, Floats], measured: Floats
) -> pd.DataFrame:
    """One row per head: what is measured, and what each source predicts."""
    columns: dict[str, object] = {
        "propagation": numbers["ρ"],
        "width": numbers["width"],
        "entropy": numbers["entropy"],
        "regime_measured": regime_of_curve(measured),
    }
    for name, prediction in predictions.items():
        predicted = _predicted_numbers(prediction)
        columns |= {
            f"propagation_{name}": predicted["mean"],
            f"width_{name}": predicted["width"],
            f"eta_{name}": predicted["eta"],
            f"regime_{name}": prediction.regime,
            f"error_{name}": mean_of(np.abs(prediction.curve - measured)),
        }
    return run.heads[["layer", "head"]].assign(**columns)


Correlations = dict[tuple[str, str, str], OverHeads]
"""(source, predicted number, measured number) → rank correlation over heads."""


def _correlations(
    predictions: dict[str, Prediction], numbers: dict[str, Floats], seed: int
) -> tuple[pd.DataFrame, Correlations]:
    correlation_of: Correlations = {}
    rows = []
    for name, prediction in predictions.items():
        numbers_of = _predicted_numbers(prediction)
        for predicted, measured, predicted_label, measured_label in COMPARED:
            estimate = rank_correlation_of_heads(numbers_of[predicted], numbers[measured], seed)
            correlation_of[name, predicted, measured] = estimate
            rows.append(
                {"from": SOURCES[name], "predicted": predicted_label, "measured": measured_label}
                | vars(estimate)
            )
    table = pd.DataFrame(rows).rename(columns={"value": "rank_correlation", "error": "standard_error"})
    return table, correlation_of


def _interval(estimate: OverHeads) -> str:
    return f"95 % interval {number(estimate.low)} to {number(estimate.high)} over {estimate.n} heads"


def _verdict_on(claim: str, what: str, estimate: OverHeads, criterion: Criterion, more: str = "") -> Verdict:
    verdict = judge(claim, what, estimate, criterion)
    evidence = f"{verdict.evidence}; {_interval(estimate)}" if np.isfinite(estimate.low) else verdict.evidence
    return replace(verdict, evidence=evidence + more)


def _order_verdicts(correlation_of: Correlations) -> list[Verdict]:
    return [
        _verdict_on(
            f"Predicted ρ orders the heads as measured ρ does, from {SOURCES[name]}",
            "rank correlation over heads of mean ρ",
            correlation_of[name, "mean", "ρ"],
            ORDERS,
        )
        for name in SOURCES
    ]


def _curve_verdicts(errors: dict[str, OverHeads]) -> list[Verdict]:
    others = (
        f"; the mean curve of all other heads: {with_error(errors['others'].value, errors['others'].error)}"
    )
    return [
        _verdict_on(
            f"The predicted curve ρ_1 … ρ_T is the measured one, from {SOURCES[name]}",
            "mean absolute error of ρ, mean over heads",
            errors[name],
            CLOSE,
            others,
        )
        for name in SOURCES
    ]


def _regime_verdicts(regimes: dict[str, tuple[OverHeads, float]]) -> list[Verdict]:
    return [
        _verdict_on(
            f"The predicted regime is that of the measured curve, from {SOURCES[name]}",
            "Cohen's κ of the two regimes",
            estimate,
            AGREES,
            f"; the same regime in {percent(share)} of the heads",
        )
        for name, (estimate, share) in regimes.items()
    ]


def _entropy_verdicts(correlation_of: Correlations, localized: OverHeads) -> list[Verdict]:
    return [
        _verdict_on(
            "Heads whose spectrum has a smaller scale have a higher entropy (A2 of section 5)",
            f"rank correlation over heads of η, from {SOURCES['text']}, with entropy",
            correlation_of["text", "eta", "entropy"],
            OPPOSED,
        ),
        _verdict_on(
            "Localized heads have a higher entropy (A2 of section 5)",
            "rank correlation over heads of the measured share of positions that propagate with entropy",
            localized,
            OPPOSED,
        ),
    ]


def _readings(
    correlation_of: Correlations, errors: dict[str, OverHeads], regimes: dict[str, tuple[OverHeads, float]]
) -> list[Reading]:
    rows = []
    for name, label in SOURCES.items():
        mean, entropy = correlation_of[name, "mean", "ρ"], correlation_of[name, "eta", "entropy"]
        shown = (
            f"ρ: {with_error(mean.value, mean.error)}; η with entropy: {with_error(entropy.value, entropy.error)}; "
            f"error of the curve: {with_error(errors[name].value, errors[name].error)}; "
            f"same regime: {percent(regimes[name][1])}"
        )
        rows.append(Reading(f"rank correlations over heads and errors, from {label}", shown))
    others = errors["others"]
    rows.append(Reading("error of the mean curve of all other heads", with_error(others.value, others.error)))
    return rows


def _scatter(run: Run, predictions: dict[str, Prediction], measured: Floats) -> Exhibit:
    layers, heads = (need_column(run.heads, name) for name in ("layer", "head"))
    means = [mean_of(prediction.curve) for prediction in predictions.values()]

    def drawn(place: int) -> go.Figure:
        titles = ("predicted mean ρ", "measured mean ρ")
        return head_scatter(means[place], measured, layers, heads, titles)

    return Exhibit(
        "heads",
        "Predicted and measured signal propagation of every head",
        drawn(0),
        "Mean over the keys of ρ, as predicted for random walks and as measured on the text, one point per head; "
        "violet "
        "blocks are early, green ones late.",
        "points on a rising line. A column of points says that the prediction does not tell heads apart.",
        f"{BAO}, section 4; the comparison with real heads is ours",
        choice=by_name("from", list(SOURCES.values()), drawn),
        wide=True,
    )


def _curves(run: Run, predictions: dict[str, Prediction], measured: Floats) -> Exhibit:
    shown = evenly(measured.shape[1], CURVE_POINTS)
    theta = (np.array(shown, dtype=np.float64) + 1) / measured.shape[1]
    curves = [measured, *(prediction.curve for prediction in predictions.values())]

    def drawn(place: int) -> go.Figure:
        values = [curve[place, shown] for curve in curves]
        return drawing.curves(theta, LINES, values, ("θ", "ρ(θ)"), yaxis={"range": [-0.02, 1.05]})

    return Exhibit(
        "curves",
        "ρ of one head, measured and predicted",
        drawn(0),
        "Share of contexts in which the key at θ = i/T propagates to the last query, and what the exact moments of a "
        "random walk predict from W_QK, from W_QK Σ̂ and from the increments' covariance.",
        "whether any prediction follows the measured curve. Where none does, the tokens of this layer do not "
        "follow a random walk.",
        f"{BAO}, section 4, with the exact moments at finite T",
        choice=by_name("head", head_labels(run), drawn),
        wide=True,
    )


def _bars(correlation_of: Correlations) -> Exhibit:
    groups = [f"{label} → {measured_label}" for _, _, label, measured_label in COMPARED]
    values = {}
    for name, label in SOURCES.items():
        estimates = [correlation_of[name, predicted, measured] for predicted, measured, _, _ in COMPARED]
        heights = np.array([estimate.value for estimate in estimates])
        values[label] = (
            heights,
            np.array([[estimate.low for estimate in estimates], [estimate.high for estimate in estimates]]),
        )
    return Exhibit(
        "correlations",
        "Rank correlations over heads",
        drawing.bars(groups, values, "Spearman's correlation", (-1.05, 1.05)),
        "Of a predicted number with a measured one over all heads, with the central 95 % of a bootstrap over heads "
        "(heads of one layer are not independent, so these are too narrow rather than too wide).",
        "tall bars: the spectrum predicts what the head does. η → entropy below 0 is what the paper expects.",
        f"{BAO}, sections 4 and 5; the correlations are ours",
        wide=True,
    )
