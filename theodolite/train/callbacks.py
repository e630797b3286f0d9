"""The monitor inside the `transformers` Trainer: its numbers go wherever the Trainer's own numbers go.

Nothing is measured or judged here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jaxtyping import Int
from torch import Tensor
from transformers import TrainerControl, TrainerState, TrainingArguments

from theodolite.models.training_model import unwrap
from theodolite.train.alarms import Limits, alarm_lines
from theodolite.train.monitor import GeometryMonitor, monitor_batch, scalars
from theodolite.train.ranks import Ranks
from theodolite.train.record import FOLDER
from theodolite.train.trackers import TrackedCallback


class GeometryCallback(TrackedCallback):
    """Logs the geometry of attention during training, and warns when it collapses.

        trainer = Trainer(model, args, train_dataset=data)
        GeometryCallback().attach(trainer)
        trainer.train()

    The numbers of `scalars` go to the Trainer's trackers (TensorBoard and so on) and to `state.log_history` as
    `geometry/entropy_mean` and so on, new alarms as the text `geometry/alarm`; the terminal is spared. Given to the
    Trainer as one of its `callbacks` instead of by `attach`, it works as well but the trackers get nothing. Every
    head's and layer's go to `output_dir/geometry/*.jsonl`, with the loss that the Trainer logs. The model is looked
    at without its wrappers, in the precision of its weights. Under `torchrun` every process reads its share of the
    monitor batch; the statistics are those of the whole batch, the same on all of them, and the first one writes,
    logs and warns.

    Args:
        ids: the monitor batch, token ids (contexts, positions) without padding; None: the first long enough rows
            of the training data, 8 × 128 tokens.
        every: optimizer steps between looks.
        spectra_every: looks between those that also read every head's weights.
        per_head: log every head's entropy and ρ, too.
        limits: the levels of alarm.

    Attributes:
        monitor: the `GeometryMonitor` of the training run under way, or of the last one.

    Raises:
        UsageError: when the training begins, for the reasons that `GeometryMonitor` and `monitor_batch` have.
    """

    def __init__(
        self,
        ids: Int[Tensor, "contexts positions"] | None = None,
        every: int = 100,
        *,
        spectra_every: int = 5,
        per_head: bool = False,
        limits: Limits | None = None,
    ) -> None:
        self.monitor: GeometryMonitor | None = None
        self._ids = ids
        self._options: dict[str, Any] = {"every": every, "spectra_every": spectra_every, "limits": limits}
        self._per_head = per_head

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Find model and monitor batch. Every process checks that the model can be monitored.

        Warns:
            TrackerWarning: there are trackers, and the callback was not attached.
        """
        model = kwargs["model"]
        unwrap(model)  # every process sees for itself that it can be monitored
        ranks = Ranks.current()
        if ranks.world == 1 and not state.is_world_process_zero:
            return  # the processes know nothing of each other: the first one looks for itself
        self._warn_if_unattached(args, state)
        ids = self._ids
        if ids is None:
            ids = ranks.from_first(
                lambda: monitor_batch(getattr(kwargs["train_dataloader"], "dataset", None))
            )
        folder = Path(args.output_dir or ".") / FOLDER
        self.monitor = GeometryMonitor(model, ids, folder=folder, over_ranks=ranks.world > 1, **self._options)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Look before the first step."""
        if self.monitor is not None and self.monitor.last is None:
            self._look(args, state, control)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Look after a step, if a look is due."""
        self._look(args, state, control)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Put the loss that the Trainer logs beside the looks; at its step a look was had already."""
        loss = (logs or {}).get("loss")
        if self.monitor is not None and self.monitor.last is not None and isinstance(loss, float):
            self.monitor(state.global_step, loss)

    def _look(self, args: TrainingArguments, state: TrainerState, control: TrainerControl) -> None:
        if self.monitor is None:
            return
        numbers = self.monitor(state.global_step)  # every process, for they look together
        if not numbers or self.monitor.last is None or not state.is_world_process_zero:
            return
        if self._per_head:
            numbers |= scalars(self.monitor.last, per_head=True)
        logs: dict[str, float | str] = {f"{FOLDER}/{name}": value for name, value in numbers.items()}
        alarms = alarm_lines(self.monitor.new_alarms)
        if alarms:
            logs[f"{FOLDER}/alarm"] = "; ".join(alarms)
        if state.epoch is not None:
            logs["epoch"] = state.epoch
        state.log_history.append({**logs, "step": state.global_step})  # type: ignore[dict-item]
        self._log_to_trackers(args, state, control, logs)
