"""Every sink of a text traced: what it catches, what it writes, where that lives on (Zhang et al. 2025, section 2)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from theodolite.errors import UsageError
from theodolite.experiments.base import (
    UNTESTABLE,
    Comparison,
    Criterion,
    Experiment,
    Outcome,
    Verdict,
    judge,
)
from theodolite.experiments.layers import exhibit
from theodolite.report import figures_traces as drawing
from theodolite.report.measures import ZHANG
from theodolite.report.text import counted, number, percent, with_error
from theodolite.run import Run
from theodolite.tracer import trace_sinks

if TYPE_CHECKING:
    from theodolite.experiments.study import Study

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


def traced_outcome(run: Run) -> Outcome:
    """The page of a trace: figures, the strongest sinks, and what becomes of the paper's claims."""
    traces, heads = run.traces, run.heads
    tables = {"sinks": traces, "heads": heads}
    if not len(traces):
        reason = "no key of any head is a sink in this text: no query pays one more than 0.3 on average"
        claims = (LATER, TAGGED, RELEASED, COPIED, OUTLIER)
        return Outcome([], [Verdict(claim, UNTESTABLE, reason) for claim in claims], tables)
    release = run.arrays["release"].numpy()
    later = traces[traces["kind"] == "later"]
    comparisons = [
        Comparison("heads that have a sink", "", f"{len(heads)} of {_heads_of(run)}"),
        *(
            Comparison(f"sinks: {name}", "", _counted(traces[traces["kind"] == kind]))
            for kind, name in drawing.KIND_NAMES.items()
        ),
        *(Comparison(_place(row), "", _told(row)) for _, row in traces.head(3).iterrows()),
    ]
    weights = traces["tagged"].fillna(0).to_numpy()
    verdicts = [
        judge(
            LATER,
            "largest share of contexts in which a later token is a sink of a head",
            float(later["share"].max()) if len(later) else 0.0,
            MANY,
        ),
        judge(
            TAGGED,
            *_mean(
                "η² of the head's output by the sink that caught a query, mean over heads with a sink; of the same "
                f"groups shifted along the context {number(float(heads['tag_shifted'].mean()))}",
                heads["tag"],
                heads["tag_se"],
            ),
            CLUSTERED,
        ),
        _released(heads),
        judge(
            COPIED,
            "cosine of tag and value vector, mean over sinks weighted by what they tag",
            _weighted(traces["alignment"], weights),
            SAME,
        ),
        judge(
            OUTLIER,
            "share of what is tagged that has an outlier dimension in its tag",
            _weighted((traces["outlier_dimensions"] != "").astype(float), weights),
            MOSTLY,
        ),
    ]
    exhibits = [
        exhibit(
            "release",
            "Where each tag lives on",
            drawing.release_map(traces, release),
            "A row a sink, those that tag most first; η², the share of the variance within contexts that is between "
            "the tokens that the sink caught and all others. First in the head's output, then in the residual stream, "
            "from the layer that enters the head's block on.",
            "rows that are bright at “head” and brighter after the head's layer than before: a tag that is released.",
            f"{ZHANG}, section 2; MATH: tag, release",
            wide=True,
        ),
        exhibit(
            "strength",
            "How much is caught, and how strongly it is tagged",
            drawing.strength(traces),
            "A dot a sink of a head: the share of all queries of the text that it catches, and η² of the head's "
            "output by being caught or not.",
            "dots to the right and up: sinks that mark many tokens clearly.",
            f"{ZHANG}, section 2",
        ),
        exhibit(
            "kept",
            "The grouping before the head and after it",
            drawing.kept(heads),
            "A dot a head: η² of its grouping of tokens in the residual stream that enters its block, and the largest "
            "of all later layers, with its standard error. On the dotted line nothing was added.",
            "dots well above the line. On it, the grouping was there before the head looked.",
            f"{ZHANG}, section 2, Fig. 2d",
        ),
    ]
    return Outcome(comparisons, verdicts, tables, exhibits)


def _released(heads: pd.DataFrame) -> Verdict:
    gain = heads["released"] - heads["before"]
    clear = heads["released_se"].notna()
    if not clear.any():
        return Verdict(RELEASED, UNTESTABLE, f"no standard error in {counted(len(heads), 'head')}; {MORE}")
    more = gain[clear] > 2 * heads["released_se"][clear]
    share = float(more.mean())
    error = float(np.sqrt(max(share * (1 - share), 0) / clear.sum()))
    what = (
        f"share of {counted(int(clear.sum()), 'head')} with a sink in which η² after the head exceeds that before by "
        f"two standard errors (mean gain {number(float(gain[clear].mean()))})"
    )
    return judge(RELEASED, what, share, MORE, error)


def _mean(what: str, values: pd.Series, errors: pd.Series) -> tuple[str, float]:
    spread = f" (largest {with_error(float(values.max()), float(errors[values.idxmax()]))})"
    return what + spread, float(values.mean())


def _weighted(values: pd.Series, weights: np.ndarray) -> float:
    known = values.notna().to_numpy() & (weights > 0)
    if not known.any():
        return float("nan")
    return float(np.average(values[known], weights=weights[known]))


def _heads_of(run: Run) -> int:
    model = run.provenance["model"]
    return int(model["layers"] * model["heads"])


def _counted(rows: pd.DataFrame) -> str:
    if not len(rows):
        return "none"
    heads_with = rows.groupby(["layer", "head"]).groups
    heads = counted(len(heads_with), "head")
    sinks, caught = counted(len(rows), "sink"), percent(float(rows["caught"].sum()) / len(heads_with))
    return f"{sinks} of {heads}, which catch {caught} of a head's queries"


def _place(row: pd.Series) -> str:
    return drawing.sink_name(row)


def _told(row: pd.Series) -> str:
    return (
        f"a sink in {percent(row['share'])} of contexts, catches {percent(row['caught'])} of all queries; η² "
        f"{with_error(row['tag'], row['tag_se'])} in the head, {number(row['before'])} before it, "
        f"{with_error(row['released'], row['released_se'])} at the most after it (layer {row['released_layer']})"
    )


def trace_of(study: Study) -> Run:
    """The trace of the study's text, made once and kept beside the pages.

    Raises:
        UsageError: there is no text.
    """
    corpus = study.corpus
    if corpus is None:
        raise UsageError("sinks are traced through a text: give it beside the run")
    folder = None if study.folder is None else study.folder / "trace"
    study.say("tracing every sink through the model")
    return study.once("trace", lambda: trace_sinks(study.opened(), corpus, folder))


def _make(study: Study) -> Outcome:
    return traced_outcome(trace_of(study))


TRACE = Experiment(
    "sinks/trace",
    "Every sink of the text: what it catches, the tag that it writes, where the tag lives on",
    "Sinks catch tokens, tag them with a common perturbation, and release them into the residual stream, where the "
    "tag is still to be seen in deep layers (section 2)",
    ("model",),
    _make,
)

TRACING = [TRACE]
