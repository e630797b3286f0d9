"""What the page says of a run: findings, which are sentences with the quantity that each is about; plain text only.

Two findings about one quantity must not disagree: what is judged is judged by one number and one limit, and health
checks and the summary both word its answer. A check is made only where the run has its numbers, and reports that it
passed, too; its limits are what columns declare to be healthy, conventions for a first look. A mean over layers passes
only where it is clear of its limit by its standard error. Each sentence of the summary is computed from the run's
numbers; every threshold that turns a number into a word is a constant here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pandas as pd

from theodolite.estimates import Estimate, Floats
from theodolite.judging import FAILS, HOLDS, UNDECIDED, Answer, Criterion, contexts_needed, judge
from theodolite.measure.column import Column
from theodolite.measure.constituents import ADDITIVE, DISJOINT
from theodolite.measure.head_roles import (
    ATTENTION_PATTERNS,
    END_TOKEN_SINK,
    FIRST_TOKEN_SINK,
    INDUCTION,
    LATER_SINK,
    LEARNED_SINK,
    PATTERN_ROLES,
    RETAINED,
    SINK_ROLES,
    SLIGHT,
    UNIFORM_ATTENTION,
    HeadRole,
)
from theodolite.measure.rank_correlation import agreement, rank_correlation_of_heads
from theodolite.passes.run import Run
from theodolite.report import published
from theodolite.report.data import (
    AT_FLOOR,
    array,
    at_floor,
    blocks,
    caller_columns,
    column,
    entropy_share,
    grid_of,
    head_labels,
    layer_average,
    layer_mean,
    limit_of,
    massive_tokens,
    provenance,
    seen_above,
    value_of,
)
from theodolite.report.drawing.constituents import SHARES, attributed
from theodolite.system.wording import (
    counted,
    head_name,
    listed,
    number,
    percent,
    percent_with_error,
    shown_token,
    spans,
    visible,
    with_error,
)
from theodolite.theory.regimes import UNDEFINED, regime_of_curve

CLUSTERED = Criterion("at least", 0.5, "adjusted Rand index: k-means finds most of the labels")
BY_CHANCE = Criterion(
    "more than", 0.0, "two namings, or two orders, of the heads agree no more than by chance"
)
ENTROPY_COLLAPSE = Criterion(
    "less than", 0.05, "share of the maximum entropy: a head attends to a single key"
)
DEAD_SHARE = Criterion("at most", 1e-4, "‖W_QK‖²_F over the model's median: a head is as good as zero")
UNKNOWN = Criterion("at least", 0.05, "share of unknown tokens: another language or script than the model's")
LEAST_VALUES = 12  # singular values of a positional basis: ScreeNOT's noise level is not known from fewer
LEAST_SIDE = 10  # rows or columns of patches: of no more, ten frequencies are all
REASON = 160  # characters of a reason that are shown
POSITIONS, SMOOTHNESS, ENTANGLEMENT, CLUSTERS = "positions", "smoothness", "entanglement", "clusters"
MASSIVE = "massive activations"
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


def of_layers(
    run: Run,
    about: str,
    name: str,
    claims: tuple[str, str, str],
    numbers: Callable[[Estimate], str],
    criterion: Criterion | None = None,
) -> Finding | None:
    """Judge the mean of a column over the layers that have it, by what is healthy; None where no layer has.

    A layer has none where noise hides it.

    Args:
        claims: what holds, what fails, and what is open, a clause that begins with "Whether".
        numbers: words the mean.
    """
    known, hidden = np.isfinite(value_of(run, name)), int(at_floor(run, name).sum())
    holds, fails, whether = claims
    if not known.any():
        text = f"{whether} is not judged: it is {AT_FLOOR} in every layer."
        return Finding(text, about, UNDECIDED) if hidden else None
    estimate, _ = layer_average(run, name)
    verdict = judge("", "", estimate, criterion or limit_of("layers", name))
    if verdict.answer != UNDECIDED:
        claim = holds if verdict.answer == HOLDS else fails
    elif math.isnan(estimate.margin):
        claim = f"{whether} is not decided, since its standard error is not known"
    else:
        unknown = "it is within an error of its limit, and how many contexts would is not known"
        needed = contexts_needed(verdict, (provenance(run, "corpus") or {}).get("contexts", 0))
        claim = f"{whether} is not decided; {needed or unknown}"
    layers = f"mean of {counted(int(known.sum()), 'layer')}; in {hidden} of all it is {AT_FLOOR}"
    return Finding(f"{claim}: {numbers(estimate)}{f' ({layers})' if hidden else ''}.", about, verdict.answer)


def measured_regimes(run: Run) -> np.ndarray[Any, Any] | None:
    """Name the regime of every head by its measured curve; None where there is none."""
    curves = array(run, "propagation_by_position")
    if curves is None or not len(run.heads):
        return None
    return regime_of_curve(curves[run.heads["layer"], run.heads["head"]])


def regime_agreement(run: Run, suffix: str = "") -> tuple[Estimate, Estimate] | None:
    """Compare the regimes predicted from W_QK (`suffix` "_data": W_QK Σ̂) with measured curves, over heads.

    Returns:
        κ of predicted and measured names, 0 by chance, and the rank correlation of mean ρ; None without these.
    """
    names, measured = measured_regimes(run), column(run.heads, "propagation")
    predicted = array(run, f"propagation_predicted{suffix}")
    if names is None or predicted is None or measured is None or f"regime{suffix}" not in run.heads:
        return None
    layers, heads = run.heads["layer"].to_numpy(dtype=int), run.heads["head"].to_numpy(dtype=int)
    regimes = run.heads[f"regime{suffix}"].fillna(UNDEFINED).astype(str).to_numpy()
    with np.errstate(invalid="ignore"):
        expected = np.asarray(predicted[layers, heads], dtype=np.float64).mean(axis=1)
    return agreement(regimes, names, layers)[0], rank_correlation_of_heads(expected, measured, layers)


def in_a_line(checks: Sequence[Finding]) -> str:
    """Say the outcome of all checks in one sentence."""
    flagged, undecided = (sum(check.answer == answer for check in checks) for answer in (FAILS, UNDECIDED))
    amounts = [(flagged, "flagged"), (undecided, "not decided")]
    first, *others = [f"{amount} {outcome}" for amount, outcome in amounts if amount] or [""]
    if not first:
        return "The health check passed." if len(checks) == 1 else f"All {len(checks)} health checks passed."
    first = first.replace(" ", f" of {counted(len(checks), 'health check')} ", 1)
    return ", ".join([first, *others]) + "."


CheckResult = tuple[str, bool] | Finding | None
"""The text of a check and whether it is flagged; or a finding, which may be open; None: not for this run."""


def checks(run: Run) -> list[Finding]:
    """Run every check that the run's numbers allow, those of a caller's own columns last."""
    own = [measure for table in ("layers", "heads") for measure in caller_columns(run, table)]
    outcomes = [check(run, about) for about in CHECKS]
    outcomes += [_as_finding(measure.name, _own(measure, run)) for measure in own]
    return [outcome for outcome in outcomes if outcome is not None]


def check(run: Run, about: str) -> Finding | None:
    """Run one of `CHECKS`; None where the run has no numbers for it."""
    return _as_finding(about, CHECKS[about][1](run))


def _as_finding(about: str, outcome: CheckResult) -> Finding | None:
    if outcome is None or isinstance(outcome, Finding):
        return outcome
    text, flagged = outcome
    return Finding(text, about, FAILS if flagged else HOLDS)


def _own(measure: Column, run: Run) -> CheckResult:
    """Run the check that a caller's column declares."""
    frame = getattr(run, measure.table)
    if (values := column(frame, measure.name)) is None or measure.healthy is None:
        return None
    limit = f"{measure.healthy.side} {number(measure.healthy.limit)}"
    if not (unhealthy := _unhealthy(measure.healthy, values)).any():
        return f"{visible(measure.title)} is {limit} in all {measure.table}.", False
    layers = [f"layer {layer}" for layer in frame["layer"][unhealthy]]
    names = listed(layers) if measure.table == "layers" else _named(run, unhealthy)
    return (
        f"{visible(measure.title)} is not {limit} in {names}: {visible(measure.healthy.source, REASON)}.",
        True,
    )


