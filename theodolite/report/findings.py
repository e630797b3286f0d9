"""What the page says of a run: findings, which are sentences with the quantity that each is about; plain text only.

Two findings about one quantity must not disagree: it is judged by one number and one limit, which its column
declares. A mean over layers passes only where it is clear of its limit by its standard error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from theodolite.estimates import Floats
from theodolite.judging import FAILS, HOLDS, UNDECIDED, Answer, Criterion, contexts_needed, judge
from theodolite.measure import head_roles
from theodolite.measure.column import Column, declared
from theodolite.measure.constituents import ADDITIVE, DISJOINT
from theodolite.passes.run import Run
from theodolite.report import data
from theodolite.report.drawing.constituents import SHARES
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
from theodolite.theory.regimes import UNDEFINED

CLUSTERED = Criterion("at least", 0.5, "adjusted Rand index: k-means finds most of the labels")
ENTROPY_COLLAPSE = Criterion(
    "less than", 0.05, "share of the maximum entropy: a head attends to a single key"
)
DEAD_SHARE = Criterion("at most", 1e-4, "‖W_QK‖²_F over the model's median: a head is as good as zero")
UNKNOWN = Criterion("at least", 0.05, "share of unknown tokens: another language or script than the model's")
REASON = 160  # characters of a reason that are shown
# Quantities that are judged in more than one place.
POSITIONS, SMOOTHNESS, ENTANGLEMENT, CLUSTERS = "positions", "smoothness", "entanglement", "clusters"
MASSIVE = "massive activations"
MOST = 5  # sentences that a reader should know first: of these topics where less is unusual
USUAL = ("Sinks", "Heads", "Outliers", "Context", "Constituents", "Localization")


class Finding(NamedTuple):
    """A sentence, the quantity that it is `about` (empty: it only gives numbers), and its `answer` to what is asked.

    Of a health check HOLDS is passed, FAILS flagged, and UNDECIDED neither: not decided, or not judged at all.
    """

    text: str
    about: str = ""
    answer: Answer | Literal[""] = ""


Judged = tuple[str, Answer] | None  # what a check says, and its answer; None: not for this run


def of_layers(
    run: Run,
    name: str,
    claims: tuple[str, str, str],
    mean: str,
    show: Callable[[float, float], str] = with_error,
    criterion: Criterion | None = None,
) -> Judged:
    """Judge the mean of a column over the layers that have it, by what is healthy; None where no layer has.

    `claims`: what holds, what fails, and what is open, a clause that begins with "Whether". `mean`: its words, {} the
    number as `show` shows it.
    """
    known, hidden = np.isfinite(data.value_of(run, name)), int(data.at_floor(run, name).sum())
    holds, fails, whether = claims
    if not known.any():
        text = f"{whether} is not judged: it is {data.AT_FLOOR} in every layer."
        return (text, UNDECIDED) if hidden else None
    estimate, _ = data.layer_average(run, name)
    verdict = judge("", "", estimate, criterion or data.limit_of("layers", name))
    if verdict.answer != UNDECIDED:
        claim = holds if verdict.answer == HOLDS else fails
    elif math.isnan(estimate.margin):
        claim = f"{whether} is not decided, since its standard error is not known"
    else:
        unknown = "it is within an error of its limit, and how many contexts would is not known"
        needed = contexts_needed(verdict, data.provenance(run, "corpus", "contexts") or 0)
        claim = f"{whether} is not decided; {needed or unknown}"
    is_noise = estimate.value < 0 and declared("layers")[name].range[0] == 0
    shown = mean.format(data.AT_FLOOR if is_noise else show(estimate.value, estimate.error))
    layers = f"mean of {counted(int(known.sum()), 'layer')}; in {hidden} of all it is {data.AT_FLOOR}"
    return f"{claim}: {shown}{f' ({layers})' if hidden else ''}.", verdict.answer


def in_a_line(checks: Sequence[Finding]) -> str:
    """Say the outcome of all checks in one sentence."""
    flagged, undecided = (sum(check.answer == answer for check in checks) for answer in (FAILS, UNDECIDED))
    amounts = [(flagged, "flagged"), (undecided, "not decided")]
    first, *others = [f"{amount} {outcome}" for amount, outcome in amounts if amount] or [""]
    if not first:
        return "The health check passed." if len(checks) == 1 else f"All {len(checks)} health checks passed."
    first = first.replace(" ", f" of {counted(len(checks), 'health check')} ", 1)
    return ", ".join([first, *others]) + "."


def checks(run: Run) -> list[Finding]:
    """Run every check that the run's numbers allow, those of a caller's own columns last."""
    own = [column for table in ("layers", "heads") for column in data.caller_columns(run, table)]
    outcomes = [_found(about, judged(run)) for about, (_, judged) in CHECKS.items()]
    outcomes += [_found(column.name, _own(column, run)) for column in own]
    return [finding for found in outcomes for finding in found]


def _found(about: str, outcome: Judged) -> list[Finding]:
    """Make the finding of a check; empty where it is not for this run."""
    return [] if outcome is None else [Finding(outcome[0], about, outcome[1])]


def _own(measure: Column, run: Run) -> Judged:
    """Run the check that a caller's column declares."""
    values, healthy = data.column(getattr(run, measure.table), measure.name), measure.healthy
    if values is None or healthy is None:
        return None
    title, limit = visible(measure.title), f"{healthy.side} {number(healthy.limit)}"
    if not (unhealthy := _unhealthy(healthy, values)).any():
        return f"{title} is {limit} in all {measure.table}.", HOLDS
    named = _named_layers if measure.table == "layers" else _named
    return f"{title} is not {limit} in {named(run, unhealthy)}: {visible(healthy.source, REASON)}.", FAILS


