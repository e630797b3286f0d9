"""The monitor: looks at a model every so many steps of its training, records what it sees, and warns.

For a loop of one's own; `callbacks.py` puts it into the `transformers` Trainer. It changes neither the model nor the
random numbers, so that a training is the same with and without it.
"""

from __future__ import annotations

import json
import math
import time
import warnings
from collections.abc import Sized
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Int
from torch import Tensor, nn

from theodolite.errors import UsageError, WorkError
from theodolite.files import write_text, writing
from theodolite.train.alarms import Alarm, Alarms, Limits, told
from theodolite.train.geometry import LEAST_LENGTH, Geometry, GeometryProbe

CONTEXTS, LENGTH = 8, 128
"""Size of a probe that is taken from a data set: 1,024 tokens, a small part of a usual step."""

SEARCHED = 512
"""Rows of a data set in which long enough ones are looked for."""

FILES = ("heads", "layers", "alarms")


class GeometryWarning(UserWarning):
    """Attention or the residual stream of a model in training collapses; the message names head and trend."""


class GeometryMonitor:
    """Looks at a model in training.

        monitor = GeometryMonitor(model, ids, every=100)
        for step, batch in enumerate(batches):
            numbers = monitor(step)  # {} where no look is due
            ...

    Args:
        model: as `GeometryProbe` takes it; it stays the object that is trained.
        ids: the probe, token ids (contexts, positions) without padding; 8 × 128 do (see `probe_of`).
        every: steps between looks.
        spectra_every: looks between those that also read every head's weights, the first included.
        folder: where `heads.jsonl`, `layers.jsonl` and `alarms.jsonl` go, one row a line; None: nowhere.
        limits: the levels of alarm.

    Attributes:
        last: the last look, or None.
        alarms: all alarms so far; `new_alarms` those of the last look.

    Raises:
        UsageError: the model or the ids do not fit, or a number is not positive.
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
    ) -> None:
        if every < 1 or spectra_every < 1:
            raise UsageError(f"every is {every} and spectra_every {spectra_every}: both must be 1 or more")
        self.every = every
        self.spectra_every = spectra_every
        self.last: Geometry | None = None
        self.alarms: list[Alarm] = []
        self.new_alarms: list[Alarm] = []
        self._probe = GeometryProbe(model, ids)
        self._judge = Alarms(limits)
        self._record = Record(folder)
        self._begun = False
        self._broken = False
        self._started = time.perf_counter()
        self._seconds = 0.0

    def __call__(self, step: int) -> dict[str, float]:
        """Look, if a look is due after `step` optimizer steps; the numbers to plot, else {}.

        Warns:
            GeometryWarning: a head or a layer collapses, or hidden states are no numbers any more.

        Raises:
            WorkError: the record cannot be written.
        """
        if not self._begun:
            self._begin(step)
        if step % self.every or (self.last is not None and step <= self.last.step) or self._broken:
            return {}
        try:
            geometry = self._probe.look(step, spectra=step // self.every % self.spectra_every == 0)
        except WorkError as error:
            self._broken = True
            _warn(
                f"step {step}: {error}; the weights are lost: go back to a checkpoint, lower the learning rate"
            )
            return {}
        self.new_alarms = found = self._judge.update(geometry)
        self.last = geometry
        self.alarms += found
        self._record.write(geometry, found)
        for line in told(found):
            _warn(line)
        self._seconds += geometry.seconds
        share = self._seconds / (time.perf_counter() - self._started)
        return scalars(geometry) | {"alarms": float(self._judge.active), "time_share": share}

    def _begin(self, step: int) -> None:
        """Begin at a step; at a later one than 0, go on from what the folder holds of the steps before."""
        self._begun = True
        self._started = time.perf_counter()
        for geometry in self._record.begin(step):
            self.alarms += self._judge.update(geometry)
            self.last = geometry


class Record:
    """The tables of all looks, as lines of JSON in a folder; a NaN is `null`."""

    def __init__(self, folder: str | Path | None) -> None:
        self._folder = None if folder is None else Path(folder)

    def begin(self, step: int) -> list[Geometry]:
        """Drop what was recorded after `step` (all of it, at step 0); the looks that are kept.

        Raises:
            WorkError: the folder cannot be written.
        """
        if self._folder is None:
            return []
        tables: dict[str, list[dict[str, Any]]] = {}
        with writing(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
            for name in FILES:
                path = self._folder / f"{name}.jsonl"
                lines = path.read_text(encoding="utf-8").splitlines() if step and path.exists() else []
                tables[name] = [row for row in map(_row, lines) if row is not None and row["step"] <= step]
                write_text(path, "".join(_line(row) for row in tables[name]))
        heads, layers = (_by_step(tables[name]) for name in ("heads", "layers"))
        return [Geometry(at, heads[at], layers[at], 0.0) for at in sorted(heads.keys() & layers.keys())]

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
        with writing(self._folder):
            for name, lines in rows.items():
                with (self._folder / f"{name}.jsonl").open("a", encoding="utf-8") as file:
                    file.write("".join(map(_line, lines)))


def scalars(geometry: Geometry, per_head: bool = False) -> dict[str, float]:
    """The numbers of a look to plot: over all heads, the mean of each layer, and each head's if `per_head`.

    entropy_mean, entropy_min (nats), entropy_share_min (over its maximum), propagation_mean, propagation_min,
    sink_first_mean, sink_later_mean, rank_collapse_min, norm_max, massive_activations (of all layers),
    outlier_dimensions (most of any layer), entropy/layer_3 and so on; with spectra also spectral_norm_max, eta_max,
    trace_mean, vanishing_heads. A number that is NaN everywhere is left out.
    """
    heads, layers = geometry.heads, geometry.layers
    found = {
        "entropy_mean": heads["entropy"].mean(),
        "entropy_min": heads["entropy"].min(),
        "entropy_share_min": heads["entropy_share"].min(),
        "propagation_mean": heads["propagation"].mean(),
        "propagation_min": heads["propagation"].min(),
        "sink_first_mean": heads["sink_first"].mean(),
        "sink_later_mean": heads["sink_later"].mean(),
        "rank_collapse_min": layers["rank_collapse"].min(),
        "norm_max": layers["norm"].max(),
        "massive_activations": layers["massive_activations"].sum(),
        "outlier_dimensions": layers["outlier_dimensions"].max(),
    }
    if "regime" in heads:
        found |= {
            "spectral_norm_max": heads["spectral_norm"].max(),
            "eta_max": heads["eta_symmetric"].max(),
            "trace_mean": heads["trace"].mean(),
            "vanishing_heads": (heads["regime"] == "vanishing").sum(),
        }
    for name in ("entropy", "propagation"):
        by_layer = heads.groupby("layer")[name].mean()
        found |= {f"{name}/layer_{layer}": value for layer, value in by_layer.items()}
        if per_head:
            places = zip(heads["layer"], heads["head"], heads[name], strict=True)
            found |= {f"{name}/layer_{layer}_head_{head}": value for layer, head, value in places}
    by_layer = layers.set_index("layer")["rank_collapse"]
    found |= {f"rank_collapse/layer_{layer}": value for layer, value in by_layer.items()}
    return {name: float(value) for name, value in found.items() if math.isfinite(value)}


def probe_of(rows: Any, contexts: int = CONTEXTS, length: int = LENGTH) -> Int[Tensor, "contexts positions"]:
    """A probe from the first long enough rows of a data set of token ids.

    Args:
        rows: indexable, of dictionaries with `input_ids` and, where rows are padded, `attention_mask`.
        contexts: at most so many rows are taken.
        length: tokens of each; fewer, if there are not as many rows of this length among the first 512.

    Raises:
        UsageError: the data set cannot be indexed, has no `input_ids`, or only rows below 8 tokens.
    """
    if not isinstance(rows, Sized) or not hasattr(rows, "__getitem__"):
        raise UsageError(
            "the training data is a stream, which a probe would use up: give the probe's token ids"
        )
    found = []
    for index in range(min(len(rows), SEARCHED)):
        row = rows[index]
        if not hasattr(row, "keys") or "input_ids" not in row:
            raise UsageError("the rows of the training data have no input_ids: give the probe's token ids")
        ids = torch.as_tensor(np.asarray(row["input_ids"])).flatten()
        if "attention_mask" in row:
            ids = ids[torch.as_tensor(np.asarray(row["attention_mask"])).flatten().bool()]
        found.append(ids)
        if sum(len(ids) >= length for ids in found) == contexts:
            break
    longest = sorted((len(ids) for ids in found), reverse=True)[:contexts]
    usable = [size for size in longest if size >= LEAST_LENGTH]
    if not usable:
        raise UsageError(
            f"no row of the training data has {LEAST_LENGTH} tokens or more: give the probe's token ids"
        )
    length = min(length, usable[-1])
    return torch.stack([ids[:length] for ids in found if len(ids) >= length][:contexts]).long()


def _warn(message: str) -> None:
    warnings.warn(message, GeometryWarning, stacklevel=3)


def _line(row: dict[str, Any]) -> str:
    numbers = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in row.items()
    }
    return json.dumps(numbers) + "\n"


def _row(line: str) -> dict[str, Any] | None:
    try:
        return json.loads(line)
    except ValueError:
        return None  # the line at which a process was killed


def _by_step(rows: list[dict[str, Any]]) -> dict[int, pd.DataFrame]:
    """The table of each look, as it was before it was written."""
    by_step: dict[int, list[dict[str, Any]]] = {}
    for row in rows:
        by_step.setdefault(row.pop("step"), []).append(row)
    tables = {step: pd.DataFrame(of_step) for step, of_step in by_step.items()}
    for table in tables.values():
        numbers = [name for name in table.columns if name != "regime"]
        table[numbers] = table[numbers].apply(pd.to_numeric)  # a column of `null` only is one of NaN
    return tables
