"""Which notices first that a learning rate is too high: the monitor of attention's geometry, or the loss.

"The loss notices" is what one can see while a training runs, without another one to compare it with (`noticed`).
For the strictest comparison the tables also hold the step at which the loss is behind that of a healthy training
with the same seed, which nobody has in practice. Nothing is drawn here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd

from theodolite.train.collapse import Pace, Trace, train_watched
from theodolite.train.small_tasks import Characters

HEALTHY = Pace("healthy", 1e-3)
PACES = (HEALTHY, Pace("30 times too high", 3e-2), Pace("rising to 100 times too high", 1e-1, warm_up=300))
"""One learning rate that is well chosen for this model, one far too high from the first step on, and one whose
warm-up leads into failure: the loss falls as it should before it fails."""

STEPS, EVERY, SEEDS, LENGTH = 400, 10, (0, 1, 2), 64

SMOOTHED = 20
"""Steps of which the loss is averaged: that of one batch of 1,024 characters varies by 0.03 nats."""

RISE = 0.05
"""Nats by which the smoothed loss must exceed its minimum so far to count as rising."""

STALL, STALLED = 0.01, 100
"""Nats that the smoothed loss must have gained within so many steps not to count as stalled."""

BEHIND = 0.1
"""Nats by which the smoothed loss must exceed that of the healthy training to count as behind."""

ShowProgress = Callable[[str, int], None]
"""Told the name of the pace and the seed before each training."""


def collapse(
    task: Characters,
    *,
    paces: Sequence[Pace] = PACES,
    seeds: Sequence[int] = SEEDS,
    steps: int = STEPS,
    every: int = EVERY,
    show_progress: ShowProgress = lambda pace, seed: None,
) -> dict[str, pd.DataFrame]:
    """Train at every pace with every seed, and compare.

    Args:
        task: the characters, in contexts of `LENGTH`.
        paces: the first one is the healthy one.
        seeds, steps, every: of each training; `every` is how often the monitor looks.
        show_progress: told before each training.

    Returns:
        runs: one row a training: first_alarm and first_kind, first_entropy_alarm, loss_rises, loss_stalls,
            loss_notices (the earlier of both), lead (loss_notices − first_alarm; at least steps − first_alarm where
            the loss never notices: `lead_at_least`), behind_healthy, final_loss (mean of the last 20 steps). Steps
            are numbers of updates done; empty where it never happens.
        losses: pace, seed, step, loss, smoothed. looks: pace, seed, step and the numbers of `scalars`.
        alarms: pace, seed, step, kind, layer, head, value, slope.
    """
    tables: dict[str, list[pd.DataFrame]] = {"losses": [], "looks": [], "alarms": []}
    runs: list[dict[str, object]] = []
    for seed in seeds:
        healthy: Trace | None = None
        for pace in paces:
            show_progress(pace.name, seed)
            trace = train_watched(task, pace, seed, steps, every)
            healthy = healthy or trace
            place = {"pace": pace.name, "seed": seed}
            runs.append(place | _compared(trace, healthy, steps))
            smooth = smoothed(np.array(trace.losses))
            losses = pd.DataFrame(
                {"step": np.arange(1, len(smooth) + 1), "loss": trace.losses, "smoothed": smooth}
            )
            for name, table in (("losses", losses), ("looks", trace.looks), ("alarms", trace.alarms)):
                tables[name].append(pd.DataFrame(place, index=table.index).join(table))
    found = {name: pd.concat(parts, ignore_index=True) for name, parts in tables.items()}
    return {"runs": pd.DataFrame(runs)} | found


def smoothed(losses: np.ndarray) -> np.ndarray:
    """The mean of the last `SMOOTHED` losses, NaN before there are as many."""
    return pd.Series(losses).rolling(SMOOTHED).mean().to_numpy()


def rises(losses: np.ndarray) -> int | None:
    """Updates done when the smoothed loss first exceeds its minimum so far by `RISE`, or is no number."""
    smooth = smoothed(losses)
    above = smooth > np.fmin.accumulate(smooth) + RISE
    return _first(above | ~np.isfinite(losses))


def stalls(losses: np.ndarray) -> int | None:
    """Updates done when the best smoothed loss is first less than `STALL` below what it was `STALLED` steps ago."""
    best = np.fmin.accumulate(smoothed(losses))
    gained = np.full(len(best), np.inf)
    gained[STALLED:] = best[:-STALLED] - best[STALLED:]
    return _first(gained < STALL)  # a NaN, before the first smoothed value, is no stall


def behind(losses: np.ndarray, healthy: np.ndarray) -> int | None:
    """Updates done when the smoothed loss first exceeds the healthy one's by `BEHIND`."""
    both = min(len(losses), len(healthy))
    return _first(smoothed(losses[:both]) > smoothed(healthy[:both]) + BEHIND)


def noticed(losses: np.ndarray) -> int | None:
    """Updates done when the loss first rises or stalls."""
    steps = [step for step in (rises(losses), stalls(losses)) if step is not None]
    return min(steps, default=None)


def _compared(trace: Trace, healthy: Trace, steps: int) -> dict[str, object]:
    losses = np.array(trace.losses)
    alarms = trace.alarms
    first = None if alarms.empty else int(alarms["step"].iloc[0])
    entropy = alarms.loc[alarms["kind"] == "entropy collapse", "step"]
    notices = noticed(losses)
    known = first is not None and notices is not None
    return {
        "first_alarm": first,
        "first_kind": None
        if first is None
        else ", ".join(alarms.loc[alarms["step"] == first, "kind"].unique()),
        "first_entropy_alarm": None if entropy.empty else int(entropy.iloc[0]),
        "loss_rises": rises(losses),
        "loss_stalls": stalls(losses),
        "loss_notices": notices,
        "lead": notices - first if known else None,  # type: ignore[operator]
        "lead_at_least": steps - first if first is not None and notices is None else None,
        "behind_healthy": behind(losses, np.array(healthy.losses)),
        "final_loss": float(losses[-SMOOTHED:].mean()),
        "time_share": trace.time_share,
    }


def _first(flags: np.ndarray) -> int | None:
    found = np.flatnonzero(flags)
    return int(found[0]) + 1 if len(found) else None
