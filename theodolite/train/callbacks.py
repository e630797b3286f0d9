"""The monitor and LocAteR inside the `transformers` Trainer: numbers go wherever the Trainer's own numbers go."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from jaxtyping import Int
from torch import Tensor
from transformers import PrinterCallback, ProgressCallback, TrainerCallback, TrainerState
from transformers.trainer_callback import CallbackHandler

from theodolite.models.open import unwrap
from theodolite.models.training.shards import is_of_deepspeed
from theodolite.train.alarms import alarm_lines
from theodolite.train.geometry import Ranks
from theodolite.train.locater import Locater, Strength
from theodolite.train.monitor import GeometryMonitor, monitor_batch
from theodolite.train.record import FOLDER

if TYPE_CHECKING:
    from transformers import Trainer


class TrackedCallback(TrainerCallback):
    """A callback whose numbers go to the trackers of the Trainer that it is attached to, which it cannot see itself."""

    _handler: CallbackHandler | None = None

    def attach(self, trainer: Trainer) -> Self:
        """Make this a callback of `trainer`, if it is none yet, and log to its trackers; returns this callback.

        It becomes the first callback, so that what it adds to the Trainer's own log reaches trackers and terminal.
        """
        handler = trainer.callback_handler
        handler.callbacks = [self, *(callback for callback in handler.callbacks if callback is not self)]
        self._handler = handler
        return self

    def _log(self, args: Any, state: TrainerState, control: Any, step: int, logs: dict[str, Any]) -> None:
        """Log as `Trainer.log` would, but not on the terminal, where it would drown the loss."""
        state.log_history.append({**logs, "step": step})
        if self._handler is None:
            return
        due, trackers = control.should_log, copy.copy(self._handler)
        spared = PrinterCallback | ProgressCallback
        trackers.callbacks = [each for each in trackers.callbacks if not isinstance(each, spared)]
        trackers.on_log(args, state, control, logs)
        control.should_log = due  # a log of the loss that is due at this step must stay due


class GeometryCallback(TrackedCallback):
    """Logs the geometry of attention during training, and warns when it collapses.

        trainer = Trainer(model, args, train_dataset=data)
        GeometryCallback().attach(trainer)
        trainer.train()

    The numbers that `GeometryMonitor` returns go to the Trainer's trackers (TensorBoard and so on) and to
    `state.log_history` as `geometry/entropy_mean` and so on, new alarms as the text `geometry/alarm`. Trackers get
    nothing where it is one of the Trainer's `callbacks` without `attach`. Every head's and layer's numbers go to
    `output_dir/geometry/*.jsonl`, with the loss that the Trainer logs. Under `torchrun` the processes share the
    monitor batch; the first one writes, logs and warns.

    Args:
        ids: the monitor batch, token ids (contexts, positions); None: the first long enough rows of the training data,
            8 × 128 tokens.
        options: every, spectra_every, limits, attention_mask, position_ids, as in `GeometryMonitor`.

    `monitor` is the `GeometryMonitor` of the training run under way, or of the last one. Errors, when training begins,
    are its own and those of `monitor_batch`.
    """

    def __init__(self, ids: Int[Tensor, "contexts positions"] | None = None, **options: Any) -> None:
        self.monitor: GeometryMonitor | None = None
        self._ids, self._options = ids, options

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Find model and monitor batch. Every process checks that the model can be monitored."""
        model = kwargs["model"]
        unwrap(model)  # every process sees for itself that it can be monitored
        ranks = Ranks.current()
        if ranks.world == 1 and not state.is_world_process_zero:
            return  # the processes know nothing of each other: the first one looks for itself
        ids, data = self._ids, getattr(kwargs.get("train_dataloader"), "dataset", None)
        if ids is None:
            ids = ranks.from_first(lambda: monitor_batch(data))
        folder = Path(args.output_dir or ".") / FOLDER
        self.monitor = GeometryMonitor(model, ids, folder=folder, over_ranks=ranks.world > 1, **self._options)

    def on_step_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Measure before the first step."""
        if self.monitor is not None and self.monitor.last is None:
            self._look(args, state, control)

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Measure after a step, if a look is due."""
        if self.monitor is not None:
            self._look(args, state, control)

    def on_train_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Close the monitor."""
        if self.monitor is not None:
            self.monitor.close()

    def on_log(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Record the loss that the Trainer logs; the monitor already measured at this step."""
        loss = (kwargs.get("logs") or {}).get("loss")
        if self.monitor is not None and self.monitor.last is not None and isinstance(loss, float):
            self.monitor(state.global_step, loss)

    def _look(self, args: Any, state: TrainerState, control: Any) -> None:
        assert self.monitor is not None
        numbers = self.monitor(state.global_step)  # every process, for they look together
        if not numbers or not state.is_world_process_zero:
            return
        logs: dict[str, Any] = {f"{FOLDER}/{name}": value for name, value in numbers.items()}
        if alarms := alarm_lines(self.monitor.new_alarms):
            logs[f"{FOLDER}/alarm"] = "; ".join(alarms)
        if state.epoch is not None:
            logs["epoch"] = state.epoch
        self._log(args, state, control, state.global_step, logs)


