"""Test whether a tag is used: ablate it, against norm-matched controls (Zhang et al. 2025, sections 2, 3)."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd
import plotly.graph_objects as go
import torch

from theodolite import Corpus, trace_sinks
from theodolite.errors import UsageError
from theodolite.estimates import Estimate
from theodolite.judging import Verdict, all_of, untestable
from theodolite.report import style
from theodolite.report.drawing.grammar import bars
from theodolite.report.sink_trace import show_trace
from theodolite.system.wording import counted, for_plotly, head_name, number, percent, with_error
from theodolite_papers.catch_tag_release.head_ablation import (
    HEAD_SINKS,
    LATER_SINKS,
    LOSS_CAUGHT,
    LOSS_DIFFERENCE,
    LOSS_OTHERS,
    ablation_test,
)
from theodolite_papers.catch_tag_release.trace_claims import judge_trace
from theodolite_papers.experiment import Outcome, Study, chosen_and_judged, declared


def changes(table: pd.DataFrame, measures: list[str]) -> go.Figure:
    """Draw bars with standard errors: one group per ablation and measure, ablation and control side by side."""
    shown = table[table["measure"].isin(measures)]
    names = [for_plotly(f"{row.ablation}: {row.measure}") for row in shown.itertuples()]
    looks = ("control", "control", style.GREY), ("change", "ablation", style.VERMILLION)
    traces = []
    for column, name, colour in looks:
        hover = f"%{{y}}<br>{name}: %{{x:.4g}}<extra></extra>"
        errors = style.error_bars(shown[f"{column}_se"])
        own: dict[str, Any] = {"orientation": "h", "error_x": errors}
        traces.append(bars(shown[column], names, name, colour, hover, **own))
    down = {"autorange": "reversed", "automargin": True}
    layout = {"yaxis": down, "barmode": "group", "margin": {"l": 300}}
    return style.figure(traces, "change", height=150 + 46 * len(names), layout=layout)


@declared("sinks/trace")
def traced(study: Study, outcome: Outcome) -> None:
    corpus = study.require_corpus("sinks are traced through a text: pass it together with the run")
    folder = study.folder and study.folder / "trace"
    run = trace_sinks(study.require_model(), corpus, folder, show_progress=study.show)
    show_trace(outcome, run)
    judge_trace(outcome, run)


HALF = 0.5
"""Of a grouping's η²: what must go for the clusters to be the tag's (ours)."""


def _chosen_tag(study: Study, contexts: Corpus) -> tuple[int, int, torch.Tensor]:
    """Choose the head asked for, or whose sinks tag most tokens; and its strongest tag's direction."""
    run = trace_sinks(study.require_model(), contexts, show_progress=study.show)
    traces, focus = run.traces, study.focus
    if focus.layer is not None:
        traces = traces[(traces["layer"] == focus.layer) & (traces["head"] == focus.head)]
    traces = traces.dropna(subset="tag")
    if traces.empty:
        raise UsageError(
            "that head writes no tag in this text: choose another --layer and --head, or another text"
        )
    row = traces.index[0]
    direction = run.arrays["tag_direction"][row]
    return int(traces.loc[row, "layer"]), int(traces.loc[row, "head"]), direction


@declared("sinks/ablation")
def ablated(study: Study, outcome: Outcome) -> None:
    corpus = study.require_corpus("a head is ablated while it reads a text: pass it together with the run")
    chosen_on, judged_on = chosen_and_judged(corpus)
    layer, head, direction = _chosen_tag(study, chosen_on)
    table = ablation_test(study.require_model(), judged_on, layer, head, direction, study.show)
    last = f"η² in layer {study.require_model().layers}"
    measures = [LOSS_CAUGHT, LOSS_OTHERS, HEAD_SINKS, LATER_SINKS, last]
    name = head_name(layer, head)
    outcome.tables["changes"] = table
    outcome.read("ablated head", f"{name}, in {counted(int(table['contexts'].max()), 'context')}")
    for row in table[table["measure"].isin(measures)].itertuples():
        outcome.read(
            f"{row.ablation}: {row.measure}",
            f"{number(row.untouched)} untouched, change {with_error(row.change, row.change_se)}, control "
            f"{with_error(row.control, row.control_se)}",
        )
    tag, low_rank = "tag ablated", table["ablation"].iloc[-1]
    outcome.verdicts += [
        against_control(outcome, "retrieved", table, tag, LOSS_CAUGHT, +1),
        against_others(outcome, table),
        against_control(outcome, "clusters", table, tag, last, -1, HALF),
        against_control(outcome, "low-rank", table, low_rank, HEAD_SINKS, -1),
        against_control(outcome, "behind", table, tag, LATER_SINKS, -1),
    ]
    outcome.draw("losses", changes(table, [LOSS_CAUGHT, LOSS_OTHERS]), name=name)
    outcome.draw("sinks", changes(table, [HEAD_SINKS, LATER_SINKS]), name=name)
    drawn = changes(table, [m for m in table["measure"].unique() if m.startswith("η²")])
    outcome.draw("clusters", drawn, name=name)


def _row(table: pd.DataFrame, ablation: str, measure: str) -> pd.Series:
    return table[(table["ablation"] == ablation) & (table["measure"] == measure)].iloc[0]


def against_control(
    outcome: Outcome,
    claim: str,
    table: pd.DataFrame,
    ablation: str,
    measure: str,
    sign: int,
    least: float = 0.0,
) -> Verdict:
    """Judge whether a measure changes more than under the control that is hardest to beat."""
    row = _row(table, ablation, measure)
    if row["untouched"] == 0 and row["change"] == 0:
        return untestable(outcome.sentence(claim), f"{measure}: there are none")
    hardest = "beyond_most" if sign > 0 else "beyond_least"
    gain = sign * row[hardest] - least * abs(row["untouched"])
    step = 1.0 if measure in (HEAD_SINKS, LATER_SINKS) else 0.0  # of sinks, which may change alike by chance
    known = Estimate(gain, row[f"{hardest}_se"], int(row["contexts"]), "contexts").floored(step)
    changes = {name: with_error(row[name], row[f"{name}_se"]) for name in ("change", "control")}
    part = f", less {percent(least)} of what it was" if least else ""
    moves = "falls" if sign < 0 else "rises"
    return _paired(
        outcome, claim, known, ablation=ablation, measure=measure, moves=moves, part=part, **changes
    )


def against_others(outcome: Outcome, table: pd.DataFrame) -> Verdict:
    """Judge whether caught tokens lose more than others, and by more than they do under any control."""
    losses = (LOSS_CAUGHT, LOSS_OTHERS, LOSS_DIFFERENCE)
    caught, uncaught, between = (_row(table, "tag ablated", name) for name in losses)
    changes = {
        name: with_error(of["change"], of["change_se"])
        for name, of in (("caught", caught), ("others", uncaught))
    }
    change = Estimate(between["change"], between["change_se"], int(between["contexts"]), "contexts")
    more = _paired(outcome, "serves.others", change, **changes)
    beyond = against_control(outcome, "serves.controls", table, "tag ablated", LOSS_DIFFERENCE, +1)
    return all_of(outcome.sentence("serves"), [more, beyond])


def _paired(outcome: Outcome, claim: str, gain: Estimate, **values: str) -> Verdict:
    if not math.isfinite(gain.error):
        return untestable(outcome.sentence(claim), f"too few contexts; {outcome.criterion(claim)}")
    return outcome.verdict(claim, gain, **values)
