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
from theodolite.report import findings, health, published
from theodolite.report.data import (
    AT_FLOOR,
    array,
    at_floor,
    column,
    entropy_share,
    grid_of,
    head_labels,
    layer_mean,
    massive_tokens,
    provenance,
    value_of,
)
from theodolite.report.drawing.constituents import SHARES, attributed
from theodolite.report.findings import Finding
from theodolite.system.wording import (
    counted,
    head_name,
    listed,
    number,
    percent,
    percent_with_error,
    shown_token,
    spans,
    with_error,
)
from theodolite.theory.regimes import UNDEFINED


def summarise(run: Run) -> dict[str, list[Finding]]:
    """Word the run's topics in sentences, in reading order, as far as it has numbers; weights alone: localization."""
    told = {topic: list(map(_finding, sentences(run))) for topic, sentences in TOPICS.items()}
    return {topic: sentences for topic, sentences in told.items() if sentences}


def _finding(sentence: str | Finding) -> Finding:
    return Finding(sentence) if isinstance(sentence, str) else sentence


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
    if (smooth := health.check(run, findings.SMOOTHNESS)) is not None:
        yield smooth
        if layer_mean(run, "low_frequency_10") is not None:
            yield (
                f"The published share is {percent(published.LOW_FREQUENCY[10])} for GPT-2, and about "
                f"{percent(published.LOW_FREQUENCY_ADDITION)} for a model trained on addition."
            )


def _context(run: Run) -> Iterator[str | Finding]:
    within, between = layer_mean(run, "similarity_within"), layer_mean(run, "similarity_between")
    if (
        clusters := findings.of_layers(run, findings.CLUSTERS, "cluster_ari", findings.CLUSTERED)
    ) is not None:
        estimate = clusters.estimate.value, clusters.estimate.error
        yield clusters.finding(
            "Contexts cluster clearly by label",
            "Contexts do not cluster clearly by label",
            "Whether contexts cluster clearly by label",
            f"k-means finds the labels with an adjusted Rand index of {_mean(estimate)} (1: perfect, 0: chance)",
        )
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
    if (entangled := health.check(run, findings.ENTANGLEMENT)) is not None:
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
    agreement = findings.regime_agreement(run, suffix)
    ranked = sorted(counts.items(), key=lambda item: (-item[1], str(item[0])))
    regimes = listed([f"{amount} {kind}" for kind, amount in ranked], limit=6)
    of = f"{matrix}, of {counted(len(run.heads), 'head')}"
    if agreement is None:
        return f"Regimes predicted from {of}, not measured here: {regimes}."
    if not agreement.holds:
        return (
            f"The regimes that theory predicts from {matrix} are not those of this model's heads: their agreement with "
            f"the measured curves is not above chance ({agreement})."
        )
    return f"Regimes predicted from {of}: {regimes}; they agree with the measured curves above chance ({agreement})."


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
    if (later := health.check(run, findings.MASSIVE)) is not None:
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
    yield f"Layer {_layers(run)[most]} has the most outlier dimensions: {int(among[most])}.{highest}"


def massive_line(run: Run) -> str:
    """Name the tokens after the first position that were left out for massive activations; empty where none was."""
    tokens = massive_tokens(run)
    if not len(tokens):
        return ""
    names = []
    for row in tokens.itertuples():
        layers = f"layer{'s' if len(row.layers) > 1 else ''} {spans(row.layers)}"
        names.append(f"‘{shown_token(row.token)}’ (context {row.context}, position {row.position}, {layers})")
    return f"Left out of all other numbers for their massive activations: {listed(names, 4)}."


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


TOPICS: dict[str, Callable[[Run], Iterator[str | Finding]]] = {
    "Position": _position,
    "Context": _context,
    "Localization": _localization,
    "Sinks": _sinks,
    "Outliers": _outliers,
    "Heads": _heads,
    "Constituents": _constituents,
}
"""What makes the sentences of each topic, in reading order."""
