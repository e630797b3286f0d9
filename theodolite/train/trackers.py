"""Numbers from a callback to the Trainer's trackers: TensorBoard and so on.

A callback sees neither the Trainer nor its trackers, and those are called before it. So the handler that calls the
callback is found on the stack, and is given the numbers as `Trainer.log` would give them.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping
from types import FrameType

from transformers import PrinterCallback, ProgressCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import CallbackHandler

from theodolite.errors import UsageError


def pass_on(
    args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Mapping[str, float | str]
) -> None:
    """Give `logs` to every tracker, but not to the terminal, where they would drown the loss.

    Raises:
        UsageError: as `find_handler`.
    """
    handler = copy.copy(find_handler())
    handler.callbacks = [
        c for c in handler.callbacks if not isinstance(c, PrinterCallback | ProgressCallback)
    ]
    due = control.should_log
    handler.on_log(args, state, control, dict(logs))
    control.should_log = due  # a log of the loss that is due at this step must stay due


def find_handler() -> CallbackHandler:
    """The handler that is calling the callback from which this is called.

    Raises:
        UsageError: there is none.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, CallbackHandler):
            return caller
        frame = frame.f_back
    raise UsageError(
        "this callback works inside the Trainer of transformers only; in a loop of your own use GeometryMonitor or "
        "Locater"
    )
