"""Alarms of a training run, judged from the last few measurements (looks), never from a single one."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from theodolite.estimates import Floats
from theodolite.system.wording import counted, head_name
from theodolite.train.geometry import Geometry, residual_place

Flags = NDArray[np.bool_]
ENTROPY = "entropy collapse"
RANK = "rank collapse"
VANISHING = "vanishing signal"
ADVICE = {
    ENTROPY: "lower the learning rate, warm up longer, or penalise W_QK",
    RANK: "lower the learning rate, warm up longer, or scale the residual branches down",
    VANISHING: "lower the learning rate, warm up longer, or penalise W_QK: its logits outgrow the context's length",
}

LEVEL = 3  # looks whose median is the level: one odd look alarms nobody
TREND = 8  # looks, at most, whose Theil-Sen slope is the trend
RECOVERED = 1.5  # times its limit is the level where an alarm is over, after `LEVEL` looks that alarm nobody

# Attention from which a head counts as sharp on purpose: to one distance, to equal tokens, to the first token or
# a learned sink. A previous-token head of a healthy model has an entropy of 3 % of its maximum.
PATTERN = 0.5


@dataclass(frozen=True)
class Limits:
    """Levels below which something has collapsed, and from which a fall towards them is taken seriously.

    Attributes:
        entropy: mean entropy over its maximum, of a head whose signal is weak, too (`weak`).
        entropy_alone: the same whatever the signal, but not of a head that is sharp on purpose (`PATTERN`).
        rank: ‖X − 1x̄ᵀ‖/‖X‖ of a layer; at 0.05 two tokens have a cosine of 0.9975.
        propagation: mean ρ of the last query of a head; 0.1 as for the regime of this name (`theory/regimes.py`).
        entropy_falling: only below this does a fall of the entropy count; below `weak` one of ρ; one of the rank never.
        weak: ρ below which a signal is weak; healthy heads had 0.45 or more.
        horizon: looks; a fall counts if it reaches the limit within so many.
    """

    entropy: float = 0.1
    entropy_alone: float = 0.02
    rank: float = 0.05
    propagation: float = 0.1
    entropy_falling: float = 0.5
    weak: float = 0.4
    horizon: float = 5.0


@dataclass(frozen=True)
class Alarm:
    """An alarm: a head or a residual layer that collapses."""

    step: int
    kind: str  # `ENTROPY`, `RANK` or `VANISHING`
    layer: int
    head: int | None  # None for a layer of the residual stream
    value: float  # entropy over its maximum, relative residual, or ρ: the median of the last looks
    slope: float  # the Theil-Sen slope of the value, a step
    collapsed: bool = False  # below the limit; else it is falling there, or the spectrum of W_QK says so

    @property
    def place(self) -> str:
        """`in L2H5`; of the residual stream `after block 1` (residual layer 2), `before block 0`."""
        return residual_place(self.layer) if self.head is None else f"in {head_name(self.layer, self.head)}"

    @property
    def trend(self) -> str:
        """The value and where it goes, in words."""
        name = {ENTROPY: "entropy over its maximum", RANK: "relative residual", VANISHING: "ρ"}[self.kind]
        goes = "collapsed" if self.collapsed else "not falling any more"
        if not self.collapsed and self.slope < 0 < self.value:
            goes = f"reaches 0 in about {counted(max(1, round(self.value / -self.slope)), 'step')}"
        return f"{name} {self.value:.2g}, {goes}"


def alarm_lines(alarms: list[Alarm]) -> list[str]:
    """Return a line for each kind of alarm of one step: the worst in full, the others by name, and what to do."""
    lines = []
    for kind in ADVICE:
        same = sorted((alarm for alarm in alarms if alarm.kind == kind), key=lambda alarm: alarm.value)
        if not same:
            continue
        others = ", ".join(alarm.place.removeprefix("in ") for alarm in same[1:4])
        more = f" and {len(same) - 4} more" if len(same) > 4 else ""
        also = f" (also {others}{more})" if others else ""
        lines.append(f"step {same[0].step}: {kind} {same[0].place}: {same[0].trend}{also}; {ADVICE[kind]}")
    return lines


class Alarms:
    """Raises alarms, look by look, by head or layer and kind: one until it has recovered, and one if it collapses."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.limits = limits = limits or Limits()
        self._patterned: deque[Flags] = deque(maxlen=LEVEL)
        self._vanishing: Flags | bool = False  # before the first look with spectra
        levels = {ENTROPY: limits.entropy, RANK: limits.rank, VANISHING: limits.propagation}
        self._histories = {kind: _History(limit) for kind, limit in levels.items()}

    @property
    def active(self) -> int:
        """Heads and layers that are alarming now, counted once for each kind."""
        return sum(int(history.over.sum()) for history in self._histories.values())

    def update(self, geometry: Geometry) -> list[Alarm]:
        """Add one look; returns the new alarms."""
        heads, layers, limits = geometry.heads, geometry.layers, self.limits
        entropy, rank, propagation = self._histories.values()
        entropy.add(geometry.step, heads["entropy_share"])
        rank.add(geometry.step, layers["rank_collapse"])
        propagation.add(geometry.step, heads["propagation"])
        patterns = heads[["at_distance", "same_token", "sink_first", "sink_learned"]]
        # No token came twice: NaN, which is no pattern.
        self._patterned.append((patterns.to_numpy(dtype=np.float64) >= PATTERN).any(axis=1))
        if "regime" in heads:
            self._vanishing = (heads["regime"] == "vanishing").to_numpy()
        if len(self._patterned) < LEVEL:
            return []
        weak = propagation.level < limits.weak
        purposeful = np.mean(self._patterned, axis=0) > 0.5
        sharp = entropy.falls(limits.entropy_falling, limits.horizon) & weak
        sharp |= (entropy.level < limits.entropy_alone) & ~purposeful
        vanishing = propagation.falls(limits.weak, limits.horizon) | (weak & self._vanishing)
        alarms = []
        for kind, alarming in ((ENTROPY, sharp), (RANK, rank.collapsed), (VANISHING, vanishing)):
            history, table = self._histories[kind], layers if kind == RANK else heads
            level, slope, collapsed = history.level, history.slope, alarming & history.collapsed
            for index in np.flatnonzero(history.new(alarming, collapsed)):
                layer = int(table["layer"].iloc[index])
                head = None if kind == RANK else int(table["head"].iloc[index])
                numbers = float(level[index]), float(slope[index]), bool(collapsed[index])
                alarms.append(Alarm(geometry.step, kind, layer, head, *numbers))
        return alarms


