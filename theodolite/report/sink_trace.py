"""Every sink of a text traced: what it catches, what it writes, where that persists (Zhang et al. 2025, section 2)."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from theodolite.attention.sinks import SINK_THRESHOLD
from theodolite.estimates import SIGMAS, Estimate, Floats, most_extreme, sigmas
from theodolite.judging import Criterion
from theodolite.passes.run import Run
from theodolite.report import style
from theodolite.report.drawing.grammar import dots, heat, map_height, reference
from theodolite.report.drawing.heads import KIND_NAMES, sink_name
from theodolite.report.outcome import Heading, Outcome
from theodolite.system.wording import counted, for_plotly, head_name, number, percent, with_error

LATER = "Attention sinks emerge in later tokens too, and depend on the sequence (section 1.4, Q2)"
TAGGED = "Tokens cluster by the sink that they attend to in the output of the head (section 2, Fig. 2c)"
RELEASED = "The clusters by attended sink remain in deeper layers (section 2, Fig. 2d)"
COPIED = "The tag is the sink's own value, copied to the tokens that it caught (Fig. 2b)"
OUTLIER = "The tag is an outlier feature dimension (section 2, Fig. 2b)"

SHOWN_SINKS = 40  # rows of a map
KIND_COLOURS = dict(zip(KIND_NAMES, (style.BLUE, style.VERMILLION, style.GREEN, style.ORANGE), strict=True))

MANY = Criterion("at least", 0.01, "“emerge” read as: in one context in a hundred at some head (ours)")
CLUSTERED = Criterion("at least", 0.1, "“cluster” read as: a tenth of the variance (ours)")
MORE = Criterion(
    "at least", 0.5, "“remain” read as: in half of the heads more after the head than before (ours)"
)
SAME = Criterion("at least", 0.9, "“copied” read as: a cosine of 0.9 (ours)")
MOSTLY = Criterion("at least", 0.5, "“outlier” read as: a dimension of six robust standard deviations (ours)")


TRACE = Heading(
    "sinks/trace",
    "Every sink of the text: what it catches, the tag that it writes, where the tag persists",
    "Sinks catch tokens, tag them with a common perturbation, and release them into the residual stream, where the "
    "tag is still to be seen in deep layers (section 2)",
)


def show_trace(outcome: Outcome, run: Run) -> None:
    """Fill the page of a trace: figures, the strongest sinks, and a verdict on each of the paper's claims."""
    traces, heads = run.traces, run.heads
    outcome.tables |= {"sinks": traces, "heads": heads}
    if "written_from" in (corpus := run.provenance["corpus"]):
        outcome.read("written by the model", f"positions {corpus['written_from']} to {corpus['length'] - 1}")
    if not len(traces):
        pays = f"no query pays one more than {SINK_THRESHOLD} on average"
        for claim in (LATER, TAGGED, RELEASED, COPIED, OUTLIER):
            outcome.cannot_test(claim, f"no key of any head is a sink in this text: {pays}")
        return
    model = run.provenance["model"]
    outcome.read("heads that have a sink", f"{len(heads)} of {int(model['layers'] * model['heads'])}")
    for kind, name in KIND_NAMES.items():
        outcome.read(f"sinks: {name}", _kind_summary(traces[traces["kind"] == kind]))
    for _, row in traces.head(3).iterrows():
        outcome.read(sink_name(row), _sink_summary(row))
    weights, later = traces["tagged"].fillna(0).to_numpy(), traces[traces["kind"] == "later"]
    judge_later(outcome, later["share"], run.provenance["corpus"]["contexts"])
    judge_clusters(outcome, heads)
    judge_release(outcome, heads, model["layers"])
    judge_copy(outcome, traces["alignment"], weights)
    judge_outliers(outcome, traces["outlier_dimensions"] != "", weights)
    outcome.show("trace", "release", release_map(traces, run.arrays["release"].numpy()))
    outcome.show("trace", "strength", strength(traces))
    outcome.show("trace", "kept", release_scatter(heads))


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


def _kind_summary(rows: pd.DataFrame) -> str:
    if not len(rows):
        return "none"
    heads = rows.groupby(["layer", "head"]).ngroups
    caught = percent(float(rows["caught"].sum()) / heads)
    return (
        f"{counted(len(rows), 'sink')} of {counted(heads, 'head')}, which catch {caught} of a head's queries"
    )


