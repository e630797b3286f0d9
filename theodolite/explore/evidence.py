"""Which roles a head has, and why: every score with its threshold, and what spectrum and logits say in words.

Nothing here computes a score.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from theodolite.measure.head_roles import LEARNED_SINK, ROLES, HeadRole
from theodolite.models.head_weights import EXACT, NO_MATRIX
from theodolite.passes.run import Run
from theodolite.report.data import column, entropy_share
from theodolite.system.wording import number, percent
from theodolite.theory.regimes import UNDEFINED


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
    scored = [
        row
        for row in rows
        if not (math.isnan(row.on_text) and math.isnan(row.on_prompt))
        and not (row.role is LEARNED_SINK and not (row.on_text or row.on_prompt))
    ]
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
