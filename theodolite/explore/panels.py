"""Every panel of the explorer's page, one value per model: a Plotly figure, or words as HTML.

Models that stand side by side share their scales, so that a colour or a height means the same in both. gradio is not
known here, so that all of it can be tested without.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import plotly.graph_objects as go

from theodolite.errors import TheodoliteError, UsageError
from theodolite.explore import words
from theodolite.explore.subject import Subject, tag_colours
from theodolite.measure.head_matrices import MOST_POSITIONS
from theodolite.measure.head_roles import END_TOKEN_SINK, LEARNED_SINK, PREVIOUS_TOKEN, SAME_TOKEN, SINK_ROLES
from theodolite.report import style
from theodolite.report.data import columns_of
from theodolite.report.drawing import heads, prompt
from theodolite.report.drawing.constituents import qk_panels
from theodolite.sinks.prompt import HeadView
from theodolite.system.wording import head_name, visible

_T = TypeVar("_T")
Figures = list[go.Figure | None]

PROMPT, TEXT = "prompt", "text"
ON_PROMPT = ("entropy", PREVIOUS_TOKEN.column, SAME_TOKEN.column, *(role.column for role in SINK_ROLES))
"""Measures that one prompt gives; the others need a text, random tokens, or the weights."""

LABELS: dict[str, Any] = {
    "labels": 24,
    "letters": 10,
}  # of tokens: in a column of half a laptop's screen they do not touch
AXIS_MARGIN = 0.06  # of an axis, beyond its outermost points


class Shown(NamedTuple):
    """What the page shows: a head of every model on a prompt, and how.

    `measure`: of the map, as `prompt:entropy`. `first`: the first position of which constituents are drawn.
    """

    subjects: Sequence[Subject]
    ids: tuple[int, ...]
    layer: int
    head: int
    measure: str = "prompt:entropy"
    log: bool = False
    hide_sinks: bool = False
    first: int = 1

    @property
    def views(self) -> list[HeadView]:
        """The head of every model."""
        return [each.view(self.ids, self.layer, self.head) for each in self.subjects]


def parse_head(name: str) -> tuple[int, int]:
    """`L3H5` as (3, 5); `UsageError` where it is written in another way."""
    layer, _, head = name.strip().upper().removeprefix("L").partition("H")
    if not (layer.isascii() and layer.isdigit() and head.isascii() and head.isdigit()):
        raise UsageError(
            f"{visible(name, 20)} is not a head: write L3H5 for head 5 of layer 3, both counted from 0"
        )
    return int(layer), int(head)


def heads_of(subjects: Sequence[Subject]) -> list[str]:
    """The names of all heads."""
    return [head_name(layer, head) for layer, head in subjects[0].model.places]


def measures_of(subjects: Sequence[Subject]) -> list[tuple[str, str]]:
    """What the map can be coloured by: (label, `prompt:entropy`), those of the prompt first."""
    measured = [{measure.name for measure in heads.head_measures(subject.run)} for subject in subjects]
    described = columns_of(subjects[0].run, "heads")
    on_text = [name for name in described if all(name in of_model for of_model in measured)]
    learned = LEARNED_SINK.column
    present = {
        learned: any(
            subject.run.heads[learned].any() for subject in subjects if learned in subject.run.heads
        ),
        END_TOKEN_SINK.column: END_TOKEN_SINK.column in on_text,
    }
    on_prompt = [name for name in ON_PROMPT if present.get(name, True)]
    return [
        (f"{label} · {described[name].title}", f"{where}:{name}")
        for where, names, label in ((PROMPT, on_prompt, "this prompt"), (TEXT, on_text, "the text"))
        for name in names
    ]


def windows(ids: tuple[int, ...]) -> list[tuple[str, int]]:
    """The windows of positions that constituents are drawn of: (label, first position)."""
    return [
        (f"positions {first} to {min(first + MOST_POSITIONS, len(ids)) - 1}", first)
        for first in range(1, len(ids), MOST_POSITIONS)
    ]


def head_map(shown: Shown) -> Figures:
    """The map of all heads by the measure, with the head framed; none where no head has the measure."""
    where, _, column = shown.measure.partition(":")
    runs = [each.run if where == TEXT else each.measured(shown.ids) for each in shown.subjects]
    x, y = shown.head, shown.layer
    frame = {"type": "rect", "x0": x - 0.5, "x1": x + 0.5, "y0": y - 0.5, "y1": y + 0.5, "layer": "above"}
    try:
        drawn = [heads.head_map(run, column) for run in runs]
    except UsageError:
        return [None] * len(runs)
    for figure in drawn:
        for colour, width in ((style.NEUTRAL, 7), (style.INK, 3)):  # paper around ink is seen on any colour
            figure.add_shape(frame, line={"color": colour, "width": width})
    return share_scales(drawn)


def head(shown: Shown) -> list[str]:
    """The head's name, roles and evidence."""
    return [
        words.head_html(view, each.run, each.measured(shown.ids))
        for each, view in zip(shown.subjects, shown.views, strict=True)
    ]


def hidden_keys(view: HeadView) -> list[int]:
    """Keys that the switch hides: the head's sinks, or where it has none the first token."""
    return sorted({sink.position for sink in view.sinks if sink.position >= 0}) or [0]


