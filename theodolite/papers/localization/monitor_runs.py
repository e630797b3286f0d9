"""Which notices first that a learning rate is too high: the monitor of attention's geometry, or the loss.

"The loss notices" when it rises or stalls more than in any healthy training run (`LossThresholds`): as early as it can
without a false alarm. For the strictest comparison the tables also hold the step at which the loss is behind that of
the healthy run with the same seed, which nobody has in practice. Nothing is drawn here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from theodolite.papers.localization.monitored_training import MonitoredRun, train_with_monitor
from theodolite.papers.training.tasks import Characters
from theodolite.papers.training.training_loop import LearningRate

HEALTHY = "healthy"
LEARNING_RATES = {
    HEALTHY: LearningRate(1e-3),
    "30 times too high": LearningRate(3e-2),
    "rising to 100 times too high": LearningRate(1e-1, warm_up=300),
}
"""One learning rate that is well chosen for this model, one far too high from the first step on, and one whose
warm-up leads into failure: the loss falls as it should before it fails."""

STEPS, EVERY, SEEDS, LENGTH = 400, 10, (0, 1, 2), 64

SMOOTHED = 20
"""Steps of which the loss is averaged: that of one batch of 1,024 characters varies by 0.03 to 0.1 nats."""

STALLED = 100
"""Steps within which the smoothed loss must gain something not to count as stalled."""

BEHIND = 0.1
"""Nats by which the smoothed loss must exceed that of the healthy training run to count as behind."""


@dataclass(frozen=True)
class LossThresholds:
    """What a loss must show to be noticed.

    Attributes:
        rise: nats by which the smoothed loss exceeds its minimum so far.
        gain: nats that it gained in the last `STALLED` steps; less is a stall.
    """

    rise: float
    gain: float

    @classmethod
    def beyond(cls, healthy: Sequence[np.ndarray]) -> LossThresholds:
        """The weakest signs that none of these losses shows."""
        return cls(
            max(float(np.nanmax(_above(losses), initial=0.0)) for losses in healthy),
            min(float(np.nanmin(_gained(losses), initial=np.inf)) for losses in healthy),
        )


MAY_BE_NEVER = (
    "first_alarm",
    "first_entropy_alarm",
    "loss_rises",
    "loss_stalls",
    "loss_notices",
    "lead",
    "lead_at_least",
    "behind_healthy",
)

ShowProgress = Callable[[str, int], None]
"""Called with the name of the learning rate and the seed before each training run."""


def compare_learning_rates(
    task: Characters,
    *,
    learning_rates: Mapping[str, LearningRate] = LEARNING_RATES,
    seeds: Sequence[int] = SEEDS,
    steps: int = STEPS,
    every: int = EVERY,
    show_progress: ShowProgress = lambda learning_rate, seed: None,
) -> dict[str, pd.DataFrame]:
    """Train at every learning rate with every seed, and compare.

    Args:
        task: the characters, in contexts of `LENGTH`.
        learning_rates: by name, `HEALTHY` among them.
        seeds, steps, every: of each training run; `every` is the monitor's interval in steps.
        show_progress: called before each training run.

    Returns:
        runs: one row per training run: first_alarm and first_kind, first_entropy_alarm, loss_rises, loss_stalls,
            loss_notices (the earlier of both), lead (loss_notices − first_alarm; at least steps − first_alarm where
            the loss never notices: `lead_at_least`), behind_healthy, final_loss (mean of the last 20 steps). Steps
            are numbers of updates done; empty where it never happens.
        losses: pace, seed, step, loss, smoothed. looks: pace, seed, step and the numbers of `scalars`.
        alarms: pace, seed, step, kind, layer, head, value, slope.
    """
    tables: dict[str, list[pd.DataFrame]] = {"losses": [], "looks": [], "alarms": []}
    traces: dict[tuple[str, int], MonitoredRun] = {}
    for seed in seeds:
        for pace, rate in learning_rates.items():
            show_progress(pace, seed)
            trace = traces[pace, seed] = train_with_monitor(task, rate, seed, steps, every)
            place = {"pace": pace, "seed": seed}
            smooth = smoothed(np.array(trace.losses))
            losses = pd.DataFrame(
                {"step": np.arange(1, len(smooth) + 1), "loss": trace.losses, "smoothed": smooth}
            )
            for name, table in (("losses", losses), ("looks", trace.looks), ("alarms", trace.alarms)):
                tables[name].append(pd.DataFrame(place, index=table.index).join(table))
    signs = LossThresholds.beyond([np.array(traces[HEALTHY, seed].losses) for seed in seeds])
    runs = [
        {"pace": pace, "seed": seed} | _compared(trace, traces[HEALTHY, seed], signs, steps)
        for (pace, seed), trace in traces.items()
    ]
    joined = {name: pd.concat(parts, ignore_index=True) for name, parts in tables.items()}
    return {"runs": pd.DataFrame(runs).astype(dict.fromkeys(MAY_BE_NEVER, "float64"))} | joined


def smoothed(losses: np.ndarray) -> np.ndarray:
    """The mean of the last `SMOOTHED` losses, NaN before there are as many."""
    return pd.Series(losses).rolling(SMOOTHED).mean().to_numpy()


def _above(losses: np.ndarray) -> np.ndarray:
    """The smoothed loss over its minimum so far."""
    smooth = smoothed(losses)
    above: np.ndarray = smooth - np.fmin.accumulate(smooth)
    return above


def _gained(losses: np.ndarray) -> np.ndarray:
    """By how much the best smoothed loss is below what it was `STALLED` steps ago; NaN where it was not yet."""
    best = np.fmin.accumulate(smoothed(losses))
    gained = np.full(len(best), np.nan)
    gained[STALLED:] = best[:-STALLED] - best[STALLED:]
    return gained


def rises(losses: np.ndarray, signs: LossThresholds) -> int | None:
    """Updates done when the smoothed loss first exceeds its minimum by more than `signs.rise`, or is no number."""
    return _first((_above(losses) > signs.rise) | ~np.isfinite(losses))


def stalls(losses: np.ndarray, signs: LossThresholds) -> int | None:
    """Updates done when the best smoothed loss has first gained less than `signs.gain` in `STALLED` steps."""
    return _first(_gained(losses) < signs.gain)


def behind(losses: np.ndarray, healthy: np.ndarray) -> int | None:
    """Updates done when the smoothed loss first exceeds the healthy one's by `BEHIND`."""
    shared = min(len(losses), len(healthy))
    return _first(smoothed(losses[:shared]) > smoothed(healthy[:shared]) + BEHIND)


