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
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from theodolite.errors import UsageError
from theodolite.measure.head_roles import ATTENTION_PATTERNS
from theodolite.passes.run import Run
from theodolite.report import style
from theodolite.report.data import blocks, columns_of, heads_per_block, offered
from theodolite.report.drawing import constituents as split
from theodolite.report.drawing import geometry, heads, layers, patches, sinks
from theodolite.report.exhibits import EXHIBITS
from theodolite.system.wording import head_name, listed

_P = ParamSpec("_P")
_EXHIBITS = {exhibit.key: exhibit for exhibit in EXHIBITS}
_CHOICES: dict[str, Sequence[object]] = {
    "pattern": tuple(ATTENTION_PATTERNS),
    "cutoff": geometry.CUTOFFS,
    "suffix": ("", "_data"),
    "name": ("spectrum", "spectrum_data"),
}
"""What the arguments that are no places may be."""

_OF_BLOCKS = (split.head_shares, patches.received_on_pictures)
"""What is drawn of a block and not of a residual layer."""

_KEYS = {"cosine_previous": "cosine"}  # figures that the page knows by another name than the function's


def available(run: Run) -> list[str]:
    """The names of the figures that this run has the numbers for, in the order of the page."""
    keys = {exhibit.key.removesuffix("-data") for exhibit in EXHIBITS if exhibit.available(run)}
    keys |= {"attribution"} if any(key.startswith("attribution-") for key in keys) else set()
    return [name for name in FIGURES if _key(name) in keys]


def _key(name: str) -> str:
    return _KEYS.get(name, name.replace("_", "-"))


def _title_and_note(name: str, arguments: dict[str, Any], *, of_block: bool) -> tuple[str, str]:
    """Title of a figure drawn with these arguments, and what to look for."""
    key, subject = _key(name), ""
    if "pattern" in arguments:
        key += f"-{arguments['pattern']}"
    if arguments.get("suffix") or arguments.get("name") == "spectrum_data":
        key += "-data"
    if "head" in arguments:
        subject = head_name(arguments["layer"], arguments["head"])
    elif "layer" in arguments:
        subject = f"{'block' if of_block else 'layer'} {arguments['layer']}"
    elif "measure" in arguments:
        subject = columns_of(arguments["run"], "heads")[arguments["measure"]].title
    elif "cutoff" in arguments:
        subject = f"K = {arguments['cutoff']}"
    exhibit = _EXHIBITS[key]
    return exhibit.title + (f" · {subject}" if subject else ""), f"Look for {exhibit.look_for}"


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
    for name, choices in (_CHOICES | {"measure": tuple(offered(run))}).items():
        if name in arguments and arguments[name] not in choices:
            raise UsageError(
                f"no {name} {arguments[name]!r}: there are {listed([repr(choice) for choice in choices], 60)}"
            )


FIGURES: dict[str, Callable[..., go.Figure]] = {}
"""All of them by name, in the order of the page, which is that of their definitions below."""


def _standalone(draw: Callable[_P, go.Figure]) -> Callable[_P, go.Figure]:
    signature = inspect.signature(draw)

    @functools.wraps(draw)
    def drawn(*args: _P.args, **kwargs: _P.kwargs) -> go.Figure:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        of_block = "head" in bound.arguments or draw in _OF_BLOCKS
        _check(bound.arguments, of_block=of_block)
        words = _title_and_note(draw.__name__, bound.arguments, of_block=of_block)
        return style.alone(draw(*args, **kwargs), *words)

    FIGURES[draw.__name__] = drawn
    return drawn


patch_components = _standalone(patches.patch_components)
patch_frequencies = _standalone(patches.patch_frequencies)
received_on_pictures = _standalone(patches.received_on_pictures)
norms_on_pictures = _standalone(patches.norms_on_pictures)
spiral = _standalone(geometry.spiral)
waves = _standalone(geometry.waves)
singular_values = _standalone(geometry.singular_values)
gram = _standalone(geometry.gram)
dct = _standalone(geometry.dct)
rank = _standalone(layers.rank)
stable_rank = _standalone(layers.stable_rank)
relative_norm = _standalone(layers.relative_norm)
low_frequency = _standalone(layers.low_frequency)
similarity = _standalone(layers.similarity)
incoherence = _standalone(layers.incoherence)
clusters = _standalone(layers.clusters)
norm = _standalone(layers.norm)
cosine_previous = _standalone(layers.cosine_previous)
rank_collapse = _standalone(layers.rank_collapse)
head_map = _standalone(heads.head_map)
entropy_by_position = _standalone(heads.entropy_by_position)
regime_plane = _standalone(heads.regime_plane)
head_shares = _standalone(split.head_shares)
attribution = _standalone(split.attribution)
inherited_smoothness = _standalone(geometry.inherited_smoothness)
constituents = _standalone(split.constituents)
spectrum = _standalone(heads.spectrum)
propagation = _standalone(heads.propagation)
head_entropy = _standalone(heads.head_entropy)
sinks_by_position = _standalone(sinks.sinks_by_position)
massive_activations = _standalone(layers.massive_activations)
outlier_dimensions = _standalone(layers.outlier_dimensions)
outlier_shares = _standalone(layers.outlier_shares)

__all__ = ["FIGURES", "available", *FIGURES]
