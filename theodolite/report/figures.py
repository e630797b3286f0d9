"""Every figure of the report: functions that take a `Run` and return a Plotly figure, to use anywhere.

    from theodolite.report import figures
    figures.available(run)           # the names of those that this run has the numbers for
    figures.spiral(run, layer=2)     # in a notebook it shows itself; .write_html("spiral.html") keeps it

Those of one layer or head take it as further arguments. Each raises `UsageError` where the run has no numbers for it.
A figure carries its title and what to look for, on paper of its own; the page of the report draws the same ones
without, among its captions. This module only gathers: the drawing is in its siblings.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from theodolite.errors import UsageError
from theodolite.passes.run import Run
from theodolite.report import style
from theodolite.report.data import blocks, heads_per_block, offered
from theodolite.report.drawing import constituents as split
from theodolite.report.drawing import heads, layers
from theodolite.report.exhibit import CAPTIONS, DECLARED, SurveyExhibit, by_residual_layer
from theodolite.system.wording import head_name, listed, nearest

MODULES = (layers, split, heads)  # where they are declared
EXHIBITS = [DECLARED[key] for key in CAPTIONS]  # all of them in the order of the page
_OF_FUNCTION = {exhibit.function.__name__: exhibit for exhibit in EXHIBITS if exhibit.alone}


def available(run: Run) -> list[str]:
    """List the figures that this run has the numbers for, in the order of the page."""
    return [name for name, exhibit in _OF_FUNCTION.items() if exhibit.of(run)]


def _check(run: Any, given: dict[str, Any], *, of_block: bool) -> None:
    """Refuse arguments for which there is nothing to draw: no run, no such layer or head, an unknown name."""
    if not isinstance(getattr(run, "heads", None), pd.DataFrame):
        kind = type(run).__name__
        raise UsageError(f"figures are drawn of a Run, such as Run.load(FOLDER); this is {kind}")
    layers = blocks(run) if of_block else len(run.layers)
    for name, size in (("layer", layers), ("head", heads_per_block(run))):
        value = given.get(name, 0)
        if size and value not in range(size):
            raise UsageError(f"{name} {value!r} does not exist: this figure has {name}s 0 to {size - 1}")
    for name, choices in (("name", ["spectrum", "spectrum_data"]), ("measure", list(offered(run)))):
        if name in given and given[name] not in choices:
            there_are = f"there are {listed([repr(choice) for choice in choices], 60)}"
            raise UsageError(f"no {name} {given[name]!r}: {nearest(str(given[name]), choices, there_are)}")


def _standalone(exhibit: SurveyExhibit) -> Callable[..., go.Figure]:
    """Make of an exhibit's function one that checks its arguments, and adds a title and what to look for."""
    signature = inspect.signature(exhibit.function)

    @functools.wraps(exhibit.function)
    def drawn(*args: Any, **kwargs: Any) -> go.Figure:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given, title = bound.arguments, exhibit.caption["title"]
        of_block = "head" in given or exhibit.picker is not by_residual_layer
        _check(given["run"], given, of_block=of_block)
        if "head" in given:
            title += f" · {head_name(given['layer'], given['head'])}"
        elif "layer" in given:
            title += f" · {'block' if of_block else 'layer'} {given['layer']}"
        elif "measure" in given:
            title += f" · {offered(given['run'])[given['measure']].title}"
        figure = go.Figure(exhibit.function(*args, **kwargs))
        return style.standalone(figure, title, f"Look for {exhibit.caption['look_for']}")

    return drawn


FIGURES = {name: _standalone(exhibit) for name, exhibit in _OF_FUNCTION.items()}
globals().update(FIGURES)
__all__ = ["FIGURES", "available", *FIGURES]


def __getattr__(name: str) -> Callable[..., go.Figure]:  # for type checkers, which do not see the update
    there_are = f"there are {listed(list(FIGURES), 60)}"
    raise AttributeError(f"no figure {name!r}: {nearest(name, FIGURES, there_are)}")
