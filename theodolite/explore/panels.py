"""Every panel of the page as the string that the browser gets: words as HTML, figures as JSON.

Between the numbers of a view and the page; gradio is not known here, so that all of it can be tested without.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from theodolite.errors import UsageError
from theodolite.explore import figures, words
from theodolite.explore.subject import Slow, Subject
from theodolite.report import figures_spectra
from theodolite.report.figures_heads import head_measures
from theodolite.report.figures_qk import MOST, qk_panels
from theodolite.report.measures import HEAD_MEASURES
from theodolite.report.payload import figure_json
from theodolite.report.text import head_name, visible

Ids = tuple[int, ...]

PROMPT, TEXT = "prompt", "text"
ON_PROMPT = ("entropy", "previous_token", "same_token", "sink_first", "sink_later", "sink_learned")
"""Measures that one prompt gives; the others need a text, random tokens, or the weights."""


@dataclass(frozen=True)
class Place:
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
        raise UsageError(f"{visible(name, 20)} is no head: write L3H5 for head 5 of layer 3, both from 0")
    return int(layer), int(head)


def heads_of(subjects: Sequence[Subject]) -> list[str]:
    """The names of all heads."""
    model = subjects[0].model
    return [head_name(layer, head) for layer in range(model.layers) for head in range(model.heads)]


def measures_of(subjects: Sequence[Subject]) -> list[tuple[str, str]]:
    """What the map can be coloured by: (what is said, `prompt:entropy`), those of the prompt first."""
    known = [{measure.column for measure in head_measures(subject.run)} for subject in subjects]
    on_text = [name for name in HEAD_MEASURES if all(name in own for own in known)]
    learned = any(
        bool(subject.run.heads.get("sink_learned", subject.run.heads["layer"] * 0).any())
        for subject in subjects
    )
    on_prompt = [name for name in ON_PROMPT if learned or name != "sink_learned"]
    both = ((PROMPT, on_prompt, "this prompt"), (TEXT, on_text, "the text"))
    return [
        (f"{said} · {HEAD_MEASURES[name].title}", f"{where}:{name}")
        for where, names, said in both
        for name in names
    ]


def head_map(subject: Subject, ids: Ids, place: Place) -> str:
    """The layer × head map with the head framed; empty where no head has the measure."""
    where, measure = place.measure
    run = subject.run if where == TEXT else subject.read(ids).measured
    try:
        return figure_json(figures.chosen_map(run, measure, place.layer, place.head), {})
    except UsageError:
        return ""


def head(subject: Subject, ids: Ids, place: Place) -> str:
    """The head's name, kind and evidence."""
    return words.head_words(
        subject.view(ids, place.layer, place.head), subject.run, subject.read(ids).measured
    )


def attention(subject: Subject, ids: Ids, place: Place, switches: Switches) -> str:
    """The head's attention map."""
    view = subject.view(ids, place.layer, place.head)
    return figure_json(figures.attention_map(view, log=switches.log, hide_sinks=switches.hide_sinks), {})


def sinks(subject: Subject, ids: Ids, place: Place) -> str:
    """The tokens with their sinks."""
    return words.sink_words(subject.view(ids, place.layer, place.head))


def tags(subject: Subject, ids: Ids, place: Place) -> str:
    """The tokens in the colours of what the head writes."""
    found = subject.slow(ids, place.layer, place.head)
    return words.tag_words(subject.view(ids, place.layer, place.head), found.tags, found.no_tags)


def constituents(subject: Subject, ids: Ids, place: Place, first: int) -> tuple[str, str]:
    """The head's constituents, their sum and its attention, from position `first` on; or why there are none."""
    found: Slow = subject.slow(ids, place.layer, place.head)
    if found.split is None:
        return "", words.message(f"The logits cannot be split: {found.not_split}")
    drawn = qk_panels(found.split, place.head, subject.read(ids).tokens, first=first)
    return figure_json(drawn, {}), ""


def windows(ids: Ids) -> list[tuple[str, int]]:
    """The stretches of positions that constituents are drawn of: (what is said, first position)."""
    return [
        (f"positions {first} to {min(first + MOST, len(ids)) - 1}", first)
        for first in range(1, len(ids), MOST)
    ]


def spectrum(subject: Subject, place: Place) -> str:
    """The eigenvalues of the head's query-key matrix, with the text's covariance where that was measured."""
    name = "spectrum_data" if "spectrum_data" in subject.run.arrays else "spectrum"
    return figure_json(figures_spectra.spectrum(subject.run, place.layer, place.head, name), {})


def propagation(subject: Subject, place: Place) -> str:
    """The propagation that the spectrum predicts, and the one measured on the text."""
    return figure_json(figures_spectra.propagation(subject.run, place.layer, place.head), {})