def _unhealthy(healthy: Criterion, values: Floats) -> npt.NDArray[np.bool_]:
    """Mark the known values that do not meet what those of a healthy model do."""
    return np.isfinite(values) & ~healthy.met(values)


def _named(run: Run, flags: npt.NDArray[np.bool_]) -> str:
    return listed([name for name, flag in zip(head_labels(run), flags, strict=True) if flag])


def _counted(flags: npt.NDArray[np.bool_]) -> str:
    return counted(int(flags.sum()), "head")


def _rank_collapse(run: Run) -> CheckResult:
    residual = column(run.layers, "rank_collapse")
    if residual is None:
        return None
    layers = run.layers["layer"].to_numpy(dtype=int)
    lowest = int(np.nanargmin(residual))
    least = number(residual[lowest], 2)
    healthy = limit_of("layers", "rank_collapse")
    if low := [f"layer {layer}" for layer in layers[_unhealthy(healthy, residual)]]:
        limits = f"(residual below {healthy.limit:g}; lowest {least})"
        return f"Rank collapse: in {listed(low)} all tokens are nearly the same vector {limits}.", True
    return f"No rank collapse: the residual stays at or above {least} (layer {layers[lowest]}).", False


def _entropy_collapse(run: Run) -> CheckResult:
    share = entropy_share(run)
    if share is None:
        return None
    low = ENTROPY_COLLAPSE.met(share)
    limit = percent(ENTROPY_COLLAPSE.limit)
    if not low.any():
        return f"No entropy collapse: every head has at least {limit} of the maximum entropy.", False
    explained = np.zeros(len(share), dtype=bool)
    for role in (*PATTERN_ROLES, *SINK_ROLES):
        values = column(run.heads, role.column)
        if values is not None:
            explained |= low & (values >= role.explains_low_entropy)
    heads = f"{_counted(low)} {'has' if low.sum() == 1 else 'have'}"
    text = f"{heads} less than {limit} of the maximum entropy: {_named(run, low)}."
    unexplained = low & ~explained
    if not unexplained.any():
        return f"{text} All are first-token sink heads or have one fixed role, as is common.", False
    if explained.any():
        text += f" Neither a first-token sink nor a fixed role explains {_named(run, unexplained)}."
    return f"Entropy collapse: {text}", True


