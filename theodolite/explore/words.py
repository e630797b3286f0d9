"""What the explorer says of one head, in sentences and in tokens on colours; nothing is drawn or measured here.

Colour never stands alone: sinks are marked and numbered, and a caught token carries the number of its sink.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from theodolite.attention.sinks import SINK_THRESHOLD
from theodolite.explore.subject import Tags
from theodolite.measure.head_roles import LEARNED_SINK, ROLES, HeadRole
from theodolite.models.weights.head_weights import EXACT, NO_MATRIX
from theodolite.passes.run import Run
from theodolite.report.content import flowing
from theodolite.report.data import Floats, entropy_share
from theodolite.report.drawing.constituents import SHARES
from theodolite.report.page import environment
from theodolite.sinks.prompt import LEFT_OUT, UNCAUGHT, HeadView
from theodolite.system.wording import counted, head_name, number, percent, shown_token
from theodolite.theory.regimes import UNDEFINED

LIGHT = 0.179  # relative luminance of a colour on which black and white have the same contrast, 4.6 (WCAG 2)
WHITE, PLUM = np.array([255, 255, 255]), np.array([197, 133, 179])


def html(macro: str, *values: object) -> str:
    """Fill one macro of the explorer's template; its values are escaped."""
    return str(getattr(environment().get_template("explore.html.j2").module, macro)(*values)).strip()


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
    """List every role with the head's scores; the roles that it has come first."""
    columns = [role.column for role in ROLES]
    on_text, on_prompt = (_row(each, layer, head).reindex(columns).astype(float) for each in (run, measured))
    rows = [Evidence(role, on_text[role.column], on_prompt[role.column]) for role in ROLES]
    rows = [row for row in rows if not (math.isnan(row.on_text) and math.isnan(row.on_prompt))]
    scored = [row for row in rows if row.role is not LEARNED_SINK or row.on_text or row.on_prompt]
    return sorted(scored, key=lambda row: not row.holds)


def _row(run: Run, layer: int, head: int) -> pd.Series:
    """The head's row of the table, with its entropy as a share of the highest."""
    heads = run.heads.assign(entropy_share=entropy_share(run))
    return heads[(heads["layer"] == layer) & (heads["head"] == head)].iloc[0]


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
    suffix, matrix = ("_data", "W_QK Σ̂") if "regime_data" in row else ("", "W_QK")
    regime = str(row[f"regime{suffix}"])
    if regime == UNDEFINED:
        return f"The spectrum of {matrix} falls into no regime."
    xi, eta = (number(row[f"{name}_symmetric{suffix}"]) for name in ("xi", "eta"))
    margin = number(row[f"regime_margin{suffix}"], 2)
    return f"Predicted regime: {regime}, from {matrix} (ξ = {xi}, η = {eta}; {margin} from the nearest threshold)."


def shares_line(run: Run, layer: int, head: int) -> str:
    """The constituents of the head's logits on the surveyed text, in a sentence; empty where they are not known."""
    shares = _row(run, layer, head).reindex(SHARES).astype(float).fillna({"share_additive": 0.0})
    if shares.isna().any():
        return ""
    known = [
        f"{SHARES[name]} {percent(share)}"
        for name, share in shares.items()
        if share or name != "share_additive"
    ]
    return f"Variance of its logits on the text: {', '.join(known)}."


def head_html(view: HeadView, run: Run, measured: Run) -> str:
    """The head's name, its roles with the evidence, and what its spectrum and its logits say."""
    found, place = evidence(run, measured, view.layer, view.head), (view.layer, view.head)
    rows = [
        (row.role, row.holds, [number(row.on_text, 2), number(row.on_prompt, 2), f"{row.role.threshold:g}"])
        for row in found
    ]
    lines = [shares_line(run, *place), spectrum_line(run, *place)]
    return html("head", head_name(*place), roles_of(found), rows, lines)


def sinks_html(view: HeadView, most: float) -> str:
    """The prompt's tokens, shaded by the attention that they receive up to `most`; and each sink in a sentence."""
    shades = np.nan_to_num(view.received)[:, None] / most
    lines = [
        f"White to plum: mean attention from the tokens that see it, 0 to {number(most, 2)}. ▼1: a sink. "
        "Small number: the sink that caught the token."
    ]
    lines += [sink_sentence(view, index) for index in range(len(view.sinks))]
    if view.sinks:
        lines.append(f"{(view.group == UNCAUGHT).sum()} of the other tokens are caught by no sink")
    else:
        lines.append(f"No sink: no token receives more than {SINK_THRESHOLD}, or dominates a contiguous span")
    if (learned := view.learned.mean()) > 0:
        lines.append(
            f"{learned:.2f} of the attention goes to a learned sink column, which belongs to no token"
        )
    return html("tokens", _tokens(view, WHITE + shades * (PLUM - WHITE)), lines)


def tags_html(view: HeadView, tags: Tags, colours: Floats) -> str:
    """The same tokens in the `colours` of what the head writes; and how far the sinks explain it."""
    key = "Similar colours mean similar outputs: three principal components as red, green and blue."
    explained = (
        "No sink groups these tokens, so there is no tag to measure."
        if math.isnan(tags.explained)
        else f"The grouping by sink explains {percent(tags.explained)} of the variance of the head's output (η²) and "
        f"{percent(tags.before)} of that of the stream that enters the block; a random grouping would explain "
        f"{percent(tags.chance)}."
    )
    return html("tokens", _tokens(view, colours), [key, explained])


def sink_sentence(view: HeadView, index: int) -> str:
    """A sink's mark, and what it receives and catches."""
    sink = view.sinks[index]
    token = f"token {sink.position} “{shown_token(view.tokens[sink.position])}”"
    local = " (a local sink: it dominates a contiguous span)" if sink.stretch else ""
    return (
        f"▼{index + 1} {'the learned column' if sink.position < 0 else token} receives {sink.received:.2f} of the "
        f"attention on average and catches {counted(sink.caught, 'token')}{local}"
    )


def _tokens(view: HeadView, colours: Floats) -> list[dict[str, Any]]:
    """The tokens as the template shows them, each on its colour (T, 3)."""
    number_of = {sink.position: index for index, sink in enumerate(view.sinks, 1)}
    tokens = []
    for place, (colour, group, received) in enumerate(zip(colours, view.group, view.received, strict=True)):
        text = flowing(view.tokens[place])
        is_seen = "seen by too few tokens" if math.isnan(received) else f"receives {received:.3f}"
        tokens.append(
            {
                "text": text.rstrip("\n"),
                "breaks": text[len(text.rstrip("\n")) :],
                "sink": number_of.get(place),
                "caught": 0 if group in (UNCAUGHT, LEFT_OUT) else int(group) + 1,
                "colour": [round(float(channel)) for channel in colour],
                "ink": "#000" if _luminance(colour) >= LIGHT else "#fff",
                "hint": f"{place}: {shown_token(view.tokens[place])} · {is_seen}",
            }
        )
    return tokens


def _luminance(colour: Floats) -> float:
    """The relative luminance of a colour, 0 to 255 a channel (WCAG 2)."""
    share = colour / 255
    linear = np.where(share <= 0.04045, share / 12.92, ((share + 0.055) / 1.055) ** 2.4)
    return float(linear @ (0.2126, 0.7152, 0.0722))
