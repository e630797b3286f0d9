"""A grid of LocAteR training runs in numbers: a row for each at one step, means over seeds, effects paired by seed.

Nothing here judges, draws or trains.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import get_args

import numpy as np
import pandas as pd

from theodolite.estimates import Estimate
from theodolite.judging import Criterion
from theodolite.measure.rank_correlation import error_under_independence, rank_correlation
from theodolite.passes.corpus_pass import perplexity_of
from theodolite.report.data import Floats
from theodolite_papers.localization.locater_grid import GridRun
from theodolite_papers.localization.locater_training import Reduction, Setting

MEASURES = {
    "final_loss": "held-out loss, nats per token",
    "lowest_loss": "lowest held-out loss, nats per token",
    "frobenius_squared": "spectrum scale tr(W_QKᵀW_QK)",
    "trace_of_square": "tr(W_QK²)",
    "trace": "tr W_QK",
    "entropy": "attention entropy, nats",
    "stripes": "standard deviation of ρ over positions",
}
"""Columns of `at_step`. Of attention those of the first layer, as in appendix D."""


def label_of(setting: Setting) -> str:
    """`κ₂ = 0.01`, `no LocAteR`, `weight decay 0.1`."""
    if setting.scale == setting.mean == 0:
        return "no LocAteR" if setting.weight_decay == 0.01 else f"weight decay {setting.weight_decay:g}"
    decay = "" if setting.weight_decay == 0.01 else f", weight decay {setting.weight_decay:g}"
    return f"κ₂ = {setting.mean:g}{decay}{manner(setting)}"


def manner(setting: Setting) -> str:
    """What LocAteR does differently in it than at κ₁ = 100 against the mean loss, as words that follow a comma."""
    return "".join(
        [
            "" if setting.scale == 100 else f", κ₁ = {setting.scale:g}",
            "" if setting.reduction == "mean" else ", against the summed loss",
            "" if setting.gradient == "exact" else ", printed gradient",
            "" if setting.off_at is None else f", off after step {setting.off_at}",
        ]
    )


def without_seed(setting: Setting) -> Setting:
    """The same setting of seed 0: what the training runs of all seeds have in common."""
    return replace(setting, seed=0)


def common_step(runs: Sequence[GridRun]) -> int:
    """The last step at which every one of the training runs was measured."""
    measured = [set(run.losses["step"].tolist()) for run in runs]
    return int(max(set.intersection(*measured)))


def at_step(runs: Sequence[GridRun], step: int) -> pd.DataFrame:
    """One row per training run: `setting` (without its seed), `label`, `seed`, `lowest_step` and `MEASURES`, at `step`.

    The lowest loss is that of all steps up to `step`; ρ is averaged over them.
    """
    rows = []
    for run in runs:
        losses = run.losses[run.losses["step"] <= step]
        lowest = losses.loc[losses["held_out_loss"].idxmin()]
        first = run.heads[(run.heads["layer"] == 0) & (run.heads["step"] == step)].iloc[0]
        rows.append(
            {
                "setting": without_seed(run.setting),
                "label": label_of(run.setting),
                "seed": run.setting.seed,
                "final_loss": float(losses["held_out_loss"].iloc[-1]),
                "lowest_loss": float(lowest["held_out_loss"]),
                "lowest_step": int(lowest["step"]),
                **{name: float(first[name]) for name in MEASURES if name in first},
                "stripes": float(profile(run, step).std()),
            }
        )
    return pd.DataFrame(rows)


def profile(run: GridRun, step: int) -> Floats:
    """ρ_i of the first layer's last query, mean over steps 1 to `step` by the trapezoidal rule: (T,)."""
    at = np.array(run.propagation_steps, dtype=np.float64)
    chosen = (at > 0) & (at <= step)
    values: Floats = run.propagation[:, 0].numpy()[chosen].astype(np.float64)
    if len(values) < 2:
        return values[0] if len(values) else np.full(run.propagation.shape[-1], np.nan)
    between = np.diff(at[chosen])  # early steps are measured more often, and count by their time all the same
    middle = (values[1:] + values[:-1]) / 2
    mean: Floats = (between[:, None] * middle).sum(axis=0) / between.sum()
    return mean


def by_setting(rows: pd.DataFrame) -> pd.DataFrame:
    """One row per setting: means over seeds and half-widths of their intervals (`…_half`), and perplexities."""
    settings = []
    for setting, group in rows.groupby("setting", sort=False):
        row: dict[str, object] = {"setting": label_of(setting), "seeds": len(group)}
        for name in MEASURES:
            effect = Estimate.mean(group[name].to_numpy(dtype=np.float64), "seeds")
            row |= {name: effect.value, f"{name}_half": effect.margin}
        row["final_perplexity"] = perplexity_of(group["final_loss"].mean())
        row["lowest_perplexity"] = perplexity_of(group["lowest_loss"].mean())
        row["lowest_step"] = int(group["lowest_step"].median())
        settings.append(row)
    return pd.DataFrame(settings)