def _vanishing(run: Run) -> CheckResult:
    propagation, healthy = column(run.heads, "propagation"), limit_of("heads", "propagation")
    if propagation is None:
        return None
    if (vanished := _unhealthy(healthy, propagation)).any():
        keys = f"fewer than {percent(healthy.limit)} of the keys propagate"
        return f"Vanishing signal: {keys} in {_counted(vanished)}: {_named(run, vanished)}.", True
    lowest = percent(float(np.nanmin(propagation)))
    return f"No vanishing signal: at least {lowest} of the keys propagate in every head.", False


def _dead_heads(run: Run) -> CheckResult:
    size = column(run.heads, "frobenius_squared")
    if size is None:
        return None
    zero, share = DEAD_SHARE.met(size / (float(np.nanmedian(size)) or 1.0)), entropy_share(run)
    uniform = ~zero & (share is not None and share >= UNIFORM_ATTENTION.threshold)
    causes = (("W_QK is numerically zero", zero), ("attention is uniform", uniform))
    if dead := [f"{cause} in {_named(run, flags)}" for cause, flags in causes if flags.any()]:
        return f"Dead heads: {'; '.join(dead)}.", True
    return "No dead heads: no W_QK is negligible compared with the others.", False


def _constant_logits(run: Run) -> CheckResult:
    share = column(run.heads, "share_constant")
    # Rotary positions turn means by distance: the logits of two means are a pattern, and no constant.
    if share is None or provenance(run, "model", "positions") in ("rotary", "unknown"):
        return None
    healthy = limit_of("heads", "share_constant")
    constant = _unhealthy(healthy, share)
    if not constant.any():
        varying = (
            f"at least {percent(1 - healthy.limit)} of the logits' variance depends on position or context"
        )
        return f"No constant logits: in every head, {varying}.", False
    scores = column(run.heads, FIRST_TOKEN_SINK.column)
    explained = scores is not None and bool((scores[constant] >= FIRST_TOKEN_SINK.explains_low_entropy).all())
    text = (
        f"Constant logits: in {_counted(constant)} means and biases alone account for at least "
        f"{percent(healthy.limit)} of the logits' variance, independent of position and context: "
        f"{_named(run, constant)}."
    )
    return text + (" All are first-token sink heads, as is common." if explained else ""), not explained


