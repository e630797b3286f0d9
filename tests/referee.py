"""Verdicts found again from the numbers of a page, by a reading of the rule that shares no code with the package.

The rule, as docs/reproduce.md has it: an interval wholly on the right side of the line holds, wholly on the wrong side
fails. Student's quantile is scipy's.
"""

from __future__ import annotations

import math
from typing import Any

from scipy import stats


def answer_of(row: dict[str, Any], *, strict: bool = True) -> str:
    """Of one number: a row of the table `judged` that has no rule. strict: without an error nothing is decided."""
    value, error, limit = row["value"], row["error"], row["limit"]
    if row["kind"] == "exact":
        margin = 0.0
    elif error is None or math.isnan(error):
        if strict:
            return "not decided"
        margin = 0.0
    elif row["kind"] == "share":
        margin = 1.959963984540054 * error
    else:
        margin = float(stats.t(row["n"] - 1).isf(0.025 / row["looks"])) * error
    low, high, side = value - margin, value + margin, row["side"]
    if side == "within":
        if low >= -limit and high <= limit:
            return "holds"
        return (
            "fails"
            if (low >= limit and value > limit) or (high <= -limit and value < -limit)
            else "not decided"
        )
    if side in ("at most", "less than"):
        low, high, value, limit = -high, -low, -value, -limit
    line = limit + row["negligible"]
    if low > line or (low == line and side in ("at least", "at most")):
        return "holds"
    return "fails" if high <= line and value < line else "not decided"


def answers_of(rows: list[dict[str, Any]], *, strict: bool = True) -> list[str]:
    """The answers of all verdicts of a page, from its table `judged` alone, in their order."""
    return [_answer(row, rows, strict) for row in rows if "." not in row["place"]]


def _answer(row: dict[str, Any], rows: list[dict[str, Any]], strict: bool) -> str:
    parts = [
        _answer(inner, rows, strict) for inner in rows if inner["place"].rpartition(".")[0] == row["place"]
    ]
    if row["withheld"]:
        return "not decided"
    if not parts:
        return answer_of(row, strict=strict) if row["side"] else "not testable here"
    holding, failing = parts.count("holds"), parts.count("fails")
    match row["rule"]:
        case "number":
            return parts[0]
        case "most":
            if max(holding, failing) > len(parts) / 2:
                return "holds" if holding > failing else "fails"
            return "in part" if holding and failing and holding + failing > len(parts) / 2 else "not decided"
        case "all":
            worst = ["fails", "in part", "not testable here", "not decided", "holds"]
            return next(answer for answer in worst if answer in parts)
        case "mixed":
            if "in part" in parts or (holding and failing):
                return "in part"
            if "not decided" in parts:
                return "not decided"
            return "holds" if holding else "fails" if failing else "not testable here"
    raise AssertionError(f"{row['what']}: {row['answer']} by no rule")