class _History:
    """The last values of one quantity of all heads, or all layers, and where it is alarming now."""

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.over: Any = np.False_  # until there are flags: of none
        self._steps: deque[int] = deque(maxlen=TREND)
        self._values: deque[Floats] = deque(maxlen=TREND)
        self._collapsed_before: Any = np.False_
        self._calm: Any = 0

    def add(self, step: int, values: pd.Series) -> None:
        """Append the values of one look."""
        self._steps.append(step)
        self._values.append(values.to_numpy(dtype=np.float64))
        self.level = np.median(list(self._values)[-LEVEL:], axis=0)
        self.collapsed = self.level < self.limit

    @property
    def slope(self) -> Floats:
        """The trend a step."""
        return theil_sen(np.array(self._steps, dtype=np.float64), np.array(self._values))

    def falls(self, below: float, horizon: float) -> Flags:
        """Mark numbers below the limit, or below `below` and, as they fall, at the limit within `horizon` looks."""
        ahead = horizon * float(np.median(np.diff(self._steps)))
        return self.collapsed | ((self.level < below) & (self.level + self.slope * ahead < self.limit))

    def new(self, alarming: Flags, collapsed: Flags) -> Flags:
        """Mark numbers that are alarming and were not, or that collapse after an alarm."""
        self._calm = np.where(alarming, 0, self._calm + 1)
        recovered = (self._calm >= LEVEL) & (self.level >= RECOVERED * self.limit)
        over, before = self.over & ~recovered, self._collapsed_before & ~recovered
        new: Flags = (alarming & ~over) | (collapsed & ~before)
        self.over, self._collapsed_before = over | new, before | collapsed
        return new


def theil_sen(x: Floats, y: Floats) -> Floats:
    """Compute the median slope of all pairs of points, for every column of y (points, columns); x increases."""
    first, second = np.triu_indices(len(x), 1)
    return np.median((y[second] - y[first]) / (x[second] - x[first])[:, None], axis=0)
