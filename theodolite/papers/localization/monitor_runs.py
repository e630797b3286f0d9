"""Which notices first that a learning rate is too high: the monitor of attention's geometry, or the loss.

"The loss notices" when it rises or stalls more than in any healthy training run (`LossThresholds`): as early as it can
without a false alarm. For the strictest comparison the tables also hold the step at which the loss is behind that of
the healthy run with the same seed, which nobody has in practice. Nothing is drawn here.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from theodolite.papers.training.models import gpt2
from theodolite.papers.training.tasks import Characters
from theodolite.papers.training.training_loop import BETAS, LearningRate, updates
from theodolite.system.progress import ShowStage, shown
from theodolite.train.monitor import CONTEXTS, GeometryMonitor, GeometryWarning

HEALTHY = "healthy"
LEARNING_RATES = {
    HEALTHY: LearningRate(1e-3),
    "30 times too high": LearningRate(3e-2),
    "rising to 100 times too high": LearningRate(1e-1, warm_up=300),
}
"""One learning rate that is well chosen for this model, one far too high from the first step on, and one whose
warm-up leads into failure: the loss falls as it should before it fails."""

LAYERS, HEADS, WIDTH, BATCH = 3, 4, 64, 16
SIZE = (LAYERS, HEADS, WIDTH)
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
            max(float(np.nanmax(above(losses), initial=0.0)) for losses in healthy),
            min(float(np.nanmin(gained(losses), initial=np.inf)) for losses in healthy),
        )


def compare_learning_rates(
    task: Characters,
    *,
    learning_rates: Mapping[str, LearningRate] = LEARNING_RATES,
    seeds: Sequence[int] = SEEDS,
    steps: int = STEPS,
    every: int = EVERY,
    show_progress: ShowStage = lambda what, done, total: None,
) -> dict[str, pd.DataFrame]:
    """Train at every learning rate with every seed, and compare.

    Args:
        task: the characters, in contexts of `LENGTH`.
        learning_rates: by name, `HEALTHY` among them.
        seeds, steps, every: of each training run; `every` is the monitor's interval in steps.
        show_progress: told (what is being done, training runs done, training runs in all); it may raise to stop.

    Returns:
        runs: one row per training run: first_alarm and first_kind, first_entropy_alarm, loss_rises, loss_stalls,
            loss_notices (the earlier of both), lead (loss_notices − first_alarm: `restricted_lead`), behind_healthy,
            final_loss (mean of the last 20 steps). Steps are numbers of updates done; empty where it never happens.
        losses: pace, seed, step, loss, smoothed, gradient_norm. looks: pace, seed, step and the numbers of `scalars`.
        alarms: pace, seed, step, kind, layer, head, value, slope.
    """
    trained: dict[tuple[str, int], dict[str, pd.DataFrame]] = {}
    places = [(pace, seed) for seed in seeds for pace in learning_rates]
    for pace, seed in shown(places, "training", show_progress):
        trained[pace, seed] = train_with_monitor(task, learning_rates[pace], seed, steps, every)
    losses = {place: tables["losses"]["loss"].to_numpy() for place, tables in trained.items()}
    signs = LossThresholds.beyond([losses[HEALTHY, seed] for seed in seeds])
    runs = [
        {"pace": pace, "seed": seed}
        | _compared(losses[pace, seed], losses[HEALTHY, seed], tables["alarms"], signs, steps)
        for (pace, seed), tables in trained.items()
    ]
    joined = {
        name: pd.concat(
            [
                pd.DataFrame({"pace": pace, "seed": seed}, index=tables[name].index).join(tables[name])
                for (pace, seed), tables in trained.items()
            ],
            ignore_index=True,
        )
        for name in ("losses", "looks", "alarms")
    }
    table = pd.DataFrame(runs)
    may_be_never = table.columns.drop(["pace", "seed", "first_kind"])
    return {"runs": table.astype(dict.fromkeys(may_be_never, "float64"))} | joined


def train_with_monitor(
    task: Characters,
    learning_rate: LearningRate,
    seed: int,
    steps: int,
    every: int,
    size: tuple[int, int, int] = SIZE,
) -> dict[str, pd.DataFrame]:
    """Train for `steps` updates, or until the loss is no number, and measure every `every` steps.

    GPT-2's architecture, AdamW without weight decay, and no clipping of gradients, which would hide a failure. The
    same seed gives the same tables on the same machine and number of threads: `losses`, `looks` and `alarms` of
    `compare_learning_rates`, without pace and seed; the losses have the `gradient_norm`, too.

    Args:
        size: layers, heads and width.
    """
    torch.manual_seed(seed)
    model = gpt2(len(task.characters), task.length, *size)
    optimizer = torch.optim.AdamW(model.parameters(), betas=BETAS, weight_decay=0.0)
    held_out = torch.from_numpy(task.validation[: CONTEXTS * task.length]).view(CONTEXTS, task.length)
    monitor = GeometryMonitor(model, held_out, every=every)
    losses: list[float] = []
    norms: list[float] = []
    looks: list[dict[str, float]] = []

    def look(step: int) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", GeometryWarning)  # they are among the alarms
            numbers = monitor(step)
        if numbers:
            looks.append({"step": step, **numbers})

    def loss_of(step: int) -> Tensor:
        inputs, targets = task.batch(step, BATCH, seed)
        logits = model(input_ids=inputs, use_cache=False).logits
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def note_gradient(model: torch.nn.Module) -> None:
        squares = [p.grad.square().sum() for p in model.parameters() if p.grad is not None]
        norms.append(float(torch.stack(squares).sum().sqrt()))

    look(0)
    for step, loss in updates(model, optimizer, loss_of, learning_rate.at, range(steps), clip=note_gradient):
        losses.append(loss.item())
        look(step)
        if not math.isfinite(losses[-1]):
            break
    columns = ["step", "kind", "layer", "head", "value", "slope"]
    return {
        "losses": pd.DataFrame(
            {
                "step": range(1, len(losses) + 1),
                "loss": losses,
                "smoothed": smoothed(np.array(losses)),
                "gradient_norm": norms,
            }
        ),
        "looks": pd.DataFrame(looks).drop(columns="time_share"),
        "alarms": pd.DataFrame([alarm.as_dict() for alarm in monitor.alarms], columns=columns),
    }


def smoothed(losses: np.ndarray) -> np.ndarray:
    """The mean of the last `SMOOTHED` losses, NaN before there are as many."""
    return pd.Series(losses).rolling(SMOOTHED).mean().to_numpy()


def above(losses: np.ndarray) -> np.ndarray:
    """The smoothed loss over its minimum so far."""
    smooth = smoothed(losses)
    above: np.ndarray = smooth - np.fmin.accumulate(smooth)
    return above


def gained(losses: np.ndarray) -> np.ndarray:
    """By how much the best smoothed loss is below what it was `STALLED` steps ago; NaN where it was not yet."""
    best = np.fmin.accumulate(smoothed(losses))
    gained = np.full(len(best), np.nan)
    gained[STALLED:] = best[:-STALLED] - best[STALLED:]
    return gained


def rises(losses: np.ndarray, signs: LossThresholds) -> int | None:
    """Updates done when the smoothed loss first exceeds its minimum by more than `signs.rise`, or is no number."""
    return _first((above(losses) > signs.rise) | ~np.isfinite(losses))


def stalls(losses: np.ndarray, signs: LossThresholds) -> int | None:
    """Updates done when the best smoothed loss has first gained less than `signs.gain` in `STALLED` steps."""
    return _first(gained(losses) < signs.gain)


def behind(losses: np.ndarray, healthy: np.ndarray) -> int | None:
    """Updates done when the smoothed loss first exceeds the healthy one's by `BEHIND`."""
    shared = min(len(losses), len(healthy))
    return _first(smoothed(losses[:shared]) > smoothed(healthy[:shared]) + BEHIND)


