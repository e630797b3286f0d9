"""What Bao et al. 2024 claim of training with LocAteR, judged on a grid of training runs; nothing is drawn here.

By differences paired by seed. The paper does not say which loss its penalty was added to, the mean of a batch's tokens
or their sum, which fairseq makes: its κ means 4,096 times less there. What it claims is decided where both readings
answer alike; what it claims of the end of training, where training was as long.
"""

from __future__ import annotations

from theodolite.judging import (
    FAILS,
    HOLDS,
    IN_PART,
    Criterion,
    Estimate,
    judge,
    mix_of,
    unless_explained,
)
from theodolite.papers.localization.locater_training import PUBLISHED_STEPS, Reduction, Setting
from theodolite.papers.localization.paired_effects import (
    MEASURES,
    Comparable,
    association,
    difference,
    distinct,
    label_of,
    left_out,
    manner,
)
from theodolite.report.outcome import Outcome
from theodolite.system.wording import number

NEGLIGIBLE = 0.01
"""Relative difference (and difference in ρ) below which there is no effect to speak of: ours; the paper has curves."""
RISES = Criterion("more than", 0.0, "ours", NEGLIGIBLE)
FALLS = Criterion("less than", 0.0, "ours", NEGLIGIBLE)
BELOW = Criterion("less than", 0.0, "“smaller … contributes to higher”, read as their order")

READINGS: dict[Reduction, str] = {
    "mean": "κ against the mean loss of a token",
    "sum": "κ against the loss summed over a batch",
}
SILENT = "the paper does not say which of the two its penalty was added to"

SPECTRUM = ("the eigenspectrum scale shrinks", "frobenius_squared", FALLS, True)
ENTROPY = ("the attention entropy increases", "entropy", RISES, True)
PERPLEXITY = ("the perplexity improves", "final_loss", FALLS, False)
"""Of captions: words, measure, criterion of the difference, whether it is taken between logarithms."""


def in_both_readings(
    outcome: Outcome, claim: str, what: str, estimates: dict[Reduction, Estimate], criterion: Criterion
) -> None:
    """Judge a claim under either reading of κ: decided where both were trained and answer alike.

    Args:
        estimates: of the readings that were trained.
    """
    parts = [
        judge(claim, f"{what}, {READINGS[reduction]}", estimate, criterion)
        for reduction, estimate in estimates.items()
    ]
    verdict = mix_of(claim, parts)
    if len(parts) == 1:
        for answer in (HOLDS, FAILS):
            verdict = unless_explained(verdict, answer, f"{SILENT}, and the other was not trained")
    outcome.verdicts.append(unless_explained(verdict, IN_PART, f"{SILENT}, and they answer differently"))


def _final(outcome: Outcome, data: Comparable, claim: str) -> bool:
    """Whether the training runs are as long as the published ones, of whose end the claim is; said where not."""
    if data.step < PUBLISHED_STEPS:
        outcome.cannot_test(
            claim, f"compared at step {number(data.step)} of the published {number(PUBLISHED_STEPS)}"
        )
    return data.step >= PUBLISHED_STEPS


def _each(
    data: Comparable, against: Setting | None, measure: tuple[str, str, Criterion, bool]
) -> dict[Reduction, Estimate]:
    """The difference of the strongest κ₂ against a setting (None: the weakest) in either reading."""
    _, name, _, relative = measure
    return {
        reduction: difference(data.rows, settings[-1], against or settings[0], name, relative=relative)
        for reduction, settings in data.published.items()
    }


def captions(outcome: Outcome, data: Comparable) -> None:
    """The claims of every caption: the strongest κ₂ against the weakest."""
    if any(len(settings) < 2 for settings in data.published.values()) or not data.published:
        return
    strongest, weakest = (next(iter(data.published.values()))[place].mean for place in (-1, 0))
    what = f"difference of logarithms, κ₂ = {strongest:g} against {weakest:g}, step {data.step}"
    for measure in (SPECTRUM, ENTROPY, PERPLEXITY):
        claim = f"With stronger κ₂ {measure[0]}"
        if measure is not PERPLEXITY or _final(outcome, data, claim):
            in_both_readings(outcome, claim, what, _each(data, None, measure), measure[2])


