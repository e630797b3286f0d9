"""Is the tag used? One sink's head ablated, against norm-matched controls (Zhang et al. 2025, sections 2 and 3)."""

from __future__ import annotations

import math

import pandas as pd
import torch

from theodolite.errors import UsageError
from theodolite.judging import Criterion, Estimate
from theodolite.papers.catch_tag_release.traced_sinks import trace_of
from theodolite.papers.experiment import Study, experiment
from theodolite.report.drawing import sinks as drawing
from theodolite.report.measures import ZHANG
from theodolite.report.outcome import Outcome
from theodolite.sinks.ablation import (
    HEAD_SINKS,
    LATER_SINKS,
    LOSS_CAUGHT,
    LOSS_DIFFERENCE,
    LOSS_OTHERS,
    ablation_test,
)
from theodolite.system.wording import counted, head_name, number, percent, with_error

MORE = Criterion("more than", 0.0, "an effect beyond the control's (ours)")
HALF = 0.5
"""Of a grouping's η²: what must go for the clusters to be the tag's (ours)."""
USED = "The tag is retrieved by deeper layers (abstract): ablating it makes the prediction of caught tokens worse"
MORE_THAN_OTHERS = (
    "The tag serves the caught tokens (section 2): ablating it costs them more than other tokens"
)
CLUSTERS = (
    "The clusters in deeper layers come from the tag (Fig. 2d): ablating it lowers the variance that the grouping "
    "explains"
)
LOW_RANK = (
    "Low-rank parts of W_Q, W_K, W_V make the sinks (section 3.2): ablating them leaves the head fewer sinks"
)
BEHIND = "Sinks downstream of the head depend on its tag: ablating it leaves fewer (ours)"


def _chosen_tag(study: Study) -> tuple[int, int, torch.Tensor]:
    """The head that is asked for, or whose sinks tag most tokens; and its strongest tag's direction."""
    run, focus = trace_of(study), study.focus
    traces = run.traces
    if focus.layer is not None:
        traces = traces[(traces["layer"] == focus.layer) & (traces["head"] == focus.head)]
    traces = traces[traces["tag"].notna()]
    if not len(traces):
        raise UsageError(
            "that head writes no tag in this text: choose another --layer and --head, or another text"
        )
    row = traces.index[0]
    direction = run.arrays["tag_direction"][row]
    return int(traces.loc[row, "layer"]), int(traces.loc[row, "head"]), direction


@experiment(
    "sinks/ablation",
    "One sink's head ablated (tag, attention to its sinks, low-rank weights), against norm-matched controls",
    "Removing the low-rank terms of W_Q, W_K, W_V removes the sinks (section 3.2, Fig. 4); tags are retrieved by "
    "deeper layers (abstract)",
    needs=("model",),
    options=("layer", "head"),
    scaled_down="at most 64 contexts in which the head has a sink",
)
def ablated(study: Study, outcome: Outcome) -> None:
    layer, head, direction = _chosen_tag(study)
    corpus = study.corpus
    assert corpus is not None  # or there would be no trace
    table = ablation_test(study.require_model(), corpus, layer, head, direction, show_progress=study.show)
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
    _against_control(outcome, USED, table, "tag ablated", LOSS_CAUGHT, +1)
    _against_others(outcome, table)
    _against_control(outcome, CLUSTERS, table, "tag ablated", last, -1, HALF)
    _against_control(outcome, LOW_RANK, table, table["ablation"].iloc[-1], HEAD_SINKS, -1)
    _against_control(outcome, BEHIND, table, "tag ablated", LATER_SINKS, -1)
    outcome.figure(
        "losses",
        f"{name} ablated: loss of the next token",
        drawing.changes(table, [LOSS_CAUGHT, LOSS_OTHERS]),
        "Change of the loss in nats, mean over contexts with its standard error. Caught: the token is one that "
        "the head's sinks caught in the untouched model. Control: a random ablation of the same norm.",
        "red bars longer than the grey ones, on caught tokens more than on others.",
        f"{ZHANG}, sections 2 and 3",
        wide=True,
    )
    outcome.figure(
        "sinks",
        f"{name} ablated: sinks",
        drawing.changes(table, [HEAD_SINKS, LATER_SINKS]),
        "Change of the number of sinks in a context: of the head itself, and later ones in all deeper heads.",
        "red bars longer than the grey ones.",
        f"{ZHANG}, section 3.2",
        wide=True,
    )
    outcome.figure(
        "clusters",
        f"{name} ablated: clusters downstream",
        drawing.changes(table, [m for m in table["measure"].unique() if m.startswith("η²")]),
        "Change of η² of the head's grouping in each later residual layer; the groups are those of the "
        "untouched model.",
        "η² that falls by nearly its whole value: then the clusters came from this tag.",
        f"{ZHANG}, section 2, Fig. 2d",
        wide=True,
    )


def _row(table: pd.DataFrame, ablation: str, measure: str) -> pd.Series:
    return table[(table["ablation"] == ablation) & (table["measure"] == measure)].iloc[0]


def _against_control(
    outcome: Outcome,
    claim: str,
    table: pd.DataFrame,
    ablation: str,
    measure: str,
    sign: int,
    least: float = 0.0,
) -> None:
    row = _row(table, ablation, measure)
    if row["untouched"] == 0 and row["change"] == 0:
        outcome.cannot_test(claim, f"{measure}: there are none")
        return
    measured = (
        f"{ablation}: {measure} changes by {with_error(row['change'], row['change_se'])}, under the control by "
        f"{with_error(row['control'], row['control_se'])}"
    )
    part = f", less {percent(least)} of what it was" if least else ""
    what = f"{measured}; {'falls' if sign < 0 else 'rises'} more than the control{part}"
    gain = sign * row["beyond"] - least * abs(row["untouched"])
    _claim_more(outcome, claim, what, gain, row["beyond_se"], row["contexts"])


def _against_others(outcome: Outcome, table: pd.DataFrame) -> None:
    caught, uncaught, between = (
        _row(table, "tag ablated", name) for name in (LOSS_CAUGHT, LOSS_OTHERS, LOSS_DIFFERENCE)
    )
    what = (
        f"tag ablated: the loss changes by {with_error(caught['change'], caught['change_se'])} on caught tokens, by "
        f"{with_error(uncaught['change'], uncaught['change_se'])} on others; rises more on caught tokens than on others"
    )
    _claim_more(outcome, MORE_THAN_OTHERS, what, between["change"], between["change_se"], between["contexts"])


def _claim_more(outcome: Outcome, claim: str, what: str, gain: float, error: float, contexts: int) -> None:
    """Judge a difference paired by context."""
    if math.isfinite(error):
        outcome.claim(
            claim, f"{what}, by", Estimate(float(gain), float(error), int(contexts), "contexts"), MORE
        )
    else:
        outcome.cannot_test(claim, f"{what}: too few contexts; {MORE}")
