"""What the monitor of collapse is worth against simpler signs, on training runs that no limit was set on.

Each rival gets the weakest limit that no calibration training run exceeds that ends well, at whatever rate; the
monitor's own were set on the same text. What is judged on are other texts, sizes and seeds. Which training runs end
well is told by their loss at the end, for calibration as for judging. Nothing is trained or drawn here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy import stats

from theodolite.estimates import CONFIDENCE
from theodolite.papers.localization.monitor_runs import above, gained, restricted_lead, smoothed
from theodolite.report.data import Floats

MONITOR = "monitor"
WARM_UP = 20
"""Steps of which running medians are taken; there is none before."""

FAILED = 0.1
"""Nats by which the loss at the end of a failing training run exceeds the lowest of the same text, size and seed."""

GROUP = ["text", "size", "seed"]
"""What training runs share initial weights and batches that differ in nothing but their rate."""

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


def loss_spikes(tables: Tables) -> pd.Series:
    """Nats of the loss of one step over its median in the `WARM_UP` steps before."""
    losses = tables["losses"]["loss"]
    return _of_losses(tables, (losses - _median_before(losses)).to_numpy())


def gradient_jumps(tables: Tables) -> pd.Series:
    """Norm of the gradient over its median in the `WARM_UP` steps before."""
    norms = tables["losses"]["gradient_norm"]
    return _of_losses(tables, (norms / _median_before(norms)).to_numpy())


def _median_before(values: pd.Series) -> pd.Series:
    return values.shift().rolling(WARM_UP).median()


def largest_logit(tables: Tables) -> pd.Series:
    """Largest logit of any head at the monitor's looks."""
    return tables["looks"].set_index("step")["largest_logit_max"]


RIVALS = {
    "loss rises": loss_rises,
    "loss stalls": loss_stalls,
    "loss spikes": loss_spikes,
    "gradient norm jumps": gradient_jumps,
    "largest logit": largest_logit,
}


@dataclass(frozen=True)
class Watched:
    """One training run.

    Attributes:
        text, size, rate, seed: what it was. peak: the highest learning rate. tables: of it.
    """

    text: str
    size: str
    rate: str
    seed: int
    peak: float
    tables: Tables


def run_table(runs: Sequence[Watched]) -> pd.DataFrame:
    """One row per training run, by its loss alone.

    Returns:
        text, size, rate, seed, peak; `final_loss`, smoothed; `failed`: the final loss is no number, or `FAILED` above
        the lowest of the same text, size and seed at any rate, and the rate is higher than that run's (a lower one is
        only slow); `steps` trained.
    """
    table = pd.DataFrame(
        {
            "text": run.text, "size": run.size, "rate": run.rate, "seed": run.seed, "peak": run.peak,
            "final_loss": smoothed(run.tables["losses"]["loss"].to_numpy())[-1],
            "steps": len(run.tables["losses"]),
        }
        for run in runs
    )  # fmt: skip
    failed = pd.Series(False, index=table.index)
    for _, group in table.groupby(GROUP):
        best = group.loc[group["final_loss"].idxmin()]
        too_high = group["peak"] > best["peak"]
        failed[group.index] = too_high & ~(group["final_loss"] - best["final_loss"] <= FAILED)
    return table.assign(failed=failed)


def limits(calibration: Sequence[Watched], allowed: int = 0) -> dict[str, float]:
    """Of every rival the lowest limit that is exceeded in `allowed` of the training runs that do not fail.

    On the runs that are judged, with as many as the monitor alarms in, these are the limits of hindsight: rival and
    monitor then have the same false alarms.
    """
    failed = run_table(calibration)["failed"]
    healthy = [run.tables for run, fails in zip(calibration, failed, strict=True) if not fails]
    return {
        name: float(np.sort([value(tables).max() for tables in healthy])[-1 - allowed])
        for name, value in RIVALS.items()
    }


def first_alarms(tables: Tables, of: Mapping[str, float]) -> dict[str, float]:
    """Steps at which each rival first exceeds its limit, and at which the monitor first alarms; NaN: never.

    A value that is no number exceeds every limit, once there has been one.
    """
    first = {MONITOR: float(tables["alarms"]["step"].min())}
    for name, value in RIVALS.items():
        values = value(tables)
        known = np.maximum.accumulate(np.isfinite(values.to_numpy()))
        beyond = values.index[known & ~(values.to_numpy() <= of[name])]
        first[name] = float(beyond[0]) if len(beyond) else math.nan
    return first