def against_none(outcome: Outcome, data: Comparable) -> None:
    """LocAteR against none: what section 7 says of it, and what it is worth so far."""
    if data.plain is None:
        return
    what = f"difference of logarithms, strongest κ₂ against {label_of(data.plain)}, step {data.step}"
    if data.published:
        entropy = "With LocAteR the attention entropy is higher (section 7)"
        in_both_readings(outcome, entropy, what, _each(data, data.plain, ENTROPY), RISES)
        claim = "With LocAteR the perplexity improves (“eventually”, section 7)"
        if _final(outcome, data, claim):
            in_both_readings(outcome, claim, what, _each(data, data.plain, PERPLEXITY), FALLS)
    if data.step < PUBLISHED_STEPS:
        for how, settings in data.with_locater.items():
            outcome.claim(
                f"At step {data.step} LocAteR{how} has the lower perplexity (ours)",
                f"difference of logarithms, {label_of(settings[-1])} against {label_of(data.plain)}",
                difference(data.rows, settings[-1], data.plain, "final_loss", relative=False),
                FALLS,
            )


def against_decay(outcome: Outcome, data: Comparable) -> None:
    """The best of LocAteR against the best plain weight decay, in either reading; each seed's chosen by the others."""
    if len(data.decays) < 2:
        return
    for settings in data.published.values():
        outcome.claim(
            f"LocAteR{manner(settings[0])} does better than equally tuned weight decay (ours)",
            f"difference of the losses at step {data.step}, best of {len(settings)} κ₂ against best of "
            f"{len(data.decays)} weight decays, chosen for each seed by the others",
            left_out(data.rows, (settings, data.decays), "final_loss"),
            FALLS,
        )


def linked(outcome: Outcome, data: Comparable) -> None:
    """Section 7's explanation: smaller scale, higher entropy, lower perplexity, over settings that differ."""
    settings = [s for group in data.with_locater.values() for s in group if s.gradient == "exact"]
    settings += [data.plain] if data.plain else []
    for claim, name, against in (
        ("A smaller eigenspectrum scale goes with higher attention entropy", "entropy", "frobenius_squared"),
        ("Higher attention entropy goes with lower perplexity", "final_loss", "entropy"),
    ):
        claim = f"{claim} (section 7)"
        if name == "final_loss" and not _final(outcome, data, claim):
            continue
        groups = distinct(data.rows, settings, against, RISES)
        if len(groups) < 2:
            outcome.cannot_test(
                claim, f"{MEASURES[against]}: no two of {len(settings)} settings differ in it"
            )
            continue
        what = "difference between the two" if len(groups) == 2 else f"rank correlation over {len(groups)}"
        outcome.claim(
            claim,
            f"{what} groups of settings that differ in {MEASURES[against]}, {len(settings)} settings in all, "
            f"step {data.step}",
            association(data.rows, groups, name, against),
            BELOW,
        )


def stripes(outcome: Outcome, data: Comparable) -> None:
    """Section 7 on Fig. 7: ρ differs over positions with LocAteR, and hardly without."""
    if not data.published or data.plain is None:
        return
    values = data.rows.groupby("setting", sort=False)["stripes"]
    levels = ", ".join(
        f"{label_of(setting)} {Estimate.mean(values.get_group(setting).to_numpy(), 'seeds')}"
        for setting in (*(settings[-1] for settings in data.published.values()), data.plain)
    )
    in_both_readings(
        outcome,
        "LocAteR entails salient stripes of ρ, and without LocAteR there are none (section 7)",
        f"standard deviation over positions of ρ averaged over steps ({levels}), difference to step {data.step}",
        _each(data, data.plain, ("", "stripes", RISES, False)),
        RISES,
    )


def judge_grid(outcome: Outcome, data: Comparable) -> None:
    """Every claim that the training runs of one depth and width can decide."""
    captions(outcome, data)
    against_none(outcome, data)
    against_decay(outcome, data)
    linked(outcome, data)
    stripes(outcome, data)
