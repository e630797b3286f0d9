"""The constituents of the logits in sentences: which carry the variance, and which make a pattern.

Thresholds that turn numbers into words are constants here. Plain text only.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from theodolite.measure.constituents import DISJOINT
from theodolite.measure.head_roles import ATTENTION_PATTERNS, RETAINED, SLIGHT
from theodolite.passes.run import Run
from theodolite.report.data import Floats, column
from theodolite.report.drawing.constituents import ADDITIVE, SHARES, attributed
from theodolite.system.wording import counted, head_name, listed, number, percent


def constituents(run: Run) -> list[str]:
    """What carries the logits over all heads, then one sentence a pattern on the head that follows it most."""
    sentences = [
        sentence for pattern in ATTENTION_PATTERNS if (sentence := _pattern(run, pattern)) is not None
    ]
    return _shares(run) + sentences


def _shares(run: Run) -> list[str]:
    shares: dict[str, Floats] = {}
    for name in SHARES:
        values = column(run.heads, name)
        if values is not None and np.nan_to_num(values).any():
            shares[name] = values
    if not shares:
        return []
    table = np.stack(list(shares.values()))
    split = np.isfinite(table).all(axis=0)
    if not split.any():
        return []
    means = table[:, split].mean(axis=1)
    leads = np.bincount(table[:, split].argmax(axis=0), minlength=len(shares))
    order = np.argsort(-means, kind="stable")
    names = list(shares)
    parts = listed([f"{percent(float(means[i]))} {SHARES[names[i]]}" for i in order], limit=len(names))
    leading = [
        f"{SHARES[names[i]]} in {counted(int(leads[i]), 'head')}"
        for i in np.argsort(-leads, kind="stable")
        if leads[i]
    ]
    return [
        f"On average over {counted(int(split.sum()), 'head')}, the logits' variance is {parts} (mean and bias count "
        f"with the constituent on the other side); the largest share is {listed(leading, limit=len(names))}."
    ]


def _pattern(run: Run, pattern: str) -> str | None:
    heads = attributed(run, pattern)
    if not heads:
        return None
    rows = heads[0]
    score, uniform = float(rows["score"].iloc[0]), float(rows["uniform"].iloc[0])
    name = head_name(int(rows["layer"].iloc[0]), int(rows["head"].iloc[0]))
    target, scores = (
        ATTENTION_PATTERNS[pattern].target,
        f"{number(score, 2)}; uniform attention: {number(uniform, 2)}",
    )
    if score < SLIGHT or score <= uniform:
        return (
            f"On random tokens, no head attends strongly {target}; {name} has the highest score ({scores})."
        )
    return f"On random tokens, {name} attends most {target} ({scores}): {_carried(rows, score, uniform)}."


def _carried(rows: pd.DataFrame, score: float, uniform: float) -> str:
    disjoint = rows[rows["group"].isin((*DISJOINT, ADDITIVE))]  # the others are parts of these
    best = disjoint.sort_values("only", kind="stable").iloc[-1]
    group, only, without = str(best["group"]), float(best["only"]), float(best["without"])
    needed = RETAINED * (score - uniform)
    ablated = f"ablating it leaves {number(without, 2)}"
    if only - uniform < needed:
        clause = f"{group} retains most ({number(only, 2)})"
        return f"no group of constituents alone retains half of that; {clause}, and {ablated}"
    if without - uniform < needed:
        return f"{group} alone retains {number(only, 2)}; {ablated}"
    return f"{group} alone retains {number(only, 2)}, but {ablated}, so other groups carry it too"
