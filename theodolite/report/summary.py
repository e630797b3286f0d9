"""What a run says, in sentences: position, context, localization, sinks, outliers, heads, constituents, health.

Every sentence is computed from the run's numbers and is left out where the run has none of them; every
threshold that turns a number into a word is a constant here. This module writes plain text only: no markup,
no figures.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pandas as pd

from theodolite.corpus.patches import grid_described
from theodolite.measure.constituents import ADDITIVE, DISJOINT
from theodolite.measure.head_roles import (
    ATTENTION_PATTERNS,
    END_TOKEN_SINK,
    FIRST_TOKEN_SINK,
    LATER_SINK,
    LEARNED_SINK,
    PATTERN_ROLES,
    RETAINED,
    SLIGHT,
    HeadRole,
)
from theodolite.passes.run import Run
from theodolite.report import health, published
from theodolite.report.data import (
    Floats,
    array,
    column,
    entropy_share,
    head_labels,
    layer_average,
    layer_mean,
    limit_of,
    provenance,
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
    with_error,
)
from theodolite.theory.regimes import UNDEFINED

Status = Literal["plain", "passed", "flagged"]

SMOOTH = 0.90  # share of the Gram matrix's energy in the 10 lowest frequencies; GPT-2 has 0.997
CLEAR_SEPARATION = 2.0  # similarity within labels over between; GPT-2 has 4.4
WEAK_SEPARATION = 1.2
NEARLY_ORTHOGONAL = 0.10  # mean |cosine| of position and context; GPT-2 has 0.051


@dataclass(frozen=True)
class Finding:
    """A sentence of one topic. `status`: of a health check, "passed" or "flagged"; of all else "plain"."""

    topic: str
    text: str
    status: Status = "plain"


def summarise(run: Run) -> list[Finding]:
    """The run in sentences, grouped by topic in reading order; health comes last.

    A run from weights alone gives localization and health only.
    """
    parts: tuple[tuple[str, Callable[[Run], list[str]]], ...] = (
        ("Position", _position),
        ("Context", _context),
        ("Localization", _localization),
        ("Sinks", _sinks),
        ("Outliers", _outliers),
        ("Heads", _heads),
        ("Constituents", _constituents),
    )
    findings = [Finding(topic, text) for topic, sentences in parts for text in sentences(run)]
    return findings + [
        Finding("Health", check.text, "flagged" if check.flagged else "passed")
        for check in health.checks(run)
    ]


def health_line(flagged: int, checks: int) -> str:
    """The outcome of the health checks in one sentence."""
    if not flagged:
        return "The health check passed." if checks == 1 else f"All {checks} health checks passed."
    return f"{flagged} of {counted(checks, 'health check')} flagged."


def _range(values: Floats, show: Callable[[float], str]) -> str:
    low, high = show(float(np.nanmin(values))), show(float(np.nanmax(values)))
    return low if low == high else f"{low} to {high}"


def _extremes(run: Run, values: Floats) -> tuple[int, int]:
    layers = run.layers["layer"].to_numpy(dtype=int)
    return int(layers[np.nanargmax(values)]), int(layers[np.nanargmin(values)])


def _mean(mean_and_error: tuple[float, float]) -> str:
    """A mean in two digits, or with its standard error where it has one."""
    mean, error = mean_and_error
    return with_error(mean, error) if error > 0 else number(mean, 2)


def _position(run: Run) -> list[str]:
    sentences = []
    norm, rank = column(run.layers, "relative_norm"), column(run.layers, "rank")
    model = published.closest(run)
    reference = published.AVERAGES[model]
    norm_mean, rank_mean = layer_mean(run, "relative_norm"), layer_mean(run, "rank")
    if norm is not None and norm_mean is not None:
        most, least = _extremes(run, norm)
        sentences.append(
            f"The relative norm of the positional basis is {percent_with_error(*norm_mean)} on average over layers, "
            f"highest in layer {most} ({percent(float(np.nanmax(norm)))}) and lowest in layer {least} "
            f"({percent(float(np.nanmin(norm)))}). Published for {model}: {percent(reference.relative_norm[0])}."
        )
    if rank is not None and rank_mean is not None:
        sentences.append(
            f"The mean rank of the positional basis is {_mean(rank_mean)} ({_range(rank, number)} by layer); "
            f"published for {model}: {reference.rank[0]:.1f}."
        )
    among = health.above_noise(run)
    smooth = layer_average(run, "low_frequency_10", among)[0]
    if math.isfinite(smooth.value):
        share = smooth.value
        word = (
            "smooth"
            if share >= SMOOTH
            else "only partly smooth"
            if share >= limit_of("layers", "low_frequency_10").limit
            else "not smooth"
        )
        where = "" if among.all() else " in the layers where the text's sampling noise is less than a tenth"
        sentences.append(
            f"The positional basis is {word}: the ten lowest frequencies{health.of_plane(run)} hold "
            f"{percent_with_error(smooth.value, smooth.error)} of the energy of its Gram matrix{where} "
            f"(GPT-2 {percent(published.LOW_FREQUENCY[10])}, a model trained on addition about "
            f"{percent(published.LOW_FREQUENCY_ADDITION)})."
        )
    return sentences


def _context(run: Run) -> list[str]:
    sentences = []
    within, between = layer_mean(run, "similarity_within"), layer_mean(run, "similarity_between")
    if within is not None and between is not None:
        ratio = within[0] / between[0] if between[0] > 0 else np.inf
        word = "clearly" if ratio >= CLEAR_SEPARATION else "weakly" if ratio >= WEAK_SEPARATION else "hardly"
        sentences.append(
            f"Contexts cluster {word} by label: the mean |cosine| of context vectors is {_mean(within)} within labels "
            f"and {_mean(between)} between labels."
        )
    elif column(run.layers, "relative_norm") is not None:
        sentences.append("The text has no labels, or only one, so clustering by topic cannot be assessed.")
    agreement, silhouette = layer_mean(run, "cluster_ari"), layer_mean(run, "silhouette")
    if agreement is not None and silhouette is not None:
        sentences.append(
            f"k-means recovers the labels with an adjusted Rand index of {_mean(agreement)} (1: perfect, 0: chance); "
            f"the mean silhouette of the labels is {_mean(silhouette)}."
        )
    mean, random = layer_mean(run, "incoherence_mean"), column(run.layers, "incoherence_random")
    if mean is not None:
        level = mean[0]
        near = level <= NEARLY_ORTHOGONAL or (random is not None and level <= 1.5 * float(np.nanmean(random)))
        word = (
            "nearly orthogonal"
            if near
            else "entangled"
            if level > limit_of("layers", "incoherence_mean").limit
            else "partly entangled"
        )
        chance = "" if random is None else f" (random directions: {number(float(np.nanmean(random)), 2)})"
        sentences.append(f"Position and context are {word}: mean |cosine| {_mean(mean)}{chance}.")
    return sentences


def _regimes(run: Run, name: str) -> str | None:
    if name not in run.heads.columns:
        return None
    kinds = run.heads[name].dropna().astype(str)
    kinds = kinds[(kinds.str.len() > 0) & (kinds != UNDEFINED)]
    if not len(kinds):
        return None
    counts = sorted(kinds.value_counts().items(), key=lambda item: (-item[1], str(item[0])))
    return listed([f"{amount} {kind}" for kind, amount in counts], limit=6)


def _localization(run: Run) -> list[str]:
    sentences = []
    total = counted(len(run.heads), "head")
    share, entropy = entropy_share(run), column(run.heads, "entropy")
    if share is not None and entropy is not None:
        names = head_labels(run)
        sharpest, widest = int(np.nanargmin(share)), int(np.nanargmax(share))
        sentences.append(
            f"Mean attention entropy is {percent(float(np.nanmean(share)))} of its maximum; the sharpest head is "
            f"{names[sharpest]} ({number(entropy[sharpest], 2)} nats), the most uniform {names[widest]} "
            f"({number(entropy[widest], 2)} nats, {percent(float(share[widest]))})."
        )
    for name, matrix in (("regime_data", "W_QK Σ̂"), ("regime", "W_QK alone")):
        regimes = _regimes(run, name)
        if regimes is not None:
            sentences.append(f"Regimes predicted from {matrix}, of {total}: {regimes}.")
    propagation = column(run.heads, "propagation")
    if propagation is not None:
        sentences.append(
            f"Measured signal propagation: {percent(float(np.nanmean(propagation)))} of the keys on average "
            f"({_range(propagation, percent)} by head)."
        )
    return sentences


def _heads_of(run: Run, role: HeadRole) -> list[str]:
    """Heads that have the role, strongest first, each with its score."""
    values = column(run.heads, role.column)
    if values is None:
        return []
    order = np.argsort(-np.nan_to_num(values, nan=-1.0), kind="stable")
    names = head_labels(run)
    return [f"{names[i]} ({number(values[i], 2)})" for i in order if values[i] >= role.threshold]


def _sinks(run: Run) -> list[str]:
    sentences = []
    total, least = counted(len(run.heads), "head"), percent(FIRST_TOKEN_SINK.threshold)
    if column(run.heads, FIRST_TOKEN_SINK.column) is not None:
        heads = _heads_of(run, FIRST_TOKEN_SINK)
        sentences.append(
            f"{len(heads)} of {total} have a first-token sink in at least {least} of the contexts: {listed(heads)}."
            if heads
            else f"No head has a first-token sink in at least {least} of the contexts."
        )
    if column(run.heads, LATER_SINK.column) is not None:
        heads, least = _heads_of(run, LATER_SINK), percent(LATER_SINK.threshold)
        if heads:
            tokens = _later_tokens(run)
            often = f"; most often {listed(tokens, 3)}" if tokens else ""
            have = "has" if len(heads) == 1 else "have"
            sentences.append(
                f"{counted(len(heads), 'head')} {have} a later sink in at least {least} of the contexts: "
                f"{listed(heads)}{often}."
            )
        else:
            sentences.append(f"No head has a later sink in at least {least} of the contexts.")
    at_end = _heads_of(run, END_TOKEN_SINK)
    if at_end:
        have = "has" if len(at_end) == 1 else "have"
        sentences.append(
            f"{counted(len(at_end), 'head')} {have} a sink at the special token that ends every context in at least "
            f"{percent(END_TOKEN_SINK.threshold)} of the contexts: {listed(at_end)}."
        )
    learned = _heads_of(run, LEARNED_SINK)
    if learned:
        sentences.append(
            f"A learned sink receives at least {number(LEARNED_SINK.threshold)} of the attention of {listed(learned)}."
        )
    return sentences


def _later_tokens(run: Run) -> list[str]:
    """The three tokens past position 0 that were sinks most often, contexts summed over heads."""
    if run.sinks is None or not len(run.sinks):
        return []
    grid = grid_described(provenance(run, "corpus") or {})
    apart = (
        grid.leading if grid else 0
    )  # an image's tokens are their positions, and its registers are no patches
    later = run.sinks[~run.sinks["first"].astype(bool) & (run.sinks["token_id"] >= apart)]
    counts = later.groupby("token", sort=True)["contexts"].sum()
    ranked = sorted(counts.items(), key=lambda item: (-item[1], str(item[0])))
    return [f"‘{shown_token(token)}’" for token, _ in ranked[:3]]


def _outliers(run: Run) -> list[str]:
    sentences = []
    massive = column(run.layers, "massive_activations")
    first = column(run.layers, "massive_activations_first")
    layers = (
        run.layers["layer"].to_numpy(dtype=int) if massive is not None or first is not None else np.array([])
    )
    for values, where in ((first, "at the first token"), (massive, "at later tokens")):
        if values is None:
            continue
        affected = layers[np.nan_to_num(values) > 0]
        if len(affected):
            sentences.append(
                f"Massive activations occur {where} in {counted(len(affected), 'layer')} "
                f"({_spans(affected.tolist())}), most in layer {int(layers[np.nanargmax(values)])} "
                f"({number(float(np.nanmax(values)))})."
            )
    if massive is not None and not sentences:
        sentences.append("There are no massive activations.")
    dimensions = column(run.layers, "outlier_dimensions")
    if dimensions is not None:
        most, _ = _extremes(run, dimensions)
        highest = float(np.nanmax(dimensions))
        sentences.append(
            f"Layer {most} has the most outlier dimensions: {int(highest)}."
            if highest
            else "There are no outlier dimensions."
        )
    shares = array(run, "outlier_share")
    if shares is not None and dimensions is not None and np.nanmax(dimensions) > 0:
        leading = np.argsort(-np.nan_to_num(shares).max(axis=0), kind="stable")[:3]
        sentences[-1] += (
            f" The dimensions with the highest share of outliers: {listed([str(int(i)) for i in leading])}."
        )
    return sentences


def _spans(numbers: list[int]) -> str:
    """`0–3, 7`: runs of neighbours written as ranges."""
    spans: list[list[int]] = []
    for value in sorted(numbers):
        if spans and value == spans[-1][-1] + 1:
            spans[-1].append(value)
        else:
            spans.append([value])
    return ", ".join(str(span[0]) if len(span) == 1 else f"{span[0]}–{span[-1]}" for span in spans)


def _heads(run: Run) -> list[str]:
    sentences = []
    for role in PATTERN_ROLES:
        values = column(run.heads, role.column)
        if values is None:
            continue
        heads = _heads_of(run, role)
        best = int(np.nanargmax(values))
        strongest = f"{head_labels(run)[best]} ({number(values[best], 2)})"
        sentences.append(
            f"{role.plural.capitalize()}: {listed(heads)}."
            if heads
            else f"No {role.title} stands out; the strongest is {strongest}."
        )
    return sentences


def _constituents(run: Run) -> list[str]:
    """What carries the logits over all heads, then one sentence a pattern on the head that follows it most."""
    sentences = [
        sentence for pattern in ATTENTION_PATTERNS if (sentence := _pattern(run, pattern)) is not None
    ]
    return _logit_shares(run) + sentences


def _logit_shares(run: Run) -> list[str]:
    known = [name for name in SHARES if name in run.heads and run.heads[name].fillna(0).any()]
    shares = run.heads[known].rename(columns=SHARES).dropna()
    if shares.empty:
        return []
    means = shares.mean().sort_values(ascending=False, kind="stable")
    leads = shares.idxmax(axis=1).value_counts(sort=False).reindex(shares.columns).dropna()
    leads = leads.sort_values(ascending=False, kind="stable").astype(int)
    parts = [f"{percent(mean)} {name}" for name, mean in means.items()]
    leading = [f"{name} in {counted(count, 'head')}" for name, count in leads.items()]
    every = counted(len(shares), "head")
    return [
        f"On average over {every}, the logits' variance is {listed(parts, len(parts))} (mean and bias count with the "
        f"constituent on the other side); the largest share is {listed(leading, len(leading))}."
    ]


def _pattern(run: Run, pattern: str) -> str | None:
    heads = attributed(run, pattern)
    if not heads:
        return None
    rows = heads[0]
    score, uniform = float(rows["score"].iloc[0]), float(rows["uniform"].iloc[0])
    name = head_name(int(rows["layer"].iloc[0]), int(rows["head"].iloc[0]))
    target = ATTENTION_PATTERNS[pattern].target
    scores = f"{number(score, 2)}; uniform attention: {number(uniform, 2)}"
    if score < SLIGHT or score <= uniform:
        return (
            f"On random tokens, no head attends strongly {target}; {name} has the highest score ({scores})."
        )
    return f"On random tokens, {name} attends most {target} ({scores}): {_carried(rows, score, uniform)}."


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