def _unhealthy(healthy: Criterion, values: Floats) -> npt.NDArray[np.bool_]:
    """Mark the known values that do not meet what those of a healthy model do."""
    return np.isfinite(values) & ~healthy.met(values)


def _named(run: Run, flags: npt.NDArray[np.bool_]) -> str:
    return listed([name for name, flag in zip(data.head_labels(run), flags, strict=True) if flag])


def _named_layers(run: Run, flags: npt.NDArray[np.bool_]) -> str:
    return listed([f"layer {layer}" for layer in _layers(run)[flags]])


def _have(count: int) -> str:
    return f"{counted(count, 'head')} {'has' if count == 1 else 'have'}"


def _rank_collapse(run: Run) -> Judged:
    if (residual := data.column(run.layers, "rank_collapse")) is None:
        return None
    lowest, healthy = int(np.nanargmin(residual)), data.limit_of("layers", "rank_collapse")
    least, low = number(residual[lowest], 2), _unhealthy(healthy, residual)
    if low.any():
        layers, limits = _named_layers(run, low), f"(residual below {healthy.limit:g}; lowest {least})"
        return f"Rank collapse: in {layers} all tokens are nearly the same vector {limits}.", FAILS
    return f"No rank collapse: the residual stays at or above {least} (layer {_layers(run)[lowest]}).", HOLDS


def _entropy_collapse(run: Run) -> Judged:
    if (share := data.entropy_share(run)) is None:
        return None
    low, limit = ENTROPY_COLLAPSE.met(share), percent(ENTROPY_COLLAPSE.limit)
    if not low.any():
        return f"No entropy collapse: every head has at least {limit} of the maximum entropy.", HOLDS
    explained = np.zeros(len(share), dtype=bool)
    for role in (*head_roles.PATTERN_ROLES, *head_roles.SINK_ROLES):
        if (values := data.column(run.heads, role.column)) is not None:
            explained |= low & (values >= role.explains_low_entropy)
    text = f"{_have(int(low.sum()))} less than {limit} of the maximum entropy: {_named(run, low)}."
    unexplained = low & ~explained
    if not unexplained.any():
        return f"{text} All are first-token sink heads or have one fixed role, as is common.", HOLDS
    if explained.any():
        text += f" Neither a first-token sink nor a fixed role explains {_named(run, unexplained)}."
    return f"Entropy collapse: {text}", FAILS


def _vanishing(run: Run) -> Judged:
    propagation, healthy = data.column(run.heads, "propagation"), data.limit_of("heads", "propagation")
    if propagation is None:
        return None
    if (vanished := _unhealthy(healthy, propagation)).any():
        keys = f"fewer than {percent(healthy.limit)} of the keys propagate"
        heads = counted(int(vanished.sum()), "head")
        return f"Vanishing signal: {keys} in {heads}: {_named(run, vanished)}.", FAILS
    lowest = percent(float(np.nanmin(propagation)))
    return f"No vanishing signal: at least {lowest} of the keys propagate in every head.", HOLDS


