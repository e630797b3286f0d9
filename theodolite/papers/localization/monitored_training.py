"""A small language model trained at a healthy or at a far too high learning rate, under the monitor.

For the experiment that asks which notices first that a training run fails, the monitor or the loss. GPT-2's
architecture on the characters of a text, AdamW without weight decay, and no clipping of gradients, which would hide
the failure.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass

import pandas as pd
import torch
from torch import Tensor

from theodolite.papers.training.models import gpt2
from theodolite.papers.training.tasks import Characters
from theodolite.papers.training.training_loop import BETAS, LearningRate, updates
from theodolite.train.monitor import CONTEXTS, GeometryMonitor, GeometryWarning

LAYERS, HEADS, WIDTH, BATCH = 3, 4, 64, 16


@dataclass(frozen=True)
class MonitoredRun:
    """One training run: each step's loss (nats), and the monitor's numbers and alarms at every measurement."""

    losses: list[float]
    looks: pd.DataFrame
    alarms: pd.DataFrame
    time_share: float


def train_with_monitor(
    task: Characters, learning_rate: LearningRate, seed: int, steps: int, every: int
) -> MonitoredRun:
    """Train for `steps` updates, or until the loss is no number, and measure every `every` steps.

    The same seed gives the same trace, but for the times, on the same machine and number of threads.
    """
    torch.manual_seed(seed)
    model = gpt2(len(task.characters), task.length, LAYERS, HEADS, WIDTH)
    optimizer = torch.optim.AdamW(model.parameters(), betas=BETAS, weight_decay=0.0)
    held_out = torch.from_numpy(task.validation[: CONTEXTS * task.length]).view(CONTEXTS, task.length)
    monitor = GeometryMonitor(model, held_out, every=every)
    losses: list[float] = []
    measurements: list[dict[str, float]] = []

    def measure(step: int) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", GeometryWarning)  # they are in the trace
            numbers = monitor(step)
        if numbers:
            measurements.append({"step": step, **numbers})

    def loss_of(step: int) -> Tensor:
        inputs, targets = task.batch(step, BATCH, seed)
        logits = model(input_ids=inputs, use_cache=False).logits
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    measure(0)
    for step, loss in updates(model, optimizer, loss_of, learning_rate.at, range(steps)):
        losses.append(loss.item())
        measure(step)
        if not math.isfinite(losses[-1]):
            break
    share = measurements[-1]["time_share"]
    table = pd.DataFrame(measurements).drop(columns="time_share")
    columns = ["step", "kind", "layer", "head", "value", "slope"]
    alarms = pd.DataFrame([alarm.as_dict() for alarm in monitor.alarms], columns=columns)
    return MonitoredRun(losses, table, alarms, share)
