"""Health checks of a run, by what columns declare to be healthy.

A check is made only where the run has its numbers, and reports that it passed, too. The limits are conventions for a
first look. A mean over layers passes only where it is clear of its limit by its standard error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from theodolite.estimates import Floats
from theodolite.judging import FAILS, HOLDS, UNDECIDED, Criterion
from theodolite.measure.column import Column
from theodolite.measure.head_roles import FIRST_TOKEN_SINK, PATTERN_ROLES, SINK_ROLES, UNIFORM_ATTENTION
from theodolite.passes.run import Run
from theodolite.report import findings
from theodolite.report.data import (
    array,
    caller_columns,
    column,
    entropy_share,
    grid_of,
    head_labels,
    limit_of,
    provenance,
)
from theodolite.report.findings import Finding, Judged
from theodolite.system.wording import (
    counted,
    listed,
    number,
    percent,
    percent_with_error,
    visible,
    with_error,
)
from theodolite.theory.regimes import VANISHING

ENTROPY_COLLAPSE = Criterion(
    "less than", 0.05, "share of the maximum entropy: a head attends to a single key"
)
DEAD_SHARE = Criterion("at most", 1e-4, "‖W_QK‖²_F over the model's median: a head is as good as zero")
UNKNOWN = Criterion("at least", 0.05, "share of unknown tokens: another language or script than the model's")
LEAST_VALUES = 12  # singular values of a positional basis: ScreeNOT's noise level is not known from fewer
LEAST_SIDE = 10  # rows or columns of patches: of no more, ten frequencies are all
REASON = 160  # characters of a reason that are shown


def in_a_line(checks: Sequence[Finding]) -> str:
    """Say the outcome of all checks in one sentence."""
    flagged, undecided = (sum(check.answer == answer for check in checks) for answer in (FAILS, UNDECIDED))
    amounts = [(flagged, "flagged"), (undecided, "not decided")]
    first, *others = [f"{amount} {outcome}" for amount, outcome in amounts if amount] or [""]
    if not first:
        return "The health check passed." if len(checks) == 1 else f"All {len(checks)} health checks passed."
    first = first.replace(" ", f" of {counted(len(checks), 'health check')} ", 1)
    return ", ".join([first, *others]) + "."


Outcome = tuple[str, bool] | Finding | None
"""The text of a check and whether it is flagged; or a finding, which may be open; None: not for this run."""


def checks(run: Run) -> list[Finding]:
    """Run every check that the run's numbers allow, those of a caller's own columns last."""
    own = [measure for table in ("layers", "heads") for measure in caller_columns(run, table)]
    outcomes = [check(run, about) for about in CHECKS]
    outcomes += [_as_finding(measure.name, _own(measure, run)) for measure in own]
    return [outcome for outcome in outcomes if outcome is not None]


def check(run: Run, about: str) -> Finding | None:
    """Run one of `CHECKS`; None where the run has no numbers for it."""
    return _as_finding(about, CHECKS[about](run))


def _as_finding(about: str, outcome: Outcome) -> Finding | None:
    if outcome is None or isinstance(outcome, Finding):
        return outcome
    text, flagged = outcome
    return Finding(text, about, FAILS if flagged else HOLDS)


def _own(measure: Column, run: Run) -> Outcome:
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


def _rank_collapse(run: Run) -> Outcome:
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


def _entropy_collapse(run: Run) -> Outcome:
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


def _vanishing(run: Run) -> Outcome:
    propagation, healthy = column(run.heads, "propagation"), limit_of("heads", "propagation")
    if propagation is not None:
        if (vanished := _unhealthy(healthy, propagation)).any():
            keys = f"fewer than {percent(healthy.limit)} of the keys propagate"
            return f"Vanishing signal: {keys} in {_counted(vanished)}: {_named(run, vanished)}.", True
        lowest = percent(float(np.nanmin(propagation)))
        return f"No vanishing signal: at least {lowest} of the keys propagate in every head.", False
    if "regime" not in run.heads.columns:
        return None
    predicted = (run.heads["regime"] == VANISHING).to_numpy()
    heads = f"for {_counted(predicted)}: {_named(run, predicted)}" if predicted.any() else "for no head"
    text = f"Whether the signal vanishes is not judged without a text: W_QK alone predicts it {heads}."
    return Finding(text, findings.PROPAGATION, UNDECIDED)


def _dead_heads(run: Run) -> Outcome:
    size = column(run.heads, "frobenius_squared")
    if size is None:
        return None
    zero, share = DEAD_SHARE.met(size / (float(np.nanmedian(size)) or 1.0)), entropy_share(run)
    uniform = ~zero & (share is not None and share >= UNIFORM_ATTENTION.threshold)
    causes = (("W_QK is numerically zero", zero), ("attention is uniform", uniform))
    if dead := [f"{cause} in {_named(run, flags)}" for cause, flags in causes if flags.any()]:
        return f"Dead heads: {'; '.join(dead)}.", True
    return "No dead heads: no W_QK is negligible compared with the others.", False


def _constant_logits(run: Run) -> Outcome:
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


def _not_decomposed(run: Run) -> Outcome:
    refused = provenance(run, "constituents_refused")
    if not refused:
        return None
    layers = listed([f"layer {visible(layer)}" for layer in refused])
    reason = visible(next(iter(refused.values())), REASON)
    return f"Logits could not be decomposed in {layers}: {reason}.", True


def _massive(run: Run) -> Outcome:
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


def _positional(run: Run) -> Outcome:
    """Check whether the positional basis is more than noise; without that and smoothness, weights look random."""
    singular_values, judged = (
        array(run, "singular_values"),
        findings.of_layers(run, findings.POSITIONS, "rank"),
    )
    if judged is None or singular_values is None or singular_values.shape[1] < LEAST_VALUES:
        return None
    rank = f"mean rank of the positional basis {judged.estimate}"
    smooth = _smoothness(run)
    if judged.answer != HOLDS and smooth and smooth.answer == FAILS:
        text = f"No positional structure beyond noise: {rank}, and it is rough. The model looks untrained."
        return Finding(text, judged.about, FAILS)
    whether = "Whether positions are encoded"
    return judged.finding("Positions are encoded", "Positions are not encoded", whether, rank)


def of_plane(run: Run) -> str:
    """Word the frequencies of patches, which lie in rows and columns."""
    return " of rows and of columns" if grid_of(run) else ""


def _smoothness(run: Run) -> Judged | None:
    grid = grid_of(run)
    if grid and min(grid.rows, grid.columns) <= LEAST_SIDE:
        return None
    return findings.of_layers(run, findings.SMOOTHNESS, "low_frequency_10")


def _smooth(run: Run) -> Outcome:
    if (judged := _smoothness(run)) is None:
        return None
    share = percent_with_error(judged.estimate.value, judged.estimate.error)
    return judged.finding(
        "The positional basis is smooth",
        "The positional basis is rough, and neighbouring positions have unrelated vectors",
        "Whether the positional basis is smooth",
        f"the ten lowest frequencies{of_plane(run)} hold {share} of the energy of its Gram matrix",
    )


def _entangled(run: Run) -> Outcome:
    if (judged := findings.of_layers(run, findings.ENTANGLEMENT, "incoherence_mean")) is None:
        return None
    return judged.finding(
        "Position and context are not entangled",
        "Position and context are entangled",
        "Whether position and context are entangled",
        f"root mean square cosine {with_error(judged.estimate.value, judged.estimate.error)}",
    )


def _missing(run: Run) -> Outcome:
    """Check for heads that have no measured attention although the text was read."""
    if column(run.heads, "entropy") is None:
        return None
    unknown = run.heads["entropy"].isna().to_numpy()
    return (f"The attention of {_named(run, unknown)} could not be read.", True) if unknown.any() else None


def _unknown_tokens(run: Run) -> Outcome:
    unknown, tokens = provenance(run, "counts", "unknown_tokens"), provenance(run, "counts", "tokens")
    if not tokens or not unknown or not UNKNOWN.met(unknown / tokens):
        return None
    reason = "the text may be in a language or script that the model does not know"
    return f"{percent(unknown / tokens)} of the tokens are unknown to the tokenizer: {reason}.", True


CHECKS: dict[str, Callable[[Run], Outcome]] = {
    "rank collapse": _rank_collapse,
    "entropy collapse": _entropy_collapse,
    findings.PROPAGATION: _vanishing,
    "dead heads": _dead_heads,
    "constant logits": _constant_logits,
    findings.MASSIVE: _massive,
    findings.POSITIONS: _positional,
    findings.SMOOTHNESS: _smooth,
    findings.ENTANGLEMENT: _entangled,
    "missing attention": _missing,
    "decomposition": _not_decomposed,
    "unknown tokens": _unknown_tokens,
}
"""What each check is about."""