def attention_map(view: HeadView, *, log: bool = False, hide_sinks: bool = False) -> go.Figure:
    """The head's attention, queries down and keys across; colours run to the largest weight that is shown.

    `hide_sinks` leaves out the columns of `hidden_keys`; what is left is not made to sum to 1.
    """
    weights = view.attention.copy()
    if hide_sinks:
        weights[:, hidden_keys(view)] = np.nan
    highest = float(np.nanmax(weights, initial=0.0)) or 1.0
    sinks = [sink.position for sink in view.sinks if sink.position >= 0]
    drawn = prompt.attention(weights, view.tokens, sinks, highest=highest, log=log, **LABELS)
    place = {"constrain": "domain", "automargin": False}  # the map stays where it is when a switch is turned
    drawn.update_xaxes(place, constraintoward="left")
    drawn.update_yaxes(place, constraintoward="top", scaleanchor="x")
    return drawn.update_layout(height=560, margin={"l": 84, "r": 8, "t": 8, "b": 84})


def attention(shown: Shown) -> Figures:
    """The head's attention map."""
    return share_scales(
        [attention_map(view, log=shown.log, hide_sinks=shown.hide_sinks) for view in shown.views]
    )


def sinks(shown: Shown) -> list[str]:
    """The tokens with their sinks."""
    views = shown.views
    most = max((float(value) for view in views for value in view.received if value > 0), default=1.0)
    return [words.sinks_html(view, most) for view in views]


def tags(shown: Shown) -> list[str]:
    """The tokens in the colours of what the head writes."""
    tags, reasons = _tried(lambda each: each.tags(*shown[1:4]), shown)
    return [
        words.tags_html(view, of_model, colours)
        if of_model
        else words.html("line", f"Cannot be shown: {reason}.")
        for view, of_model, colours, reason in zip(shown.views, tags, tag_colours(tags), reasons, strict=True)
    ]


def constituents(shown: Shown) -> Figures:
    """The head's constituents, their sum and its attention."""
    drawn = [
        split and qk_panels(split, shown.head, each.read(shown.ids).tokens, first=shown.first)
        for each, split in zip(shown.subjects, _splits(shown)[0], strict=True)
    ]
    share_scales([figure for figure in drawn if figure])
    return drawn


def not_split(shown: Shown) -> list[str]:
    """Why there are no constituents; empty where there are."""
    reasons = _splits(shown)[1]
    return [words.html("line", reason and f"The logits cannot be decomposed: {reason}") for reason in reasons]


def _splits(shown: Shown) -> tuple[list[Any], list[str]]:
    return _tried(lambda each: each.constituents(shown.ids, shown.layer), shown)


def _tried(work: Callable[[Subject], _T], shown: Shown) -> tuple[list[_T | None], list[str]]:
    """Do `work` for each model: the results, None where it failed, and the reasons."""
    values: list[_T | None] = []
    reasons = []
    for each in shown.subjects:
        try:
            value, reason = work(each), ""
        except TheodoliteError as error:
            value, reason = None, visible(error)
        values.append(value)
        reasons.append(reason)
    return values, reasons


def spectrum(shown: Shown) -> Figures:
    """The eigenvalues of the head's query-key matrix, with the text's covariance where that was measured."""
    names = ["spectrum_data" if "spectrum_data" in each.run.arrays else "spectrum" for each in shown.subjects]
    place = shown.layer, shown.head
    return share_scales(
        [heads.spectrum(each.run, *place, name) for each, name in zip(shown.subjects, names, strict=True)]
    )


def propagation(shown: Shown) -> Figures:
    """The propagation that the spectrum predicts, and the one measured on the text."""
    return share_scales([heads.propagation(each.run, shown.layer, shown.head) for each in shown.subjects])


PANELS: dict[str, Callable[[Shown], list[Any]]] = {
    draw.__name__: draw
    for draw in (head_map, head, attention, sinks, spectrum, propagation, constituents, not_split, tags)
}


def share_scales(drawn: list[go.Figure]) -> list[go.Figure]:
    """Give figures of several models, alike but for their numbers, the same ends of colours and of axes."""
    for figure in drawn:
        # On a dark page, too: colours are those of light paper.
        figure.update_layout(paper_bgcolor=style.NEUTRAL)
    if len(drawn) < 2:
        return drawn
    for name in ("coloraxis", "coloraxis2"):
        _share([figure.layout[name] for figure in drawn if name in figure.layout], "c")
    _share([trace for figure in drawn for trace in figure.select_traces({"type": "heatmap"})], "z")
    for axis in ("x", "y"):
        if all(figure.layout[f"{axis}axis"].range is None for figure in drawn):
            _share_axis(drawn, axis)
    return drawn


def _share(scales: Sequence[Any], letter: str) -> None:
    """Give colour scales the same ends, with the ticks of the one that goes farthest."""
    low, high = f"{letter}min", f"{letter}max"
    scales = [scale for scale in scales if scale[high] is not None]
    if not scales:
        return
    lowest, widest = min(scale[low] for scale in scales), max(scales, key=lambda scale: scale[high])
    for scale in scales:
        scale.update({low: lowest, high: widest[high], "colorbar": widest.colorbar})


def _share_axis(drawn: Sequence[go.Figure], axis: str) -> None:
    """Give an axis of numbers the same ends in all figures."""
    points = [trace[axis] for figure in drawn for trace in figure.select_traces({"type": "scatter"})]
    values = np.concatenate([np.asarray(each, np.float64) for each in points] or [np.zeros(0)])
    if not np.isfinite(values).any():
        return
    low, high = float(np.nanmin(values)), float(np.nanmax(values))
    margin = AXIS_MARGIN * (high - low or 1.0)
    for figure in drawn:
        figure.layout[f"{axis}axis"].range = [low - margin, high + margin]
