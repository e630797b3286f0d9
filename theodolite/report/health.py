"""Health checks of a run, by what columns declare to be healthy.

A check is made only where the run has its numbers, and reports that it passed, too. The limits are conventions for a
first look. A mean over layers passes only where it is clear of its limit by its standard error.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from theodolite.estimates import Estimate, Floats
from theodolite.judging import HOLDS, Criterion, judge
from theodolite.measure.column import Column
from theodolite.measure.head_roles import FIRST_TOKEN_SINK, PATTERN_ROLES, SINK_ROLES, UNIFORM_ATTENTION
from theodolite.passes.run import Run
from theodolite.report.data import (
    array,
    caller_columns,
    column,
    entropy_share,
    grid_of,
    head_labels,
    layer_average,
    limit_of,
    provenance,
)
from theodolite.system.wording import (
    counted,
    listed,
    number,
    percent,
    percent_with_error,
    visible,
    with_error,
)

ENTROPY_COLLAPSE = Criterion(
    "less than", 0.05, "share of the maximum entropy: a head attends to a single key"
)
DEAD_SHARE = Criterion("at most", 1e-4, "‖W_QK‖²_F over the model's median: a head is as good as zero")
UNKNOWN = Criterion("at least", 0.05, "share of unknown tokens: another language or script than the model's")
LEAST_VALUES = 12  # singular values of a positional basis: ScreeNOT's noise level is not known from fewer
REASON = 160  # characters of a reason that are shown


class Check(NamedTuple):
    """The outcome of one check."""

    text: str
    flagged: bool


def in_a_line(checks: Sequence[Check]) -> str:
    """Say the outcome of all checks in one sentence."""
    if flagged := sum(check.flagged for check in checks):
        return f"{flagged} of {counted(len(checks), 'health check')} flagged."
    return "The health check passed." if len(checks) == 1 else f"All {len(checks)} health checks passed."


Outcome = tuple[str, bool]
"""The text of a check, and whether it is flagged."""


def checks(run: Run) -> list[Check]:
    """Run every check that the run's numbers allow, those of a caller's own columns last."""
    outcomes = [
        *(_rank_collapse(run), _entropy_collapse(run), _vanishing(run), _dead_heads(run)),
        *(_constant_logits(run), _massive(run), _positional(run), _smooth(run), _entangled(run)),
        *(_missing(run), _not_decomposed(run), _unknown_tokens(run)),
        *(_own(measure, run) for table in ("layers", "heads") for measure in caller_columns(run, table)),
    ]
    return [Check(*outcome) for outcome in outcomes if outcome is not None]


def _own(measure: Column, run: Run) -> Outcome | None:
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


def _rank_collapse(run: Run) -> Outcome | None:
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


def _entropy_collapse(run: Run) -> Outcome | None:
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


def _vanishing(run: Run) -> Outcome | None:
    propagation = column(run.heads, "propagation")
    if propagation is not None:
        healthy = limit_of("heads", "propagation")
        vanished = _unhealthy(healthy, propagation)
        if vanished.any():
            keys = f"fewer than {percent(healthy.limit)} of the keys propagate"
            return f"Vanishing signal: {keys} in {_counted(vanished)}: {_named(run, vanished)}.", True
        lowest = percent(float(np.nanmin(propagation)))
        return f"No vanishing signal: at least {lowest} of the keys propagate in every head.", False
    name = "regime_data" if "regime_data" in run.heads.columns else "regime"
    if name not in run.heads.columns:
        return None
    predicted = run.heads[name].astype(str).str.startswith("vanishing").to_numpy()
    if predicted.any():
        heads = f"{_counted(predicted)}: {_named(run, predicted)}"
        return f"Theory predicts a vanishing signal for {heads}.", True
    return "Theory predicts no vanishing signal.", False


def _dead_heads(run: Run) -> Outcome | None:
    size = column(run.heads, "frobenius_squared")
    if size is None:
        return None
    zero, share = DEAD_SHARE.met(size / (float(np.nanmedian(size)) or 1.0)), entropy_share(run)
    uniform = ~zero & (share is not None and share >= UNIFORM_ATTENTION.threshold)
    causes = (("W_QK is numerically zero", zero), ("attention is uniform", uniform))
    if dead := [f"{cause} in {_named(run, flags)}" for cause, flags in causes if flags.any()]:
        return f"Dead heads: {'; '.join(dead)}.", True
    return "No dead heads: no W_QK is negligible compared with the others.", False


def _constant_logits(run: Run) -> Outcome | None:
    share = column(run.heads, "share_constant")
    # Rotary positions turn means by distance: the logits of two means are a pattern, and no constant.
    if share is None or provenance(run, "model", "positions") == "rotary":
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


def _not_decomposed(run: Run) -> Outcome | None:
    refused = provenance(run, "constituents_refused")
    if not refused:
        return None
    layers = listed([f"layer {visible(layer)}" for layer in refused])
    reason = visible(next(iter(refused.values())), REASON)
    return f"Logits could not be decomposed in {layers}: {reason}.", True


def _massive(run: Run) -> Outcome | None:
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


def _passes(estimate: Estimate, criterion: Criterion) -> bool:
    """Tell whether a number is clearly on the right side; with no error (under eight contexts), there at all."""
    if math.isnan(estimate.error):
        return bool(criterion.met(estimate.value))
    return judge("", "", estimate, criterion).answer == HOLDS


def _positional(run: Run) -> Outcome | None:
    """Check whether the positional basis is more than noise; without that and smoothness, weights look random."""
    rank, singular_values = layer_average(run, "rank")[0], array(run, "singular_values")
    if not math.isfinite(rank.value) or singular_values is None or singular_values.shape[1] < LEAST_VALUES:
        return None
    if _passes(rank, limit_of("layers", "rank")):
        return f"Positions are encoded: the mean rank of their basis is {rank}.", False
    text = f"No positional structure beyond noise: the mean rank of the positional basis is {rank}."
    smooth = layer_average(run, "low_frequency_10")[0]
    if math.isfinite(smooth.value) and not _passes(smooth, limit_of("layers", "low_frequency_10")):
        text += " The model looks untrained: random weights give such numbers."
    return text, True


def of_plane(run: Run) -> str:
    """Word the frequencies of patches, which lie in rows and columns."""
    return " of rows and of columns" if grid_of(run) else ""


LEAST_SIDE = 10
"""Rows or columns of patches: of no more, ten frequencies are all."""


def above_noise(run: Run) -> npt.NDArray[np.bool_]:
    """Mark the layers in whose positional basis the mean of so many contexts leaves little noise.

    The mean of n contexts at each of T positions has noise of relative norm 1/√n. In T equal directions it gives the
    Gram matrix an energy of T/n² (in the embedded model 1.1 times as much): a tenth of the whole where the relative
    norm is (9T)^¼/√n.
    """
    corpus, norms = provenance(run, "corpus") or {}, column(run.layers, "relative_norm")
    if norms is None or not corpus.get("contexts"):
        return np.ones(len(run.layers), dtype=bool)
    least = (9 * corpus["length"]) ** 0.25 / math.sqrt(corpus["contexts"])
    return norms >= least


def _smooth(run: Run) -> Outcome | None:
    grid = grid_of(run)
    if column(run.layers, "low_frequency_10") is None or (
        grid and min(grid.rows, grid.columns) <= LEAST_SIDE
    ):
        return None
    among = above_noise(run)
    if not among.any():
        text = (
            "The smoothness of the positional basis is not judged: positions are so little of the hidden states that "
            "noise is a tenth or more of the basis in every layer. Read more contexts."
        )
        return text, False
    smooth = layer_average(run, "low_frequency_10", among)[0]
    if not math.isfinite(smooth.value):
        return None
    share = f"ten lowest frequencies{of_plane(run)} hold {percent_with_error(smooth.value, smooth.error)} of the energy"
    healthy = limit_of("layers", "low_frequency_10")
    if _passes(smooth, healthy):
        return f"The positional basis is not rough: its {share}.", False
    limit = f"not clearly more than {percent(healthy.limit)}: neighbouring positions have unrelated vectors"
    return f"Rough positional basis: the {share} of its Gram matrix, {limit}.", True


def _entangled(run: Run) -> Outcome | None:
    incoherence = layer_average(run, "incoherence_mean")[0]
    if not math.isfinite(incoherence.value):
        return None
    cosine = with_error(incoherence.value, incoherence.error)
    healthy = limit_of("layers", "incoherence_mean")
    if _passes(incoherence, healthy):
        return f"Position and context are not entangled: mean |cosine| {cosine}.", False
    limit = f"not clearly below {healthy.limit:g}"
    return f"Position and context are entangled: mean |cosine| {cosine}, {limit}.", True


def _missing(run: Run) -> Outcome | None:
    """Check for heads that have no measured attention although the text was read."""
    if column(run.heads, "entropy") is None:
        return None
    unknown = run.heads["entropy"].isna().to_numpy()
    return (f"The attention of {_named(run, unknown)} could not be read.", True) if unknown.any() else None


def _unknown_tokens(run: Run) -> Outcome | None:
    unknown, tokens = provenance(run, "counts", "unknown_tokens"), provenance(run, "counts", "tokens")
    if not tokens or not unknown or not UNKNOWN.met(unknown / tokens):
        return None
    reason = "the text may be in a language or script that the model does not know"
    return f"{percent(unknown / tokens)} of the tokens are unknown to the tokenizer: {reason}.", True