def _not_decomposed(run: Run) -> CheckResult:
    refused = provenance(run, "constituents_refused")
    if not refused:
        return None
    layers = listed([f"layer {visible(layer)}" for layer in refused])
    reason = visible(next(iter(refused.values())), REASON)
    return f"Logits could not be decomposed in {layers}: {reason}.", True


def _massive(run: Run) -> CheckResult:
    later = column(run.layers, "massive_activations")
    if later is None:
        return None
    unhealthy = _unhealthy(limit_of("layers", "massive_activations"), later)
    affected = run.layers["layer"].to_numpy(dtype=int)[unhealthy]
    if not len(affected):
        return "No massive activations after the first token.", False
    where = f"in {counted(len(affected), 'layer')} (first in layer {affected.min()})"
    harm = "common in large models, harmful to low-precision formats"
    return f"Massive activations after the first token {where}: {harm}.", True


def _positional(run: Run) -> CheckResult:
    """Check whether the positional basis is more than noise; without that and smoothness, weights look random."""
    claims = "Positions are encoded", "Positions are not encoded", "Whether positions are encoded"
    rank = "mean rank of the positional basis {}"
    encoded, singular_values = (
        of_layers(run, POSITIONS, "rank", claims, rank.format),
        array(run, "singular_values"),
    )
    if encoded is None or singular_values is None or singular_values.shape[1] < LEAST_VALUES:
        return None
    smooth = _smooth(run)
    if encoded.answer != HOLDS and smooth and smooth.answer == FAILS:
        beyond = f"beyond noise: {rank.format(layer_average(run, 'rank')[0])}, and it is rough"
        return Finding(f"No positional structure {beyond}. The model looks untrained.", POSITIONS, FAILS)
    return encoded


def _smooth(run: Run) -> Finding | None:
    grid = grid_of(run)
    if grid and min(grid.rows, grid.columns) <= LEAST_SIDE:
        return None
    of_plane = " of rows and of columns" if grid else ""

    def numbers(share: Estimate) -> str:
        shown = seen_above(share.value, percent_with_error(share.value, share.error))
        return f"the ten lowest frequencies{of_plane} hold {shown} of the energy of its Gram matrix"

    claims = (
        "The positional basis is smooth",
        "The positional basis is rough, and neighbouring positions have unrelated vectors",
        "Whether the positional basis is smooth",
    )
    return of_layers(run, SMOOTHNESS, "pp_low_frequency_10", claims, numbers)


def _entangled(run: Run) -> Finding | None:
    claims = (
        "Position and context are not entangled",
        "Position and context are entangled",
        "Whether position and context are entangled",
    )

    def numbers(cosine: Estimate) -> str:
        return f"root mean square cosine {seen_above(cosine.value, with_error(cosine.value, cosine.error))}"

    return of_layers(run, ENTANGLEMENT, "incoherence_mean", claims, numbers)


def _missing(run: Run) -> CheckResult:
    """Check for heads that have no measured attention although the text was read."""
    if column(run.heads, "entropy") is None:
        return None
    unknown = run.heads["entropy"].isna().to_numpy()
    return (f"The attention of {_named(run, unknown)} could not be read.", True) if unknown.any() else None


def _unknown_tokens(run: Run) -> CheckResult:
    unknown, tokens = provenance(run, "counts", "unknown_tokens"), provenance(run, "counts", "tokens")
    if not tokens or not unknown or not UNKNOWN.met(unknown / tokens):
        return None
    reason = "the text may be in a language or script that the model does not know"
    return f"{percent(unknown / tokens)} of the tokens are unknown to the tokenizer: {reason}.", True


