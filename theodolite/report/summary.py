"""Summarise a run in sentences: position, context, localization, sinks, outliers, heads, constituents.

Every sentence is computed from the run's numbers and is left out where the run has none of them; every
threshold that turns a number into a word is a constant here. This module writes plain text only: no markup,
no figures.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import pandas as pd

from theodolite.estimates import Floats
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
    array,
    column,
    entropy_share,
    grid_of,
    head_labels,
    layer_average,
    layer_mean,
    limit_of,
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
    with_error,
)
from theodolite.theory.regimes import UNDEFINED

SMOOTH = 0.90  # share of the Gram matrix's energy in the 10 lowest frequencies; GPT-2 has 0.997
CLEAR_SEPARATION = 2.0  # similarity within labels over between; GPT-2 has 4.4
WEAK_SEPARATION = 1.2
NEARLY_ORTHOGONAL = 0.10  # mean |cosine| of position and context; GPT-2 has 0.051


def summarise(run: Run) -> dict[str, list[str]]:
    """Word the run's topics in sentences, in reading order, as far as it has numbers; weights alone: localization."""
    told = {topic: list(sentences(run)) for topic, sentences in TOPICS.items()}
    return {topic: sentences for topic, sentences in told.items() if sentences}


def _range(values: Floats, show: Callable[[float], str]) -> str:
    low, high = show(float(np.nanmin(values))), show(float(np.nanmax(values)))
    return low if low == high else f"{low} to {high}"


def _layers(run: Run) -> npt.NDArray[np.int_]:
    return run.layers["layer"].to_numpy(dtype=int)


def _mean(mean_and_error: tuple[float, float]) -> str:
    """Word a mean in two digits, or with its standard error where it has one."""
    mean, error = mean_and_error
    return with_error(mean, error) if error > 0 else number(mean, 2)


def _position(run: Run) -> Iterator[str]:
    model = published.closest(run)
    reference = published.AVERAGES[model]
    if (norm_mean := layer_mean(run, "relative_norm")) is not None:
        norm, layers = value_of(run, "relative_norm"), _layers(run)
        most, least = int(np.nanargmax(norm)), int(np.nanargmin(norm))
        yield (
            f"The relative norm of the positional basis is {percent_with_error(*norm_mean)} on average over layers, "
            f"highest in layer {layers[most]} ({percent(norm[most])}) and lowest in layer {layers[least]} "
            f"({percent(norm[least])}). Published for {model}: {percent(reference.relative_norm[0])}."
        )
    if (rank_mean := layer_mean(run, "rank")) is not None:
        by_layer = _range(value_of(run, "rank"), number)
        yield (
            f"The mean rank of the positional basis is {_mean(rank_mean)} ({by_layer} by layer); "
            f"published for {model}: {reference.rank[0]:.1f}."
        )
    among = health.above_noise(run)
    smooth = layer_average(run, "low_frequency_10", among)[0]
    if math.isfinite(smooth.value):
        partly = limit_of("layers", "low_frequency_10").limit
        word = "" if smooth.value >= SMOOTH else "only partly " if smooth.value >= partly else "not "
        where = "" if among.all() else " in the layers where the text's sampling noise is less than a tenth"
        yield (
            f"The positional basis is {word}smooth: the ten lowest frequencies{health.of_plane(run)} hold "
            f"{percent_with_error(smooth.value, smooth.error)} of the energy of its Gram matrix{where} "
            f"(GPT-2 {percent(published.LOW_FREQUENCY[10])}, a model trained on addition about "
            f"{percent(published.LOW_FREQUENCY_ADDITION)})."
        )


def _context(run: Run) -> Iterator[str]:
    within, between = layer_mean(run, "similarity_within"), layer_mean(run, "similarity_between")
    if within is not None and between is not None:
        ratio = within[0] / between[0] if between[0] > 0 else np.inf
        word = "clearly" if ratio >= CLEAR_SEPARATION else "weakly" if ratio >= WEAK_SEPARATION else "hardly"
        yield (
            f"Contexts cluster {word} by label: the mean |cosine| of context vectors is {_mean(within)} within labels "
            f"and {_mean(between)} between labels."
        )
    elif column(run.layers, "relative_norm") is not None:
        yield "The text has no labels, or only one, so clustering by topic cannot be assessed."
    agreement, silhouette = layer_mean(run, "cluster_ari"), layer_mean(run, "silhouette")
    if agreement is not None and silhouette is not None:
        yield (
            f"k-means recovers the labels with an adjusted Rand index of {_mean(agreement)} (1: perfect, 0: chance); "
            f"the mean silhouette of the labels is {_mean(silhouette)}."
        )
    if (mean := layer_mean(run, "incoherence_mean")) is not None:
        random = layer_mean(run, "incoherence_random")
        near = mean[0] <= max(NEARLY_ORTHOGONAL, 1.5 * random[0] if random else 0)
        entangled = mean[0] > limit_of("layers", "incoherence_mean").limit
        word = "nearly orthogonal" if near else "entangled" if entangled else "partly entangled"
        chance = f" (random directions: {number(random[0], 2)})" if random else ""
        yield f"Position and context are {word}: mean |cosine| {_mean(mean)}{chance}."


