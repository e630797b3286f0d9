"""Every panel of the page, one value per model: a Plotly figure, or words as HTML.

Models that stand side by side share their scales, so that a colour or a height means the same in both. gradio is not
known here, so that all of it can be tested without.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import plotly.graph_objects as go

from theodolite.errors import UsageError
from theodolite.explore import panel_html
from theodolite.explore.figures import attention_map, framed_map, share_scales
from theodolite.explore.subject import Subject
from theodolite.explore.view import tag_colours
from theodolite.measure.head_matrices import MOST_POSITIONS
from theodolite.measure.head_roles import END_TOKEN_SINK, LEARNED_SINK, PREVIOUS_TOKEN, SAME_TOKEN, SINK_ROLES
from theodolite.report.data import columns_of
from theodolite.report.drawing import spectra as spectra_figures
from theodolite.report.drawing.constituents import qk_panels
from theodolite.report.drawing.heads import head_measures
from theodolite.system.wording import head_name, visible

Figures = list[go.Figure | None]

PROMPT, TEXT = "prompt", "text"
ON_PROMPT = ("entropy", PREVIOUS_TOKEN.column, SAME_TOKEN.column, *(role.column for role in SINK_ROLES))
"""Measures that one prompt gives; the others need a text, random tokens, or the weights."""


class Shown(NamedTuple):
    """What the page shows: a head of every model on a prompt."""

    subjects: Sequence[Subject]
    ids: tuple[int, ...]
    layer: int
    head: int


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
    measured = [{measure.name for measure in head_measures(subject.run)} for subject in subjects]
    described = columns_of(subjects[0].run, "heads")
    on_text = [name for name in described if all(name in of_model for of_model in measured)]
    learned = any(
        subject.run.heads.get(LEARNED_SINK.column, 0 * subject.run.heads["layer"]).any()
        for subject in subjects
    )
    present = {
        LEARNED_SINK.column: learned,
        END_TOKEN_SINK.column: END_TOKEN_SINK.column in set.intersection(*measured),
    }
    on_prompt = [name for name in ON_PROMPT if present.get(name, True)]
    return [
        (f"{label} · {described[name].title}", f"{where}:{name}")
        for where, names, label in ((PROMPT, on_prompt, "this prompt"), (TEXT, on_text, "the text"))
        for name in names
    ]


def head_map(shown: Shown, measure: str) -> Figures:
    """The layer × head map of `prompt:entropy`, say, with the head framed; none where no head has the measure."""
    where, _, column = measure.partition(":")
    runs = [each.run if where == TEXT else each.read(shown.ids).measured for each in shown.subjects]
    try:
        return share_scales([framed_map(run, column, shown.layer, shown.head) for run in runs])
    except UsageError:
        return [None] * len(runs)


def head(shown: Shown) -> list[str]:
    """The head's name, roles and evidence."""
    return [
        panel_html.head_html(each.view(*shown[1:]), each.run, each.read(shown.ids).measured)
        for each in shown.subjects
    ]


def attention(shown: Shown, *, log: bool = False, hide_sinks: bool = False) -> Figures:
    """The head's attention map."""
    views = [each.view(*shown[1:]) for each in shown.subjects]
    return share_scales([attention_map(view, log=log, hide_sinks=hide_sinks) for view in views])


def sinks(shown: Shown) -> list[str]:
    """The tokens with their sinks."""
    views = [each.view(*shown[1:]) for each in shown.subjects]
    most = panel_html.most_received(views)
    return [panel_html.sinks_html(view, most) for view in views]


def tags(shown: Shown) -> list[str]:
    """The tokens in the colours of what the head writes."""
    details = [each.constituents_and_tags(*shown[1:]) for each in shown.subjects]
    colours = tag_colours([detail.tags for detail in details])
    return [
        panel_html.tags_html(each.view(*shown[1:]), detail.tags, rgb, detail.no_tags)
        for each, detail, rgb in zip(shown.subjects, details, colours, strict=True)
    ]


def constituents(shown: Shown, first: int = 1) -> tuple[Figures, list[str]]:
    """The head's constituents, their sum and its attention, from position `first` on; and why there are none."""
    details = [each.constituents_and_tags(*shown[1:]) for each in shown.subjects]
    drawn = [
        detail.split and qk_panels(detail.split, shown.head, each.read(shown.ids).tokens, first=first)
        for each, detail in zip(shown.subjects, details, strict=True)
    ]
    share_scales([figure for figure in drawn if figure])
    reasons = [
        detail.not_split and f"The logits cannot be decomposed: {visible(detail.not_split)}"
        for detail in details
    ]
    return drawn, [panel_html.line(reason) for reason in reasons]


def windows(ids: tuple[int, ...]) -> list[tuple[str, int]]:
    """The windows of positions that constituents are drawn of: (label, first position)."""
    return [
        (f"positions {first} to {min(first + MOST_POSITIONS, len(ids)) - 1}", first)
        for first in range(1, len(ids), MOST_POSITIONS)
    ]


def spectrum(shown: Shown) -> Figures:
    """The eigenvalues of the head's query-key matrix, with the text's covariance where that was measured."""
    names = ["spectrum_data" if "spectrum_data" in each.run.arrays else "spectrum" for each in shown.subjects]
    return share_scales(
        [
            spectra_figures.spectrum(each.run, shown.layer, shown.head, name)
            for each, name in zip(shown.subjects, names, strict=True)
        ]
    )


def propagation(shown: Shown) -> Figures:
    """The propagation that the spectrum predicts, and the one measured on the text."""
    return share_scales(
        [spectra_figures.propagation(each.run, shown.layer, shown.head) for each in shown.subjects]
    )
