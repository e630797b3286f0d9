"""The panels of the page that are words and coloured tokens, as HTML. Every string of a model or a prompt is escaped.

Which roles a head has is told with every score and its threshold; no score is computed here.

Colour never stands alone: sinks are marked and numbered, and a caught token carries the number of its sink.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np

from theodolite.attention.sinks import SINK_THRESHOLD
from theodolite.errors import TheodoliteError
from theodolite.explore.view import HeadView, Tags
from theodolite.measure.head_roles import LEARNED_SINK, ROLES, HeadRole
from theodolite.models.weights.head_weights import EXACT, NO_MATRIX
from theodolite.passes.run import Run
from theodolite.report.content import flowing
from theodolite.report.data import Floats, column, entropy_share, provenance
from theodolite.sinks.prompt import LEFT_OUT, UNCAUGHT
from theodolite.system.wording import counted, head_name, number, percent, shown_token, tokens_of, visible
from theodolite.theory.regimes import UNDEFINED

LIGHT = 0.179  # relative luminance of a colour on which black and white have the same contrast, 4.6 (WCAG 2)
WHITE, PLUM = np.array([255, 255, 255]), np.array([197, 133, 179])
_BOX = "max-height:22rem;overflow:auto;white-space:pre-wrap;overflow-wrap:anywhere;line-height:1.9"
_TOKEN = "unicode-bidi:isolate;border-radius:3px;padding:.1em 0"


@dataclass(frozen=True)
class Evidence:
    """A role with the head's score on the surveyed text and on this prompt; NaN where there is none."""

    role: HeadRole
    on_text: float
    on_prompt: float

    @property
    def holds(self) -> bool:
        """Whether the head has this role: on the text, or on the prompt where the text has no number."""
        score = self.on_prompt if math.isnan(self.on_text) else self.on_text
        return score >= self.role.threshold


def evidence(run: Run, measured: Run, layer: int, head: int) -> list[Evidence]:
    """Every role with the head's scores, those that it has first."""
    rows = [
        Evidence(role, _value(run, role.column, layer, head), _value(measured, role.column, layer, head))
        for role in ROLES
    ]
    rows = [row for row in rows if not (math.isnan(row.on_text) and math.isnan(row.on_prompt))]
    scored = [row for row in rows if row.role is not LEARNED_SINK or row.on_text or row.on_prompt]
    return sorted(scored, key=lambda row: not row.holds)


def roles_of(rows: list[Evidence]) -> str:
    """The head's roles in words."""
    return ", ".join(row.role.title for row in rows if row.holds) or "no named role"


def spectrum_line(run: Run, layer: int, head: int) -> str:
    """What the spectrum predicts for the head, in a sentence."""
    row = _row(run, layer, head)
    source = str(row.get("spectrum_of", EXACT))
    if source == NO_MATRIX:
        return "Its queries and keys are not affine in its input, so it has no query-key matrix."
    if source != EXACT:
        return (
            "This family normalises queries and keys after projecting them: the eigenvalues are those of the "
            "projection before the norm, and do not predict propagation."
        )
    suffix = "_data" if "regime_data" in row else ""
    regime, matrix = str(row[f"regime{suffix}"]), "W_QK Σ̂" if suffix else "W_QK"
    if regime == UNDEFINED:
        return f"The spectrum of {matrix} falls into no regime."
    numbers = ", ".join(
        f"{symbol} = {number(row[f'{name}_symmetric{suffix}'])}"
        for symbol, name in (("ξ", "xi"), ("η", "eta"))
    )
    margin = number(row[f"regime_margin{suffix}"], 2)
    return f"Predicted regime: {regime}, from {matrix} ({numbers}; {margin} from the nearest threshold)."


def shares_line(run: Run, layer: int, head: int) -> str:
    """The constituents of the head's logits on the surveyed text, in a sentence; empty where they are not known."""
    row = _row(run, layer, head)
    names = {"position": "position", "context": "context", "cross": "both", "constant": "neither"}
    shares = {label: float(row.get(f"share_{name}", math.nan)) for name, label in names.items()}
    if any(math.isnan(share) for share in shares.values()):
        return ""
    listed_shares = ", ".join(f"{label} {percent(share)}" for label, share in shares.items())
    added = float(row.get("share_additive", 0.0))
    bias = f", bias added by the model {percent(added)}" if added else ""
    return f"Variance of its logits on the text: {listed_shares}{bias}."


def _row(run: Run, layer: int, head: int) -> dict[str, Any]:
    rows = run.heads[(run.heads["layer"] == layer) & (run.heads["head"] == head)]
    return {str(name): value for name, value in rows.iloc[0].items()}


def _value(run: Run, name: str, layer: int, head: int) -> float:
    values = entropy_share(run) if name == "entropy_share" else column(run.heads, name)
    if values is None:
        return math.nan
    chosen = (run.heads["layer"] == layer) & (run.heads["head"] == head)
    return float(values[chosen.to_numpy()][0])


def title(names: Sequence[str], runs: Sequence[Run]) -> str:
    """The page's heading: the models, and what they were surveyed on."""
    shown = [escape(visible(name, 80)) for name in names]
    lines = []
    for name, run in zip(shown, runs, strict=True):
        model = provenance(run, "model") or {}
        shape = f"{model.get('layers')} layers × {model.get('heads')} heads"
        lines.append(f"<p>{name}: {shape}, surveyed on {escape(text_line(run))}</p>")
    if len(shown) > 1:
        lines.append(
            "<p>Both models share all scales: a colour, shade or height means the same on either side.</p>"
        )
    return f"<h1>{' and '.join(shown)}</h1>{''.join(lines)}"


