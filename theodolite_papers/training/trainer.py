"""The loop that trains the papers' toy models, and the checkpoint that it resumes from.

Whatever is random in a step is drawn from (seed, step) alone, so that a resumed training run gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from theodolite.errors import UsageError, WorkError
from theodolite.jobs.job import Unfinished
from theodolite.system.files import disk_errors

CHECKPOINT = "checkpoint"
SEEDS = 1 << 32  # a step's generator takes seed · 2³² + step, below 2⁶⁴
MOST_THREADS = 1024  # far more end a process without a word
MOMENTS = ("exp_avg", "exp_avg_sq")


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
