"""Predict every head's behaviour from its spectrum, and judge it by what the head does on the text.

ρ_1 … ρ_T of every head is predicted for tokens that walk at random: from W_QK alone, from W_QK Σ̂ with the covariance of
what the head reads, and from W_QK Σ̂ with that of its increments. Then each assumption of the theory is replaced in turn
by what is measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import numpy as np
import numpy.typing as npt
import pandas as pd
import plotly.graph_objects as go
import torch
from jaxtyping import Float, Float64
from torch import Tensor

from theodolite import Corpus, OpenModel, Run
from theodolite.accumulate.second_moments import SecondMoments, covariance
from theodolite.attention.inputs import MASKED, AttentionInputs
from theodolite.attention.summary import summarise
from theodolite.errors import WorkError
from theodolite.estimates import Estimate, Floats
from theodolite.models.guard import measures
from theodolite.models.hooks import Hooks, hooked
from theodolite.models.weights.head_weights import HeadWeights
from theodolite.report import style
from theodolite.report.data import evenly, head_labels, need, need_column
from theodolite.system.wording import number, percent, with_error
from theodolite.theory import curve_width, propagation_finite, qk_moments, regime, regime_of_curve
from theodolite.theory.propagation import propagation_of_draws
from theodolite.theory.regimes import UNDEFINED
from theodolite_papers import drawing
from theodolite_papers.drawing import Line
from theodolite_papers.experiment import Outcome, Study, by_name, declared
from theodolite_papers.localization.text_as_walk import TextWalk, text_walk
from theodolite_papers.rank_correlation import agreement, over_heads, rank_correlation_of_heads

Indices = npt.NDArray[np.int64]

SUFFIX = {"weights": "", "text": "_data"}
"""Of the survey's columns and arrays, for the two predictions that it has."""

SOURCES = {
    "weights": "W_QK",
    "text": "W_QK Σ̂, Σ̂ of what the head reads",
    "increments": "W_QK Σ̂, Σ̂ of its increments",
}
"""Where a prediction comes from → how it is called."""

COMPARED = (
    ("mean", "ρ", "mean ρ", "mean ρ"),
    ("mean", "entropy", "mean ρ", "entropy"),
    ("width", "width", "share of positions", "share of positions"),
    ("width", "entropy", "share of positions", "entropy"),
    ("eta", "entropy", "η", "entropy"),
)
"""Predicted number, measured number, and how both are called."""

CLOSE = 0.1  # error of a curve that would be close: shown, and not what is judged by

LINES = (
    Line("measured", style.MEASURED, width=2.6),
    Line("from W_QK", style.PREDICTED, "dash"),
    Line("with Σ̂", style.PREDICTED),
    Line("with Σ̂ of increments", style.GREEN),
)
CURVE_POINTS = 128  # drawn a curve


@dataclass(frozen=True)
class Prediction:
    """The prediction from one source for all heads, in the order of the table `heads`.

    curve: ρ_1 … ρ_T; NaN where the family's queries and keys have no W_QK. regime: its name by the source's ξ and η.
    eta: √tr(W²)/λ of the symmetric part.
    """

    curve: Float64[Tensor, "heads positions"]
    regime: np.ndarray
    eta: Float64[Tensor, " heads"]

    @property
    def numbers(self) -> dict[str, Floats]:
        """Mean ρ and share of positions of every head's curve, and η."""
        mean, width = self.curve.nanmean(1), curve_width(self.curve)
        return {"mean": mean.numpy(), "width": width.numpy(), "eta": self.eta.numpy()}


def from_survey(run: Run, source: str) -> Prediction:
    """Return the survey's own prediction, from `weights` or from `text`."""
    suffix = SUFFIX[source]
    layer, head = (torch.tensor(run.heads[name].to_numpy()) for name in ("layer", "head"))
    return Prediction(
        run.arrays[f"propagation_predicted{suffix}"][layer, head].double(),
        run.heads[f"regime{suffix}"].to_numpy(),
        torch.tensor(need_column(run.heads, f"eta_symmetric{suffix}")),
    )


