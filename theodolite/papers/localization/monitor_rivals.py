"""What the monitor of collapse is worth against simpler signs, on training runs that no limit was set on.

Each rival gets the weakest limit that no calibration training run, all of them healthy, exceeds; the monitor's own were
set on the same text. What is judged on are other texts, sizes, rates and seeds. Whether a training run at a high rate
fails is told by its loss at the end: some recover. Nothing is trained or drawn here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy import stats

from theodolite.papers.localization.monitor_runs import above, behind, gained, smoothed
from theodolite.report.data import Floats

MONITOR = "monitor"
WARM_UP = 20
"""Steps of which the running median of the gradient norm is taken; it has none before."""

FAILED = 0.1
"""Nats by which the loss at the end exceeds that of the healthy training run of the same text, size and seed."""

PER = 10_000
"""Steps that a rate of false alarms is given for."""

Tables = Mapping[str, pd.DataFrame]
"""`losses`, `looks` and `alarms` of `train_with_monitor`."""


def _of_losses(tables: Tables, values: Floats) -> pd.Series:
    return pd.Series(values, index=tables["losses"]["step"].to_numpy())


def loss_rises(tables: Tables) -> pd.Series:
    """Nats of the smoothed loss over its minimum so far, by step."""
    return _of_losses(tables, above(tables["losses"]["loss"].to_numpy()))


def loss_stalls(tables: Tables) -> pd.Series:
    """Nats that the best smoothed loss gained of late, negated: higher is worse."""
    return _of_losses(tables, -gained(tables["losses"]["loss"].to_numpy()))


def gradient_jumps(tables: Tables) -> pd.Series:
    """Norm of the gradient over its median in the `WARM_UP` steps before."""
    norms = tables["losses"]["gradient_norm"]
    return _of_losses(tables, (norms / norms.shift().rolling(WARM_UP).median()).to_numpy())


def largest_logit(tables: Tables) -> pd.Series:
    """Largest logit of any head at the monitor's looks."""
    return tables["looks"].set_index("step")["largest_logit_max"]


RIVALS = {
    "loss rises": loss_rises,
    "loss stalls": loss_stalls,
    "gradient norm jumps": gradient_jumps,
    "largest logit": largest_logit,
}


def limits(calibration: Sequence[Tables]) -> dict[str, float]:
    """Of every rival the highest value in any calibration training run."""
    return {name: max(float(value(tables).max()) for tables in calibration) for name, value in RIVALS.items()}


def onsets(tables: Tables, of: Mapping[str, float]) -> dict[str, list[int]]:
    """Steps at which each rival begins to exceed its limit, and at which the monitor has new alarms.

    A value that is no number exceeds every limit, once there has been one.
    """
    steps = {MONITOR: sorted(set(tables["alarms"]["step"].astype(int)))}
    for name, value in RIVALS.items():
        values = value(tables)
        known = np.maximum.accumulate(np.isfinite(values.to_numpy()))
        beyond = known & ~(values.to_numpy() <= of[name])
        begins = beyond & ~np.concatenate([[False], beyond[:-1]])
        steps[name] = values.index[begins].astype(int).tolist()
    return steps


@dataclass(frozen=True)
class Watched:
    """One training run that is judged on.

    Attributes:
        text, size, rate, seed: what it was. is_high: whether the rate is above that of the reference.
        tables: of it. reference: of the healthy one that it is compared with.
    """

    text: str
    size: str
    rate: str
    seed: int
    is_high: bool
    tables: Tables
    reference: Tables


def judged_runs(runs: Sequence[Watched], of: Mapping[str, float]) -> pd.DataFrame:
    """One row per training run and detector.

    Returns:
        text, size, rate, seed; `failed`: its rate is high, and its smoothed loss at the end no number or `FAILED` above
        the reference's (a low rate is only slow);
        `behind`: the step from which on it is 0.1 nats behind the reference; detector, `alarms`, `first` (step),
        `late` (`first` − `behind`, negative where the alarm is early), `steps` watched.
    """
    rows = []
    for run in runs:
        losses, reference = (tables["losses"]["loss"].to_numpy() for tables in (run.tables, run.reference))
        gap = smoothed(losses)[-1] - smoothed(reference)[-1]
        begins = behind(losses, reference)
        for detector, steps in onsets(run.tables, of).items():
            first = steps[0] if steps else math.nan
            rows.append(
                {
                    "text": run.text, "size": run.size, "rate": run.rate, "seed": run.seed,
                    "failed": run.is_high and not gap <= FAILED,
                    "behind": math.nan if begins is None else begins,
                    "detector": detector, "alarms": len(steps), "first": first,
                    "late": first - begins if begins is not None else math.nan,
                    "steps": len(losses),
                }
            )  # fmt: skip
    return pd.DataFrame(rows)


def summary(rows: pd.DataFrame) -> pd.DataFrame:
    """One row per detector: false alarms per `PER` healthy steps, and what it says of failing training runs.

    Returns:
        false_alarms, healthy_steps, false_rate with its exact 95 % interval (`false_low`, `false_high`) as if alarms
        came independently; failing, caught (an alarm at all), before_loss (no later than the loss is behind),
        late_median, late_low and late_high (least and most, of those caught).
    """
    table = []
    for detector, of in rows.groupby("detector", sort=False):
        healthy, failing = of[~of["failed"]], of[of["failed"]]
        caught = failing[failing["first"].notna()]
        count, steps = int(healthy["alarms"].sum()), int(healthy["steps"].sum())
        low, high = (
            float(stats.chi2.ppf(0.025, 2 * count)) / 2 if count else 0.0,
            float(stats.chi2.ppf(0.975, 2 * count + 2)) / 2,
        )
        table.append(
            {
                "detector": detector, "false_alarms": count, "healthy_steps": steps,
                "false_rate": PER * count / steps if steps else math.nan,
                "false_low": PER * low / steps if steps else math.nan,
                "false_high": PER * high / steps if steps else math.nan,
                "failing": len(failing), "caught": len(caught),
                "before_loss": int((caught["late"] <= 0).sum()),
                "late_median": float(caught["late"].median()) if len(caught) else math.nan,
                "late_low": float(caught["late"].min()) if len(caught) else math.nan,
                "late_high": float(caught["late"].max()) if len(caught) else math.nan,
            }
        )  # fmt: skip
    return pd.DataFrame(table)
