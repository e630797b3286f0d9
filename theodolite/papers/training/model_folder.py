"""A model that is trained into a folder which `transformers` opens: what the trainers of text and of tasks share.

Until it is finished, everything is in `<out>.partial`, which says from the start which training run it is of, so that
another one takes nothing from it. A training run that was killed resumes from its last checkpoint there.
"""

from __future__ import annotations

import filecmp
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Generic, TypeVar

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
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from theodolite.errors import UsageError, WorkError
from theodolite.papers.training import training_loop
from theodolite.papers.training.models import ModelConfig, TaskModelConfig
from theodolite.papers.training.training_loop import BETAS, CHECKPOINT, CLIP, another_training_run
from theodolite.system.checksums import CorruptFile, read_notes
from theodolite.system.files import check_target, disk_errors, folder_purpose, folder_written_atomically
from theodolite.system.interrupt import STOPPING, interruptible

NOT_SIZES = ("seed", "weight_decay", "dropout", "no_op", "schedule", "positions", "bfloat16", "series")

Result = TypeVar("Result")


@dataclass(frozen=True)
class ModelTraining(Generic[Result]):
    """What distinguishes one training run into a folder from another.

    Attributes:
        build: the untrained model; torch's global generator is seeded before.
        data: names and hashes of what it is trained on, by which an unfinished training run is known.
        loss: the mean loss of a step's batch, a scalar with a graph.
        progress: what to print at a checkpoint, given the model and the loss of the step before.
        measure: the result, of the finished model.
        page: name and text of the file beside the weights that states the result.
        series: numbers of updates after which a copy of the model is kept.
    """

    config: ModelConfig
    build: Callable[[], PreTrainedModel]
    tokenizer: PreTrainedTokenizerFast
    data: dict[str, str]
    loss: Callable[[PreTrainedModel, int], Tensor]
    progress: Callable[[PreTrainedModel, float], str]
    measure: Callable[[PreTrainedModel], Result]
    page: Callable[[Result], tuple[str, str]]
    series: tuple[int, ...] = ()


def partial_of(out: Path) -> Path:
    """Folder of an unfinished training run into `out`."""
    return out.with_name(out.name + ".partial")


def check_training(out: Path, config: ModelConfig, threads: int) -> None:
    """Refuse numbers that no training run can use, and to train into what is there, unless this training run wrote it
    and was killed before it forgot its checkpoint.

    Raises:
        UsageError: such a number; or `out` exists, and its checkpoint is not of the last step, or not there.
    """
    training_loop.check_numbers(config.seed, threads)
    check_target(out)
    if out.exists():
        try:
            finished = out.is_dir() and int(read_notes(partial_of(out) / CHECKPOINT)["step"]) == config.steps
        except (CorruptFile, KeyError):
            finished = False
        if not finished:
            raise _exists(out)
    for name, value in asdict(config).items():
        if name not in NOT_SIZES and value <= 0:
            raise UsageError(f"{name} is {value}; it must be positive.")
    if config.width % config.heads:
        raise UsageError(f"A width of {config.width} does not divide into {config.heads} heads.")
    if isinstance(config, TaskModelConfig) and config.positions not in ("learned", "rotary"):
        raise UsageError(f"positions are '{config.positions}'; choose learned or rotary.")


def train_into(out: Path, training: ModelTraining[Result], threads: int, console: Console | None) -> Result:
    """Train a model, from its last checkpoint if there is one, and write it to `out`.

    Raises:
        UsageError: `out` holds another model, or `<out>.partial` another training run.
        WorkError: the loss is no longer a number, or a file cannot be written.
        KeyboardInterrupt: Ctrl-C was pressed; a checkpoint of the last whole step was written before.
    """
    partial, console = partial_of(out), console or Console(stderr=True)
    with training_loop.threads(threads):
        torch.manual_seed(training.config.seed)
        model = training.build()
        _fit(model, training, partial, console)
        model.eval()
        with phase("measuring the model", console):
            result = training.measure(model)
    finished = partial / "finished"
    _write_model(finished, model, training)
    with disk_errors(out):
        name, text = training.page(result)
        (finished / name).write_text(text, encoding="utf-8")
        if (partial / "series").exists():  # copied: a kill before the rename must not lose it
            shutil.copytree(partial / "series", finished / "series")
        _publish(finished, out)
    return result


def _fit(model: PreTrainedModel, training: ModelTraining[Result], partial: Path, console: Console) -> None:
    config, checkpoint = training.config, partial / CHECKPOINT
    identity = {"config": json.dumps(asdict(config)), **training.data}
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=BETAS, fused=True)
    begin, _ = training_loop.load_checkpoint(checkpoint, model, optimizer, identity)
    # A folder that does not say what it is of has to have a checkpoint, which has just been judged by its own notes.
    unknown = f"{partial} does not say which training run it holds; remove it to start over."
    refusal = None if checkpoint.exists() else unknown
    if folder_purpose(partial / "identity.json", identity, refusal) != identity:
        raise another_training_run(partial)

    def keep(step: int) -> None:
        if step in training.series:
            _write_model(partial / "series" / f"{step:06d}", model, training)

    steps = training_loop.updates(
        model,
        optimizer,
        lambda step: training.loss(model, step),
        config.rate.at,
        range(begin, config.steps),
        seed=config.seed,
        clip=lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP),
    )
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with (
        interruptible(lambda: console.print(STOPPING)) as pressed,
        Progress(*columns, console=console) as progress,
    ):
        if not begin:
            keep(0)
        task = progress.add_task("training", total=config.steps, completed=begin)
        for step, value in steps:
            loss = value.item()
            progress.update(task, description=f"training, loss {loss:.3f}")
            if not math.isfinite(loss):
                raise WorkError(f"The loss was {loss} at step {step - 1}; lower the learning rate.")
            keep(step)
            due = step % config.checkpoint_every == 0 or step == config.steps
            stop = pressed()  # asked once: what is pressed later is for the next step
            if due or stop:
                training_loop.save_checkpoint(checkpoint, model, optimizer, identity | {"step": str(step)})
            if due:
                model.eval()
                console.print(f"step {step}: {training.progress(model, loss)}")
            progress.advance(task)  # what is shown and saved after a step is a part of it
            if stop:
                raise KeyboardInterrupt


@contextmanager
def phase(title: str, console: Console) -> Iterator[None]:
    """A named bar that moves without an end while something of unknown length is done before or after the training."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(title, total=None)
        yield
        progress.update(task, total=1, completed=1)


def _write_model(folder: Path, model: PreTrainedModel, training: ModelTraining[Result]) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    with folder_written_atomically(folder) as temporary:
        model.save_pretrained(temporary)
        training.tokenizer.save_pretrained(temporary)


def _publish(finished: Path, out: Path) -> None:
    """Give the finished folder its name, and forget the training run: last of all its checkpoint.

    Raises:
        UsageError: `out` is there, with another model in it.
    """
    if out.exists():
        new, old = (folder / "model.safetensors" for folder in (finished, out))
        if not old.is_file() or not filecmp.cmp(new, old, shallow=False):
            raise _exists(out)
    else:
        os.replace(finished, out)
    partial = partial_of(out)
    for path in partial.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != CHECKPOINT:
            path.unlink()
    shutil.rmtree(partial)


def _exists(out: Path) -> UsageError:
    return UsageError(f"{out} exists; give another folder or remove it.")