CHECKS: dict[str, tuple[str, Callable[[Run], CheckResult]]] = {
    "rank collapse": ("pruning", _rank_collapse),
    "entropy collapse": ("heads", _entropy_collapse),
    "signal propagation": ("heads", _vanishing),
    "dead heads": ("heads", _dead_heads),
    "constant logits": ("heads", _constant_logits),
    MASSIVE: ("sinks", _massive),
    POSITIONS: ("position", _positional),
    SMOOTHNESS: ("position", _smooth),
    ENTANGLEMENT: ("position", _entangled),
    "missing attention": ("heads", _missing),
    "decomposition": ("heads", _not_decomposed),
    "unknown tokens": ("", _unknown_tokens),
}
"""What each check is about → the section of the page that shows it, and the check."""


def summarise(run: Run) -> dict[str, list[Finding]]:
    """Word the run's topics in sentences, in reading order, as far as it has numbers; weights alone: localization."""
    findings = {
        topic: [each if isinstance(each, Finding) else Finding(each) for each in sentences(run)]
        for topic, (_, sentences) in TOPICS.items()
    }
    return {topic: sentences for topic, sentences in findings.items() if sentences}


def _range(values: Floats, show: Callable[[float], str]) -> str:
    low, high = show(float(np.nanmin(values))), show(float(np.nanmax(values)))
    return low if low == high else f"{low} to {high}"


def _layers(run: Run) -> npt.NDArray[np.int_]:
    return run.layers["layer"].to_numpy(dtype=int)


def _mean(mean_and_error: tuple[float, float]) -> str:
    """Word a mean in two digits, or with its standard error where it has one."""
    mean, error = mean_and_error
    return with_error(mean, error) if error > 0 else number(mean, 2)


def _position(run: Run) -> Iterator[str | Finding]:
    model = published.closest(run)
    reference = published.AVERAGES[model]
    if (norm_mean := layer_mean(run, "relative_norm")) is not None:
        norm, layers, hidden = value_of(run, "relative_norm"), _layers(run), at_floor(run, "relative_norm")
        most, least = int(np.nanargmax(norm)), int(np.nanargmin(norm))
        lowest = f"lowest in layer {layers[least]} ({percent(norm[least])})"
        if hidden.any():
            lowest = f"{AT_FLOOR} in {counted(int(hidden.sum()), 'layer')} ({spans(layers[hidden].tolist())})"
        yield (
            f"The relative norm of the positional basis is {percent_with_error(*norm_mean)} on average over layers, "
            f"highest in layer {layers[most]} ({percent(norm[most])}) and {lowest}. "
            f"Published for {model}: {percent(reference.relative_norm[0])}."
        )
    if (rank_mean := layer_mean(run, "rank")) is not None:
        by_layer = _range(value_of(run, "rank"), number)
        screenot = layer_mean(run, "rank_screenot")
        as_published = f" {_mean(screenot)} here," if screenot else ""
        yield (
            f"{_mean(rank_mean)} directions of the positional basis replicate in contexts left out, on average "
            f"({by_layer} by layer). Its rank as published (ScreeNOT):{as_published} {reference.rank[0]:.1f} for "
            f"{model}."
        )
    if (smooth := check(run, SMOOTHNESS)) is not None:
        yield smooth
        if layer_mean(run, "pp_low_frequency_10") is not None:
            yield (
                f"The published share is {percent(published.LOW_FREQUENCY[10])} for GPT-2, and about "
                f"{percent(published.LOW_FREQUENCY_ADDITION)} for a model trained on addition."
            )


def _context(run: Run) -> Iterator[str | Finding]:
    within, between = layer_mean(run, "similarity_within"), layer_mean(run, "similarity_between")
    claims = (
        "Contexts cluster clearly by label",
        "Contexts do not cluster clearly by label",
        "Whether contexts cluster clearly by label",
    )

    def index(ari: Estimate) -> str:
        shown = _mean((ari.value, ari.error))
        return f"k-means finds the labels with an adjusted Rand index of {shown} (1: perfect, 0: chance)"

    if clusters := of_layers(run, CLUSTERS, "cluster_ari", claims, index, CLUSTERED):
        yield clusters
    elif column(run.layers, "relative_norm") is not None and within is None:
        yield "The text has no labels, or only one, so clustering by topic cannot be assessed."
    if within is not None and between is not None:
        any_labels = layer_mean(run, "similarity_random")
        yield (
            f"The root mean square cosine of context vectors is {_mean(within)} within labels and {_mean(between)} "
            f"between labels{f' ({_mean(any_labels)} whatever the labels)' if any_labels else ''}."
        )
    if (silhouette := layer_mean(run, "silhouette")) is not None:
        yield f"The mean silhouette of the labels is {_mean(silhouette)}."
    if (entangled := check(run, ENTANGLEMENT)) is not None:
        yield entangled
        if (random := layer_mean(run, "incoherence_random")) is not None:
            yield f"Random directions of the same covariance have {number(random[0], 2)}."


