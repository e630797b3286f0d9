"""Every sink of a text traced: what it catches, what it writes, where that persists (Zhang et al. 2025, section 2)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from theodolite.estimates import Floats
from theodolite.passes.run import Run
from theodolite.report import data, style
from theodolite.report.drawing.grammar import heat, map_height
from theodolite.report.drawing.heads import KIND_NAMES, sink_name
from theodolite.report.outcome import Heading, Outcome
from theodolite.system.wording import counted, for_plotly, number, percent, with_error

SHOWN_SINKS = 40  # rows of a map

TRACE = Heading(
    "sinks/trace",
    "Every sink of the text: what it catches, the tag that it writes, where the tag persists",
    "Sinks catch tokens, tag them with a common perturbation, and release them into the residual stream, where the "
    "tag is still to be seen in deep layers (section 2)",
)


def show_trace(outcome: Outcome, run: Run) -> None:
    """Fill the page of a trace: figures, tables, and the strongest sinks."""
    traces, heads = run.traces, run.heads
    outcome.tables |= {"sinks": traces, "heads": heads}
    if "written_from" in (corpus := run.provenance["corpus"]):
        outcome.read("written by the model", f"positions {corpus['written_from']} to {corpus['length'] - 1}")
    model = run.provenance["model"]
    looked_at = len(model.get("chosen_layers") or range(model["layers"])) * model["heads"]
    outcome.read("heads that have a sink", f"{len(heads)} of {looked_at}")
    if not len(traces):
        return
    for kind, name in KIND_NAMES.items():
        if kind == "local" and not data.provenance(run, "fingerprint", "local_sinks"):
            continue  # they were not looked for
        rows, summary = traces[traces["kind"] == kind], "none"
        if count := rows.groupby(["layer", "head"]).ngroups:
            caught = percent(float(rows["caught"].sum()) / count)
            of_heads = f"{counted(len(rows), 'sink')} of {counted(count, 'head')}"
            summary = f"{of_heads}, which catch {caught} of a head's queries"
        outcome.read(f"sinks: {name}", summary)
    for _, row in traces.head(3).iterrows():
        summary = (
            f"a sink in {percent(row['share'])} of contexts, catches {percent(row['caught'])} of all queries; η² "
            f"{with_error(row['tag'], row['tag_se'])} in the head (by chance {number(row['tag_chance'])}, shifted "
            f"along the context {number(row['tag_shifted'])}), {number(row['before'])} before it, "
            f"{with_error(row['released'], row['released_se'])} at most after it (layer {row['released_layer']}; "
            f"gain {with_error(row['gain'], row['gain_se'])})"
        )
        outcome.read(sink_name(row), summary)
    outcome.show("trace", "release", release_map(traces, run.arrays["release"].numpy()))


def release_map(traces: pd.DataFrame, release: Floats) -> go.Figure:
    """Draw η² of the strongest sinks: in the head's own output, in colours of its own, then by residual layer."""
    strongest = traces.head(SHOWN_SINKS)
    named = (sink_name(row) for _, row in strongest.iterrows())
    names = [for_plotly(f"{place}. {name}") for place, name in enumerate(named, 1)]

    def cells(values: Floats, columns: list[str], quantity: str, place: float, **look: Any) -> dict[str, Any]:
        highest = float(np.nanmax(values)) if np.isfinite(values).any() else 1.0
        hover = f"%{{y}}<br>{quantity}, %{{x}}: η² %{{z:.3f}}<extra></extra>"
        bar = style.colour_bar(f"η² {quantity}", x=place)
        return heat(values, 0, highest, hover, bar=bar, x=columns, y=names, **look)

    # η² in the head's output is ten times that in the stream: on one colour scale the latter would vanish.
    tags = strongest["tag"].to_numpy(float)[:, None]
    layers = [str(layer) for layer in range(release.shape[1])]
    heats = [
        cells(tags, ["head"], "in the head's output", 1.0, xgap=4),
        cells(release[: len(strongest)], layers, "in the residual stream", 1.1),
    ]
    layout = {"yaxis": {"autorange": "reversed"}, "xaxis": {"type": "category"}, "margin": {"l": 150}}
    height = map_height(len(names), most=None)
    return style.figure(heats, "head output, then residual layers", height=height, layout=layout)
