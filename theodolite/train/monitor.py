"""The monitor: looks at a model every so many steps of its training, records what it sees, and warns.

For a loop of one's own; `callbacks.py` puts it into the `transformers` Trainer. It changes neither the model nor the
random numbers, so that a training run is the same with and without it.
"""

from __future__ import annotations

import json
import math
import time
import warnings
from collections.abc import Sequence, Sized
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Int
from torch import Tensor, nn

from theodolite.errors import UsageError, WorkError
from theodolite.system.files import disk_errors, json_text, write_text
from theodolite.train.alarms import Alarm, Alarms, Limits, alarm_lines
from theodolite.train.geometry import LEAST_LENGTH, Geometry, GeometryReader
from theodolite.train.ranks import Ranks

CONTEXTS, LENGTH = 8, 128
"""Size of a monitor batch that is taken from a data set: 1,024 tokens, a small part of a usual step."""

SEARCHED = 512
"""Rows of a data set in which long enough ones are looked for."""

FILES = ("heads", "layers", "alarms")

JUDGED = {"entropy_share", "propagation", "at_distance", "same_token", "sink_first", "sink_learned"}
"""Columns of the heads that a resumed monitor judges again."""


class GeometryWarning(UserWarning):
    """Attention or the residual stream of a model in training collapses; the message names head and trend."""


class RecordWarning(UserWarning):
    """A record is damaged, of another training run, or cannot be written; the message says which."""