def _localization(run: Run) -> Iterator[str | Finding]:
    share, entropy = entropy_share(run), column(run.heads, "entropy")
    if share is not None and entropy is not None:
        names = head_labels(run)
        sharpest, widest = int(np.nanargmin(share)), int(np.nanargmax(share))
        yield (
            f"Mean attention entropy is {percent(float(np.nanmean(share)))} of its maximum; the sharpest head is "
            f"{names[sharpest]} ({number(entropy[sharpest], 2)} nats), the most uniform {names[widest]} "
            f"({number(entropy[widest], 2)} nats, {percent(float(share[widest]))})."
        )
    for suffix, matrix in (("_data", "W_QK Σ̂"), ("", "W_QK alone")):
        if predicted := regimes_line(run, suffix, matrix):
            yield predicted
    if (propagation := column(run.heads, "propagation")) is not None:
        yield (
            f"For the last query, {percent(float(np.nanmean(propagation)))} of the keys receive gradient on average "
            f"({_range(propagation, percent)} by head)."
        )


def regimes_line(run: Run, suffix: str, matrix: str) -> str:
    """Say which regimes a spectrum predicts, beside what the text shows; empty where none is predicted."""
    kinds = run.heads.get(f"regime{suffix}", pd.Series(dtype=object)).dropna().astype(str)
    counts = kinds[~kinds.isin(["", UNDEFINED])].value_counts()
    if not len(counts):
        return ""
    ranked = sorted(counts.items(), key=lambda item: (-item[1], str(item[0])))
    regimes = listed([f"{amount} {kind}" for kind, amount in ranked], limit=6)
    of = f"{matrix}, of {counted(len(run.heads), 'head')}"
    if (compared := regime_agreement(run, suffix)) is None:
        return f"Regimes predicted from {of}, not measured here: {regimes}."
    kappa, correlation = (with_error(estimate.value, estimate.error) for estimate in compared)
    numbers = f"κ {kappa}, where 0 is chance; rank correlation with the measured ρ {correlation}"
    agree, ranked_alike = (judge("", "", estimate, BY_CHANCE).answer == HOLDS for estimate in compared)
    if not agree:
        but = ", though they rank the heads above chance" if ranked_alike else ""
        return (
            f"The regimes that theory predicts from {matrix} are not those of this model's heads: their agreement with "
            f"the measured curves is not above chance{but} ({numbers})."
        )
    return f"Regimes predicted from {of}: {regimes}; they agree with the measured curves above chance ({numbers})."


def ranked_heads(run: Run, role: HeadRole) -> list[tuple[float, str]]:
    """List every head's score in a role, strongest first, with its name: (0.45, "L3H0 (0.45)")."""
    values = column(run.heads, role.column)
    if values is None:
        return []
    order, names = np.argsort(-np.nan_to_num(values, nan=-1.0), kind="stable"), head_labels(run)
    return [(float(values[i]), f"{names[i]} ({number(values[i], 2)})") for i in order]


def _heads_of(run: Run, role: HeadRole) -> list[str]:
    """Name the heads that have the role, strongest first, each with its score."""
    return [name for score, name in ranked_heads(run, role) if score >= role.threshold]


