"""A grid of LocAteR training runs in numbers: a row for each at one step, means over seeds, effects paired by seed.

Nothing here judges, draws or trains.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from theodolite.judging import Estimate
from theodolite.measure.rank_correlation import rank_correlation
from theodolite.papers.localization.locater_grid import GridRun
from theodolite.papers.localization.locater_training import Setting
from theodolite.report.data import Floats

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
    printed = "" if setting.gradient == "exact" else ", printed gradient"
    strength = "" if setting.scale == 100 else f", κ₁ = {setting.scale:g}"
    decay = "" if setting.weight_decay == 0.01 else f", weight decay {setting.weight_decay:g}"
    return f"κ₂ = {setting.mean:g}{strength}{decay}{printed}"


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
        row["final_perplexity"] = math.exp(group["final_loss"].mean())
        row["lowest_perplexity"] = math.exp(group["lowest_loss"].mean())
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


def rank_correlation_by_seed(
    rows: pd.DataFrame, settings: Sequence[Setting], name: str, against: str = ""
) -> Estimate:
    """Rank correlation of a measure with κ₂, or with another measure, over settings: one value per seed.

    Seeds that lack a setting are left out; a measure that does not vary has correlation 0.
    """
    by_seed = []
    for _, group in rows.groupby("seed"):
        by_setting = group.set_index("setting")
        if not all(setting in by_setting.index for setting in settings):
            continue
        values = np.array([float(by_setting.at[setting, name]) for setting in settings])
        others = [float(by_setting.at[setting, against]) if against else setting.mean for setting in settings]
        by_seed.append(float(np.nan_to_num(rank_correlation(np.array(others), values))))
    return Estimate.mean(np.array(by_seed, dtype=np.float64), "seeds")


@dataclass(frozen=True)
class Comparable:
    """The training runs of one depth and width, all at one step.

    Attributes:
        exact, printed: LocAteR settings by rising κ₂, with either gradient of its second term.
        decays: settings without LocAteR by rising weight decay.
        plain: the one of them with the published decay, None where it was not trained.
    """

    runs: list[GridRun]
    step: int
    rows: pd.DataFrame
    exact: list[Setting]
    printed: list[Setting]
    decays: list[Setting]
    plain: Setting | None


def comparable(runs: Sequence[GridRun]) -> Comparable:
    """Sort the training runs of one depth and width by what they are for."""
    step = common_step(runs)
    kinds = sorted({without_seed(run.setting) for run in runs}, key=lambda s: (s.mean, s.weight_decay))
    with_locater = [setting for setting in kinds if setting.scale or setting.mean]
    none = [setting for setting in kinds if not (setting.scale or setting.mean)]
    exact = [setting for setting in with_locater if setting.gradient == "exact"]
    printed = [setting for setting in with_locater if setting.gradient == "published"]
    if printed:  # at κ₂ = 0 there is no second term, hence one gradient
        printed = [setting for setting in exact if setting.mean == 0] + printed
    plain = next((setting for setting in none if label_of(setting) == "no LocAteR"), None)
    return Comparable(list(runs), step, at_step(runs, step), exact, printed, none, plain)