def _dead_heads(run: Run) -> Judged:
    if (size := data.column(run.heads, "frobenius_squared")) is None:
        return None
    zero, share = DEAD_SHARE.met(size / (float(np.nanmedian(size)) or 1.0)), data.entropy_share(run)
    uniform = ~zero & (share is not None and share >= head_roles.UNIFORM_ATTENTION.threshold)
    causes = (("W_QK is numerically zero", zero), ("attention is uniform", uniform))
    if dead := [f"{cause} in {_named(run, flags)}" for cause, flags in causes if flags.any()]:
        return f"Dead heads: {'; '.join(dead)}.", FAILS
    return "No dead heads: no W_QK is negligible compared with the others.", HOLDS


def _not_decomposed(run: Run) -> Judged:
    if not (refused := data.provenance(run, "constituents_refused")):
        return None
    layers = listed([f"layer {visible(layer)}" for layer in refused])
    reason = visible(next(iter(refused.values())), REASON)
    return f"Logits could not be decomposed in {layers}: {reason}.", FAILS


def _massive(run: Run) -> Judged:
    if (later := data.column(run.layers, "massive_activations")) is None:
        return None
    affected = _layers(run)[_unhealthy(data.limit_of("layers", "massive_activations"), later)]
    if not len(affected):
        return "No massive activations after the first token.", HOLDS
    where = f"in {counted(len(affected), 'layer')} (first in layer {affected.min()})"
    harm = "common in large models, harmful to low-precision formats"
    return f"Later tokens have massive activations {where}: {harm}.", FAILS


def _positional(run: Run) -> Judged:
    """Check whether the positional basis is more than noise; without that and smoothness, weights look random."""
    claims = "Positions are encoded", "Positions are not encoded", "Whether positions are encoded"
    rank, values = "mean rank of the positional basis {}", data.array(run, "singular_values")
    encoded, smooth = of_layers(run, "rank", claims, rank), _smooth(run)
    if encoded is None or values is None or values.shape[1] < 12:  # ScreeNOT's noise level is unknown
        return None
    if encoded[1] != HOLDS and smooth and smooth[1] == FAILS:
        beyond = f"beyond noise: {rank.format(data.layer_average(run, 'rank')[0])}, and it is rough"
        return f"No positional structure {beyond}. The model looks untrained.", FAILS
    return encoded


def _smooth(run: Run) -> Judged:
    grid = data.grid_of(run)
    if grid and min(grid.rows, grid.columns) <= 10:  # ten frequencies are all of them
        return None
    of_plane = " of rows and of columns" if grid else ""
    share = f"the ten lowest frequencies{of_plane} hold {{}} of the energy of its Gram matrix"
    claims = (
        "The positional basis is smooth",
        "The positional basis is rough, and neighbouring positions have unrelated vectors",
        "Whether the positional basis is smooth",
    )
    return of_layers(run, "pp_low_frequency_10", claims, share, percent_with_error)


def _entangled(run: Run) -> Judged:
    claims = (
        "Position and context are not entangled",
        "Position and context are entangled",
        "Whether position and context are entangled",
    )
    return of_layers(run, "incoherence_mean", claims, "root mean square cosine {}")


def _unknown_tokens(run: Run) -> Judged:
    counts = data.provenance(run, "counts") or {}
    unknown, tokens = counts.get("unknown_tokens"), counts.get("tokens")
    if not tokens or not unknown or not UNKNOWN.met(unknown / tokens):
        return None
    reason = "the text may be in a language or script that the model does not know"
    return f"{percent(unknown / tokens)} of the tokens are unknown to the tokenizer: {reason}.", FAILS