def _sinks(run: Run) -> Iterator[str]:
    total = counted(len(run.heads), "head")
    for role, sink in (
        (FIRST_TOKEN_SINK, "a first-token sink"),
        (LATER_SINK, "a later sink"),
        (END_TOKEN_SINK, "a sink at the special token that ends every context"),
    ):
        heads = _heads_of(run, role)
        where = f"{sink} in at least {percent(role.threshold)} of the contexts"
        if not heads:
            if role is not END_TOKEN_SINK and column(run.heads, role.column) is not None:
                yield f"No head has {where}."
            continue
        have = f"{counted(len(heads), 'head')} {'has' if len(heads) == 1 else 'have'}"
        if role is FIRST_TOKEN_SINK:
            have = f"{len(heads)} of {total} have"
        tokens = _later_tokens(run) if role is LATER_SINK else []
        often = f"; most often {listed(tokens, 3)}" if tokens else ""
        yield f"{have} {where}: {listed(heads)}{often}."
    if learned := _heads_of(run, LEARNED_SINK):
        least = number(LEARNED_SINK.threshold)
        yield f"A learned sink receives at least {least} of the attention of {listed(learned)}."


def _later_tokens(run: Run) -> list[str]:
    """List the three tokens past position 0 that were sinks most often, contexts summed over heads."""
    if run.sinks.empty:
        return []
    grid = grid_of(run)
    apart = grid.leading if grid else 0  # an image's tokens are their positions, its registers no patches
    later = run.sinks[~run.sinks["first"].astype(bool) & (run.sinks["token_id"] >= apart)]
    counts = later.groupby("token", sort=True)["contexts"].sum()
    ranked = sorted(counts.items(), key=lambda item: (-item[1], str(item[0])))
    return [f"‘{shown_token(token)}’" for token, _ in ranked[:3]]


def _outliers(run: Run) -> Iterator[str | Finding]:
    if not len(run.layers):
        return
    first = value_of(run, "massive_activations_first")
    affected = _layers(run)[np.nan_to_num(first) > 0]
    if len(affected):
        most = int(np.nanargmax(first))
        yield (
            f"Massive activations occur at the first token in {counted(len(affected), 'layer')} "
            f"({spans(affected.tolist())}), most in layer {_layers(run)[most]} ({number(first[most])})."
        )
    if (later := check(run, MASSIVE)) is not None:
        yield later
    if left_out := massive_line(run):
        yield left_out
    dimensions, shares = column(run.layers, "outlier_dimensions"), array(run, "outlier_share")
    if dimensions is None:
        return
    everywhere = dimensions > (provenance(run, "model", "width") or math.inf) / 2
    if everywhere.any():
        yield (
            f"In {counted(int(everywhere.sum()), 'layer')} ({spans(_layers(run)[everywhere].tolist())}) more than half "
            "of all dimensions pass the published |x| ≥ 6: the whole stream is that large, and these are no outliers."
        )
    among = np.where(everywhere, np.nan, dimensions)
    if not np.nansum(among):
        if not everywhere.any():
            yield "There are no outlier dimensions."
        return
    most = int(np.nanargmax(among))
    highest = ""
    if shares is not None:
        leading = np.argsort(-np.nan_to_num(shares[~everywhere]).max(axis=0), kind="stable")[:3]
        highest = f" The dimensions with the highest share of outliers: {listed(list(map(str, leading)))}."
    of_others = "Of the others, l" if everywhere.any() else "L"
    yield f"{of_others}ayer {_layers(run)[most]} has the most outlier dimensions: {int(among[most])}.{highest}"


def massive_line(run: Run) -> str:
    """Name the tokens after the first position that were left out for massive activations; empty where none was."""
    tokens = massive_tokens(run)
    if not len(tokens):
        return ""
    names = []
    for row in tokens.itertuples():
        layers = f"layer{'s' if len(row.layers) > 1 else ''} {spans(row.layers)}"
        names.append(f"‘{shown_token(row.token)}’ (context {row.context}, position {row.position}, {layers})")
    most = counted(int(np.nan_to_num(value_of(run, "massive_tokens")).max()), "token")
    return f"Left out of position and context for massive activations, at most {most} in a layer: {listed(names, 4)}."


def _heads(run: Run) -> Iterator[str]:
    for role in PATTERN_ROLES:
        if heads := _heads_of(run, role):
            yield f"{role.plural.capitalize()}: {listed(heads)}."
        elif ranked := ranked_heads(run, role):
            yield f"No {role.title} stands out; the strongest is {ranked[0][1]}."


