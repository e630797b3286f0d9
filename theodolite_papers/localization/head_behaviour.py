"""From spectrum to behaviour: what the spectra predict of every head, judged by what it does on the text."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product

import numpy as np
import numpy.typing as npt
import pandas as pd
import plotly.graph_objects as go
import torch
from jaxtyping import Float
from torch import Tensor

from theodolite import Run
from theodolite.estimates import Estimate, jackknife_error
from theodolite.judging import Criterion
from theodolite.measure.rank_correlation import partial_rank_correlation, rank_correlation
from theodolite.report import style
from theodolite.report.data import Floats, evenly, head_labels, need, need_column
from theodolite.system.wording import percent, with_error
from theodolite.theory import curve_width, regime_of_curve
from theodolite.theory.regimes import UNDEFINED
from theodolite_papers import drawing
from theodolite_papers.drawing import Line, head_scatter
from theodolite_papers.experiment import Outcome, Study, by_name, declared
from theodolite_papers.localization.head_predictions import SUFFIX, Prediction, from_increments, from_survey
from theodolite_papers.localization.text_as_walk import text_walk

Indices = npt.NDArray[np.int64]

LEAST_HEADS = 8
"""Below that, a number over heads has no error worth giving, and a rank correlation says nothing."""


def over_heads(statistic: Callable[[Indices], float], layers: Indices) -> Estimate:
    """A number over heads, with its error from leaving out one layer after the other (jackknife).

    Heads of one layer are not independent. statistic: of heads by their indices. No error below `LEAST_HEADS`.
    """
    heads, of = np.arange(len(layers)), np.unique(layers)
    value = statistic(heads) if len(heads) else math.nan
    if len(heads) < LEAST_HEADS or not math.isfinite(value):
        return Estimate(value)
    if len(of) == 1:
        return Estimate(value, n=1, of="layers")
    error = jackknife_error([statistic(heads[layers != layer]) for layer in of])
    return Estimate(value, float(error), len(of), "layers")


def mean_over_heads(values: Floats, layers: Indices) -> Estimate:
    """The mean over the heads that have a number, (heads,)."""
    known = np.isfinite(values)
    values = values[known]
    return over_heads(lambda heads: float(values[heads].mean()), layers[known])


def rank_correlation_of_heads(x: Floats, y: Floats, layers: Indices, given: Floats | None = None) -> Estimate:
    """Rank correlation over the heads that have both, with the ranks of `given` held fixed; NaN below `LEAST_HEADS`."""
    columns = (x, y) if given is None else (x, y, given)
    known = np.isfinite(columns).all(axis=0)
    if known.sum() < LEAST_HEADS:
        return Estimate(math.nan)
    of, values = rank_correlation if given is None else partial_rank_correlation, np.stack(columns)[:, known]
    return over_heads(lambda heads: float(of(*values[:, heads])), layers[known])


def agreement(first: np.ndarray, second: np.ndarray, layers: Indices) -> tuple[Estimate, float]:
    """Cohen's κ of two namings of the heads (Cohen 1960), those `UNDEFINED` left out, and the share that agree."""
    known = (first != UNDEFINED) & (second != UNDEFINED)
    names = np.unique(np.concatenate([first[known], second[known]]))
    first_codes, second_codes = (np.searchsorted(names, values[known]) for values in (first, second))

    def kappa(heads: Indices) -> float:
        one, two = first_codes[heads], second_codes[heads]
        same = (one == two).mean()
        chance = sum((one == name).mean() * (two == name).mean() for name in range(len(names)))
        # Where both have one name throughout, chance alone agrees fully: no agreement beyond it can be seen.
        return float((same - chance) / (1 - chance)) if chance < 1 else math.nan

    share = float((first_codes == second_codes).mean()) if known.any() else np.nan
    return over_heads(kappa, layers[known]), share


def curve_errors(
    predicted: Float[Tensor, "heads positions"], measured: Float[Tensor, "heads positions"]
) -> Float[Tensor, " heads"]:
    """Mean absolute error of each head's curve over the positions that both have; NaN where there is none."""
    return (predicted - measured).abs().nanmean(1)