def difference(rows: pd.DataFrame, of: Setting, against: Setting, name: str, *, relative: bool) -> Estimate:
    """`of` − `against` in a measure, paired by seed; relative: the difference of their logarithms.

    Losses are logarithms of perplexities already.
    """
    values = []
    for setting in (of, against):
        by_seed = rows[rows["setting"] == setting].set_index("seed")[name]
        values.append(by_seed.map(math.log) if relative else by_seed)
    paired = (values[0] - values[1]).dropna()
    return Estimate.mean(paired.sort_index().to_numpy(dtype=np.float64), "seeds")


def left_out(rows: pd.DataFrame, groups: Sequence[Sequence[Setting]], name: str) -> Estimate:
    """The best setting of the first group minus that of the second, in a measure of which less is better.

    For every seed the best are those of the other seeds' means, so that none is judged on what it was chosen by.
    """
    table = rows.pivot(index="seed", columns="label", values=name)
    table = table[[label_of(setting) for group in groups for setting in group]].dropna()
    values = []
    for seed in table.index if len(table) > 1 else []:
        others, of_seed = table.drop(index=seed).mean(), table.loc[seed]
        best = [others[[label_of(setting) for setting in group]].idxmin() for group in groups]
        values.append(of_seed[best[0]] - of_seed[best[1]])
    return Estimate.mean(values, "seeds") if values else Estimate(math.nan)


def distinct(
    rows: pd.DataFrame, settings: Sequence[Setting], name: str, apart: Criterion
) -> list[list[Setting]]:
    """Settings in groups of rising `name`; within one, no setting is decided to differ from the group's first.

    Args:
        apart: of the difference of logarithms, paired by seed.
    """
    means = rows.groupby("setting", sort=False)[name].mean()
    groups: list[list[Setting]] = []
    for setting in sorted(settings, key=lambda each: means[each]):
        if groups:
            gap = difference(rows, setting, groups[-1][0], name, relative=True)
            if not (gap.n > 1 and apart.decided(gap.value, gap.margin)[0]):
                groups[-1].append(setting)
                continue
        groups.append([setting])
    return groups


def association(rows: pd.DataFrame, groups: Sequence[Sequence[Setting]], name: str, against: str) -> Estimate:
    """How `name` goes with `against` over groups of settings, each the mean of its members; one value per seed.

    Of three groups or more the rank correlation; of two, whose ranks could only agree or not, the difference of
    `name` from the one with the smaller `against` to the other.

    A few rank correlations over a few groups are often alike by chance, and then have no spread. Where their interval
    is narrower than that of as many correlations of what has nothing to do with each other, it is taken for theirs.
    """
    values = []
    for _, of_seed in rows.groupby("seed"):
        table = of_seed.set_index("setting")
        if not all(setting in table.index for group in groups for setting in group):
            continue
        x, y = ([table.loc[list(group), one].mean() for group in groups] for one in (against, name))
        values.append(
            y[1] - y[0]
            if len(groups) == 2
            else float(np.nan_to_num(rank_correlation(np.array(x), np.array(y))))
        )
    if not values:
        return Estimate(math.nan)
    known = Estimate.mean(values, "seeds")
    if len(groups) == 2:
        return known
    error = error_under_independence(len(groups)) / math.sqrt(known.n)
    by_chance = replace(known, error=error, by_chance=True)
    return by_chance if known.margin < by_chance.margin else known


@dataclass(frozen=True)
class Comparable:
    """The training runs of one depth and width, all at one step.

    Attributes:
        published: LocAteR settings by rising κ₂ at κ₁ = 100 with the exact gradient, by the reduction of the loss
            that κ weighs against: the readings of what the paper did.
        others: other ways of LocAteR, in words → settings by rising κ₂.
        decays: settings without LocAteR by rising weight decay.
        plain: the one of them with the published decay, None where it was not trained.
    """

    runs: list[GridRun]
    step: int
    rows: pd.DataFrame
    published: dict[Reduction, list[Setting]]
    others: dict[str, list[Setting]]
    decays: list[Setting]
    plain: Setting | None

    @property
    def with_locater(self) -> dict[str, list[Setting]]:
        """All ways of LocAteR, in words → settings by rising κ₂."""
        return {manner(settings[0]): settings for settings in self.published.values()} | self.others


def comparable(runs: Sequence[GridRun]) -> Comparable:
    """Sort the training runs of one depth and width by what they are for."""
    step = common_step(runs)
    kinds = sorted({without_seed(run.setting) for run in runs}, key=lambda s: (s.mean, s.weight_decay))
    none = [setting for setting in kinds if not (setting.scale or setting.mean)]
    by_manner: dict[str, list[Setting]] = {}
    for setting in kinds:
        if setting not in none:
            by_manner.setdefault(manner(setting), []).append(setting)
    for settings in by_manner.values():  # at κ₂ = 0 there is no second term, hence one gradient
        exact = replace(settings[0], gradient="exact", mean=0.0)
        if settings[0].gradient != "exact" and exact in kinds:
            settings.insert(0, exact)
    published: dict[Reduction, list[Setting]] = {}
    for reduction in get_args(Reduction):
        settings = by_manner.pop(manner(Setting(scale=100.0, reduction=reduction)), [])
        if settings:
            published[reduction] = settings
    plain = next((setting for setting in none if label_of(setting) == "no LocAteR"), None)
    return Comparable(list(runs), step, at_step(runs, step), published, by_manner, none, plain)
