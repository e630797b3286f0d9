"""The panels of the page that are words and coloured tokens, as HTML; the templates escape every string.

Colour never stands alone: sinks are marked and numbered, and a caught token carries the number of its sink.
"""

from __future__ import annotations

import functools
import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

import jinja2
import numpy as np

from theodolite.attention.summary import SINK_THRESHOLD
from theodolite.explore.evidence import Evidence, evidence, roles_of, shares_line, spectrum_line
from theodolite.explore.view import HeadView, Sink, Tags
from theodolite.passes.run import Run
from theodolite.report.content import flowing
from theodolite.report.data import provenance
from theodolite.report.page import environment
from theodolite.sinks.prompt import LEFT_OUT, UNCAUGHT
from theodolite.system.wording import counted, head_name, number, percent, shown_token, tokens_of, visible

LIGHT = 0.179  # relative luminance of a colour on which black and white have the same contrast, 4.6 (WCAG 2)


@dataclass(frozen=True)
class Row:
    """A role in the table of evidence."""

    holds: bool
    role: str
    meaning: str
    on_text: str
    on_prompt: str
    threshold: str


@dataclass(frozen=True)
class Token:
    """A token in running text; its line ends apart, so that its mark does not reach into the next line."""

    text: str
    breaks: str
    hint: str
    mark: str
    note: str
    style: str


def head_html(view: HeadView, run: Run, measured: Run) -> str:
    """The head's name, its roles with the evidence, and what its spectrum and its logits say."""
    rows = evidence(run, measured, view.layer, view.head)
    return render(
        "head.html.j2",
        name=head_name(view.layer, view.head),
        roles=roles_of(rows),
        rows=[_row(row) for row in rows],
        text=text_line(run),
        lines=[
            line
            for line in (shares_line(run, view.layer, view.head), spectrum_line(run, view.layer, view.head))
            if line
        ],
    )


def text_line(run: Run) -> str:
    """What was surveyed: contexts, length and name of the text."""
    corpus = provenance(run, "corpus") or {}
    size = f"{counted(int(corpus['contexts']), 'context')} of {tokens_of(corpus)} tokens"
    return f"{size} of {visible(corpus['name'], 60)}"


def most_received(views: Sequence[HeadView]) -> float:
    """The most attention that any token receives in any of the models."""
    return max((float(value) for view in views for value in view.received if value > 0), default=1.0)


def sinks_html(view: HeadView, most: float) -> str:
    """The prompt's tokens, shaded by the attention that they receive, sinks marked; and each sink in a sentence.

    `most`: what the deepest shade means.
    """
    shades = np.nan_to_num(view.received) / most
    tokens = [token(view, position, f"--a:{shade:.2f}") for position, shade in enumerate(shades)]
    learned = float(view.learned.mean())
    return render(
        "sinks.html.j2",
        tokens=tokens,
        most=number(most, 2),
        threshold=SINK_THRESHOLD,
        sinks=[sink_sentence(view, index) for index in range(len(view.sinks))],
        learned=f"{learned:.2f}" if learned > 0 else "",
        uncaught=int((view.group == UNCAUGHT).sum()),
    )


def tags_html(view: HeadView, tags: Tags | None, colours: np.ndarray, reason: str) -> str:
    """The same tokens in the `colours` of what the head writes; and how far the sinks explain it."""
    tokens = [token(view, position, _background(colour)) for position, colour in enumerate(colours)]
    return render(
        "tags.html.j2",
        tokens=tokens,
        reason=visible(reason),
        line="" if tags is None else _tag_sentence(view, tags),
    )


def message(text: str) -> str:
    """One line that says why nothing changed; empty for none."""
    return render("message.html.j2", text=visible(text))


def escaped(text: str) -> str:
    """A name that stands in a line of HTML."""
    return html.escape(visible(text, 80))


def title(names: list[str], runs: list[Run]) -> str:
    """The page's heading: the models, and what they were surveyed on."""
    models = [
        {
            "name": visible(name, 80),
            "shape": _shape(run),
            "text": text_line(run),
        }
        for name, run in zip(names, runs, strict=True)
    ]
    return render("title.html.j2", models=models)


def _shape(run: Run) -> str:
    model = provenance(run, "model") or {}
    return f"{model.get('layers')} layers × {model.get('heads')} heads"


def _row(evidence: Evidence) -> Row:
    return Row(
        evidence.holds,
        evidence.role.title,
        evidence.role.meaning,
        number(evidence.on_text, 2),
        number(evidence.on_prompt, 2),
        f"{evidence.role.threshold:g}",
    )


def token(view: HeadView, position: int, style: str) -> Token:
    """A token of the prompt in running text: marked as a sink, or with the number of the one that caught it."""
    text = flowing(view.tokens[position])
    line = text.rstrip("\n")
    sinks = [sink.position for sink in view.sinks]
    mark = f"▼{sinks.index(position) + 1}" if position in sinks else ""
    group = int(view.group[position])
    caught = group not in (UNCAUGHT, LEFT_OUT)
    received = float(view.received[position])
    hint = f"{position}: {shown_token(view.tokens[position])}"
    hint += " · seen by too few tokens" if math.isnan(received) else f" · receives {received:.3f}"
    hint += f" · sink {mark}" if mark else f" · caught by ▼{group + 1}" if caught else ""
    return Token(line, text[len(line) :], hint, mark, str(group + 1) if caught else "", style)


def sink_sentence(view: HeadView, index: int) -> tuple[str, str]:
    """A sink's mark, and what it receives and catches."""
    sink = view.sinks[index]
    name = "the learned column" if sink.position < 0 else f"token {sink.position} “{_token_of(view, sink)}”"
    local = " (a local sink: it dominates a contiguous span)" if sink.stretch else ""
    return f"▼{index + 1}", (
        f"{name} receives {sink.received:.2f} of the attention on average and catches "
        f"{counted(sink.caught, 'token')}{local}"
    )


def _token_of(view: HeadView, sink: Sink) -> str:
    return shown_token(view.tokens[sink.position])


def _background(colour: np.ndarray) -> str:
    red, green, blue = (int(channel) for channel in colour)
    share = colour / 255
    linear = np.where(share <= 0.04045, share / 12.92, ((share + 0.055) / 1.055) ** 2.4)
    luminance = linear @ (0.2126, 0.7152, 0.0722)
    return f"background:rgb({red},{green},{blue});color:{'#000' if luminance >= LIGHT else '#fff'}"


def _tag_sentence(view: HeadView, tags: Tags) -> str:
    if math.isnan(tags.explained):
        return (
            "No sink groups these tokens, so there is no tag to measure: the colours show the leading principal "
            "components of the head's output."
        )
    return (
        f"The grouping by sink explains {percent(tags.explained)} of the variance of the head's output (η²) and "
        f"{percent(tags.before)} of that of the stream that enters the block; a random grouping would explain "
        f"{percent(tags.chance)}."
    )


@functools.cache
def _environment() -> jinja2.Environment:
    return environment("theodolite.explore", "static")


def render(template: str, /, **values: object) -> str:
    """One of the templates in `static/`, which escape every string."""
    return _environment().get_template(template).render(values)
