"""An exhibit of the page: a figure, its caption (in `exhibits.toml`), its picker, and which runs can show it."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import plotly.graph_objects as go

from theodolite.errors import UsageError
from theodolite.passes.run import Run
from theodolite.report.data import blocks, evenly, heads_per_block, packaged
from theodolite.report.style import Patch
from theodolite.system.wording import head_name

Drawing = TypeVar("Drawing", bound=Callable[..., go.Figure])

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
    """A figure's picker: its `options`, and the same figure drawn for each.

    `mode`: "picker" (its own), or "head" (the page's pickers of one head). `grid`: keys that are also drawn small, side
    by side. `start`: which option a page shows first.
    """

    name: str
    options: list[Option]
    draw: Callable[[str], go.Figure]
    mode: str = "picker"
    grid: Sequence[str] = ()
    start: int = 0

    def first_shown(self) -> go.Figure:
        """Draw the option that a page shows first."""
        return self.draw(self.options[self.start].key)

    def variants(self) -> dict[str, list[Patch]]:
        """Return, for every option, the entries of each trace that are not the same in all options."""
        drawn = {option.key: self.draw(option.key).to_plotly_json()["data"] for option in self.options}
        changing = [
            [name for name in sorted(set().union(*traces)) if not _alike([each.get(name) for each in traces])]
            for traces in zip(*drawn.values(), strict=True)
        ]
        return {
            key: [{name: trace.get(name) for name in changing[place]} for place, trace in enumerate(traces)]
            for key, traces in drawn.items()
        }


def _alike(entries: Sequence[Any]) -> bool:
    """Tell whether entries of traces are equal; Plotly leaves arrays of words, and empty ones, to numpy."""
    first, *others = entries
    if any(isinstance(entry, np.ndarray) for entry in entries):
        return all(np.array_equal(first, other) for other in others)
    return all(first == other for other in others)


@dataclass(frozen=True)
class Exhibit:
    """One figure of a page with its caption."""

    key: str
    title: str
    figure: go.Figure
    shows: str
    look_for: str
    source: str
    unhealthy: str = ""
    choice: Choice | None = None
    wide: bool = False
    of_heads: bool = False  # a cell a head, which a click opens


Draw = Callable[..., go.Figure]

_DECLARED = packaged("exhibits.toml")
SECTIONS = {section: (captions.pop("name"), captions.pop("lead")) for section, captions in _DECLARED.items()}
"""Of the page: identifier → name, and the sentence under it."""

CAPTIONS = {
    key: {"section": section} | caption
    for section, captions in _DECLARED.items()
    for key, caption in captions.items()
}
"""Of every exhibit what `exhibits.toml` says, in the page's order; `drawing/layers.py` draws those with `curves`."""


@dataclass(frozen=True)
class SurveyExhibit:
    """One figure of the page, and of `report.figures`: a function of a run, declared by `exhibit`.

    `key`: in `exhibits.toml`, which has its `caption`. `picker`: what the page offers to choose from. `alone`: whether
    `report.figures` has it. The function raises `UsageError` where a run has no numbers for it.
    """

    key: str
    function: Callable[..., go.Figure]
    caption: dict[str, Any]
    picker: Callable[[Run, Draw], Choice] | None = None
    alone: bool = True

    def of(self, run: Run) -> Exhibit | None:
        """Draw the figure of a run with its caption and picker; None where the run lacks what it needs."""
        try:
            choice = self.picker and self.picker(run, functools.partial(self.function, run))
            if choice and not choice.options:
                return None
            figure = choice.first_shown() if choice else self.function(run)
        except UsageError:
            return None
        known = {name: value for name, value in self.caption.items() if name in Exhibit.__annotations__}
        return Exhibit(self.key, figure=figure, choice=choice, **known)


DECLARED: dict[str, SurveyExhibit] = {}
"""All exhibits of the modules imported so far, by key; `figures.EXHIBITS` has those of the page, in its order."""


def exhibit(key: str = "", **more: Any) -> Callable[[Drawing], Drawing]:
    """Declare a function of a run to be a figure of the page, `key` in `exhibits.toml`; `more`: of `SurveyExhibit`."""

    def declare(function: Drawing) -> Drawing:
        name = key or function.__name__.replace("_", "-")
        DECLARED[name] = SurveyExhibit(name, function, CAPTIONS[name], **more)
        return function

    return declare


def by_name(
    kind: str, names: Sequence[str], draw: Callable[[int], go.Figure], *, grid: bool = False, start: int = 0
) -> Choice:
    """Offer numbered pictures; `grid`: at most `GRID` of them, evenly chosen, are also drawn small."""
    options = [Option(str(index), name) for index, name in enumerate(names)]
    small = [str(index) for index in evenly(len(names), GRID)] if grid else []
    return Choice(kind, options, lambda key: draw(int(key)), grid=small, start=start)


def by_layer(count: int, draw: Callable[[int], go.Figure], *, grid: bool = False) -> Choice:
    """Offer residual layers, the middle one first."""
    names = [f"layer {layer}" for layer in range(count)]
    return by_name("layer", names, draw, grid=grid, start=count // 2)


def by_residual_layer(run: Run, draw: Draw) -> Choice:
    """Offer the residual layers of a run, some of them also small."""
    return by_layer(blocks(run) + 1, draw, grid=True)


def by_block(run: Run, draw: Draw, *, grid: bool = False) -> Choice:
    """Offer the blocks of a run."""
    return by_layer(blocks(run), draw, grid=grid)


def by_head(run: Run, draw: Draw) -> Choice:
    """Offer the heads, which the page's pickers of one head choose."""
    places = itertools.product(range(blocks(run)), range(heads_per_block(run)))
    named = {f"{layer},{head}": (layer, head) for layer, head in places}
    options = [Option(key, head_name(*place)) for key, place in named.items()]
    return Choice("head", options, lambda key: draw(*named[key]), "head")
