"""The paper's claims on every sink of a text, judged by its trace (Zhang et al. 2025, section 2)."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pandas as pd

from theodolite import Run
from theodolite.attention.sinks import SINK_THRESHOLD
from theodolite.estimates import SIGMAS, Estimate, most_extreme, sigmas
from theodolite.judging import Criterion
from theodolite.report.outcome import Outcome
from theodolite.system.wording import counted, number, with_error

LATER = "Attention sinks emerge in later tokens too, and depend on the sequence (section 1.4, Q2)"
TAGGED = "Tokens cluster by the sink that they attend to in the output of the head (section 2, Fig. 2c)"
RELEASED = "The clusters by attended sink remain in deeper layers (section 2, Fig. 2d)"
COPIED = "The tag is the sink's own value, copied to the tokens that it caught (Fig. 2b)"
OUTLIER = "The tag is an outlier feature dimension (section 2, Fig. 2b)"

MANY = Criterion("at least", 0.01, "“emerge” read as: in one context in a hundred at some head (ours)")
CLUSTERED = Criterion("at least", 0.1, "“cluster” read as: a tenth of the variance (ours)")
MORE = Criterion(
    "at least", 0.5, "“remain” read as: in half of the heads more after the head than before (ours)"
)
SAME = Criterion("at least", 0.9, "“copied” read as: a cosine of 0.9 (ours)")
MOSTLY = Criterion("at least", 0.5, "“outlier” read as: a dimension of six robust standard deviations (ours)")


def judge_trace(outcome: Outcome, run: Run) -> None:
    """Judge each of the paper's claims by the trace of a text."""
    traces, heads = run.traces, run.heads
    if not len(traces):
        pays = f"no query pays one more than {SINK_THRESHOLD} on average"
        for claim in (LATER, TAGGED, RELEASED, COPIED, OUTLIER):
            outcome.cannot_test(claim, f"no key of any head is a sink in this text: {pays}")
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
    what = f"largest share of contexts in which a later token is a sink of a head, of {counted(len(shares), 'sink')}"
    outcome.claim(LATER, what, replace(largest, error=most_extreme(len(shares)) * largest.error), MANY)


def judge_clusters(outcome: Outcome, heads: pd.DataFrame) -> None:
    """Judge η² of the heads, each weighted by its contexts; their errors add up, since they share contexts."""
    known = heads[heads["tag_se"].notna()]
    single = len(heads) - len(known)
    what = (
        f"η² of the head's output by the sink that caught a query, mean over {counted(len(known), 'head')} with a "
        "sink, weighted by the contexts where it has one"
    )
    if not len(known):
        outcome.cannot_test(TAGGED, f"no standard error in {counted(single, 'head')}; {CLUSTERED}")
        return
    best = known.loc[known["tag"].idxmax()]
    mean, error, shifted = (
        float(np.average(known[name], weights=known["contexts"])) for name in ("tag", "tag_se", "tag_shifted")
    )
    left_out = f"; {counted(single, 'head')} that rest on one context left out" if single else ""
    what += (
        f" (largest {with_error(best['tag'], best['tag_se'])}; of the same groups shifted along the context "
        f"{number(shifted)}{left_out})"
    )
    contexts = round(float(np.average(known["contexts"], weights=known["contexts"])))
    outcome.claim(TAGGED, what, Estimate(mean, error, contexts, "contexts"), CLUSTERED)


def judge_release(outcome: Outcome, heads: pd.DataFrame, layers: int) -> None:
    """Judge whether most heads' grouping explains more of some later layer than of the one before the head.

    The largest of several layers is looked at (Bonferroni), with Student's intervals for a head's contexts; the heads
    share the 5 % (`Estimates.looks`). Heads whose gain is neither more nor less count for neither side.
    """
    clear = heads[heads["gain_se"].notna()]
    if not len(clear):
        outcome.cannot_test(RELEASED, f"no standard error in {counted(len(heads), 'head')}; {MORE}")
        return
    looks = math.ceil(len(clear) / 2)
    needed, least = (sigmas(clear["contexts"], looks * seen) for seen in (layers - clear["layer"], 1))
    more = int((clear["gain"] > needed * clear["gain_se"]).sum())
    less = int((clear["gain"] < -least * clear["gain_se"]).sum())
    best = clear.loc[clear["gain"].idxmax()]
    what = (
        "η² in the later layer where it is largest, less η² before the head, over the same contexts: more in "
        f"{more} of {counted(len(clear), 'head')} with a sink, less in {less} (mean "
        f"{number(float(clear['gain'].mean()))}, largest {with_error(best['gain'], best['gain_se'])}; more: by "
        f"{number(min(needed))} to {number(max(needed))} standard errors, more where more layers follow or "
        "fewer contexts are behind it); heads with more, each that has neither counted as a half with that error"
    )
    neither = len(clear) - more - less
    count = Estimate(more + neither / 2, neither / 2 / SIGMAS, len(clear), "heads", by_chance=True)
    outcome.claim(RELEASED, what, count, replace(MORE, limit=len(clear) / 2))


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
    outcome.claim(COPIED, f"cosine of tag and value vector, mean over {_sinks(known, count)}", estimate, SAME)


def judge_outliers(outcome: Outcome, outlying: pd.Series, weights: np.ndarray) -> None:
    """Judge whether tags have an outlier dimension, by the share of sinks, weighted by what each tags."""
    known = weights > 0
    count = _effective(weights[known])
    estimate = Estimate(math.nan)
    if known.any():
        share = float(np.average(outlying[known], weights=weights[known]))
        estimate = Estimate.share(share, count, "sinks")
    what = f"share of {_sinks(known, count)} that have an outlier dimension in their tag"
    outcome.claim(OUTLIER, what, estimate, MOSTLY)


def _effective(weights: np.ndarray) -> float:
    """Return the effective number of sinks (Kish): (Σw)²/Σw²."""
    return float(weights.sum() ** 2 / (weights**2).sum()) if len(weights) else 0.0


def _sinks(known: np.ndarray, count: float) -> str:
    return f"{counted(int(known.sum()), 'sink')}, weighted by what they tag (effective number {number(count, 2)})"
