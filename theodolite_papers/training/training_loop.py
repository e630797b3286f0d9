"""The loop that all toy models are trained with: a learning rate by step, an update after the other, a checkpoint.

Whatever is random in a step is drawn from (seed, step) alone, so that a resumed training run gives the same bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from theodolite.errors import UsageError, WorkError
from theodolite.system.checksums import CorruptFile, read_checked, write_checked
from theodolite.system.files import disk_errors, write_atomically

CHECKPOINT = "checkpoint.safetensors"
CLIP = 1.0  # Euclidean norm of the whole gradient
BETAS = (0.9, 0.95)  # AdamW
FINAL_RATE = 0.1  # of the peak learning rate, where a cosine ends
SEEDS = 1 << 32  # a step's generator takes seed · 2³² + step, below 2⁶⁴
MOST_THREADS = 1024  # far more end a process without a word
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class LearningRate:
    """The learning rate by step: a line from 0 over `warm_up`, then level, a cosine to `FINAL_RATE`, or a line to 0."""

    peak: float
    warm_up: int = 1
    decay: Literal["none", "cosine", "linear"] = "none"
    steps: int = 0

    def at(self, step: int) -> float:
        """The rate of a step."""
        done = max(0.0, (step - self.warm_up) / max(1, self.steps - self.warm_up))
        share = {
            "none": 1.0,
            "cosine": FINAL_RATE + (1 - FINAL_RATE) * 0.5 * (1 + math.cos(math.pi * done)),
            "linear": 1 - done,
        }[self.decay]
        return self.peak * (min(1.0, (step + 1) / self.warm_up) * share)


def updates(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Callable[[int], Tensor],
    rate: Callable[[int], float],
    steps: range,
    *,
    seed: int | None = None,
    clip: Callable[[nn.Module], object] | None = None,
) -> Iterator[tuple[int, Tensor]]:
    """Train `model` in place, and yield after every update how many were done, and the loss before it.

    seed: of what is random in the model, such as dropout. clip: what is done to the gradient before an update.
    """
    for step in steps:
        learning_rate = rate(step)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
        if seed is not None:
            torch.manual_seed((seed << 32) + step)
        model.train()
        value = loss(step)
        optimizer.zero_grad()
        value.backward()
        if clip is not None:
            clip(model)
        optimizer.step()
        yield step + 1, value.detach()


def trained_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Names and parameters, but for those that stay as they are."""
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]


def save_checkpoint(
    path: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    notes: Mapping[str, str],
    others: Mapping[str, Tensor] | None = None,
) -> None:
    """Write weights, both moments and `others` to one file, whole or not at all."""
    if not all(parameter.isfinite().all() for _, parameter in trained_parameters(model)):
        raise WorkError(
            f"The weights are no longer finite numbers: remove {path.parent}, and train with a lower rate."
        )
    tensors = dict(others or {})
    for name, parameter in trained_parameters(model):
        state = optimizer.state[parameter]  # empty before the first update
        tensors[name] = parameter.detach()
        tensors |= {f"{name}/{key}": state[key] if state else torch.zeros_like(parameter) for key in MOMENTS}
    with disk_errors(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, lambda temporary: write_checked(temporary, tensors, notes))


def load_checkpoint(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, identity: Mapping[str, str] | None = None
) -> tuple[int, dict[str, Tensor]]:
    """Load a checkpoint into model and optimizer: its updates (0 where there is none), and all its tensors."""
    if not path.exists():
        return 0, {}
    try:
        tensors, notes = read_checked(path)
    except CorruptFile as error:
        raise UsageError(f"{path} is damaged ({error}): remove {path.parent} to start over.") from error
    if any(notes.get(key) != value for key, value in (identity or {}).items()):
        raise another_training_run(path.parent)
    step = int(notes["step"])
    for name, parameter in trained_parameters(model):
        parameter.data.copy_(tensors[name])
        moments = {key: tensors[f"{name}/{key}"].to(parameter.device) for key in MOMENTS}
        count = torch.tensor(float(step), device=parameter.device)
        optimizer.state[parameter] = {"step": count, **moments}
    return step, tensors


def another_training_run(folder: Path) -> UsageError:
    """The refusal to go on with what another training run left in `folder`."""
    return UsageError(f"{folder} holds a training run of other settings or text; remove it to start over.")


def check_numbers(seed: int, threads: int = 1) -> None:
    """Refuse what no training run can use."""
    if not 0 <= seed < SEEDS:
        raise UsageError(f"seed is {seed}; it must be from 0 to {SEEDS - 1}.")
    if threads <= 0:
        raise UsageError(f"threads is {threads}; it must be positive.")
    if threads > MOST_THREADS:
        raise UsageError(f"threads is {threads}; it must be {MOST_THREADS} at most.")