CHECKS: dict[str, tuple[str, Callable[[Run], Judged]]] = {
    "rank collapse": ("pruning", _rank_collapse),
    "entropy collapse": ("heads", _entropy_collapse),
    "signal propagation": ("heads", _vanishing),
    "dead heads": ("heads", _dead_heads),
    MASSIVE: ("sinks", _massive),
    POSITIONS: ("position", _positional),
    SMOOTHNESS: ("position", _smooth),
    ENTANGLEMENT: ("position", _entangled),
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


def _mean(mean: float, error: float) -> str:
    """Word a mean in two digits, or with its standard error where it has one."""
    return with_error(mean, error) if error > 0 else number(mean, 2)


def _position(run: Run) -> Iterator[str | Finding]:
    model = data.closest(run)
    reference = data.AVERAGES[model]
    if (norm_mean := data.layer_mean(run, "relative_norm")) is not None:
        norm, layers = data.value_of(run, "relative_norm"), _layers(run)
        most, least = int(np.nanargmax(norm)), int(np.nanargmin(norm))
        lowest = f"lowest in layer {layers[least]} ({percent(norm[least])})"
        if hidden := layers[data.at_floor(run, "relative_norm")].tolist():
            lowest = f"{data.AT_FLOOR} in {counted(len(hidden), 'layer')} ({spans(hidden)})"
        yield (
            f"The relative norm of the positional basis is {percent_with_error(*norm_mean)} on average over layers, "
            f"highest in layer {layers[most]} ({percent(norm[most])}) and {lowest}. "
            f"Published for {model}: {percent(reference.relative_norm[0])}."
        )
    if (rank_mean := data.layer_mean(run, "rank")) is not None:
        by_layer = _range(data.value_of(run, "rank"), number)
        screenot = data.layer_mean(run, "rank_screenot")
        as_published = f" {_mean(*screenot)} here," if screenot else ""
        yield (
            f"{_mean(*rank_mean)} directions of the positional basis replicate in contexts left out, on average "
            f"({by_layer} by layer). Its rank as published (ScreeNOT):{as_published} {reference.rank[0]:.1f} for "
            f"{model}."
        )
    yield from _found(SMOOTHNESS, _smooth(run))


def _context(run: Run) -> Iterator[str | Finding]:
    within, between = data.layer_mean(run, "similarity_within"), data.layer_mean(run, "similarity_between")
    claims = (
        "Contexts cluster clearly by label",
        "Contexts do not cluster clearly by label",
        "Whether contexts cluster clearly by label",
    )
    index = "k-means finds the labels with an adjusted Rand index of {} (1: perfect, 0: chance)"
    clusters = of_layers(run, "cluster_ari", claims, index, _mean, CLUSTERED)
    yield from _found(CLUSTERS, clusters)
    if not clusters and within is None and data.column(run.layers, "relative_norm") is not None:
        yield "The text has no labels, or only one, so clustering by topic cannot be assessed."
    if within is not None and between is not None:
        any_labels = data.layer_mean(run, "similarity_random")
        yield (
            f"The root mean square cosine of context vectors is {_mean(*within)} within labels and {_mean(*between)} "
            f"between labels{f' ({_mean(*any_labels)} whatever the labels)' if any_labels else ''}."
        )
    for entangled in _found(ENTANGLEMENT, _entangled(run)):
        yield entangled
        if (random := data.layer_mean(run, "incoherence_random")) is not None:
            yield f"Random directions of the same covariance have {number(random[0], 2)}."


def _localization(run: Run) -> Iterator[str | Finding]:
    share, entropy = data.entropy_share(run), data.column(run.heads, "entropy")
    if share is not None and entropy is not None:
        names = data.head_labels(run)
        sharpest, widest = int(np.nanargmin(share)), int(np.nanargmax(share))
        yield (
            f"Mean attention entropy is {percent(float(np.nanmean(share)))} of its maximum; the sharpest head is "
            f"{names[sharpest]} ({number(entropy[sharpest], 2)} nats), the most uniform {names[widest]} "
            f"({number(entropy[widest], 2)} nats, {percent(float(share[widest]))})."
        )
    if (propagation := data.column(run.heads, "propagation")) is not None:
        mean = percent(float(np.nanmean(propagation)))
        yield (
            f"For the last query, {mean} of the keys receive gradient on average "
            f"({_range(propagation, percent)} by head)."
        )
        return
    kinds = run.heads.get("regime", pd.Series(dtype=object)).dropna().astype(str)
    counts = _descending(kinds[~kinds.isin(["", UNDEFINED])].value_counts().sort_index())
    if len(counts):
        regimes = listed([f"{amount} {kind}" for kind, amount in counts.items()], limit=6)
        yield f"Regimes predicted from W_QK alone, of {counted(len(run.heads), 'head')}, not measured: {regimes}."


def _descending(values: pd.Series) -> pd.Series:
    return values.sort_values(ascending=False, kind="stable")


def _heads_of(run: Run, role: head_roles.HeadRole, least: float | None = None) -> list[str]:
    """Name the heads that have the role (or a score of `least`), strongest first, with their scores: `L3H0 (0.45)`."""
    if (values := data.column(run.heads, role.column)) is None:
        return []
    order, names = np.argsort(-np.nan_to_num(values, nan=-1.0), kind="stable"), data.head_labels(run)
    has = values >= (role.threshold if least is None else least)
    return [f"{names[i]} ({number(values[i], 2)})" for i in order if has[i]]


def _sinks(run: Run) -> Iterator[str]:
    for role, sink in (
        (head_roles.FIRST_TOKEN_SINK, "a first-token sink"),
        (head_roles.LATER_SINK, "a later sink"),
        (head_roles.END_TOKEN_SINK, "a sink at the special token that ends every context"),
    ):
        heads = _heads_of(run, role)
        where = f"{sink} in at least {percent(role.threshold)} of the contexts"
        if not heads:
            if role is not head_roles.END_TOKEN_SINK and data.column(run.heads, role.column) is not None:
                yield f"No head has {where}."
            continue
        have = _have(len(heads))
        if role is head_roles.FIRST_TOKEN_SINK:
            have = f"{len(heads)} of {counted(len(run.heads), 'head')} have"
        tokens = _later_tokens(run) if role is head_roles.LATER_SINK else []
        often = f"; most often {listed(tokens, 3)}" if tokens else ""
        yield f"{have} {where}: {listed(heads)}{often}."
    if learned := _heads_of(run, head_roles.LEARNED_SINK):
        least = number(head_roles.LEARNED_SINK.threshold)
        yield f"A learned sink receives at least {least} of the attention of {listed(learned)}."


def _later_tokens(run: Run) -> list[str]:
    """List the three tokens past position 0 that were sinks most often, contexts summed over heads."""
    if run.sinks.empty:
        return []
    grid = data.grid_of(run)
    apart = grid.leading if grid else 0  # an image's tokens are their positions, its registers no patches
    later = run.sinks[~run.sinks["first"].astype(bool) & (run.sinks["token_id"] >= apart)]
    counts = later.groupby(later["token"].map(str), sort=True)["contexts"].sum()
    return [f"‘{shown_token(token)}’" for token in _descending(counts)[:3].index]


def _outliers(run: Run) -> Iterator[str | Finding]:
    if not len(run.layers):
        return
    first, layers = data.value_of(run, "massive_activations_first"), _layers(run)
    if affected := layers[np.nan_to_num(first) > 0].tolist():
        most = int(np.nanargmax(first))
        yield (
            f"The first token has massive activations in {counted(len(affected), 'layer')} ({spans(affected)}), most "
            f"in layer {layers[most]} ({number(first[most])})."
        )
    yield from _found(MASSIVE, _massive(run))
    if left_out := massive_line(run):
        yield left_out
    if (dimensions := data.column(run.layers, "outlier_dimensions")) is None:
        return
    everywhere = dimensions > (data.provenance(run, "model", "width") or math.inf) / 2
    if most_of_all := layers[everywhere].tolist():
        yield (
            f"In {counted(len(most_of_all), 'layer')} ({spans(most_of_all)}) more than half of all dimensions pass the "
            "published |x| ≥ 6: the whole stream is that large, and these are no outliers."
        )
    among = np.where(everywhere, 0, np.nan_to_num(dimensions))
    if among.any():
        of_others, most = "Of the others, l" if most_of_all else "L", int(among.argmax())
        yield f"{of_others}ayer {layers[most]} has the most outlier dimensions: {int(among[most])}."
    elif not most_of_all:
        yield "There are no outlier dimensions."


def massive_line(run: Run) -> str:
    """Name the tokens after the first position that were left out for massive activations; empty where none was."""
    names = []
    for row in data.massive_tokens(run).itertuples():
        layers = f"layer{'s' if len(row.layers) > 1 else ''} {spans(row.layers)}"
        names.append(f"‘{shown_token(row.token)}’ (context {row.context}, position {row.position}, {layers})")
    if not names:
        return ""
    most = counted(int(np.nan_to_num(data.value_of(run, "massive_tokens")).max()), "token")
    why = "for massive activations, and behind them until these have faded"
    return f"Left out of position and context {why}, at most {most} in a layer: {listed(names, 4)}."


def _heads(run: Run) -> Iterator[str]:
    for role in head_roles.PATTERN_ROLES:
        if heads := _heads_of(run, role):
            yield f"{role.title.capitalize()}s: {listed(heads)}."
        elif ranked := _heads_of(run, role, -math.inf):
            yield f"No {role.title} stands out; the strongest is {ranked[0]}."


def _constituents(run: Run) -> Iterator[str]:
    """Say what carries the logits over all heads, then for each pattern which head follows it most."""
    known = [name for name in SHARES if name in run.heads and run.heads[name].fillna(0).any()]
    shares = run.heads[known].rename(columns=SHARES).dropna()
    if not shares.empty:
        leads = shares.idxmax(axis=1).value_counts(sort=False).reindex(shares.columns).dropna()
        leads = _descending(leads).astype(int)
        parts = [f"{percent(mean)} {name}" for name, mean in _descending(shares.mean()).items()]
        leading = [f"{name} in {counted(count, 'head')}" for name, count in leads.items()]
        every = counted(len(shares), "head")
        yield (
            f"On average over {every}, the logits' variance is {listed(parts, len(parts))} (mean and bias count with "
            f"the constituent on the other side); the largest share is {listed(leading, len(leading))}."
        )
    for name, pattern in head_roles.ATTENTION_PATTERNS.items():
        if not (heads := data.attributed(run, name)):
            continue
        layer, head, score, uniform = heads[0].iloc[0][["layer", "head", "score", "uniform"]]
        label = head_name(int(layer), int(head))
        scores = f"{number(score, 2)}; uniform attention: {number(uniform, 2)}"
        if score < head_roles.SLIGHT or score <= uniform:
            none = f"no head attends strongly {pattern.target}"
            yield f"On random tokens, {none}; {label} has the highest score ({scores})."
            continue
        disjoint = heads[0][heads[0]["group"].isin((*DISJOINT, ADDITIVE))]  # the others are parts of these
        best = disjoint.sort_values("only", kind="stable").iloc[-1]
        alone, without = number(best["only"], 2), number(best["without"], 2)
        carried = f"{best['group']} alone retains {alone}; ablating it leaves {without}"
        yield f"On random tokens, {label} attends most {pattern.target} ({scores}): {carried}."


def _pruning(run: Run) -> Iterator[str]:
    """Say what of the model a pruned one would miss."""
    if not len(run.layers):
        return
    first = np.nan_to_num(data.value_of(run, "massive_activations_first"))
    if (massive := _layers(run)[first > 0]).size and massive.min() > 0:
        begins, ends = int(massive.min()), int(massive.max())
        gone = f" and are gone behind block {ends}" if ends < data.blocks(run) else ""
        yield f"Massive activations of the first token appear behind block {begins - 1}, in layer {begins},{gone}."
    if later := _heads_of(run, head_roles.LATER_SINK):
        have = _have(len(later))
        yield f"{have} sinks at later tokens, which may tag what follows: {listed(later)}. A trace shows the tags."
    if copying := _heads_of(run, head_roles.INDUCTION):
        yield f"Induction heads, which continue what stood in the text before: {listed(copying)}."
    if (cosine := data.column(run.layers, "cosine_previous")) is not None:
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


def unusual(run: Run, checks: Sequence[Finding]) -> list[tuple[str, str]]:
    """Choose the sentences that a reader should know first, each with its section of the page.

    What a health check flags comes first; then numbers by how many times they differ from the published ones by more
    than their error allows; then what every model has.
    """
    # A caller's own columns may be of layers or of heads.
    section_of = {about: section for about, (section, _) in CHECKS.items()}
    flagged = [(check.text, section_of.get(check.about, "")) for check in checks if check.answer == FAILS]
    differing = [(text, "position") for _, text in sorted(_against_published(run), reverse=True)]
    found = summarise(run)
    firsts = [(found[topic][0].text, TOPICS[topic][0]) for topic in USUAL if topic in found]
    return list(dict.fromkeys([*flagged, *differing, *firsts]))[:MOST]


def _against_published(run: Run) -> Iterator[tuple[float, str]]:
    """Compare mean numbers with the published ones of the closest model: how many times they differ, and a sentence."""
    if data.grid_of(run):
        return  # the published models read text
    model = data.closest(run)
    norm, rank = (getattr(data.AVERAGES[model], name)[0] for name in ("relative_norm", "rank"))
    for name, title, expected, show in (
        ("relative_norm", "The relative norm of the positional basis", norm, percent_with_error),
        ("rank_screenot", "The positional rank, as published,", rank, with_error),
    ):
        value, error = data.layer_mean(run, name) or (0.0, 0.0)
        margin = 1.96 * max(error, 0.0)
        if value <= margin:  # not known to be above 0
            continue
        times = max((value - margin) / expected, expected / (value + margin))
        if times > 1:
            ratio = f"{number(value / expected, 2)} times the {show(expected, 0.0)}"
            yield times, f"{title} is {show(value, error)}, {ratio} published for {model}."
