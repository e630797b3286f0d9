"""Every figure of the report: functions that take a `Run` and return a Plotly figure, to use anywhere.

    from theodolite.report import figures
    figures.available(run)           # the names of those that this run has the numbers for
    figures.spiral(run, layer=2)     # in a notebook it shows itself; .write_html("spiral.html") keeps it

Those of one layer or head take it as further arguments. Each raises `UsageError` where the run has no numbers for it.
A figure carries its title and what to look for, on paper of its own, so that it can stand alone; the page of the
report draws the same ones without, among its captions. This module only gathers: the drawing is in its siblings.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from theodolite.errors import UsageError
from theodolite.passes.run import Run
from theodolite.report import style
from theodolite.report.data import blocks, columns_of, heads_per_block, offered
from theodolite.report.drawing import constituents as split
from theodolite.report.drawing import geometry, heads, layers
from theodolite.report.exhibit import CAPTIONS, DECLARED, SurveyExhibit, by_block
from theodolite.system.wording import head_name, listed, nearest

MODULES = (geometry, layers, split, heads)
"""Where they are declared."""

EXHIBITS = [DECLARED[key] for key in CAPTIONS]
"""All of them in the order of the page."""

_OF_FUNCTION = {exhibit.function.__name__: exhibit for exhibit in EXHIBITS if exhibit.alone}


def available(run: Run) -> list[str]:
    """List the figures that this run has the numbers for, in the order of the page."""
    return [name for name, exhibit in _OF_FUNCTION.items() if exhibit.available(run)]


def _title_and_note(name: str, arguments: dict[str, Any], *, of_block: bool) -> tuple[str, str]:
    """Return the title of a figure drawn with these arguments, and what to look for."""
    subject = ""
    if "head" in arguments:
        subject = head_name(arguments["layer"], arguments["head"])
    elif "layer" in arguments:
        subject = f"{'block' if of_block else 'layer'} {arguments['layer']}"
    elif "measure" in arguments:
        subject = columns_of(arguments["run"], "heads")[arguments["measure"]].title
    caption = _OF_FUNCTION[name].caption
    return caption["title"] + (f" · {subject}" if subject else ""), f"Look for {caption['look_for']}"


def _check(arguments: dict[str, Any], *, of_block: bool) -> None:
    """Refuse arguments for which there is nothing to draw: no run, no such layer or head, an unknown name."""
    run = arguments["run"]
    if not isinstance(getattr(run, "heads", None), pd.DataFrame):
        raise UsageError(
            f"figures are drawn of a Run, such as Run.load(FOLDER); this is {type(run).__name__}"
        )
    for name, size in (
        ("layer", blocks(run) if of_block else len(run.layers)),
        ("head", heads_per_block(run)),
    ):
        value = arguments.get(name, 0)
        if size and (type(value) is bool or not isinstance(value, int | np.integer) or not 0 <= value < size):
            raise UsageError(f"{name} {value!r} does not exist: this figure has {name}s 0 to {size - 1}")
    for name, choices in (("name", ["spectrum", "spectrum_data"]), ("measure", list(offered(run)))):
        if name in arguments and arguments[name] not in choices:
            there_are = f"there are {listed([repr(choice) for choice in choices], 60)}"
            raise UsageError(
                f"no {name} {arguments[name]!r}: {nearest(str(arguments[name]), choices, there_are)}"
            )


def _standalone(exhibit: SurveyExhibit) -> Callable[..., go.Figure]:
    draw = exhibit.function
    signature = inspect.signature(draw)

    @functools.wraps(draw)
    def drawn(*args: Any, **kwargs: Any) -> go.Figure:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        of_block = "head" in bound.arguments or exhibit.picker is by_block
        _check(bound.arguments, of_block=of_block)
        words = _title_and_note(draw.__name__, bound.arguments, of_block=of_block)
        return style.standalone(go.Figure(draw(*args, **kwargs)), *words)

    return drawn


FIGURES = {name: _standalone(exhibit) for name, exhibit in _OF_FUNCTION.items()}
"""All of them by name, in the order of the page."""

globals().update(FIGURES)
__all__ = ["FIGURES", "available", *FIGURES]


def __getattr__(name: str) -> Callable[..., go.Figure]:  # for type checkers, which do not see the update
    raise AttributeError(
        f"no figure {name!r}: {nearest(name, FIGURES, f'there are {listed(list(FIGURES), 60)}')}"
    )