def judged_runs(runs: Sequence[Watched], of: Mapping[str, float]) -> pd.DataFrame:
    """`run_table`, and of every detector a column with its first alarm (step, NaN: never)."""
    first = pd.DataFrame([first_alarms(run.tables, of) for run in runs])
    return run_table(runs).join(first)


def summary(rows: pd.DataFrame) -> pd.DataFrame:
    """One row per detector: its false alarms, the failing training runs that it catches, and which comes first.

    A detector counts once a training run, whether it would alarm again or not: they recover by different rules.

    Returns:
        false_runs of healthy, their share with its exact 95 % interval (`false_low`, `false_high`; Clopper & Pearson
        1934) as if runs were independent; first alarms per 10,000 healthy steps (`false_rate`, with its
        `poisson_interval`: `rate_low`, `rate_high`); caught of failing. For a rival further: monitor_first,
        rival_first, ties (groups of training runs by the mean of `differences`), `p` of the two-sided sign test
        without ties; the median difference in steps with its interval (`low`, `high`) and the `verdict` that follows;
        the failing training runs that `both` catch, and the median over them of the steps from the rival's first
        alarm to the monitor's (`both_median`), in which nothing stands for never.
    """
    healthy, failing = rows[~rows["failed"]], rows[rows["failed"]]
    table = []
    for detector in (MONITOR, *RIVALS):
        false, caught = (int(of[detector].notna().sum()) for of in (healthy, failing))
        row = {"detector": detector, "false_runs": false, "healthy": len(healthy)}
        if len(healthy):
            interval = stats.binomtest(false, len(healthy)).proportion_ci(CONFIDENCE, "exact")
            row |= {"false_low": float(interval.low), "false_high": float(interval.high)}
            per = 10_000 / int(healthy["steps"].sum())
            low, high = poisson_interval(false)
            row |= {"false_rate": per * false, "rate_low": per * low, "rate_high": per * high}
        row |= {"caught": caught, "failing": len(failing)}
        if detector != MONITOR:
            steps = (failing[MONITOR] - failing[detector]).dropna()
            row |= compared(differences(failing, detector))
            row |= {"both": len(steps), "both_median": float(steps.median())}
        table.append(row)
    return pd.DataFrame(table)


def differences(failing: pd.DataFrame, rival: str) -> pd.Series:
    """Steps from the rival's first alarm to the monitor's, mean over the failing training runs of each group.

    Negative where the monitor is earlier; a detector that never alarms is not left out (`restricted_lead`).
    """
    moments = zip(failing[rival], failing[MONITOR], failing["steps"], strict=True)
    steps = pd.Series([restricted_lead(*of) for of in moments], index=failing.index, dtype=float)
    return steps.groupby([failing[name] for name in GROUP]).mean()


def compared(steps: pd.Series) -> dict[str, object]:
    """What `summary` has of a rival, from the `differences` of independent groups."""
    low, high = median_interval(steps.to_numpy())
    earlier, later = int((steps < 0).sum()), int((steps > 0).sum())
    decided = earlier + later
    return {
        "monitor_first": earlier,
        "rival_first": later,
        "ties": len(steps) - decided,
        "p": float(stats.binomtest(earlier, decided).pvalue) if decided else math.nan,
        "median": float(steps.median()),
        "low": low,
        "high": high,
        "verdict": "earlier" if high < 0 else "later" if low > 0 else "not decided",
    }


def median_interval(values: Floats) -> tuple[float, float]:
    """The 95 % interval of the median between two order statistics, whatever the distribution.

    The k-th lowest and k-th highest of n, with the largest k for which B(n, ½) is below k with a probability of 2.5 %
    at most; without bounds for n < 6 (David & Nagaraja, Order Statistics, 2003, section 7.1).
    """
    n = len(values)
    k = int(stats.binom.ppf((1 - CONFIDENCE) / 2, n, 0.5))
    ordered = np.sort(values)
    return (float(ordered[k - 1]), float(ordered[n - k])) if k else (-math.inf, math.inf)


def poisson_interval(count: int) -> tuple[float, float]:
    """The exact 95 % interval of the mean of a Poisson distribution from one count (Garwood 1936)."""
    tail = (1 - CONFIDENCE) / 2
    low = float(stats.chi2.ppf(tail, 2 * count)) / 2 if count else 0.0
    return low, float(stats.chi2.isf(tail, 2 * count + 2)) / 2