def _compared(
    trace: MonitoredRun, healthy: MonitoredRun, signs: LossThresholds, steps: int
) -> dict[str, object]:
    losses = np.array(trace.losses)
    alarms = trace.alarms
    first = None if alarms.empty else int(alarms["step"].iloc[0])
    entropy = alarms.loc[alarms["kind"] == "entropy collapse", "step"]
    rise, stall = rises(losses, signs), stalls(losses, signs)
    notices = min((step for step in (rise, stall) if step is not None), default=None)
    known = first is not None and notices is not None
    return {
        "first_alarm": first,
        "first_kind": None
        if first is None
        else ", ".join(alarms.loc[alarms["step"] == first, "kind"].unique()),
        "first_entropy_alarm": None if entropy.empty else int(entropy.iloc[0]),
        "loss_rises": rise,
        "loss_stalls": stall,
        "loss_notices": notices,
        "lead": notices - first if known else None,  # type: ignore[operator]
        "lead_at_least": steps - first if first is not None and notices is None else None,
        "behind_healthy": behind(losses, np.array(healthy.losses)),
        "final_loss": float(losses[-SMOOTHED:].mean()),
        "time_share": trace.time_share,
    }


def _first(flags: np.ndarray) -> int | None:
    indices = np.flatnonzero(flags)
    return int(indices[0]) + 1 if len(indices) else None
