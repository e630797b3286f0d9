"""The loop that the small trainers share: AdamW, a learning rate by step, and a checkpoint to resume from.

The folder of the checkpoint says whose it is from the start, so that another training run takes nothing from it.
It knows no text, no task and no architecture. Whatever is random in a step is drawn from (seed, step) alone, so
that a training run which was killed and resumed gives the same bytes as one that was not.
"""

from __future__ import annotations

import filecmp
import math
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from torch import Tensor
from transformers import PreTrainedModel

from theodolite.errors import UsageError, WorkError
from theodolite.system.checksums import CorruptFile, read_checked, read_notes, write_checked
from theodolite.system.files import disk_errors, folder_purpose, write_atomically
from theodolite.system.interrupt import STOPPING, interruptible

CHECKPOINT = "checkpoint.safetensors"
CLIP = 1.0  # Euclidean norm of the whole gradient
BETAS = (0.9, 0.95)  # AdamW
FINAL_RATE = 0.1  # of the peak learning rate, where a cosine ends
SEEDS = 1 << 32  # a step's generator takes seed · 2³² + step, below 2⁶⁴


@dataclass(frozen=True)
class TrainingLoop:
    """How a model is fitted, whatever it is fitted to.

    `loss(step)` is the mean loss of that step's batch, a scalar with a graph; `rate(step)` its learning rate.
    `identity` says which training run the folder of `checkpoint` and all in it belong to. `done(steps, loss)` is
    called after every update (and with 0 and NaN before the first) and `saved(steps, loss)` after every
    checkpoint that is due.
    """

    steps: int
    seed: int
    weight_decay: float  # on matrices only
    checkpoint: Path
    checkpoint_every: int  # steps
    identity: dict[str, str]
    loss: Callable[[int], Tensor]
    rate: Callable[[int], float]
    saved: Callable[[int, float], None]
    done: Callable[[int, float], None] = lambda steps, loss: None


@contextmanager
def phase(title: str, console: Console) -> Iterator[None]:
    """A named bar that moves without an end while something of unknown length is done before or after the training."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(title, total=None)
        yield
        progress.update(task, total=1, completed=1)


def fit(model: PreTrainedModel, loop: TrainingLoop, console: Console) -> None:
    """Train `model` in place, from its last checkpoint if there is one.

    Raises:
        UsageError: the checkpoint or its folder is of another training run.
        WorkError: the loss is no longer a number, or the checkpoint cannot be written.
        KeyboardInterrupt: Ctrl-C was pressed; a checkpoint of the last whole step was written before.
    """
    optimizer = _optimizer(model, loop.weight_decay)
    begin = _restore(loop.checkpoint, model, optimizer, loop.identity)
    _claim(loop.checkpoint, loop.identity)

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with (
        interruptible(lambda: console.print(STOPPING)) as pressed,
        Progress(*columns, console=console) as progress,
    ):
        if not begin:
            loop.done(0, math.nan)
        task = progress.add_task("training", total=loop.steps, completed=begin)
        for step in range(begin, loop.steps):
            loss = _step(model, optimizer, loop, step)
            progress.update(task, description=f"training, loss {loss:.3f}")
            if not math.isfinite(loss):
                raise WorkError(f"The loss was {loss} at step {step}; lower the learning rate.")
            loop.done(step + 1, loss)
            due = (step + 1) % loop.checkpoint_every == 0 or step + 1 == loop.steps
            stop = pressed()  # asked once: what is pressed later is for the next step
            if due or stop:
                _checkpoint(loop.checkpoint, model, optimizer, loop.identity | {"step": str(step + 1)})
            if due:
                loop.saved(step + 1, loss)
            progress.advance(task)  # what is shown and saved after a step is a part of it
            if stop:
                raise KeyboardInterrupt


def _step(model: PreTrainedModel, optimizer: torch.optim.Optimizer, loop: TrainingLoop, step: int) -> float:
    """One update; the batch's mean loss before it."""
    rate = loop.rate(step)
    for group in optimizer.param_groups:
        group["lr"] = rate
    torch.manual_seed((loop.seed << 32) + step)  # of dropout
    loss = loop.loss(step)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    optimizer.step()
    return loss.item()


def check_numbers(seed: int, threads: int) -> None:
    """Refuse what no training run can use.

    Raises:
        UsageError: `seed` is not from 0 to 2³² − 1, or `threads` is not positive.
    """
    if not 0 <= seed < SEEDS:
        raise UsageError(f"seed is {seed}; it must be from 0 to {SEEDS - 1}.")
    if threads <= 0:
        raise UsageError(f"threads is {threads}; it must be positive.")


