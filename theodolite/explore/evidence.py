"""What kind a head is, and why: every score that makes a kind, with its number, its threshold and plain words.

Thresholds are those of the report. Nothing here computes a score.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pandas as pd

from theodolite.passes.run import Run
from theodolite.report import health, summary
from theodolite.report.data import column, entropy_share
from theodolite.system.wording import number, percent
from theodolite.theory.regimes import UNDEFINED


@dataclass(frozen=True)
class Kind:
    """A kind of head: the column that tells, from what value on, and what the value is."""

    name: str
    column: str
    least: float
    meaning: str


KINDS = (
    Kind(
        "previous-token head",
        "previous_token",
        summary.PREVIOUS_TOKEN,
        "mean attention to the token just before",
    ),
    Kind(
        "induction head",
        "induction",
        summary.INDUCTION,
        "mean attention, on random tokens that come twice, to what followed the first time",
    ),
    Kind(
        "same-token head", "same_token", summary.SAME_TOKEN, "mean attention to earlier copies of the token"
    ),
    Kind(
        "first-token sink",
        "sink_first",
        summary.SINK_HEAD,
        "share of texts in which the first token gets more than 0.3 of the attention",
    ),
    Kind(
        "later sinks",
        "sink_later",
        summary.LATER_SINK_HEAD,
        "share of texts in which a later token gets more than 0.3 of the attention",
    ),
    Kind(
        "learned sink", "sink_learned", summary.LEARNED_SINK, "mean attention to a learned column, no token"
    ),
    Kind(
        "plain average", "entropy_share", health.UNIFORM, "entropy of its attention, of the highest possible"
    ),
)


@dataclass(frozen=True)
class Evidence:
    """A kind with the head's number on the surveyed text and on this prompt; NaN where there is none."""

    kind: Kind
    on_text: float
    on_prompt: float

    @property
    def holds(self) -> bool:
        """Whether the head is of this kind: on the text, or on the prompt where the text has no number."""
        told = self.on_prompt if math.isnan(self.on_text) else self.on_text
        return told >= self.kind.least


def opening_head(run: Run) -> tuple[int, int]:
    """The head that is most clearly of a kind: its score is the largest multiple of the threshold."""
    told = {kind.column: kind.least for kind in KINDS if kind.column in run.heads}
    clearness = (run.heads[list(told)] / pd.Series(told)).max(axis=1).fillna(0.0)
    row = run.heads.loc[clearness.idxmax()]
    return int(row["layer"]), int(row["head"])


def evidence(run: Run, measured: Run, layer: int, head: int) -> list[Evidence]:
    """Every kind with the head's numbers, those that it is of first."""
    every = [
        Evidence(kind, _value(run, kind.column, layer, head), _value(measured, kind.column, layer, head))
        for kind in KINDS
    ]
    known = [
        one
        for one in every
        if not (math.isnan(one.on_text) and math.isnan(one.on_prompt))
        and not (one.kind.column == "sink_learned" and not (one.on_text or one.on_prompt))
    ]
    return sorted(known, key=lambda one: not one.holds)


def kind_of(found: list[Evidence]) -> str:
    """The head's kinds in words."""
    names = [one.kind.name for one in found if one.holds]
    return ", ".join(names) or "no kind that has a name"


def spectrum_line(run: Run, layer: int, head: int) -> str:
    """What the spectrum predicts for the head, in a sentence."""
    row = _row(run, layer, head)
    what = str(row.get("spectrum_of", "projection"))
    if what == "none":
        return "Its queries and keys are no affine function of its input, so there is no query-key matrix."
    if what != "projection":
        return (
            "This family normalises queries and keys after projecting them: the eigenvalues are those of the "
            "projection before the norm, and predict no propagation."
        )
    data = "_data" if "regime_data" in row else ""
    regime, of = str(row[f"regime{data}"]), "W_QK Σ̂" if data else "W_QK"
    if regime == UNDEFINED:
        return f"The spectrum of {of} names no regime."
    numbers = ", ".join(
        f"{symbol} = {number(row[f'{name}_symmetric{data}'])}" for symbol, name in (("ξ", "xi"), ("η", "eta"))
    )
    margin = number(row[f"regime_margin{data}"], 2)
    return f"Predicted regime: {regime}, from {of} ({numbers}; {margin} from the nearest threshold)."


def shares_line(run: Run, layer: int, head: int) -> str:
    """What the head's logits are made of on the surveyed text, in a sentence; empty where that is not known."""
    row = _row(run, layer, head)
    names = {"position": "position", "context": "context", "cross": "both", "constant": "neither"}
    shares = {said: float(row.get(f"share_{name}", math.nan)) for name, said in names.items()}
    if any(math.isnan(share) for share in shares.values()):
        return ""
    told = ", ".join(f"{said} {percent(share)}" for said, share in shares.items())
    added = float(row.get("share_additive", 0.0))
    bias = f", bias added by the model {percent(added)}" if added else ""
    return f"Variance of its logits on the text: {told}{bias}."


def _row(run: Run, layer: int, head: int) -> dict[str, Any]:
    rows = run.heads[(run.heads["layer"] == layer) & (run.heads["head"] == head)]
    return {str(name): value for name, value in rows.iloc[0].items()}


def _value(run: Run, name: str, layer: int, head: int) -> float:
    values = entropy_share(run) if name == "entropy_share" else column(run.heads, name)
    if values is None:
        return math.nan
    chosen = (run.heads["layer"] == layer) & (run.heads["head"] == head)
    return float(values[chosen.to_numpy()][0])
