"""What a run says, in sentences: position, context, localization, sinks, outliers, heads, constituents, health.

Every sentence is computed from the run's numbers and is left out where the run has none of them; every
threshold that turns a number into a word is a constant here. This module writes plain text only: no markup,
no figures.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from theodolite.measure.head_roles import FIRST_TOKEN_SINK, LATER_SINK, LEARNED_SINK, PATTERN_ROLES, HeadRole
from theodolite.report import health, published
from theodolite.report.data import (
    Floats,
    array,
    column,
    entropy_share,
    head_labels,
    layer_mean,
    provenance,
)
from theodolite.report.summary_constituents import constituents
from theodolite.system.wording import (
    counted,
    listed,
    number,
    percent,
    percent_with_error,
    token_text,
    with_error,
)
from theodolite.theory.regimes import UNDEFINED

if TYPE_CHECKING:
    from theodolite.passes.run import Run

Status = Literal["plain", "well", "look"]

SMOOTH = 0.90  # share of the Gram matrix's energy in the 10 lowest frequencies; GPT-2 has 0.997
ROUGH = 0.60  # below it the positional basis is not smooth; a model of additions has about 0.5
CLEAR_SEPARATION = 2.0  # similarity within labels over between; GPT-2 has 4.4
WEAK_SEPARATION = 1.2
NEARLY_ORTHOGONAL = 0.10  # mean |cosine| of position and context; GPT-2 has 0.051
ENTANGLED = 0.30


@dataclass(frozen=True)
class Finding:
    """A sentence of one topic. `status` "look" marks what deserves a look, "well" a check that passed."""

    topic: str
    text: str
    status: Status = "plain"


def summarise(run: Run) -> list[Finding]:
    """The run in sentences, grouped by topic in reading order; health comes last.

    A run from weights alone gives the topics that weights can tell: localization and health.
    """
    parts: tuple[tuple[str, Callable[[Run], list[str]]], ...] = (
        ("Position", _position),
        ("Context", _context),
        ("Localization", _localization),
        ("Sinks", _sinks),
        ("Outliers", _outliers),
        ("Heads", _heads),
        ("Constituents", constituents),
    )
    findings = [Finding(topic, text) for topic, tell in parts for text in tell(run)]
    return findings + [
        Finding("Health", check.text, "look" if check.concern else "well") for check in health.checks(run)
    ]


def health_line(concerns: int, checks: int) -> str:
    """The outcome of the checks of health in one sentence."""
    if not concerns:
        return f"Nothing looks unhealthy: {counted(checks, 'check')} passed."
    deserve = "deserves" if concerns == 1 else "deserve"
    return f"{concerns} of {counted(checks, 'check')} of health {deserve} a look."


def _range(values: Floats, show: Callable[[float], str]) -> str:
    low, high = show(float(np.nanmin(values))), show(float(np.nanmax(values)))
    return low if low == high else f"{low} to {high}"


def _extremes(run: Run, values: Floats) -> tuple[int, int]:
    layers = run.layers["layer"].to_numpy(dtype=int)
    return int(layers[np.nanargmax(values)]), int(layers[np.nanargmin(values)])


def _mean(found: tuple[float, float]) -> str:
    """A mean in two digits, or with its standard error where it has one."""
    mean, error = found
    return with_error(mean, error) if error > 0 else number(mean, 2)


def _position(run: Run) -> list[str]:
    told = []
    norm, rank = column(run.layers, "relative_norm"), column(run.layers, "rank")
    model = published.closest(provenance(run, "model", "family"), provenance(run, "model", "positions"))
    reference = published.AVERAGES[model]
    norm_mean, rank_mean = layer_mean(run, "relative_norm"), layer_mean(run, "rank")
    if norm is not None and norm_mean is not None:
        most, least = _extremes(run, norm)
        told.append(
            f"Position takes {percent_with_error(*norm_mean)} of the largest direction of the hidden "
            f"states on "
            f"average over layers: most in layer {most} ({percent(float(np.nanmax(norm)))}), least in layer "
            f"{least} "
            f"({percent(float(np.nanmin(norm)))}). Published for {model}: "
            f"{percent(reference.relative_norm[0])}."
        )
    if rank is not None and rank_mean is not None:
        told.append(
            f"It lives in about {_mean(rank_mean)} dimensions ({_range(rank, number)} by "
            f"layer), "
            f"against {reference.rank[0]:.1f} published for {model}."
        )
    smooth = layer_mean(run, "low_frequency_10")
    if smooth is not None:
        share = smooth[0]
        word = (
            "is smooth" if share >= SMOOTH else "is only partly smooth" if share >= ROUGH else "is not smooth"
        )
        told.append(
            f"Its shape {word}: the ten lowest frequencies hold {percent_with_error(*smooth)} of the energy of its "
            f"Gram matrix (GPT-2 {percent(published.LOW_FREQUENCY[10])}, a model of additions about "
            f"{percent(published.LOW_FREQUENCY_ADDITION)})."
        )
    return told


def _context(run: Run) -> list[str]:
    told = []
    within, between = layer_mean(run, "similarity_within"), layer_mean(run, "similarity_between")
    if within is not None and between is not None:
        ratio = within[0] / between[0] if between[0] > 0 else np.inf
        word = "clearly" if ratio >= CLEAR_SEPARATION else "weakly" if ratio >= WEAK_SEPARATION else "hardly"
        told.append(
            f"Contexts group {word} by label: two of one label are {_mean(within)} alike (mean "
            f"|cosine|), two of "
            f"different labels {_mean(between)}."
        )
    elif column(run.layers, "relative_norm") is not None:
        told.append("The text has no labels, or only one, so nothing can be said about topics.")
    agreement, silhouette = layer_mean(run, "cluster_ari"), layer_mean(run, "silhouette")
    if agreement is not None and silhouette is not None:
        told.append(
            f"k-means finds the labels again with an adjusted Rand index of {_mean(agreement)} (1: exactly, 0: as "
            f"by chance); their mean silhouette is {_mean(silhouette)}."
        )
    mean, random = layer_mean(run, "incoherence_mean"), column(run.layers, "incoherence_random")
    if mean is not None:
        level = mean[0]
        near = level <= NEARLY_ORTHOGONAL or (random is not None and level <= 1.5 * float(np.nanmean(random)))
        word = "nearly orthogonal" if near else "entangled" if level > ENTANGLED else "partly entangled"
        chance = (
            "" if random is None else f"; random directions would give {number(float(np.nanmean(random)), 2)}"
        )
        told.append(f"Position and context are {word}: mean |cosine| {_mean(mean)}{chance}.")
    return told


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
    told = []
    total = counted(len(run.heads), "head")
    share, entropy = entropy_share(run), column(run.heads, "entropy")
    if share is not None and entropy is not None:
        names = head_labels(run)
        sharpest, widest = int(np.nanargmin(share)), int(np.nanargmax(share))
        told.append(
            f"Attention is spread over {percent(float(np.nanmean(share)))} of the highest possible entropy "
            f"on average; "
            f"sharpest is {names[sharpest]} ({number(entropy[sharpest], 2)} nats), widest {names[widest]} "
            f"({number(entropy[widest], 2)} nats, {percent(float(share[widest]))})."
        )
    weights, data = _regimes(run, "regime"), _regimes(run, "regime_data")
    if data is not None:
        told.append(f"From W_QK and the covariance of this text, theory predicts of {total}: {data}.")
    if weights is not None:
        alone = "From W_QK alone" if data is not None else "From W_QK alone (no text was read)"
        told.append(
            f"{alone}, it would be {weights}."
            if data is not None
            else f"{alone}, theory predicts of {total}: {weights}."
        )
    reach = column(run.heads, "propagation")
    if reach is not None:
        told.append(
            f"Measured, the signal of {percent(float(np.nanmean(reach)))} of the keys gets through "
            f"({_range(reach, percent)} by head)."
        )
    return told


def _heads_of(run: Run, role: HeadRole) -> list[str]:
    """Heads that have the role, strongest first, each with its score."""
    values = column(run.heads, role.column)
    if values is None:
        return []
    order = np.argsort(-np.nan_to_num(values, nan=-1.0), kind="stable")
    names = head_labels(run)
    return [f"{names[i]} ({number(values[i], 2)})" for i in order if values[i] >= role.threshold]


def _sinks(run: Run) -> list[str]:
    told = []
    total, half = len(run.heads), percent(FIRST_TOKEN_SINK.threshold)
    if column(run.heads, "sink_first") is not None:
        first = _heads_of(run, FIRST_TOKEN_SINK)
        if first:
            told.append(
                f"{len(first)} of {counted(total, 'head')} use the first token as a sink in at least {half} "
                f"of the "
                f"contexts: {listed(first)}."
            )
        else:
            told.append(f"No head uses the first token as a sink in {half} or more of the contexts.")
    if column(run.heads, "sink_later") is not None:
        later = _heads_of(run, LATER_SINK)
        if later:
            tokens = _later_tokens(run)
            told.append(
                f"{counted(len(later), 'head')} {'makes' if len(later) == 1 else 'make'} a sink of a later "
                f"token in at "
                f"least {percent(LATER_SINK.threshold)} of the contexts: {listed(later)}"
                + (f"; most often {listed(tokens, 3)}." if tokens else ".")
            )
        else:
            told.append("Later tokens hardly ever become sinks.")
    learned = _heads_of(run, LEARNED_SINK)
    if learned:
        told.append(
            f"A learned sink takes more than {number(LEARNED_SINK.threshold)} of the attention of {listed(learned)}."
        )
    return told


def _later_tokens(run: Run) -> list[str]:
    """The three tokens past position 0 that were sinks most often, contexts summed over heads."""
    if run.sinks is None or not len(run.sinks):
        return []
    later = run.sinks[~run.sinks["first"].astype(bool)]
    counts = later.groupby("token", sort=True)["contexts"].sum()
    ranked = sorted(counts.items(), key=lambda item: (-item[1], str(item[0])))
    return [f"‘{token_text(token)}’" for token, _ in ranked[:3]]


def _outliers(run: Run) -> list[str]:
    told = []
    massive, first = (
        column(run.layers, "massive_activations"),
        column(run.layers, "massive_activations_first"),
    )
    layers = (
        run.layers["layer"].to_numpy(dtype=int) if massive is not None or first is not None else np.array([])
    )
    for values, where in ((first, "at the first token"), (massive, "at later tokens")):
        if values is None:
            continue
        have = layers[np.nan_to_num(values) > 0]
        if len(have):
            told.append(
                f"Massive activations stand {where} in {counted(len(have), 'layer')} "
                f"({_spans(have.tolist())}), most "
                f"in layer {int(layers[np.nanargmax(values)])} ({number(float(np.nanmax(values)))})."
            )
    if massive is not None and not told:
        told.append("There are no massive activations.")
    dimensions = column(run.layers, "outlier_dimensions")
    if dimensions is not None:
        most, _ = _extremes(run, dimensions)
        highest = float(np.nanmax(dimensions))
        told.append(
            f"At most {counted(int(highest), 'feature dimension')} (layer {most}) "
            f"{'is' if highest == 1 else 'are'} an outlier."
            if highest
            else "No feature dimension is an outlier."
        )
    shares = array(run, "outlier_share")
    if shares is not None and dimensions is not None and np.nanmax(dimensions) > 0:
        leading = np.argsort(-np.nan_to_num(shares).max(axis=0), kind="stable")[:3]
        told[-1] += f" The most persistent: {listed([str(int(i)) for i in leading])}."
    return told


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
    told = []
    for role in PATTERN_ROLES:
        values = column(run.heads, role.column)
        if values is None:
            continue
        heads = _heads_of(run, role)
        best = int(np.nanargmax(values))
        strongest = f"{head_labels(run)[best]} ({number(values[best], 2)})"
        told.append(
            f"{role.plural.capitalize()}: {listed(heads)}."
            if heads
            else f"No {role.title} stands out; the strongest is {strongest}."
        )
    return told
