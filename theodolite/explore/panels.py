"""Every panel of the page as the string that the browser gets, one per model: text as HTML, figures as JSON.

Models that stand side by side share their scales, so that a colour or a height means the same in both.
Between the numbers of a view and the page; gradio is not known here, so that all of it can be tested without.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import plotly.graph_objects as go

from theodolite.errors import UsageError
from theodolite.explore import figures, panel_html
from theodolite.explore.subject import Subject
from theodolite.explore.view import tag_colours
from theodolite.measure.head_matrices import MOST_POSITIONS
from theodolite.measure.head_roles import END_TOKEN_SINK, LEARNED_SINK, PREVIOUS_TOKEN, SAME_TOKEN, SINK_ROLES
from theodolite.report.drawing import spectra as figures_spectra
from theodolite.report.drawing.constituents import qk_panels
from theodolite.report.drawing.heads import head_measures
from theodolite.report.measures import HEAD_MEASURES
from theodolite.report.payload import figure_json
from theodolite.system.wording import head_name, visible

Ids = tuple[int, ...]

PROMPT, TEXT = "prompt", "text"
ON_PROMPT = ("entropy", PREVIOUS_TOKEN.column, SAME_TOKEN.column, *(role.column for role in SINK_ROLES))
"""Measures that one prompt gives; the others need a text, random tokens, or the weights."""


@dataclass(frozen=True)
class Selection:
    """A head, and the measure of the map: (`PROMPT` or `TEXT`, column)."""

    layer: int
    head: int
    measure: tuple[str, str]


@dataclass(frozen=True)
class Switches:
    """How the attention map is drawn."""

    log: bool = False
    hide_sinks: bool = False


def parse_head(name: str) -> tuple[int, int]:
    """`L3H5` as (3, 5).

    Raises:
        UsageError: it is written in another way.
    """
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
    measured = [{measure.column for measure in head_measures(subject.run)} for subject in subjects]
    on_text = [name for name in HEAD_MEASURES if all(name in of_model for of_model in measured)]
    learned = any(
        bool(subject.run.heads.get(LEARNED_SINK.column, subject.run.heads["layer"] * 0).any())
        for subject in subjects
    )
    end_token = all(END_TOKEN_SINK.column in of_model for of_model in measured)
    absent = {
        role.column for role, there in ((LEARNED_SINK, learned), (END_TOKEN_SINK, end_token)) if not there
    }
    on_prompt = [name for name in ON_PROMPT if name not in absent]
    sources = ((PROMPT, on_prompt, "this prompt"), (TEXT, on_text, "the text"))
    return [
        (f"{label} · {HEAD_MEASURES[name].title}", f"{where}:{name}")
        for where, names, label in sources
        for name in names
    ]


def head_map(subjects: Sequence[Subject], ids: Ids, selection: Selection) -> list[str]:
    """The layer × head map with the head framed; empty where no head has the measure."""
    where, measure = selection.measure
    try:
        drawn = [
            figures.framed_map(
                subject.run if where == TEXT else subject.read(ids).measured,
                measure,
                selection.layer,
                selection.head,
            )
            for subject in subjects
        ]
    except UsageError:
        return [""] * len(subjects)
    title = f"{HEAD_MEASURES[measure].title} on {'the text' if where == TEXT else 'this prompt'}"
    return _payloads(drawn, f"layer × head map of {title}, {_head_name(selection)} framed")


def head(subjects: Sequence[Subject], ids: Ids, selection: Selection) -> list[str]:
    """The head's name, kind and evidence."""
    return [
        panel_html.head_html(
            subject.view(ids, selection.layer, selection.head), subject.run, subject.read(ids).measured
        )
        for subject in subjects
    ]


def attention(subjects: Sequence[Subject], ids: Ids, selection: Selection, switches: Switches) -> list[str]:
    """The head's attention map."""
    views = [subject.view(ids, selection.layer, selection.head) for subject in subjects]
    drawn = [figures.attention_map(view, log=switches.log, hide_sinks=switches.hide_sinks) for view in views]
    return _payloads(drawn, f"attention map of {_head_name(selection)} on this prompt")


def sinks(subjects: Sequence[Subject], ids: Ids, selection: Selection) -> list[str]:
    """The tokens with their sinks."""
    views = [subject.view(ids, selection.layer, selection.head) for subject in subjects]
    most = panel_html.most_received(views)
    return [panel_html.sinks_html(view, most) for view in views]


def tags(subjects: Sequence[Subject], ids: Ids, selection: Selection) -> list[str]:
    """The tokens in the colours of what the head writes."""
    details = [subject.constituents_and_tags(ids, selection.layer, selection.head) for subject in subjects]
    colours = tag_colours([each.tags for each in details])
    return [
        panel_html.tags_html(subject.view(ids, selection.layer, selection.head), each.tags, rgb, each.no_tags)
        for subject, each, rgb in zip(subjects, details, colours, strict=True)
    ]


def constituents(
    subjects: Sequence[Subject], ids: Ids, selection: Selection, first: int
) -> list[tuple[str, str]]:
    """The head's constituents, their sum and its attention, from position `first` on; or why there are none."""
    drawn, refused = [], []
    for subject in subjects:
        detail = subject.constituents_and_tags(ids, selection.layer, selection.head)
        refused.append(
            "" if detail.split else panel_html.message(f"The logits cannot be decomposed: {detail.not_split}")
        )
        if detail.split:
            drawn.append(qk_panels(detail.split, selection.head, subject.read(ids).tokens, first=first))
    payloads = iter(_payloads(drawn, f"constituents of the logits of {_head_name(selection)} on this prompt"))
    return [("", reason) if reason else (next(payloads), "") for reason in refused]


def windows(ids: Ids) -> list[tuple[str, int]]:
    """The windows of positions that constituents are drawn of: (label, first position)."""
    return [
        (f"positions {first} to {min(first + MOST_POSITIONS, len(ids)) - 1}", first)
        for first in range(1, len(ids), MOST_POSITIONS)
    ]


def spectrum(subjects: Sequence[Subject], selection: Selection) -> list[str]:
    """The eigenvalues of the head's query-key matrix, with the text's covariance where that was measured."""
    drawn = [
        figures_spectra.spectrum(
            subject.run,
            selection.layer,
            selection.head,
            "spectrum_data" if "spectrum_data" in subject.run.arrays else "spectrum",
        )
        for subject in subjects
    ]
    return _payloads(drawn, f"eigenvalues of the query-key matrix of {_head_name(selection)}")


def propagation(subjects: Sequence[Subject], selection: Selection) -> list[str]:
    """The propagation that the spectrum predicts, and the one measured on the text."""
    drawn = [
        figures_spectra.propagation(subject.run, selection.layer, selection.head) for subject in subjects
    ]
    return _payloads(drawn, f"signal propagation of {_head_name(selection)}, predicted and measured")


def _head_name(selection: Selection) -> str:
    return head_name(selection.layer, selection.head)


def _payloads(drawn: Sequence[go.Figure], label: str) -> list[str]:
    """The figures of all models on one scale, as JSON with what a screen reader says of them."""
    figures.share_scales(drawn)
    return [figure_json(figure.update_layout(meta=label), {}) for figure in drawn]