def others_median(curve: Float[Tensor, "heads positions"]) -> Float[Tensor, "heads positions"]:
    """For every head the median of all others, at each position: a prediction that knows nothing of the head."""
    ordered, order = curve.sort(dim=0)  # NaN last
    rank, known = order.argsort(dim=0), curve.isfinite()
    others = known.sum(dim=0) - known.long()
    middle = [((others - 1) // 2).clamp_min(0), others // 2]
    # From a head's own place on, the others are one further in the order of all.
    low, high = (ordered.gather(0, (at + (rank <= at)).clamp_max(len(curve) - 1)) for at in middle)
    return torch.where(others > 0, (low + high) / 2, torch.nan)


SOURCES = {
    "weights": "W_QK",
    "text": "W_QK Σ̂, Σ̂ of what the head reads",
    "increments": "W_QK Σ̂, Σ̂ of its increments",
}
"""Where a prediction comes from → how it is called."""

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
NEARER = Criterion("less than", 0.0, "nearer than a curve that knows nothing of the head (ours)")
CLOSE = 0.1
"""Error of a curve that would be close, a tenth of the range of a probability: shown, and not what is judged by."""
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

Correlations = dict[tuple[str, str, str], Estimate]
"""(source, predicted number, measured number) → rank correlation over heads."""


def _numbers(prediction: Prediction) -> dict[str, Floats]:
    mean, width = prediction.curve.nanmean(1), curve_width(prediction.curve)
    return {"mean": mean.numpy(), "width": width.numpy(), "eta": prediction.eta.numpy()}


@declared("localization/behaviour")
def behaviour(study: Study, outcome: Outcome) -> None:
    run = study.run
    layers = run.heads["layer"].to_numpy()
    places = layers, run.heads["head"].to_numpy()
    measured = torch.from_numpy(need(run, "propagation_by_position")[places]).double()
    predictions = {name: from_survey(run, name) for name in ("weights", "text")}
    predictions["increments"] = from_increments(study.require_model(), text_walk(study), measured.shape[1])
    numbers = {
        "ρ": measured.nanmean(1).numpy(),
        "width": curve_width(measured).numpy(),
        "entropy": need_column(run.heads, "entropy"),
    }
    predicted_numbers = {name: _numbers(prediction) for name, prediction in predictions.items()}
    correlation_of: Correlations = {
        (name, predicted, shown): rank_correlation_of_heads(of[predicted], numbers[shown], layers)
        for name, of in predicted_numbers.items()
        for predicted, shown, _, _ in COMPARED
    }
    _judge_order(outcome, correlation_of)
    errors = judge_curves(outcome, predictions, measured, layers)
    shares = _judge_regimes(outcome, predictions, regime_of_curve(measured), layers)
    trace = np.abs(need_column(run.heads, f"trace{SUFFIX['text']}"))
    spectra = {"eta": predictions["text"].eta.numpy(), "width": numbers["width"]}
    judge_entropy(outcome, spectra, numbers["entropy"], trace, layers)
    for name, label in SOURCES.items():
        mean, entropy = correlation_of[name, "mean", "ρ"], correlation_of[name, "eta", "entropy"]
        outcome.read(
            f"rank correlations over heads and errors, from {label}",
            f"ρ: {_shown(mean)}; η with entropy: {_shown(entropy)}; error of the curve: {_shown(errors[name])}; "
            f"same regime: {percent(shares[name])}",
        )
    outcome.read("error of the median curve of all other heads", _shown(errors["others"]))
    outcome.tables["heads"] = _heads(run, predictions, numbers, measured)
    rows = []
    for name, (number_name, measured_name, predicted, shown) in product(predictions, COMPARED):
        of = correlation_of[name, number_name, measured_name]
        rows.append((SOURCES[name], predicted, shown, of.value, of.error, of.n))
    names = ["from", "predicted", "measured", "rank_correlation", "standard_error", "layers"]
    outcome.tables["correlations"] = pd.DataFrame(rows, columns=names)
    _draw_scatter(outcome, run, predictions, numbers["ρ"])
    _draw_curves(outcome, run, predictions, measured)
    _draw_correlations(outcome, correlation_of)


def _shown(measured: Estimate) -> str:
    return with_error(measured.value, measured.error)


def _judge_order(outcome: Outcome, correlation_of: Correlations) -> None:
    for name, label in SOURCES.items():
        claim = f"Predicted ρ orders the heads as measured ρ does, from {label}"
        what = f"rank correlation over heads of mean ρ, predicted from {label}, with that measured"
        outcome.claim(claim, what, correlation_of[name, "mean", "ρ"], ORDERS)


def judge_curves(
    outcome: Outcome, predictions: dict[str, Prediction], measured: Tensor, layers: Indices
) -> dict[str, Estimate]:
    """Judge each source's curves by how much nearer they are than the median curve of all other heads, head by head."""
    baseline = curve_errors(others_median(measured), measured).numpy()
    errors = {"others": mean_over_heads(baseline, layers)}
    for name, label in SOURCES.items():
        of_heads = curve_errors(predictions[name].curve, measured).numpy()
        errors[name] = mean_over_heads(of_heads, layers)
        outcome.claim(
            "The predicted curve ρ_1 … ρ_T is nearer to the measured one than the median curve of all other heads, "
            f"from {label}",
            f"mean absolute error of ρ from {label} less that of the median curve of all other heads, mean over heads",
            mean_over_heads(of_heads - baseline, layers),
            NEARER,
            f"; the errors: {_shown(errors[name])} and {_shown(errors['others'])}, close would be {CLOSE:g}",
        )
    return errors


def _judge_regimes(
    outcome: Outcome, predictions: dict[str, Prediction], measured: np.ndarray, layers: Indices
) -> dict[str, float]:
    """The share of heads whose regime each source predicts."""
    shares = {}
    for name, label in SOURCES.items():
        kappa, shares[name] = agreement(predictions[name].regime, measured, layers)
        claim = f"The predicted regime is that of the measured curve, from {label}"
        what = f"Cohen's κ of the regimes from {label} and of the measured curves"
        same = f"; the same regime in {percent(shares[name])} of the heads"
        outcome.claim(claim, what, kappa, AGREES, same)
    return shares


def judge_entropy(
    outcome: Outcome, numbers: dict[str, Floats], entropy: Floats, trace: Floats, layers: Indices
) -> None:
    """A2 of section 5, which compares spectra of the same |tr W|: rank correlations with that held fixed."""
    smaller = "Heads whose spectrum has a smaller scale have a higher entropy"
    for claim, name, what in (
        (smaller, "eta", f"η, from {SOURCES['text']},"),
        ("Localized heads have a higher entropy", "width", "the measured share of positions that propagate"),
    ):
        plain = rank_correlation_of_heads(numbers[name], entropy, layers)
        outcome.claim(
            f"{claim} (A2 of section 5)",
            f"rank correlation over heads of {what} with entropy, |tr W| held fixed",
            rank_correlation_of_heads(numbers[name], entropy, layers, given=trace),
            OPPOSED,
            f"; {_shown(plain)} where it is not",
        )


def _heads(
    run: Run, predictions: dict[str, Prediction], numbers: dict[str, Floats], measured: Tensor
) -> pd.DataFrame:
    """One row per head: what is measured, and what each source predicts."""
    columns: dict[str, object] = {
        "propagation": numbers["ρ"],
        "width": numbers["width"],
        "entropy": numbers["entropy"],
        "regime_measured": regime_of_curve(measured),
        "error_others": curve_errors(others_median(measured), measured).numpy(),
        "trace_text": np.abs(need_column(run.heads, f"trace{SUFFIX['text']}")),
    }
    for name, prediction in predictions.items():
        mean, width, eta = _numbers(prediction).values()
        columns |= {f"propagation_{name}": mean, f"width_{name}": width, f"eta_{name}": eta}
        error = curve_errors(prediction.curve, measured).numpy()
        columns |= {f"regime_{name}": prediction.regime, f"error_{name}": error}
    return run.heads[["layer", "head"]].assign(**columns)


def _draw_scatter(outcome: Outcome, run: Run, predictions: dict[str, Prediction], measured: Floats) -> None:
    layers, heads = (need_column(run.heads, name) for name in ("layer", "head"))
    means = [prediction.curve.nanmean(1).numpy() for prediction in predictions.values()]

    def draw(place: int) -> go.Figure:
        return head_scatter(means[place], measured, layers, heads, ("predicted mean ρ", "measured mean ρ"))

    outcome.draw("heads", by_name("from", list(SOURCES.values()), draw))


def _draw_curves(outcome: Outcome, run: Run, predictions: dict[str, Prediction], measured: Tensor) -> None:
    shown = evenly(measured.shape[1], CURVE_POINTS)
    theta = (np.array(shown, dtype=np.float64) + 1) / measured.shape[1]
    curves = [measured, *(prediction.curve for prediction in predictions.values())]

    def draw(head: int) -> go.Figure:
        values = [curve[head, shown].numpy() for curve in curves]
        return drawing.curves(theta, LINES, values, ("θ", "ρ(θ)"), yaxis={"range": [-0.02, 1.05]})

    outcome.draw("curves", by_name("head", head_labels(run), draw))


def _draw_correlations(outcome: Outcome, correlation_of: Correlations) -> None:
    values = {}
    for name, label in SOURCES.items():
        estimates = [correlation_of[name, predicted, measured] for predicted, measured, _, _ in COMPARED]
        value, margin = np.array([(each.value, each.margin) for each in estimates]).T
        values[label] = value, np.stack([value - margin, value + margin]).clip(-1, 1)
    groups = [f"{label} → {measured_label}" for _, _, label, measured_label in COMPARED]
    outcome.draw("correlations", drawing.bars(groups, values, "Spearman's correlation", (-1.05, 1.05)))