def restricted_lead(first: float, other: float | None, steps: float) -> float:
    """Steps from a first alarm to another sign; what never comes (NaN, None) counts as coming after all `steps`.

    The difference is then too small, never of the wrong sign.
    """
    moments = [steps if moment is None or math.isnan(moment) else moment for moment in (first, other)]
    return moments[1] - moments[0]


def _compared(
    losses: np.ndarray, healthy: np.ndarray, alarms: pd.DataFrame, signs: LossThresholds, steps: int
) -> dict[str, object]:
    first = alarms["step"].min()  # NaN where there is none
    entropy = alarms.loc[alarms["kind"] == "entropy collapse", "step"]
    rise, stall = rises(losses, signs), stalls(losses, signs)
    notices = min((step for step in (rise, stall) if step is not None), default=None)
    return {
        "first_alarm": first,
        "first_kind": ", ".join(alarms.loc[alarms["step"] == first, "kind"].unique()) or None,
        "first_entropy_alarm": entropy.min(),
        "loss_rises": rise,
        "loss_stalls": stall,
        "loss_notices": notices,
        "lead": restricted_lead(first, notices, steps),
        "behind_healthy": behind(losses, healthy),
        "final_loss": float(losses[-SMOOTHED:].mean()),
    }


def _first(flags: np.ndarray) -> int | None:
    indices = np.flatnonzero(flags)
    return int(indices[0]) + 1 if len(indices) else None