def partial_of(out: Path) -> Path:
    """Folder of an unfinished training run into `out`."""
    return out.with_name(out.name + ".partial")


def share_of_peak(step: int, warm_up: int, steps: int, *, linear: bool = False) -> float:
    """Learning rate of a step over its peak: linear warm-up, then a cosine to `FINAL_RATE`, or a line to 0."""
    warmed = (step + 1) / warm_up
    if warmed < 1:
        return warmed
    done = max(0.0, (step - warm_up) / max(1, steps - warm_up))
    return 1 - done if linear else FINAL_RATE + (1 - FINAL_RATE) * 0.5 * (1 + math.cos(math.pi * done))


def _optimizer(model: PreTrainedModel, weight_decay: float) -> torch.optim.AdamW:
    parameters = [parameter for _, parameter in _trained(model)]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, betas=BETAS, fused=True)


def _trained(model: PreTrainedModel) -> list[tuple[str, torch.nn.Parameter]]:
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]


def _claim(checkpoint: Path, identity: dict[str, str]) -> None:
    """Write into the checkpoint's folder which training run it is of, unless it says so already.

    A folder that does not say has to have a checkpoint, which `_restore` has judged by what is written in it.
    """
    folder = checkpoint.parent
    unknown = f"{folder} does not say which training run it holds; remove it to start over."
    refusal = None if checkpoint.exists() else unknown
    if folder_purpose(folder / "identity.json", identity, refusal) != identity:
        raise _another(folder)


def _another(folder: Path) -> UsageError:
    return UsageError(f"{folder} holds a training run of other settings or text; remove it to start over.")


def _checkpoint(
    path: Path, model: PreTrainedModel, optimizer: torch.optim.AdamW, metadata: dict[str, str]
) -> None:
    """Write weights and both moments to one file, whole or not at all."""
    tensors = {}
    for name, parameter in _trained(model):
        tensors[name] = parameter.detach()
        tensors[f"{name}/exp_avg"] = optimizer.state[parameter]["exp_avg"]
        tensors[f"{name}/exp_avg_sq"] = optimizer.state[parameter]["exp_avg_sq"]
    with disk_errors(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, lambda temporary: write_checked(temporary, tensors, metadata))


def _restore(
    path: Path, model: PreTrainedModel, optimizer: torch.optim.AdamW, identity: dict[str, str]
) -> int:
    """Load a checkpoint into model and optimizer; the number of steps it had done (0: there is none)."""
    if not path.exists():
        return 0
    tensors, metadata = read_checkpoint(path)
    if any(metadata.get(key) != value for key, value in identity.items()):
        raise _another(path.parent)
    step = int(metadata["step"])
    for name, parameter in _trained(model):
        parameter.data.copy_(tensors[name])
        moments = {key: tensors[f"{name}/{key}"] for key in ("exp_avg", "exp_avg_sq")}
        optimizer.state[parameter] = {"step": torch.tensor(float(step)), **moments}
    return step


def read_checkpoint(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and notes of a training run's checkpoint.

    Raises:
        UsageError: it is damaged.
    """
    try:
        return read_checked(path)
    except CorruptFile as error:
        raise UsageError(f"{path} is damaged ({error}): remove {path.parent} to start over.") from error


def refuse_existing(out: Path, checkpoint: Path, steps: int) -> None:
    """Refuse to train into what is there, unless this training run wrote it and was killed before it forgot its
    checkpoint.

    Raises:
        UsageError: `out` exists, and the checkpoint is not of the last step, or not there.
    """
    if out.exists() and not (out.is_dir() and _steps(checkpoint) == steps):
        raise UsageError(f"{out} exists; give another folder or remove it.")


def publish(finished: Path, out: Path, checkpoint: Path) -> None:
    """Give the finished folder its name, and forget the training run: last of all its checkpoint.

    Raises:
        UsageError: `out` is there, with another model in it.
    """
    if out.exists():
        new, old = (folder / "model.safetensors" for folder in (finished, out))
        if not old.is_file() or not filecmp.cmp(new, old, shallow=False):
            raise UsageError(f"{out} exists; give another folder or remove it.")
    else:
        os.replace(finished, out)
    for path in checkpoint.parent.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path != checkpoint:
            path.unlink()
    shutil.rmtree(checkpoint.parent)


def _steps(checkpoint: Path) -> int:
    """The steps that a checkpoint had done; 0 where there is none that can be read."""
    try:
        return int(read_notes(checkpoint)["step"])
    except (CorruptFile, KeyError):
        return 0


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Use `count` threads: how sums are split over threads changes their last bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
