"""An exhibit of the page: a figure, its caption, its picker, and which runs can show it.

A caption says what is drawn, what to look for, what is unhealthy, and where the formula comes from. No HTML,
no drawing, and no particular exhibit is here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import plotly.graph_objects as go

from theodolite.report.data import array, column, evenly
from theodolite.report.style import Patch

if TYPE_CHECKING:
    from theodolite.passes.run import Run


GRID = 13  # residual layers drawn small, side by side: all of the papers' twelve-block models


@dataclass(frozen=True)
class Option:
    """One choice of a picker: the key of its data, its name, its group, and what it means."""

    key: str
    label: str
    group: str = ""
    note: str = ""


@dataclass(frozen=True)
class Choice:
    """What a figure's picker offers: `options`, the data of each (`patches`), and how it is shown.

    `mode`: "picker" (one figure under its own picker), "head" (follows the page's layer and head pickers).
    `grid`: keys that are also drawn small, side by side.
    """

    name: str
    options: Callable[[Run], list[Option]]
    patch: Callable[[Run, str], list[Patch]]
    mode: str = "picker"
    grid: Callable[[Run], list[str]] | None = None


@dataclass(frozen=True)
class Exhibit:
    """One figure of the page with its caption.

    `needs`: names such as `layers.rank` or `arrays.gram`; `when`: what else must hold of a run that has them.
    """

    key: str
    section: str
    title: str
    needs: tuple[str, ...]
    draw: Callable[[Run], go.Figure]
    shows: str
    look_for: str
    source: str
    unhealthy: str = ""
    choice: Choice | None = None
    wide: bool = False
    when: Callable[[Run], bool] | None = None

    def available(self, run: Run) -> bool:
        """True when the run has every number that the figure needs."""
        return all(_has(run, need) for need in self.needs) and (self.when is None or self.when(run))


def _has(run: Run, need: str) -> bool:
    kind, name = need.split(".", 1)
    if kind == "arrays":
        return array(run, name) is not None
    return column(getattr(run, kind), name) is not None


def exhibit(
    key: str,
    title: str,
    figure: go.Figure,
    shows: str,
    look_for: str,
    source: str,
    *,
    choice: Choice | None = None,
    wide: bool = False,
) -> Exhibit:
    """The exhibit of a finished figure."""
    return Exhibit(key, "", title, (), lambda _: figure, shows, look_for, source, choice=choice, wide=wide)


def by_name(
    kind: str, names: Sequence[str], patch: Callable[[int], list[Patch]], *, grid: bool = False
) -> Choice:
    """A picker over numbered pictures, the first `GRID` of them, evenly chosen, also drawn small."""
    return Choice(
        kind,
        lambda _: [Option(str(index), name) for index, name in enumerate(names)],
        lambda _, key: patch(int(key)),
        grid=(lambda _: [str(index) for index in evenly(len(names), GRID)]) if grid else None,
    )


def by_layer_of(
    count: Callable[[Run], int], patch: Callable[[Run, int], list[Patch]], *, grid: bool = False
) -> Choice:
    """A picker over the layers that a run has, the first `GRID` of them, evenly chosen, also drawn small."""
    return Choice(
        "layer",
        lambda run: [Option(str(layer), f"layer {layer}") for layer in range(count(run))],
        lambda run, key: patch(run, int(key)),
        grid=(lambda run: [str(layer) for layer in evenly(count(run), GRID)]) if grid else None,
    )


def by_layer(count: int, patch: Callable[[int], list[Patch]], *, grid: bool = False) -> Choice:
    """A picker over residual layers."""
    return by_name("layer", [f"layer {layer}" for layer in range(count)], patch, grid=grid)