def _sink_summary(row: pd.Series) -> str:
    return (
        f"a sink in {percent(row['share'])} of contexts, catches {percent(row['caught'])} of all queries; η² "
        f"{with_error(row['tag'], row['tag_se'])} in the head (by chance {number(row['tag_chance'])}, shifted along "
        f"the context {number(row['tag_shifted'])}), {number(row['before'])} before it, "
        f"{with_error(row['released'], row['released_se'])} at most after it (layer {row['released_layer']}; "
        f"gain {with_error(row['gain'], row['gain_se'])})"
    )


def release_map(traces: pd.DataFrame, release: Floats) -> go.Figure:
    """Draw η² of the strongest sinks: in the head's own output, in colours of its own, then by residual layer."""
    strongest = traces.head(SHOWN_SINKS)
    named = (sink_name(row) for _, row in strongest.iterrows())
    names = [for_plotly(f"{place}. {name}") for place, name in enumerate(named, 1)]

    def cells(values: Floats, columns: list[str], quantity: str, **look: Any) -> dict[str, Any]:
        highest = float(np.nanmax(values)) if np.isfinite(values).any() else 1.0
        hover = f"%{{y}}<br>{quantity}, %{{x}}: η² %{{z:.3f}}<extra></extra>"
        bar = style.colour_bar(f"η² {quantity}", x=look.pop("bar_x"))
        return heat(values, 0, highest, hover, bar=bar, x=columns, y=names, **look)

    # η² in the head's output is ten times that in the stream: on one colour scale the latter would vanish.
    tags = strongest["tag"].to_numpy(float)[:, None]
    layers = [str(layer) for layer in range(release.shape[1])]
    heats = [
        cells(tags, ["head"], "in the head's output", bar_x=1.0, xgap=4),
        cells(release[: len(strongest)], layers, "in the residual stream", bar_x=1.1),
    ]
    layout = {
        "yaxis": {"autorange": "reversed"},
        "xaxis": {"type": "category"},
        "margin": {"l": 150},
    }
    height = map_height(len(names), most=None)
    return style.figure(heats, "head output, then residual layers", height=height, layout=layout)


def strength(traces: pd.DataFrame) -> go.Figure:
    """Draw one dot per sink: the share of all queries that it catches, and η² of the head's output."""
    widest, chance = float(traces["caught"].max()), float(traces["tag_chance"].max())
    drawn = reference([0, widest], chance, "noise floor", dash="dash")
    by_kind = traces.groupby(pd.Categorical(traces["kind"], list(KIND_NAMES)), observed=True)
    for kind, rows in by_kind:
        texts = [
            f"{for_plotly(sink_name(row))}<br>a sink in {percent(row['share'])} of contexts, value vector aligned "
            f"with the tag at {number(row['alignment'])}"
            for _, row in rows.iterrows()
        ]
        hover = "%{text}<br>catches %{x:.1%} of all queries, η² %{y:.3f}<extra></extra>"
        look = (texts, KIND_NAMES[kind], KIND_COLOURS[kind], hover)
        drawn.append(dots(rows["caught"], rows["tag"], *look, marker={"opacity": 0.8}))
    layout = {"xaxis": {"tickformat": "~%", "rangemode": "tozero"}, "yaxis": {"range": [-0.02, 1.02]}}
    titles = ("share of all queries caught", "η² of the head's output")
    return style.figure(drawn, *titles, height=360, layout=layout)


def release_scatter(heads: pd.DataFrame) -> go.Figure:
    """Draw one dot per head: η² of its grouping in the layer that enters its block, and the largest of later layers.

    Bars are the standard error of the difference of the two.
    """
    texts = [
        f"{head_name(r['layer'], r['head'])}, strongest at layer {r['released_layer']}"
        for _, r in heads.iterrows()
    ]
    hover = "%{text}<br>before the head %{x:.3f}, after the head %{y:.3f}<extra></extra>"
    bar = style.whole_bar("block of the head", int(heads["layer"].max() - heads["layer"].min()))
    of_heads = dots(
        heads["before"],
        heads["released"],
        texts,
        None,
        heads["layer"],
        hover,
        error_y=style.error_bars(heads["gain_se"]),
        marker={"colorscale": style.ORDER, "showscale": True, "colorbar": bar},
        showlegend=False,
    )
    top = float(np.nanmax([heads["before"].max(), heads["released"].max(), 0.05])) * 1.05
    diagonal = reference([0, top], [0, top], "unchanged", showlegend=False)
    layout = {"xaxis": {"range": [0, top]}, "yaxis": {"range": [0, top]}}
    titles = ("η² before the head", "largest η² after the head")
    return style.figure([*diagonal, of_heads], *titles, height=360, layout=layout)