def exact_weights(model: OpenModel, layer: int) -> HeadWeights | None:
    """Return the weights of a layer; None where they do not give the logits themselves."""
    try:
        weights = model.head_weights(layer)
    except WorkError:
        return None
    return weights if weights.exact else None


@measures("model")
def from_increments(model: OpenModel, walk: TextWalk, length: int) -> Prediction:
    """Predict curves of T = `length` from the second moment of the increments of each attention module's input."""
    parts: list[tuple[Tensor, list[str], Tensor]] = []
    for layer in model.attending:
        weights = exact_weights(model, layer)
        if weights is None:
            unknown = torch.full((model.heads_of[layer], length), torch.nan, dtype=torch.float64)
            parts.append((unknown, [UNDEFINED] * len(unknown), unknown[:, 0]))
            continue
        temperature = 1 / weights.scaling
        of = qk_moments(weights.w_q, weights.w_k, walk.inputs.covariance(layer), temperature)
        curve = propagation_finite(of.trace, of.form_squared, of.trace_of_square, length, temperature)
        parts.append((curve, regime(of.xi_symmetric, of.eta_symmetric).tolist(), of.eta_symmetric))
    curves, names, etas = zip(*parts, strict=True)
    return Prediction(torch.cat(curves).cpu(), np.concatenate(names), torch.cat(etas).cpu())


def mean_over_heads(values: Floats, layers: Indices) -> Estimate:
    """Average over the heads that have a number, (heads,)."""
    known = np.isfinite(values)
    values = values[known]
    return over_heads(lambda heads: float(values[heads].mean()), layers[known])


def curve_errors(
    predicted: Float[Tensor, "heads positions"], measured: Float[Tensor, "heads positions"]
) -> Floats:
    """Average each head curve's absolute error over the positions that both have; NaN where there is none."""
    return np.asarray((predicted - measured).abs().nanmean(1))


