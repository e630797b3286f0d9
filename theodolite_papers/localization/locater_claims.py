"""What Bao et al. 2024 claim of training with LocAteR, judged on a grid of training runs; nothing is drawn here.

By differences paired by seed. The paper does not say which loss its penalty was added to, the mean of a batch's tokens
or their sum, which fairseq makes: its κ means 4,096 times less there. What it claims is decided where both readings
answer alike; what it claims of the end of training, where training was as long.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from theodolite.estimates import Estimate
from theodolite.judging import FAILS, HOLDS, IN_PART, Criterion, judge, mix_of, unless_explained
from theodolite.report.outcome import Outcome
from theodolite.system.wording import number
from theodolite.theory import curve_width
from theodolite_papers.localization.locater_grid import GridRun
from theodolite_papers.localization.locater_training import PUBLISHED_STEPS, Reduction, Setting
from theodolite_papers.localization.paired_effects import (
    MEASURES,
    Comparable,
    association,
    common_step,
    difference,
    distinct,
    label_of,
    left_out,
    profile,
    without_seed,
)

NEGLIGIBLE = 0.01
"""Relative difference (and difference in ρ) below which there is no effect to speak of: ours; the paper has curves."""
RISES = Criterion("more than", 0.0, "ours", NEGLIGIBLE)
FALLS = Criterion("less than", 0.0, "ours", NEGLIGIBLE)
ABOVE = Criterion("more than", 0.0, "“different learning phases”, read as a faster first one (ours)")
BELOW_IN_SHARE = Criterion("less than", 0.0, "“a larger d is beneficial to drive attention to localization”")
PHASE = 10_000  # steps of the first phase

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
    outcome: Outcome,
    data: Comparable,
    claim: str,
    what: str,
    estimates: dict[Reduction, Estimate],
    criterion: Criterion,
) -> None:
    """Judge a claim under either reading of κ: decided where both were trained and answer alike.

    It does not fail before the published number of steps: an effect may come later.

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
    if data.step < PUBLISHED_STEPS:
        verdict = unless_explained(verdict, FAILS, f"of {number(PUBLISHED_STEPS)} steps: it may come later")
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
            in_both_readings(outcome, data, claim, what, _each(data, None, measure), measure[2])


def against_none(outcome: Outcome, data: Comparable) -> None:
    """LocAteR against none: what section 7 says of it, and what it is worth so far."""
    if data.plain is None:
        return
    what = f"difference of logarithms, strongest κ₂ against {label_of(data.plain)}, step {data.step}"
    if data.published:
        entropy = "With LocAteR the attention entropy is higher (section 7)"
        in_both_readings(outcome, data, entropy, what, _each(data, data.plain, ENTROPY), RISES)
        claim = "With LocAteR the perplexity improves (“eventually”, section 7)"
        if _final(outcome, data, claim):
            in_both_readings(outcome, data, claim, what, _each(data, data.plain, PERPLEXITY), FALLS)
    if data.step < PUBLISHED_STEPS:
        for how, settings in data.with_locater.items():
            outcome.claim(
                f"At step {data.step} LocAteR{how} has the lower perplexity (ours)",
                f"difference of logarithms, {label_of(settings[-1])} against {label_of(data.plain)}",
                difference(data.rows, settings[-1], data.plain, "final_loss", relative=False),
                FALLS,
            )


def against_decay(outcome: Outcome, data: Comparable) -> None:
    """The best of LocAteR against the best plain weight decay; each seed's chosen by the others."""
    if len(data.decays) < 2 or not data.published:
        return
    in_both_readings(
        outcome,
        data,
        "LocAteR does better than equally tuned weight decay (ours)",
        f"difference of the losses at step {data.step}, best κ₂ against best of {len(data.decays)} weight decays, "
        "chosen for each seed by the others",
        {
            reduction: left_out(data.rows, (settings, data.decays), "final_loss")
            for reduction, settings in data.published.items()
        },
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
        data,
        "LocAteR entails salient stripes of ρ, and without LocAteR there are none (section 7)",
        f"standard deviation over positions of ρ averaged over steps ({levels}), difference to step {data.step}",
        _each(data, data.plain, ("", "stripes", RISES, False)),
        RISES,
    )


def phases(outcome: Outcome, data: Comparable) -> None:
    """Section 7: the first 10⁴ steps and the rest are different phases of learning; here, of unlike pace."""
    claim = "The first 10,000 steps and the rest are different phases of learning (section 7)"
    if data.step < 2 * PHASE:
        outcome.cannot_test(claim, f"compared at step {number(data.step)}; give {number(2 * PHASE)} or more")
        return
    shown = [settings[-1] for settings in data.published.values()] + ([data.plain] if data.plain else [])
    parts = [
        judge(
            claim,
            f"|change| of {MEASURES[name]} per 1,000 steps before step {number(PHASE)} less that after it, "
            f"{label_of(setting)}",
            Estimate.mean(pace_change(data.runs, setting, name, data.step), "seeds"),
            ABOVE,
        )
        for setting in shown
        for name in ("trace", "entropy")
    ]
    outcome.verdicts.append(mix_of(claim, parts))


def pace_change(runs: Sequence[GridRun], setting: Setting, name: str, step: int) -> list[float]:
    """By how much a measure of the first layer changed more per 1,000 steps before `PHASE` than after it, by seed."""
    values = []
    for run in runs:
        if without_seed(run.setting) == setting:
            curve = run.heads[run.heads["layer"] == 0].set_index("step")[name]
            turn = curve.index[curve.index <= PHASE].max()
            first, last = (abs(curve[b] - curve[a]) / (b - a) for a, b in ((0, turn), (turn, step)))
            values.append(1000 * float(first - last))
    return values


def wider(outcome: Outcome, runs: Sequence[GridRun]) -> None:
    """Section 4, measured: ρ on fewer positions at d = 128 than at d = 32, settings and seeds alike, one layer."""
    claim = "A larger width drives attention to localization: d = 128 against 32 (section 4)"
    of_widths = {
        width: [r for r in runs if (r.setting.layers, r.setting.width) == (1, width)] for width in (32, 128)
    }
    if not all(of_widths.values()):
        outcome.cannot_test(claim, "the grid does not have both widths: train them with --widths 32,128")
        return
    step = min(common_step(of) for of in of_widths.values())
    shares = {
        width: {
            replace(r.setting, width=0): float(curve_width(torch.from_numpy(profile(r, step)))) for r in of
        }
        for width, of in of_widths.items()
    }
    settings = sorted({without_seed(s) for s in shares[32].keys() & shares[128].keys()}, key=lambda s: s.name)
    parts = [
        judge(
            claim,
            f"effective share of positions of ρ averaged to step {number(step)}, d = 128 less d = 32, "
            f"{label_of(setting)}",
            Estimate.mean(
                [
                    shares[128][s] - shares[32][s]
                    for s in sorted(shares[32].keys() & shares[128].keys(), key=lambda s: s.seed)
                    if without_seed(s) == setting
                ],
                "seeds",
            ),
            BELOW_IN_SHARE,
        )
        for setting in settings
    ]
    outcome.verdicts.append(mix_of(claim, parts))


def judge_grid(outcome: Outcome, data: Comparable) -> None:
    """Every claim that the training runs of one depth and width can decide."""
    captions(outcome, data)
    against_none(outcome, data)
    against_decay(outcome, data)
    linked(outcome, data)
    stripes(outcome, data)
    phases(outcome, data)