class LocaterCallback(TrackedCallback):
    """Adds LocAteR to the Trainer: `LocaterCallback(scale=1e-3, mean=1e-2).attach(trainer)` before training.

    At the beginning of every optimizer step the gradient of the penalty is put where the micro-batches then add
    theirs. So it counts once a step, and is clipped and scaled (float16) together with the loss's gradient. The loss
    that is logged stays that of the task; the penalty is logged beside it as `locater`.

    Arguments and, when training begins, errors are those of `Locater`; a function κ gets `state.global_step`.
    `locater` holds the penalty from the beginning of training on.
    """

    def __init__(self, scale: Strength, mean: Strength, *, layers: Iterable[int] | None = None) -> None:
        self._options: dict[str, Any] = {"scale": scale, "mean": mean, "layers": layers}
        self.locater: Locater | None = None
        self._penalty: Tensor | None = None
        self._of_deepspeed: Any = None

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Find the weights."""
        self.locater = Locater(kwargs["model"], **self._options)

    def on_step_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Put the penalty's gradient where those of the micro-batches will be added; with DeepSpeed, as it steps."""
        locater, optimizer = self.locater, kwargs["optimizer"]
        assert locater is not None  # on_train_begin comes first
        if not any(map(is_of_deepspeed, locater.parameters)):
            scaler = getattr(optimizer, "scaler", None)  # of float16; accelerate keeps it there
            # Not backward(): DDP's hooks would take it for a part of the first micro-batch.
            self._penalty = locater.add_gradient(state.global_step, scaler.get_scale() if scaler else 1.0)
        elif self._of_deepspeed is None:
            # It has no gradients but between backward and its step, and accelerate calls both at once. DeepSpeed's
            # optimizers (0.19, deepspeed/runtime/base_optimizer.py) are none of torch.optim, and take no step hooks.
            self._of_deepspeed = optimizer.optimizer
            step = self._of_deepspeed.step

            def add_and_step(*args: Any, **kwargs: Any) -> Any:
                self._penalty = locater.add_gradient(state.global_step, float(self._of_deepspeed.loss_scale))
                return step(*args, **kwargs)

            self._of_deepspeed.step = add_and_step

    def on_train_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Restore the step of DeepSpeed's optimizer."""
        if self._of_deepspeed is not None:
            del self._of_deepspeed.step
            self._of_deepspeed = None

    def on_log(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Add the penalty of the last step to what is logged of the training loss, for the callbacks that follow."""
        logs = kwargs.get("logs") or {}
        if self._penalty is not None and "loss" in logs:
            logs["locater"] = state.log_history[-1]["locater"] = self._penalty.item()
