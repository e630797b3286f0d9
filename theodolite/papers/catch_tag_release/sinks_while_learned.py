"""Sinks, what they tag, and outliers while they are learned: a trace of every checkpoint of a `--series`.

Zhang et al. 2025 trace models that are trained; when the mechanism arises they do not say. Nothing is trained here, and
nothing is judged.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from theodolite.corpus.corpus import Corpus
from theodolite.models import OpenModel, open_model
from theodolite.papers.experiment import Study, experiment
from theodolite.papers.hidden_geometry.positions_while_learned import series_of, some_contexts
from theodolite.report.drawing import sinks as drawing
from theodolite.report.measures import ZHANG
from theodolite.report.outcome import Outcome
from theodolite.sinks.outliers import find_outliers
from theodolite.sinks.trace import trace_sinks
from theodolite.system.wording import number

MEASURES = {
    "heads": "heads with a sink",
    "first": "largest share of contexts with a first-token sink",
    "later": "largest share of contexts with a later sink",
    "caught": "share of queries that a sink catches, mean over all heads",
    "tag": "η² of a head's output by its sinks, mean over heads with one",
    "shifted": "η² of the same grouping, shifted along the context",
    "outliers": "dimensions of a layer with an outlying RMS, at most",
    "massive": "largest |x| over the RMS of its layer's median dimension",
}
"""Columns of the table by step, with what they are."""


@experiment(
    "sinks/training",
    "Sinks, tags and outliers while a model is trained",
    "Sinks catch, tag and release in trained models (section 2); when that arises is not said",
    needs=("model",),
)
def sinks_while_learned(study: Study, outcome: Outcome) -> None:
    model = study.require_model()
    corpus = study.require_corpus("every checkpoint is traced on a text: pass it together with the model")
    contexts, seed = some_contexts(corpus), int(study.provenance["seed"])
    rows = []
    series = series_of(model)
    for done, (step, path) in enumerate(series.items()):
        study.show("tracing checkpoints", done, len(series))
        checkpoint = open_model(path, dtype=model.source.dtype, device=model.device)
        rows.append({"step": step} | measured(checkpoint, contexts, seed))
    table = outcome.tables["steps"] = pd.DataFrame(rows)
    for name, what in MEASURES.items():
        outcome.read(
            what, f"{number(table[name].iloc[0])} at first, {number(table[name].iloc[-1])} in the end"
        )
    outcome.figure(
        "steps",
        "Sinks, tags and outliers by training step",
        drawing.by_step(table.assign(folder=model.id, kind="this model"), MEASURES),
        "Over the steps: each checkpoint of the series on the same contexts.",
        "whether sinks, tags and outliers arise at the same step.",
        f"{ZHANG}, section 2; over training: ours",
        wide=True,
    )


def measured(model: OpenModel, contexts: Corpus, seed: int) -> dict[str, Any]:
    """The `MEASURES` of one checkpoint."""
    run, outliers = trace_sinks(model, contexts), find_outliers(model, contexts, seed=seed)
    traces, heads, dimensions = run.traces, run.heads, outliers.dimensions

    def share(kind: str) -> float:
        of_kind = traces[traces["kind"] == kind]["share"] if len(traces) else traces
        return float(of_kind.max()) if len(of_kind) else 0.0

    largest = (
        dimensions[["maximum", "maximum_first"]].max(axis=1) * dimensions["rms_ratio"] / dimensions["rms"]
    )
    return {
        "heads": len(heads),
        "first": share("first"),
        "later": share("later"),
        "caught": float(traces["caught"].sum()) / (model.layers * model.heads) if len(traces) else 0.0,
        "tag": float(heads["tag"].mean()) if len(heads) else np.nan,
        "shifted": float(heads["tag_shifted"].mean()) if len(heads) else np.nan,
        "outliers": int(dimensions.groupby("layer")["large_rms"].sum().max()),
        "massive": float(largest.max()),
    }