def others_median(curve: Float[Tensor, "heads positions"]) -> Float[Tensor, "heads positions"]:
    """Compute each position's median of all other heads: a prediction that knows nothing of the head."""
    ordered, order = curve.sort(dim=0)  # NaN last
    rank, known = order.argsort(dim=0), curve.isfinite()
    others = known.sum(dim=0) - known.long()
    middle = [((others - 1) // 2).clamp_min(0), others // 2]
    # From a head's own place on, the others are one further in the order of all.
    low, high = (ordered.gather(0, (at + (rank <= at)).clamp_max(len(curve) - 1)) for at in middle)
    return torch.where(others > 0, (low + high) / 2, torch.nan)


@declared("localization/behaviour")
def behaviour(study: Study, outcome: Outcome) -> None:
    run = study.run
    layers, heads = run.heads["layer"].to_numpy(), run.heads["head"].to_numpy()
    measured = torch.from_numpy(need(run, "propagation_by_position")[layers, heads]).double()
    predictions = {name: from_survey(run, name) for name in SUFFIX}
    predictions["increments"] = from_increments(study.require_model(), text_walk(study), measured.shape[1])
    numbers = {
        "ρ": measured.nanmean(1).numpy(),
        "width": curve_width(measured).numpy(),
        "entropy": need_column(run.heads, "entropy"),
    }
    trace = np.abs(need_column(run.heads, f"trace{SUFFIX['text']}"))
    names = regime_of_curve(measured)
    errors = {"others": curve_errors(others_median(measured), measured)}
    table = run.heads[["layer", "head"]].assign(
        propagation=numbers["ρ"],
        width=numbers["width"],
        entropy=numbers["entropy"],
        regime_measured=names,
        error_others=errors["others"],
        trace_text=trace,
    )
    correlations: dict[tuple[str, str, str], Estimate] = {}
    for name, prediction in predictions.items():
        predicted, errors[name] = prediction.numbers, curve_errors(prediction.curve, measured)
        for of, shown, *_ in COMPARED:
            correlations[name, of, shown] = rank_correlation_of_heads(predicted[of], numbers[shown], layers)
        of_source = {"propagation": predicted["mean"], "width": predicted["width"], "eta": predicted["eta"]}
        of_source |= {"regime": prediction.regime, "error": errors[name]}
        table = table.assign(**{f"{of}_{name}": values for of, values in of_source.items()})
    for name, label in SOURCES.items():
        outcome.judge("order", correlations[name, "mean", "ρ"], spectrum=label)
    means = judge_curves(outcome, errors, layers)
    shares = {}
    for name, label in SOURCES.items():
        kappa, shares[name] = agreement(predictions[name].regime, names, layers)
        outcome.judge("regime", kappa, spectrum=label, same=percent(shares[name]))
    eta = predictions["text"].eta.numpy()
    judge_entropy(outcome, eta, numbers["width"], numbers["entropy"], trace, layers)
    for name, label in SOURCES.items():
        mean, entropy = correlations[name, "mean", "ρ"], correlations[name, "eta", "entropy"]
        shown = (
            f"ρ: {_shown(mean)}; η with entropy: {_shown(entropy)}; error of the curve: {_shown(means[name])}"
        )
        what = f"rank correlations over heads and errors, from {label}"
        outcome.read(what, f"{shown}; same regime: {percent(shares[name])}")
    outcome.read("error of the median curve of all other heads", _shown(means["others"]))
    outcome.tables["heads"] = table
    rows = []
    for name, (of, shown, *labels) in product(SOURCES, COMPARED):
        known = correlations[name, of, shown]
        rows.append((SOURCES[name], *labels, known.value, known.error, known.n))
    columns = ["from", "predicted", "measured", "rank_correlation", "standard_error", "layers"]
    outcome.tables["correlations"] = pd.DataFrame(rows, columns=columns)
    _draw(outcome, run, predictions, measured, correlations)


def _shown(measured: Estimate) -> str:
    return with_error(measured.value, measured.error)


def judge_curves(outcome: Outcome, errors: dict[str, Floats], layers: Indices) -> dict[str, Estimate]:
    """Judge each source's curves by how much nearer they are than the median curve of all other heads, head by head.

    errors: of each head's curve, (heads,), by source, and of the `others`. Returns their means.
    """
    means = {name: mean_over_heads(of_heads, layers) for name, of_heads in errors.items()}
    for name, label in SOURCES.items():
        nearer = mean_over_heads(errors[name] - errors["others"], layers)
        levels = {"error": _shown(means[name]), "others": _shown(means["others"]), "close": CLOSE}
        outcome.judge("nearer", nearer, spectrum=label, **levels)
    return means


def judge_entropy(
    outcome: Outcome, eta: Floats, width: Floats, entropy: Floats, trace: Floats, layers: Indices
) -> None:
    """Judge A2 of section 5, which compares spectra of the same |tr W|: rank correlations with that held fixed."""
    for claim, predicted in (("scale", eta), ("localized", width)):
        plain = rank_correlation_of_heads(predicted, entropy, layers)
        known = rank_correlation_of_heads(predicted, entropy, layers, given=trace)
        outcome.judge(claim, known, spectrum=SOURCES["text"], plain=_shown(plain))


def _draw(
    outcome: Outcome,
    run: Run,
    predictions: dict[str, Prediction],
    measured: Tensor,
    correlations: dict[tuple[str, str, str], Estimate],
) -> None:
    layers, heads = (need_column(run.heads, name) for name in ("layer", "head"))
    curves = [measured, *(prediction.curve for prediction in predictions.values())]
    means = [curve.nanmean(1).numpy() for curve in curves]
    shown = evenly(measured.shape[1], CURVE_POINTS)
    theta = (np.array(shown, dtype=np.float64) + 1) / measured.shape[1]

    def scatter(place: int) -> go.Figure:
        titles = "predicted mean ρ", "measured mean ρ"
        return drawing.head_scatter(means[1 + place], means[0], layers, heads, titles)

    def of_head(head: int) -> go.Figure:
        values = [curve[head, shown].numpy() for curve in curves]
        return drawing.curves(theta, LINES, values, ("θ", "ρ(θ)"), yaxis={"range": [-0.02, 1.05]})

    outcome.draw("heads", by_name("from", list(SOURCES.values()), scatter))
    outcome.draw("curves", by_name("head", head_labels(run), of_head))
    values = {}
    for name, label in SOURCES.items():
        estimates = [correlations[name, of, number] for of, number, *_ in COMPARED]
        value, margin = np.array([(each.value, each.margin) for each in estimates]).T
        values[label] = value, np.stack([value - margin, value + margin]).clip(-1, 1)
    groups = [f"{predicted} → {known}" for *_, predicted, known in COMPARED]
    drawn = drawing.grouped_bars(groups, values, "Spearman's correlation", (-1.05, 1.05))
    outcome.draw("correlations", drawn)


STEPS = {
    "walk": "a random walk with the text's increments (Assumption 1)",
    "draws": "independent draws with the covariance of what the head reads",
    "mean": "independent draws with its mean, too",
    "used": "independent draws of queries and keys as the head uses them, normed and turned by position",
    "query": "Gaussian logits with the variance over keys of each query",
    "later": "Gaussian logits with that variance, the first key left out",
    "position": "Gaussian logits with the mean and variance of each position",
}
"""What ρ is predicted from: first the theory, by which tokens walk at random and are turned alike at every position, so
that logits are Gaussian and grow along the context; each of the others assumes less."""

BATCH = 8


@dataclass(frozen=True)
class Sample:
    """The last query's logits of some contexts by layer, NaN where masked, and the moments of what each layer reads."""

    logits: dict[int, Float[Tensor, "contexts heads keys"]]
    inputs: SecondMoments


class _LastLogits(Hooks):
    def __init__(self, sample: Sample, trailing: int) -> None:
        self.sample, self.trailing = sample, trailing

    def attention_input(self, layer: int, hidden: Tensor) -> None:
        self.sample.inputs.update(layer, hidden[:, 1 : hidden.shape[1] - self.trailing].flatten(0, 1))

    def attention(self, layer: int, inputs: AttentionInputs) -> Tensor:
        end = inputs.query.shape[2] - self.trailing
        logits = inputs.of_queries(slice(end - 1, end)).logits()[:, :, 0].double().cpu()
        logits = logits.masked_fill(logits <= MASKED / 2, torch.nan)
        before = self.sample.logits.get(layer)
        self.sample.logits[layer] = logits if before is None else torch.cat([before, logits])
        return summarise(inputs).output


@measures("model")
def last_logits(model: OpenModel, corpus: Corpus) -> Sample:
    """Read some contexts: what each layer reads of them, and the logits of each last query."""
    sample = Sample({}, SecondMoments(model.layers, model.structure.attention_width))
    trailing = corpus.trailing(model.tokenizer)
    with hooked(model, _LastLogits(sample, trailing)):
        for ids in corpus.contexts.split(BATCH):
            model.forward(ids)
    return sample


def of_layer(model: OpenModel, layer: int, sample: Sample) -> dict[str, Float[Tensor, "heads positions"]]:
    """Predict a layer's curves by the steps that need its weights or its logits alone; NaN where it has no matrix."""
    logits = sample.logits[layer]
    keys = logits.isfinite().sum(dim=-1).double()
    later = logits[:, :, 1:]
    flat = {
        "query": propagation_of_draws(_variance(logits), keys).nanmean(dim=0),
        "later": propagation_of_draws(_variance(later), later.isfinite().sum(dim=-1)).nanmean(dim=0),
    }
    unknown = torch.full_like(flat["query"], torch.nan)
    flat |= {"draws": unknown, "mean": unknown}
    if weights := exact_weights(model, layer):
        state = sample.inputs.state()
        sigma, mean = covariance(state, layer), state["mean"][layer]
        query, key = (w.mT @ sigma @ w for w in (weights.w_q, weights.w_k))
        of_mean = mean @ weights.w_q + weights.b_q
        for name, moment in (("draws", query), ("mean", query + of_mean[:, :, None] * of_mean[:, None])):
            variance = (moment * key).sum(dim=(-2, -1)) * weights.scaling**2
            flat[name] = propagation_of_draws(variance, keys.mean(dim=0))
    curves = {name: values[:, None].expand(-1, logits.shape[-1]) for name, values in flat.items()}
    centred = logits - logits.nanmean(dim=-1, keepdim=True)
    mean = centred.nanmean(dim=0)
    spread = (centred - mean).square().nanmean(dim=0).sqrt()
    normal = torch.distributions.Normal(mean, spread.clamp_min(1e-12), validate_args=False)
    length = keys.mean(dim=0)[:, None]
    return curves | {"position": normal.cdf(length - 1) - normal.cdf(-torch.ones_like(length))}


def _variance(logits: Tensor) -> Tensor:
    """Compute the variance over keys of each query's logits, NaN left out."""
    return (logits - logits.nanmean(dim=-1, keepdim=True)).square().nanmean(dim=-1)


def predicted(study: Study, length: int) -> dict[str, Float[Tensor, "heads positions"]]:
    """Predict the curves of all heads by each of `STEPS`, in the order of the table `heads`."""
    model, walk = study.require_model(), text_walk(study)
    sample = last_logits(model, walk.corpus)
    by_layer = [of_layer(model, layer, sample) for layer in model.attending]
    curves = {name: torch.cat([of[name] for of in by_layer]) for name in by_layer[0]}
    used = torch.tensor(need_column(study.run.heads, "propagation_independent"))
    curves |= {
        "walk": from_increments(model, walk, length).curve,
        "used": used[:, None].expand(-1, length),
    }
    return {name: curves[name] for name in STEPS}


@declared("localization/assumptions")
def assumptions(study: Study, outcome: Outcome) -> None:
    run = study.run
    layers, heads = run.heads["layer"].to_numpy(), run.heads["head"].to_numpy()
    measured = torch.from_numpy(need(run, "propagation_by_position")[layers, heads]).double()
    level = measured.nanmean(dim=1).numpy()
    table, rows = run.heads[["layer", "head"]].assign(measured=level), []
    for name, curve in predicted(study, measured.shape[1]).items():
        step, mean = STEPS[name], curve.nanmean(dim=1).numpy()
        table[name] = mean
        if not np.isfinite(mean).any():
            outcome.cannot_judge("order", "no matrix gives the logits of these heads", step=step)
            continue
        known = rank_correlation_of_heads(mean, level, layers)
        off = float(np.nanmean(np.abs(mean - level))), float(np.nanmean(curve_errors(curve, measured)))
        outcome.judge("order", known, step=step)
        rows.append((step, known.value, known.error, *off))
        shown = with_error(known.value, known.error), *map(number, off)
        outcome.read(step, "rank correlation {}; mean ρ off by {}, the curve by {}".format(*shown))
    none = float(np.nanmean(curve_errors(others_median(measured), measured)))
    outcome.read("the median curve of all other heads", f"the curve off by {number(none)}")
    columns = ["step", "rank_correlation", "standard_error", "error_of_mean", "error_of_curve"]
    outcome.tables |= {"steps": pd.DataFrame(rows, columns=columns), "heads": table}

    def scatter(place: int) -> go.Figure:
        values = table[list(STEPS)[place]].to_numpy()
        return drawing.head_scatter(values, level, layers, heads, ("predicted mean ρ", "measured mean ρ"))

    outcome.draw("heads", by_name("from", list(STEPS.values()), scatter, grid=True))
