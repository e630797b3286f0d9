"""Numbers from a callback to the Trainer's trackers: TensorBoard and so on.

A callback of `transformers` sees neither the Trainer nor its trackers, so the user introduces them: `attach`.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Self

from transformers import (
    PrinterCallback,
    ProgressCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.integrations import MLflowCallback
from transformers.trainer_callback import CallbackHandler

from theodolite.errors import UsageError

if TYPE_CHECKING:
    from transformers import Trainer


class TrackerWarning(UserWarning):
    """The Trainer's trackers do not get a callback's numbers; the message says how they would."""


class TrackedCallback(TrainerCallback):
    """A callback whose numbers go to the trackers of the Trainer that it is attached to."""

    _handler: CallbackHandler | None = None

    def attach(self, trainer: Trainer) -> Self:
        """Make this a callback of `trainer`, if it is none yet, and log to its trackers; returns this callback.

        It becomes the first callback, so that what it adds to the Trainer's own log reaches trackers and terminal.

        Raises:
            UsageError: `trainer` is no Trainer of transformers.
        """
        handler = getattr(trainer, "callback_handler", None)
        if not isinstance(handler, CallbackHandler):
            raise UsageError(
                f"{type(self).__name__} attaches to a Trainer of transformers, not to a {type(trainer).__name__}; "
                "in a loop of your own use GeometryMonitor or Locater"
            )
        if self in handler.callbacks:
            handler.callbacks.remove(self)
        handler.callbacks.insert(0, self)
        self._handler = handler
        return self

    def _warn_if_unattached(self, args: TrainingArguments, state: TrainerState) -> None:
        """Say where the numbers go, if there are trackers that will not get them.

        Warns:
            TrackerWarning: there are.
        """
        if self._handler is None and args.report_to and state.is_world_process_zero:
            name = type(self).__name__
            warnings.warn(
                f"{', '.join(args.report_to)} will not get the numbers of {name}: call {name}(...).attach(trainer) "
                "instead of giving it as one of the Trainer's callbacks",
                TrackerWarning,
                stacklevel=2,
            )

    def _log_to_trackers(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, float | str],
    ) -> None:
        """Give `logs` to all callbacks, as `Trainer.log` would, but not to the terminal: they would drown the loss.

        MLflow's drops texts with a warning, so they become tags of its run. Nobody gets anything if this was not
        attached.
        """
        if self._handler is None:
            return
        texts = {name: value for name, value in logs.items() if isinstance(value, str)}
        numbers = {name: value for name, value in logs.items() if name not in texts}
        trackers, of_numbers = copy.copy(self._handler), copy.copy(self._handler)
        of_numbers.callbacks = [each for each in self._handler.callbacks if isinstance(each, MLflowCallback)]
        trackers.callbacks = [
            callback
            for callback in self._handler.callbacks
            if not isinstance(callback, PrinterCallback | ProgressCallback | MLflowCallback)
        ]
        due = control.should_log
        trackers.on_log(args, state, control, dict(logs))
        if of_numbers.callbacks:
            of_numbers.on_log(args, state, control, numbers)
            _tag_mlflow(texts)
        control.should_log = due  # a log of the loss that is due at this step must stay due


def _tag_mlflow(texts: Mapping[str, str]) -> None:
    """Set tags of MLflow's active run, if there is one: asking for one would begin another."""
    import mlflow

    if texts and mlflow.active_run():
        mlflow.set_tags(dict(texts))
