"""The paper's claims on every sink of a text, judged by its trace (Zhang et al. 2025, section 2)."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pandas as pd

from theodolite import Run, trace_sinks
from theodolite.attention.summary import SINK_THRESHOLD
from theodolite.estimates import SIGMAS, Estimate, most_extreme, sigmas
from theodolite.report.sink_trace import show_trace
from theodolite.system.wording import counted, number, with_error
from theodolite_papers.experiment import Outcome, Study, declared


@declared("sinks/trace")
def traced(study: Study, outcome: Outcome) -> None:
    corpus = study.require_corpus("sinks are traced through a text: pass it together with the run")
    folder = study.folder and study.folder / "trace"
    run = trace_sinks(study.require_model(), corpus, folder, show_progress=study.show)
    show_trace(outcome, run)
    judge_trace(outcome, run)


def judge_trace(outcome: Outcome, run: Run) -> None:
    """Judge each of the paper's claims by the trace of a text."""
    traces, heads = run.traces, run.heads
    if not len(traces):
        pays = f"no query pays one more than {SINK_THRESHOLD} on average"
        for claim in outcome.declared.claims:
            outcome.cannot_judge(claim, f"no key of any head is a sink in this text: {pays}")
        return
    weights, later = traces["tagged"].fillna(0).to_numpy(), traces[traces["kind"] == "later"]
    judge_later(outcome, later["share"], run.provenance["corpus"]["contexts"])
    judge_clusters(outcome, heads)
    judge_release(outcome, heads, run.provenance["model"]["layers"])
    judge_copy(outcome, traces["alignment"], weights)
    judge_outliers(outcome, traces["outlier_dimensions"] != "", weights)


def judge_later(outcome: Outcome, shares: pd.Series, contexts: int) -> None:
    """Judge whether a later token is a sink of some head in enough contexts, by the largest share of many rows."""
    largest = Estimate.share(float(shares.max()) if len(shares) else 0.0, contexts, "contexts")
    error = most_extreme(len(shares)) * largest.error
    outcome.judge("later", replace(largest, error=error), sinks=counted(len(shares), "sink"))


def judge_clusters(outcome: Outcome, heads: pd.DataFrame) -> None:
    """Judge η² of the heads, each weighted by its contexts; their errors add up, since they share contexts."""
    known = heads[heads["tag_se"].notna()]
    single = counted(len(heads) - len(known), "head")
    if not len(known):
        outcome.cannot_judge("tagged", f"no standard error in {single}; {outcome.criterion('tagged')}")
        return
    best = known.loc[known["tag"].idxmax()]
    mean, error, shifted, contexts = (
        float(np.average(known[name], weights=known["contexts"]))
        for name in ("tag", "tag_se", "tag_shifted", "contexts")
    )
    outcome.judge(
        "tagged",
        Estimate(mean, error, round(contexts), "contexts"),
        heads=counted(len(known), "head"),
        largest=with_error(best["tag"], best["tag_se"]),
        shifted=number(shifted),
        left_out=f"; {single} that rest on one context left out" if len(known) < len(heads) else "",
    )


def judge_release(outcome: Outcome, heads: pd.DataFrame, layers: int) -> None:
    """Judge whether most heads' grouping explains more of some later layer than of the one before the head.

    The largest of several layers is looked at (Bonferroni), with Student's intervals for a head's contexts; the heads
    share the 5 % (`Estimates.looks`). Heads whose gain is neither more nor less count for neither side.
    """
    clear = heads[heads["gain_se"].notna()]
    limit = len(clear) / 2
    if not len(clear):
        criterion = outcome.criterion("released", limit=0.5)
        outcome.cannot_judge("released", f"no standard error in {counted(len(heads), 'head')}; {criterion}")
        return
    needed, least = (
        sigmas(clear["contexts"], math.ceil(limit) * seen) for seen in (layers - clear["layer"], 1)
    )
    more = int((clear["gain"] > needed * clear["gain_se"]).sum())
    less = int((clear["gain"] < -least * clear["gain_se"]).sum())
    best, neither = clear.loc[clear["gain"].idxmax()], len(clear) - more - less
    outcome.judge(
        "released",
        Estimate(more + neither / 2, neither / 2 / SIGMAS, len(clear), "heads", by_chance=True),
        limit=limit,
        more=more,
        heads=counted(len(clear), "head"),
        less=less,
        mean=number(float(clear["gain"].mean())),
        largest=with_error(best["gain"], best["gain_se"]),
        least=number(min(needed)),
        most=number(max(needed)),
    )


def judge_copy(outcome: Outcome, alignment: pd.Series, weights: np.ndarray) -> None:
    """Judge whether tags are the values of their sinks, by cosines (sinks), weighted by what each sink tags."""
    known = alignment.notna().to_numpy() & (weights > 0)
    values, weights = alignment[known], weights[known]
    count = _effective(weights)
    estimate = Estimate(math.nan)
    if known.any():
        mean = float(np.average(values, weights=weights))
        scatter = float(np.average((values - mean) ** 2, weights=weights))
        error = (scatter / (count - 1)) ** 0.5 if count > 1 else math.nan
        estimate = Estimate(mean, error, max(1, round(count)), "sinks")
    outcome.judge("copied", estimate, sinks=_sinks(known, count))


def judge_outliers(outcome: Outcome, outlying: pd.Series, weights: np.ndarray) -> None:
    """Judge whether tags have an outlier dimension, by the share of sinks, weighted by what each tags."""
    known = weights > 0
    count = _effective(weights[known])
    estimate = Estimate(math.nan)
    if known.any():
        share = float(np.average(outlying[known], weights=weights[known]))
        estimate = Estimate.share(share, count, "sinks")
    outcome.judge("outlier", estimate, sinks=_sinks(known, count))


def _effective(weights: np.ndarray) -> float:
    """Return the effective number of sinks (Kish): (Σw)²/Σw²."""
    return float(weights.sum() ** 2 / (weights**2).sum()) if len(weights) else 0.0


def _sinks(known: np.ndarray, count: float) -> str:
    return f"{counted(int(known.sum()), 'sink')}, weighted by what they tag (effective number {number(count, 2)})"
