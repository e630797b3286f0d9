"""Train the papers' toy models: one loop, a checkpoint to resume from, and a folder that `transformers` opens.

Whatever is random in a step is drawn from (seed, step) alone, so that a resumed training run gives the same bytes.
Until a model is finished everything is in `<out>.partial`.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from theodolite.errors import UsageError, WorkError
from theodolite.jobs.unfinished import JOB, Unfinished, read_job
from theodolite.models.stored.loading import LOADING_ERRORS, reason_of, refuse_nonfinite_weights
from theodolite.system.files import (
    check_target,
    disk_errors,
    folder_written_atomically,
    locked,
)
from theodolite.system.processor import using_threads
from theodolite.system.progress import STOPPING, interruptible
from theodolite.system.run_folders import differences
from theodolite_papers.training.models import OR_ZERO, ModelConfig, TaskModelConfig

CHECKPOINT = "checkpoint"

CLIP = 1.0  # Euclidean norm of the whole gradient
BETAS = (0.9, 0.95)  # AdamW
SEEDS = 1 << 32  # a step's generator takes seed · 2³² + step, below 2⁶⁴
MOST_THREADS = 1024  # far more end a process without a word
MOMENTS = ("exp_avg", "exp_avg_sq")

LARGEST_RATE = 1.0
"""An update of AdamW changes a weight by about the rate: at 1, fifty times what weights begin with."""

Result = TypeVar("Result")


def check_numbers(seed: int, threads: int = 1) -> None:
    """Raise unless a training run can use the seed and the number of threads."""
    if not 0 <= seed < SEEDS:
        raise UsageError(f"seed is {seed}; it must be from 0 to {SEEDS - 1}.")
    if threads <= 0:
        raise UsageError(f"threads is {threads}; it must be positive.")
    if threads > MOST_THREADS:
        raise UsageError(f"threads is {threads}; it must be {MOST_THREADS} at most.")


@dataclass
class Trainer:
    """A model with its optimizer, which resumes from the checkpoint in its unfinished work.

    measure: gets the number of updates done and the loss before the last one, once before the first update (no loss)
    and then after every one. before_save: writes what must not be older than a checkpoint. clip: the gradient's largest
    norm; None: any. kept: tensors that are saved and resumed with the weights; `measure` may replace them.
    """

    work: Unfinished
    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss: Callable[[int], Tensor]
    rate: Callable[[int], float]
    seed: int
    save_every: int
    measure: Callable[[int, Tensor | None], None]
    before_save: Callable[[], None] = lambda: None
    clip: float | None = None
    kept: dict[str, Tensor] = field(default_factory=dict)
    step: int = 0

    def advance(self, until: int, stop: Callable[[], bool] = lambda: False) -> bool:
        """Train to step `until`, saving on the way and at the end; False where `stop` ended it before."""
        began, saved = self.step, self.saved
        if not began and not saved:
            self.measure(0, None)
        while self.step < until and not stop():
            loss = self._update()
            self.measure(self.step, loss)
            if self.step % self.save_every == 0 and self.step < until:
                self.save()
        if self.step > began or not saved:
            self.save()
        return self.step >= until

    def _update(self) -> Tensor:
        """Take one step, and return the loss before it."""
        learning_rate = self.rate(self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        torch.manual_seed((self.seed << 32) + self.step)
        self.model.train()
        loss = self.loss(self.step)
        self.optimizer.zero_grad()
        loss.backward()
        if self.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        self.step += 1
        return loss.detach()

    @property
    def saved(self) -> bool:
        """True if there is a checkpoint: the weights, both moments, and what is `kept`."""
        return bool(self.work.notes(CHECKPOINT))

    def save(self) -> None:
        """Write the checkpoint, whole or not at all."""
        if not all(parameter.isfinite().all() for parameter in self.model.parameters()):
            raise WorkError(
                f"The weights are no longer finite numbers: remove {self.work.folder}, and train with a lower rate."
            )
        with disk_errors(self.work.folder):
            self.before_save()
        tensors = dict(self.kept)
        for name, parameter in self.model.named_parameters():
            state = self.optimizer.state[parameter]  # empty before the first update
            tensors[name] = parameter.detach()
            tensors |= {
                f"{name}/{key}": state[key] if state else torch.zeros_like(parameter) for key in MOMENTS
            }
        self.work.save(CHECKPOINT, tensors, {"step": self.step})

    def resume(self) -> None:
        """Load the checkpoint, if there is one, into the model, the optimizer, `kept` and `step`.

        Raises:
            UsageError: it is damaged, or of another training run.
        """
        self.work.begin()
        tensors, notes = self.work.load(CHECKPOINT) or ({}, {})
        if not notes:
            return
        self.step = int(notes["step"])
        for name, parameter in self.model.named_parameters():
            parameter.data.copy_(tensors[name])
            moments = {key: tensors[f"{name}/{key}"].to(parameter.device) for key in MOMENTS}
            count = torch.tensor(float(self.step), device=parameter.device)
            self.optimizer.state[parameter] = {"step": count, **moments}
        self.kept = {name: tensors[name].to(value.device) for name, value in self.kept.items()}


@dataclass(frozen=True)
class ModelTraining(Generic[Result]):
    """A training run into a folder: its model, data, loss and reports.

    build: the untrained model; torch's generator is seeded before. data: names and hashes of what it is trained on.
    loss: of a step's batch. progress: what to print at a checkpoint. measure: the result, of the finished model.
    page: name and text of the file that states it.
    """

    config: ModelConfig
    build: Callable[[], PreTrainedModel]
    tokenizer: PreTrainedTokenizerFast
    data: dict[str, str]
    loss: Callable[[PreTrainedModel, int], Tensor]
    progress: Callable[[PreTrainedModel, float], str]
    measure: Callable[[PreTrainedModel], Result]
    page: Callable[[Result], tuple[str, str]]


def check_training(out: Path, config: ModelConfig, threads: int) -> None:
    """Refuse invalid settings, and an existing `out` that is no training run."""
    check_numbers(config.seed, threads)
    check_target(out)
    if out.exists() and not (out / JOB).is_file():
        raise UsageError(f"{out} exists; give another folder or remove it.")
    if not 0 < config.learning_rate <= LARGEST_RATE:
        raise UsageError(
            f"the learning rate is {config.learning_rate}; it must be above 0 and at most {LARGEST_RATE:g}."
        )
    for option in fields(config):
        value = getattr(config, option.name)
        if option.metadata != OR_ZERO and not isinstance(value, bool | str) and value <= 0:
            raise UsageError(f"{option.name} is {value}; it must be positive.")
    if config.width % config.heads:
        raise UsageError(f"A width of {config.width} does not divide into {config.heads} heads.")
    if isinstance(config, TaskModelConfig) and config.positions not in ("learned", "rotary"):
        raise UsageError(f"positions are '{config.positions}'; choose learned or rotary.")


def train_into(out: Path, training: ModelTraining[Result], threads: int, console: Console | None) -> Result:
    """Train a model, from its last checkpoint if there is one, and write it to `out`; measure it where it is done."""
    console, config = console or Console(stderr=True), asdict(training.config)
    work = Unfinished(out, {**config, **training.data}, kind="training run")
    with locked(out), using_threads(threads):
        torch.manual_seed(training.config.seed)
        model = training.build()
        if out.exists():
            there, _ = read_job(out)
            if there != work.fingerprint:
                differs = differences(there, work.fingerprint)
                raise UsageError(
                    f"{out} holds another training run ({differs}); give another folder or remove it."
                )
            console.print(f"{out} is trained already; it is measured again.", markup=False, highlight=False)
            model = _finished_model(out, model)
        else:
            _fit(model, training, work, console)
        model.eval()
        with console.status("measuring the model"):
            result = training.measure(model)
        if not out.exists():
            with folder_written_atomically(out) as finished:
                model.save_pretrained(finished)
                training.tokenizer.save_pretrained(finished)
                name, text = training.page(result)
                (finished / name).write_text(text, encoding="utf-8")
                shutil.copyfile(work.folder / JOB, finished / JOB)
        work.remove()
    return result


def _finished_model(out: Path, model: PreTrainedModel) -> PreTrainedModel:
    """Load the finished model; refuse a folder that is damaged or lacks weights."""
    advice = "give another folder or remove it."
    architecture: Any = type(model)
    try:
        trained, info = architecture.from_pretrained(
            out,
            config=model.config,
            attn_implementation=model.config._attn_implementation,
            dtype=torch.float32,
            output_loading_info=True,
        )
        refuse_nonfinite_weights(trained)
    except (*LOADING_ERRORS, WorkError) as error:
        raise UsageError(f"{out} is damaged ({reason_of(error)}); {advice}") from error
    lacking = sorted(info["missing_keys"])
    if lacking:
        raise UsageError(f"{out} is damaged ({lacking[0]} is missing); {advice}")
    return trained


def _fit(model: PreTrainedModel, training: ModelTraining[Result], work: Unfinished, console: Console) -> None:
    """Train to the last step, with a bar, and say how far it is at every checkpoint."""
    config, partial = training.config, work.folder
    groups = [
        {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]

    def measure(step: int, loss: Tensor | None) -> None:
        if loss is None:
            return
        value = loss.item()
        progress.update(task, description=f"training, loss {value:.3f}", completed=step)
        _check_loss(value, step - 1, partial)
        if step % config.checkpoint_every == 0 or step == config.steps:
            console.print(f"step {step}: {training.progress(model.eval(), value)}")

    trainer = Trainer(
        work=work,
        model=model,
        optimizer=torch.optim.AdamW(groups, betas=BETAS, fused=True),
        loss=lambda step: training.loss(model, step),
        rate=config.rate.at,
        seed=config.seed,
        save_every=config.checkpoint_every,
        measure=measure,
        clip=CLIP,
    )
    trainer.resume()
    with interruptible(lambda: console.print(STOPPING)) as pressed, Progress(console=console) as progress:
        task = progress.add_task("training", total=config.steps, completed=trainer.step)
        if not trainer.advance(config.steps, pressed):
            raise KeyboardInterrupt
    with torch.no_grad():  # no step has seen what the last update did
        _check_loss(training.loss(model.eval(), config.steps).item(), config.steps, partial)


def _check_loss(loss: float, step: int, folder: Path) -> None:
    if not math.isfinite(loss):
        raise WorkError(f"The loss was {loss} at step {step}: remove {folder}, and train with a lower rate.")
