"""What an exhibit of the page is: a figure, its caption, its picker, and when the run can show it.

A caption says what is drawn, what to look for, what is unhealthy, and where the formula comes from. No HTML,
no drawing, and no exhibit itself is here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import plotly.graph_objects as go

from theodolite.report.data import array, column
from theodolite.report.style import Patch

if TYPE_CHECKING:
    from theodolite.run import Run


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
    look: str
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