def heading(name: str) -> str:
    """The name of one of two models, over its panels."""
    return f"<h2>{escape(visible(name, 80))}</h2>"


def text_line(run: Run) -> str:
    """What was surveyed: contexts, length and name of the text."""
    corpus = provenance(run, "corpus") or {}
    size = f"{counted(int(corpus['contexts']), 'context')} of {tokens_of(corpus)} tokens"
    return f"{size} of {visible(corpus['name'], 60)}"


def line(text: str) -> str:
    """A line of text; empty for none."""
    return f"<p>{escape(text)}</p>" if text else ""


def refusal(error: TheodoliteError) -> str:
    """Why nothing changed, in a line."""
    return f"<p><b>{escape(visible(error))}</b></p>"


def head_html(view: HeadView, run: Run, measured: Run) -> str:
    """The head's name, its roles with the evidence, and what its spectrum and its logits say."""
    rows = evidence(run, measured, view.layer, view.head)
    cells = "".join(
        f'<tr><th scope="row" title="{escape(row.role.meaning)}">{"✓ " if row.holds else ""}{escape(row.role.title)}'
        f"</th><td>{number(row.on_text, 2)}</td><td>{number(row.on_prompt, 2)}</td><td>{row.role.threshold:g}</td></tr>"
        for row in rows
    )
    return (
        f"<h4>{head_name(view.layer, view.head)} {escape(roles_of(rows))}</h4>"
        f"<table><thead><tr><th>role</th><th>text</th><th>prompt</th><th>threshold</th></tr></thead>"
        f"<tbody>{cells}</tbody></table>"
        + line(shares_line(run, view.layer, view.head))
        + line(spectrum_line(run, view.layer, view.head))
    )


def most_received(views: Sequence[HeadView]) -> float:
    """The most attention that any token receives in any of the models."""
    return max((float(value) for view in views for value in view.received if value > 0), default=1.0)


def sinks_html(view: HeadView, most: float) -> str:
    """The prompt's tokens, shaded by the attention that they receive up to `most`; and each sink in a sentence."""
    shades = np.nan_to_num(view.received)[:, None] / most
    sinks = [sink_sentence(view, index) for index in range(len(view.sinks))]
    if sinks:
        sinks.append(f"{(view.group == UNCAUGHT).sum()} of the other tokens are caught by no sink")
    else:
        sinks.append(f"No sink: no token receives more than {SINK_THRESHOLD}, or dominates a contiguous span")
    if view.learned.mean() > 0:
        sinks.append(
            f"{view.learned.mean():.2f} of the attention goes to a learned sink column, which belongs to no token"
        )
    key = (
        f"White to plum: mean attention from the tokens that see it, 0 to {number(most, 2)}. ▼1: a sink. "
        "Small number: the sink that caught the token."
    )
    return _tokens(view, WHITE + shades * (PLUM - WHITE)) + line(key) + "".join(map(line, sinks))


def tags_html(view: HeadView, tags: Tags | None, colours: Floats, reason: str) -> str:
    """The same tokens in the `colours` of what the head writes; and how far the sinks explain it."""
    if tags is None:
        return line(f"Cannot be shown: {visible(reason)}.")
    key = "Similar colours mean similar outputs: three principal components as red, green and blue."
    return _tokens(view, colours) + line(key) + line(_tag_sentence(tags))


def sink_sentence(view: HeadView, index: int) -> str:
    """A sink's mark, and what it receives and catches."""
    sink = view.sinks[index]
    token = f"token {sink.position} “{shown_token(view.tokens[sink.position])}”"
    local = " (a local sink: it dominates a contiguous span)" if sink.stretch else ""
    return (
        f"▼{index + 1} {'the learned column' if sink.position < 0 else token} receives {sink.received:.2f} of the "
        f"attention on average and catches {counted(sink.caught, 'token')}{local}"
    )


def _tokens(view: HeadView, colours: Floats) -> str:
    """The tokens in running text, each on its colour (T, 3); a line ends behind its token's mark."""
    sinks = [sink.position for sink in view.sinks]
    spans = []
    for position, colour in enumerate(colours):
        text, group = flowing(view.tokens[position]), int(view.group[position])
        mark = f"<b>▼{sinks.index(position) + 1}</b>" if position in sinks else ""
        caught = f"<sub>{group + 1}</sub>" if group not in (UNCAUGHT, LEFT_OUT) else ""
        hint = f"{position}: {shown_token(view.tokens[position])} · " + (
            "seen by too few tokens"
            if math.isnan(view.received[position])
            else f"receives {view.received[position]:.3f}"
        )
        shown = text.rstrip("\n")
        spans.append(
            f'<span style="{_TOKEN};{_background(colour)}" title="{escape(hint)}">{mark}{escape(shown)}{caught}</span>'
            + text[len(shown) :]
        )
    return f'<div style="{_BOX}" tabindex="0" role="group" aria-label="the prompt\'s tokens">{"".join(spans)}</div>'


def _background(colour: Floats) -> str:
    red, green, blue = (round(float(channel)) for channel in colour)
    share = colour / 255
    linear = np.where(share <= 0.04045, share / 12.92, ((share + 0.055) / 1.055) ** 2.4)
    luminance = linear @ (0.2126, 0.7152, 0.0722)
    return f"background:rgb({red},{green},{blue});color:{'#000' if luminance >= LIGHT else '#fff'}"


def _tag_sentence(tags: Tags) -> str:
    if math.isnan(tags.explained):
        return "No sink groups these tokens, so there is no tag to measure."
    return (
        f"The grouping by sink explains {percent(tags.explained)} of the variance of the head's output (η²) and "
        f"{percent(tags.before)} of that of the stream that enters the block; a random grouping would explain "
        f"{percent(tags.chance)}."
    )