def _localization(run: Run) -> Iterator[str]:
    share, entropy = entropy_share(run), column(run.heads, "entropy")
    if share is not None and entropy is not None:
        names = head_labels(run)
        sharpest, widest = int(np.nanargmin(share)), int(np.nanargmax(share))
        yield (
            f"Mean attention entropy is {percent(float(np.nanmean(share)))} of its maximum; the sharpest head is "
            f"{names[sharpest]} ({number(entropy[sharpest], 2)} nats), the most uniform {names[widest]} "
            f"({number(entropy[widest], 2)} nats, {percent(float(share[widest]))})."
        )
    for name, matrix in (("regime_data", "W_QK Σ̂"), ("regime", "W_QK alone")):
        kinds = run.heads.get(name, pd.Series(dtype=object)).dropna().astype(str)
        counts = kinds[~kinds.isin(["", UNDEFINED])].value_counts()
        if len(counts):
            ranked = sorted(counts.items(), key=lambda item: (-item[1], str(item[0])))
            regimes = listed([f"{amount} {kind}" for kind, amount in ranked], limit=6)
            yield f"Regimes predicted from {matrix}, of {counted(len(run.heads), 'head')}: {regimes}."
    if (propagation := column(run.heads, "propagation")) is not None:
        yield (
            f"Measured signal propagation: {percent(float(np.nanmean(propagation)))} of the keys on average "
            f"({_range(propagation, percent)} by head)."
        )


def _heads_of(run: Run, role: HeadRole) -> list[str]:
    """List the heads that have the role, strongest first, each with its score."""
    values = column(run.heads, role.column)
    if values is None:
        return []
    order = np.argsort(-np.nan_to_num(values, nan=-1.0), kind="stable")
    names = head_labels(run)
    return [f"{names[i]} ({number(values[i], 2)})" for i in order if values[i] >= role.threshold]


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
    if run.sinks is None or not len(run.sinks):
        return []
    grid = grid_of(run)
    apart = grid.leading if grid else 0  # an image's tokens are their positions, its registers no patches
    later = run.sinks[~run.sinks["first"].astype(bool) & (run.sinks["token_id"] >= apart)]
    counts = later.groupby("token", sort=True)["contexts"].sum()
    ranked = sorted(counts.items(), key=lambda item: (-item[1], str(item[0])))
    return [f"‘{shown_token(token)}’" for token, _ in ranked[:3]]


def _outliers(run: Run) -> Iterator[str]:
    if not len(run.layers):
        return
    any_massive = False
    for name, where in (
        ("massive_activations_first", "at the first token"),
        ("massive_activations", "at later tokens"),
    ):
        values = value_of(run, name)
        affected = _layers(run)[np.nan_to_num(values) > 0]
        if len(affected):
            any_massive = True
            most = int(np.nanargmax(values))
            yield (
                f"Massive activations occur {where} in {counted(len(affected), 'layer')} "
                f"({_spans(affected.tolist())}), most in layer {_layers(run)[most]} ({number(values[most])})."
            )
    if column(run.layers, "massive_activations") is not None and not any_massive:
        yield "There are no massive activations."
    dimensions, shares = column(run.layers, "outlier_dimensions"), array(run, "outlier_share")
    if dimensions is None:
        return
    most = int(np.nanargmax(dimensions))
    if not dimensions[most]:
        yield "There are no outlier dimensions."
        return
    highest = ""
    if shares is not None:
        leading = np.argsort(-np.nan_to_num(shares).max(axis=0), kind="stable")[:3]
        highest = f" The dimensions with the highest share of outliers: {listed(list(map(str, leading)))}."
    yield f"Layer {_layers(run)[most]} has the most outlier dimensions: {int(dimensions[most])}.{highest}"


def _spans(numbers: list[int]) -> str:
    """Write runs of neighbours as ranges: `0–3, 7`."""
    spans: list[list[int]] = []
    for value in sorted(numbers):
        if spans and value == spans[-1][-1] + 1:
            spans[-1].append(value)
        else:
            spans.append([value])
    return ", ".join(str(span[0]) if len(span) == 1 else f"{span[0]}–{span[-1]}" for span in spans)


def _heads(run: Run) -> Iterator[str]:
    for role in PATTERN_ROLES:
        if (values := column(run.heads, role.column)) is None:
            continue
        best = int(np.nanargmax(values))
        strongest = f"{head_labels(run)[best]} ({number(values[best], 2)})"
        heads = _heads_of(run, role)
        yield (
            f"{role.plural.capitalize()}: {listed(heads)}."
            if heads
            else f"No {role.title} stands out; the strongest is {strongest}."
        )


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


TOPICS: dict[str, Callable[[Run], Iterator[str]]] = {
    "Position": _position,
    "Context": _context,
    "Localization": _localization,
    "Sinks": _sinks,
    "Outliers": _outliers,
    "Heads": _heads,
    "Constituents": _constituents,
}
"""What makes the sentences of each topic, in reading order."""
