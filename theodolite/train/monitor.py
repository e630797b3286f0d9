"""The monitor: measures a model every so many steps of its training, records the numbers, and warns."""

from __future__ import annotations

import math
import time
import warnings
import weakref
from collections.abc import Callable, Sized
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor, nn

from theodolite.errors import UsageError, WorkError
from theodolite.system.choices import check_whole
from theodolite.train.alarms import Alarm, Alarms, Limits, alarm_lines
from theodolite.train.geometry import LEAST_LENGTH, Geometry, GeometryReader
from theodolite.train.record import Record

CONTEXTS = 8  # of a monitor batch that is taken from a data set
LENGTH = 128  # tokens of each, at most
SEARCHED = 512  # rows of a data set in which long enough ones are looked for
PAGE_SHARE = 0.01  # of the time, at most, goes into writing the page; in between it is as it was


class GeometryWarning(UserWarning):
    """A head or the residual stream collapses in training; the message names the place and the trend."""


class RecordWarning(UserWarning):
    """A record is damaged, of another training run, or cannot be written; the message says which."""


class GeometryMonitor:
    """Measures the geometry of a model's attention at regular steps of its training, records it, and warns.

        monitor = GeometryMonitor(model, ids, every=100)
        for step, batch in enumerate(batches):
            numbers = monitor(step)  # {} where no look is due; steps count over all epochs
            ...

    Args:
        model: of any family that a survey reads; may be wrapped by DDP, DataParallel, `torch.compile` or PEFT. Any
            other module as `open_module` gives it.
        ids: the monitor batch, token ids (contexts, positions); 8 × 128 do.
        attention_mask, position_ids: of padded or packed ids, as `Corpus.from_ids` takes them.
        every: steps between looks; a loop that calls at some steps only has a look as soon as so many have passed.
        spectra_every: looks between those that also read every head's weights, the first included.
        folder: where `heads.jsonl`, `layers.jsonl`, `alarms.jsonl` and `losses.jsonl` go, one row a line, and the
            page that shows them, `watch.html`; None: nowhere.
        limits: the levels of alarm.
        over_ranks: share the first process's contexts among all of `torch.distributed`, and look together. Every
            process must make the monitor and call it at every step; the first alone writes and warns.

    Attributes:
        last: the last look, or None.
        alarms: all alarms so far; `new_alarms` those of the last look.

    Raises:
        UsageError: the model or the ids do not fit, or a number is not whole or not positive.
        WorkError: the model's attention, computed from its queries, keys and values, is not its own.
    """

    def __init__(
        self,
        model: nn.Module,
        ids: Int[Tensor, "contexts positions"],
        *,
        every: int = 100,
        spectra_every: int = 5,
        folder: str | Path | None = None,
        limits: Limits | None = None,
        over_ranks: bool = False,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> None:
        check_whole(every=every, spectra_every=spectra_every)
        if min(every, spectra_every) < 1:
            raise UsageError(f"every is {every} and spectra_every {spectra_every}: both must be 1 or more")
        self.every, self.spectra_every = every, spectra_every
        self.last: Geometry | None = None
        self.alarms: list[Alarm] = []
        self.new_alarms: list[Alarm] = []
        rows = {"attention_mask": attention_mask, "position_ids": position_ids}
        self._reader = GeometryReader(model, ids, over_ranks, **rows)
        self._ranks = self._reader.ranks
        self._judge = Alarms(limits)
        self._record: Record | None = None
        if folder is not None and self._ranks.first:
            opened = self._reader.model
            self._record = Record(Path(folder), opened.layers, opened.places)
            weakref.finalize(self, _finish, self._record)
        self._step: int | None = None
        self._next_look, self._next_page = 0, 0.0
        self._number: int | None = None  # of looks since the last with spectra
        self._broken = False
        self._started, self._seconds = time.perf_counter(), 0.0

    def __call__(self, step: int, loss: float | Tensor | None = None) -> dict[str, float]:
        """Measure the model if a look is due after `step` optimizer steps; returns the numbers to plot, else {}.

        `loss`: of this step, for the record, whether or not a look is due. A tensor is waited for on its device: on a
        GPU give it only at the steps at which it is logged anyway.

        Warns (`GeometryWarning`) of what collapses or is no number any more, and (`RecordWarning`) of the record.

        Raises:
            UsageError: the step is no whole number, or before that of the last call.
            WorkError: the record cannot be begun.
        """
        check_whole(step=step)
        step = int(step)  # a number of NumPy's goes into no JSON
        if self._step is None:
            self._begin(step)
        elif step < self._step:
            raise UsageError(f"step went from {self._step} to {step}: count steps over all epochs")
        self._step = step
        if loss is not None:
            value = float(loss.detach() if isinstance(loss, Tensor) else loss)
            self._write(lambda record: record.write_loss(step, value))
        if self._broken or step < self._next_look:
            return {}
        try:
            geometry = self._reader.look(step, self._with_spectra(step))
        except WorkError as error:
            self._broken = True
            self._warn(f"step {step}: {error}; go back to a checkpoint, lower the learning rate")
            return {}
        self.new_alarms = self._judge.update(geometry)
        self.last = geometry
        self.alarms += self.new_alarms
        self._write(lambda record: record.write(geometry, self.new_alarms))
        self._write(self._write_page)
        for line in alarm_lines(self.new_alarms):
            self._warn(line)
        self._seconds += geometry.seconds
        share = self._seconds / (time.perf_counter() - self._started)
        return scalars(geometry) | {"alarms": float(self._judge.active), "time_share": share}

    def close(self) -> None:
        """End monitoring: write the page. `GeometryCallback` does this itself."""
        if self._record is not None:
            _finish(self._record)

    def _with_spectra(self, step: int) -> bool:
        """Count the look at this step; returns whether it reads the weights."""
        self._next_look = step + self.every
        self._number = step // self.every if self._number is None else self._number + 1
        return self._number % self.spectra_every == 0

    def _write(self, write: Callable[[Record], None]) -> None:
        """Add to the record, if there is one; what cannot be written is not tried again."""
        if self._record is None:
            return
        try:
            write(self._record)
        except WorkError as error:
            self._record.finished, self._record = True, None
            message = f"step {self._step}: {error}; the looks go on without a record"
            self._warn(message, RecordWarning, stacklevel=4)

    def _write_page(self, record: Record) -> None:
        """Write the page, unless it was written so recently that this would take more than its share of the time."""
        started = time.perf_counter()
        if started >= self._next_page:
            # Only a process that writes it loads what draws it.
            from theodolite.train.watch_page import write_page

            write_page(record, finished=False)
            now = time.perf_counter()
            self._next_page = now + (now - started) / PAGE_SHARE

    def _begin(self, step: int) -> None:
        """Begin at a step; later than 0, resume from what the folder holds of the steps before."""
        self._started = time.perf_counter()
        record = self._record
        looks, message = self._ranks.from_first(lambda: record.begin(step) if record else ([], ""))
        # The first look of a run that begins between two multiples of `every` is at the second.
        self._next_look = -(-step // self.every) * self.every
        for geometry in looks:
            self._with_spectra(geometry.step)
            if "regime" in geometry.heads:
                self._number = 0  # the next looks count from the last one with spectra
            alarms = self._judge.update(geometry)
            if record:
                record.keep(geometry, alarms)
            self.alarms += alarms
            self.last = geometry
        if message:
            self._warn(message, RecordWarning, stacklevel=4)

    def _warn(self, message: str, kind: type[UserWarning] = GeometryWarning, stacklevel: int = 3) -> None:
        if self._ranks.first:
            warnings.warn(message, kind, stacklevel=stacklevel)


def _finish(record: Record) -> None:
    """Write the page of a run for the last time; at the latest when its monitor, or the process, ends."""
    if record.steps and not record.finished:
        from theodolite.train.watch_page import write_page

        record.finished = True
        try:
            write_page(record, finished=True)
        except WorkError as error:
            message = f"{error}; the page of the training run is not complete"
            warnings.warn(message, RecordWarning, stacklevel=3)


PLOTTED = {
    "entropy_mean": ("heads", "entropy", "mean"),
    "entropy_min": ("heads", "entropy", "min"),
    "entropy_share_min": ("heads", "entropy_share", "min"),
    "propagation_mean": ("heads", "propagation", "mean"),
    "propagation_min": ("heads", "propagation", "min"),
    "sink_first_mean": ("heads", "sink_first", "mean"),
    "sink_later_mean": ("heads", "sink_later", "mean"),
    "largest_logit_max": ("heads", "largest_logit", "max"),
    "log_sum_exp_mean": ("heads", "log_sum_exp", "mean"),
    "rank_collapse_min": ("layers", "rank_collapse", "min"),
    "norm_max": ("layers", "norm", "max"),
    "norm_growth_max": ("layers", "norm_growth", "max"),
    "massive_activations": ("layers", "massive_activations", "sum"),
    "outlier_dimensions": ("layers", "outlier_dimensions", "max"),
    "spectral_norm_max": ("heads", "spectral_norm", "max"),
    "eta_max": ("heads", "eta_symmetric", "max"),
    "trace_mean": ("heads", "trace", "mean"),
}
"""Numbers of a look that are plotted: table, column (the last three of a look with spectra), statistic."""


def scalars(geometry: Geometry) -> dict[str, float]:
    """Return a look's numbers to plot but NaN: `PLOTTED`, vanishing_heads, and means of layers (`entropy/layer_3`)."""
    numbers: dict[str, Any] = {}
    for name, (of, column, statistic) in PLOTTED.items():
        table = getattr(geometry, of)
        if column in table:
            numbers[name] = table[column].agg(statistic)
    if "regime" in geometry.heads:
        numbers["vanishing_heads"] = (geometry.heads["regime"] == "vanishing").sum()
    for of, column in (("heads", "entropy"), ("heads", "propagation"), ("layers", "rank_collapse")):
        by_layer = getattr(geometry, of).groupby("layer")[column].mean()
        numbers |= {f"{column}/layer_{layer}": value for layer, value in by_layer.items()}
    return {name: float(value) for name, value in numbers.items() if math.isfinite(value)}


def monitor_batch(
    rows: Any, contexts: int = CONTEXTS, length: int = LENGTH
) -> Int[Tensor, "contexts positions"]:
    """Make a monitor batch of the first long enough rows of a data set; `UsageError` where it has none to give."""
    found: list[Tensor] = []
    has_rows = isinstance(rows, Sized) and hasattr(rows, "__getitem__")  # streams of torch inherit the latter
    for index in range(min(len(rows), SEARCHED) if has_rows else 0):
        row = rows[index]
        if "input_ids" not in row:
            break
        ids = torch.as_tensor(np.asarray(row["input_ids"])).flatten()
        if "attention_mask" in row:
            ids = ids[torch.as_tensor(np.asarray(row["attention_mask"])).flatten().bool()]
        if len(ids) >= LEAST_LENGTH:
            found.append(ids)
        if sum(len(ids) >= length for ids in found) == contexts:
            break
    if not found:
        raise UsageError(
            f"the training data is a stream, or no row of it has {LEAST_LENGTH} input_ids or more: give the monitor "
            "batch's token ids"
        )
    longest = sorted(map(len, found), reverse=True)[:contexts]
    length = min(length, longest[-1])
    return torch.stack([ids[:length] for ids in found if len(ids) >= length][:contexts]).long()