class GeometryMonitor:
    """Looks at a model in training.

        monitor = GeometryMonitor(model, ids, every=100)
        for step, batch in enumerate(batches):
            numbers = monitor(step)  # {} where no look is due; steps count over all epochs
            ...

    Args:
        model: as `GeometryReader` takes it; it stays the object that is trained.
        ids: the monitor batch, token ids (contexts, positions) without padding; 8 × 128 do (see `monitor_batch`).
        every: steps between looks; a loop that calls at some steps only has a look as soon as so many have passed.
        spectra_every: looks between those that also read every head's weights, the first included.
        folder: where `heads.jsonl`, `layers.jsonl` and `alarms.jsonl` go, one row a line; None: nowhere.
        limits: the levels of alarm.
        over_ranks: share the contexts among the processes of `torch.distributed`, and look together. Every process
            must make the monitor and call it at every step; the batch is that of the first one, which alone writes
            and warns. Looks and alarms are the same on all of them.

    Attributes:
        last: the last look, or None.
        alarms: all alarms so far; `new_alarms` those of the last look.

    Raises:
        UsageError: the model or the ids do not fit, a number is not whole or not positive, or `limits` no `Limits`.
        WorkError: the model's attention cannot be read.
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
    ) -> None:
        if not all(isinstance(n, int) and not isinstance(n, bool) and n >= 1 for n in (every, spectra_every)):
            raise UsageError(
                f"every is {every} and spectra_every {spectra_every}: both must be 1 or more, and whole numbers"
            )
        if limits is not None and not isinstance(limits, Limits):
            raise UsageError(f"limits is a {type(limits).__name__}: give theodolite.train.alarms.Limits(...)")
        self.every = every
        self.spectra_every = spectra_every
        self.last: Geometry | None = None
        self.alarms: list[Alarm] = []
        self.new_alarms: list[Alarm] = []
        self._ranks = Ranks.current() if over_ranks else Ranks()
        self._reader = GeometryReader(model, ids, self._ranks)
        self._judge = Alarms(limits)
        self._record = Record(
            folder if self._ranks.first else None, self._reader.model.layers, self._reader.model.places
        )
        self._step: int | None = None
        self._number = -1
        self._broken = False
        self._since = 0
        self._started = time.perf_counter()
        self._seconds = 0.0

    def __call__(self, step: int) -> dict[str, float]:
        """Look, if a look is due after `step` optimizer steps; the numbers to plot, else {}.

        Warns:
            GeometryWarning: a head or a layer collapses, or hidden states are no numbers any more.
            RecordWarning: an earlier record was moved aside, or the record cannot be written any more.

        Raises:
            UsageError: the step is before that of the last call.
            WorkError: the record cannot be begun.
        """
        step = int(step)
        if self._step is None:
            self._begin(step)
        elif step < self._step:
            raise UsageError(f"step went from {self._step} to {step}: count steps over all epochs")
        self._step = step
        if self._broken or not self._due(step):
            return {}
        number = step // self.every if self.last is None else self._number + 1
        try:
            geometry = self._reader.look(step, spectra=number % self.spectra_every == 0)
        except WorkError as error:
            self._broken = True
            self._warn(
                f"step {step}: {error}; the weights are lost: go back to a checkpoint, lower the learning rate"
            )
            return {}
        self.new_alarms = self._judge.update(geometry)
        self.last = geometry
        self._number = number
        self.alarms += self.new_alarms
        try:
            self._record.write(geometry, self.new_alarms)
        except WorkError as error:
            self._record = Record(None)
            self._warn(f"step {step}: {error}; the looks go on without a record", RecordWarning)
        for line in alarm_lines(self.new_alarms):
            self._warn(line)
        self._seconds += geometry.seconds
        share = self._seconds / (time.perf_counter() - self._started)
        return scalars(geometry) | {"alarms": float(self._judge.active), "time_share": share}

    def _begin(self, step: int) -> None:
        """Begin at a step; at a later one than 0, go on from what the folder holds of the steps before."""
        self._started = time.perf_counter()
        looks, message = self._ranks.from_first(lambda: self._record.begin(step))
        for geometry in looks:
            if "regime" in geometry.heads:
                self._number = 0  # the next looks count from the last one with spectra
            else:
                self._number = geometry.step // self.every if self.last is None else self._number + 1
            self.alarms += self._judge.update(geometry)
            self.last = geometry
        # Steps without a look before the first one: looks are due at multiples of `every`.
        self._since = step // self.every * self.every
        if message:
            self._warn(message, RecordWarning, stacklevel=4)

    def _warn(self, message: str, kind: type[UserWarning] = GeometryWarning, stacklevel: int = 3) -> None:
        if self._ranks.first:
            warnings.warn(message, kind, stacklevel=stacklevel)

    def _due(self, step: int) -> bool:
        if self.last is not None:
            return step - self.last.step >= self.every
        return step % self.every == 0 or step - self._since >= self.every


class Record:
    """The tables of all looks, as lines of JSON in a folder; a NaN is `null`.

    Args:
        folder: where; None: nowhere.
        layers, places: of the model, and of its heads, to know its own complete looks.
    """

    def __init__(
        self, folder: str | Path | None, layers: int = 0, places: Sequence[tuple[int, int]] = ()
    ) -> None:
        self._folder = None if folder is None else Path(folder)
        self._layers, self._places = layers, list(places)

    def begin(self, step: int) -> tuple[list[Geometry], str]:
        """Drop what was recorded after `step` (all of it, at step 0); the looks that are kept, and what to say.

        If nothing is kept, or something is no complete look of this model, the old files are moved aside first.

        Raises:
            WorkError: the folder cannot be written.
        """
        if self._folder is None:
            return [], ""
        with disk_errors(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
            old = {name: self._read(name) for name in FILES}
            rows = {name: [row for line in old[name] if (row := _row(line))] for name in FILES}
            heads, layers = (_by_step(rows[name], step) for name in ("heads", "layers"))
            whole = {at for at in heads.keys() & layers.keys() if self._whole(heads[at], layers[at])}
            steps = sorted(whole) if step else []
            damaged = sum(len(old[name]) - len(rows[name]) for name in FILES)
            others = len((heads.keys() | layers.keys()) - whole)
            message = ""
            if any(old.values()) and (not steps or damaged or others):
                number = self._move_aside()
                message = f"{self._folder} held an earlier record: moved to heads.{number}.jsonl and so on"
                if step and (damaged or others):
                    message += (
                        f"; {len(steps)} looks kept, {others} dropped that are no complete looks of this model, "
                        f"{damaged} damaged lines"
                    )
            for name in FILES:
                remaining = [row for row in rows[name] if steps and row["step"] in whole]
                write_text(self._folder / f"{name}.jsonl", "".join(map(_line, remaining)))
        return [Geometry(at, _table(heads[at]), _table(layers[at]), 0.0) for at in steps], message

    def _read(self, name: str) -> list[str]:
        assert self._folder is not None
        path = self._folder / f"{name}.jsonl"
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n") if path.exists() else [""]
        return lines if _row(lines[-1]) else lines[:-1]  # without the half line at which a process was killed

    def _move_aside(self) -> int:
        """Rename the files to `heads.1.jsonl` and so on; the number."""
        assert self._folder is not None
        number = 1
        while any((self._folder / f"{name}.{number}.jsonl").exists() for name in FILES):
            number += 1
        for name in FILES:
            path = self._folder / f"{name}.jsonl"
            if path.exists():
                path.rename(self._folder / f"{name}.{number}.jsonl")
        return number

    def _whole(self, heads: list[dict[str, Any]], layers: list[dict[str, Any]]) -> bool:
        """Whether these are the rows of one look at a model of this many layers and heads."""
        return (
            [(row.get("layer"), row.get("head")) for row in heads] == self._places
            and [row.get("layer") for row in layers] == list(range(self._layers + 1))
            and all(map(_numeric, heads + layers))
            and all(row.keys() >= JUDGED for row in heads)
            and all("rank_collapse" in row for row in layers)
        )

    def write(self, geometry: Geometry, alarms: list[Alarm]) -> None:
        """Append one look and its alarms.

        Raises:
            WorkError: the folder cannot be written.
        """
        if self._folder is None:
            return
        at = {"step": geometry.step}
        rows = {
            "heads": [at | row for row in geometry.heads.to_dict("records")],
            "layers": [at | row for row in geometry.layers.to_dict("records")],
            "alarms": [alarm.as_dict() for alarm in alarms],
        }
        with disk_errors(self._folder):
            for name, lines in rows.items():
                with (self._folder / f"{name}.jsonl").open("a", encoding="utf-8") as file:
                    file.write("".join(map(_line, lines)))


def scalars(geometry: Geometry, per_head: bool = False) -> dict[str, float]:
    """The numbers of a look to plot: over all heads, the mean of each layer, and each head's if `per_head`.

    entropy_mean, entropy_min (nats), entropy_share_min (over its maximum), propagation_mean, propagation_min,
    sink_first_mean, sink_later_mean, largest_logit_max, log_sum_exp_mean, rank_collapse_min, norm_max,
    norm_growth_max (of a layer over the one before), massive_activations (of all layers),
    outlier_dimensions (most of any layer), entropy/layer_3 and so on; with spectra also spectral_norm_max, eta_max,
    trace_mean, vanishing_heads. A number that is NaN everywhere is left out.
    """
    heads, layers = geometry.heads, geometry.layers
    numbers = {
        "entropy_mean": heads["entropy"].mean(),
        "entropy_min": heads["entropy"].min(),
        "entropy_share_min": heads["entropy_share"].min(),
        "propagation_mean": heads["propagation"].mean(),
        "propagation_min": heads["propagation"].min(),
        "sink_first_mean": heads["sink_first"].mean(),
        "sink_later_mean": heads["sink_later"].mean(),
        "largest_logit_max": heads["largest_logit"].max(),
        "log_sum_exp_mean": heads["log_sum_exp"].mean(),
        "rank_collapse_min": layers["rank_collapse"].min(),
        "norm_max": layers["norm"].max(),
        "norm_growth_max": layers["norm_growth"].max(),
        "massive_activations": layers["massive_activations"].sum(),
        "outlier_dimensions": layers["outlier_dimensions"].max(),
    }
    if "regime" in heads:
        numbers |= {
            "spectral_norm_max": heads["spectral_norm"].max(),
            "eta_max": heads["eta_symmetric"].max(),
            "trace_mean": heads["trace"].mean(),
            "vanishing_heads": (heads["regime"] == "vanishing").sum(),
        }
    for name in ("entropy", "propagation"):
        by_layer = heads.groupby("layer")[name].mean()
        numbers |= {f"{name}/layer_{layer}": value for layer, value in by_layer.items()}
        if per_head:
            places = zip(heads["layer"], heads["head"], heads[name], strict=True)
            numbers |= {f"{name}/layer_{layer}_head_{head}": value for layer, head, value in places}
    by_layer = layers.set_index("layer")["rank_collapse"]
    numbers |= {f"rank_collapse/layer_{layer}": value for layer, value in by_layer.items()}
    return {name: float(value) for name, value in numbers.items() if math.isfinite(value)}


def monitor_batch(
    rows: Any, contexts: int = CONTEXTS, length: int = LENGTH
) -> Int[Tensor, "contexts positions"]:
    """A monitor batch: the first long enough rows of a data set of token ids.

    Args:
        rows: indexable, of dictionaries with `input_ids` and, where rows are padded, `attention_mask`.
        contexts: at most so many rows are taken.
        length: tokens of each; fewer, if there are not as many rows of this length among the first 512.

    Raises:
        UsageError: the data set cannot be indexed, has no `input_ids`, or only rows below 8 tokens.
    """
    if not isinstance(rows, Sized) or not hasattr(rows, "__getitem__"):
        raise UsageError(
            "the training data is a stream, which a monitor batch would use up: give its token ids yourself"
        )
    candidates = []
    for index in range(min(len(rows), SEARCHED)):
        row = rows[index]
        if not hasattr(row, "keys") or "input_ids" not in row:
            raise UsageError(
                "the rows of the training data have no input_ids: give the monitor batch's token ids"
            )
        ids = torch.as_tensor(np.asarray(row["input_ids"])).flatten()
        if "attention_mask" in row:
            ids = ids[torch.as_tensor(np.asarray(row["attention_mask"])).flatten().bool()]
        candidates.append(ids)
        if sum(len(ids) >= length for ids in candidates) == contexts:
            break
    longest = sorted((len(ids) for ids in candidates), reverse=True)[:contexts]
    usable = [size for size in longest if size >= LEAST_LENGTH]
    if not usable:
        raise UsageError(
            f"no row of the training data has {LEAST_LENGTH} tokens or more: give the monitor batch's token ids"
        )
    length = min(length, usable[-1])
    return torch.stack([ids[:length] for ids in candidates if len(ids) >= length][:contexts]).long()


def _line(row: dict[str, Any]) -> str:
    return json_text(row) + "\n"


def _row(line: str) -> dict[str, Any] | None:
    """A row with a step; None if the line is none, as that at which a process was killed."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) and type(row.get("step")) is int else None


def _numeric(row: dict[str, Any]) -> bool:
    """Whether all values are numbers or `null`, but for the regime, a text."""
    return all(
        isinstance(value, str)
        if name == "regime"
        else value is None or type(value) is float or (type(value) is int and abs(value) < 2**53)
        for name, value in row.items()
    )


def _by_step(rows: list[dict[str, Any]], last: int) -> dict[int, list[dict[str, Any]]]:
    """The rows of each look up to a step."""
    by_step: dict[int, list[dict[str, Any]]] = {}
    for row in rows:
        if row["step"] <= last:
            by_step.setdefault(row["step"], []).append(row)
    return by_step


def _table(rows: list[dict[str, Any]]) -> pd.DataFrame:
    """The table of a look, as it was before it was written."""
    table = pd.DataFrame(rows).drop(columns="step")
    numbers = [name for name in table.columns if name != "regime"]
    table[numbers] = table[numbers].apply(pd.to_numeric)  # a column of `null` only is one of NaN
    return table