def _constituents(run: Run) -> Iterator[str]:
    """Say what carries the logits over all heads, then for each pattern which head follows it most."""
    known = [name for name in SHARES if name in run.heads and run.heads[name].fillna(0).any()]
    shares = run.heads[known].rename(columns=SHARES).dropna()
    if not shares.empty:
        means = shares.mean().sort_values(ascending=False, kind="stable")
        leads = shares.idxmax(axis=1).value_counts(sort=False).reindex(shares.columns).dropna()
        leads = leads.sort_values(ascending=False, kind="stable").astype(int)
        parts = [f"{percent(mean)} {name}" for name, mean in means.items()]
        leading = [f"{name} in {counted(count, 'head')}" for name, count in leads.items()]
        every = counted(len(shares), "head")
        yield (
            f"On average over {every}, the logits' variance is {listed(parts, len(parts))} (mean and bias count with "
            f"the constituent on the other side); the largest share is {listed(leading, len(leading))}."
        )
    for name, pattern in ATTENTION_PATTERNS.items():
        if not (heads := attributed(run, name)):
            continue
        layer, head, score, uniform = heads[0].iloc[0][["layer", "head", "score", "uniform"]]
        label = head_name(int(layer), int(head))
        scores = f"{number(score, 2)}; uniform attention: {number(uniform, 2)}"
        yield "On random tokens, " + (
            f"no head attends strongly {pattern.target}; {label} has the highest score ({scores})."
            if score < SLIGHT or score <= uniform
            else f"{label} attends most {pattern.target} ({scores}): {_carried(heads[0], score, uniform)}."
        )


def _carried(rows: pd.DataFrame, score: float, uniform: float) -> str:
    disjoint = rows[rows["group"].isin((*DISJOINT, ADDITIVE))]  # the others are parts of these
    best = disjoint.sort_values("only", kind="stable").iloc[-1]
    group, only, without = str(best["group"]), float(best["only"]), float(best["without"])
    needed = RETAINED * (score - uniform)
    ablated = f"ablating it leaves {number(without, 2)}"
    if only - uniform < needed:
        clause = f"{group} retains most ({number(only, 2)})"
        return f"no group of constituents alone retains half of that; {clause}, and {ablated}"
    if without - uniform < needed:
        return f"{group} alone retains {number(only, 2)}; {ablated}"
    return f"{group} alone retains {number(only, 2)}, but {ablated}, so other groups carry it too"


def _pruning(run: Run) -> Iterator[str]:
    """Say what of the model a pruned one would miss."""
    if not len(run.layers):
        return
    first = np.nan_to_num(value_of(run, "massive_activations_first"))
    if (massive := _layers(run)[first > 0]).size and massive.min() > 0:
        begins, ends = int(massive.min()), int(massive.max())
        gone = f" and are gone behind block {ends}" if ends < blocks(run) else ""
        yield f"Massive activations of the first token appear behind block {begins - 1}, in layer {begins},{gone}."
    if later := _heads_of(run, LATER_SINK):
        have = f"{counted(len(later), 'head')} {'has' if len(later) == 1 else 'have'}"
        yield f"{have} sinks at later tokens, which may tag what follows: {listed(later)}. A trace shows the tags."
    if copying := _heads_of(run, INDUCTION):
        yield f"Induction heads, which continue what stood in the text before: {listed(copying)}."
    if (cosine := column(run.layers, "cosine_previous")) is not None:
        most = int(np.nanargmax(cosine))
        layer = _layers(run)[most]
        yield (
            f"Block {layer - 1} turns the hidden states least (cosine {number(cosine[most])} between what it reads and "
            f"layer {layer})."
        )


TOPICS: dict[str, tuple[str, Callable[[Run], Iterator[str | Finding]]]] = {
    "Position": ("position", _position),
    "Context": ("position", _context),
    "Localization": ("heads", _localization),
    "Sinks": ("sinks", _sinks),
    "Outliers": ("sinks", _outliers),
    "Heads": ("heads", _heads),
    "Constituents": ("heads", _constituents),
    "Pruning": ("pruning", _pruning),
}
"""Topics in reading order → the section of the page with their sentences, and what makes these."""
