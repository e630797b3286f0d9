"""The figure of when the alarms and the loss first show that a training run fails. It takes plain arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import plotly.graph_objects as go

from theodolite.report import style
from theodolite.report.data import Floats
from theodolite.system.wording import for_plotly

ROW = 26  # pixels


def moments(rows: Sequence[str], first_steps: Mapping[str, Floats], last: int) -> go.Figure:
    """One row per training run, from step 0 to `last`, with a marker at the first step of each kind of event.

    Args:
        rows: R names of training runs. first_steps: kind → R steps, NaN where it never came. last: the last step.
    """
    names = [for_plotly(row) for row in rows]
    traces = [
        go.Scatter(
            x=steps.astype(np.float32),
            y=names,
            name=for_plotly(kind),
            mode="markers",
            marker={"size": 10, "color": colour, "symbol": symbol},
            hovertemplate=f"%{{y}}<br>{for_plotly(kind)}: step %{{x}}<extra></extra>",
        )
        for (kind, steps), colour, symbol in zip(
            first_steps.items(), style.CATEGORIES, ("circle", "diamond", "x"), strict=False
        )
    ]
    layout = {
        "xaxis": {"range": [-0.02 * last, 1.02 * last]},
        "yaxis": {
            "categoryorder": "array",
            "categoryarray": names[::-1],
            "range": [-0.6, len(names) - 0.4],
            "automargin": True,
        },
        "margin": {"l": 230},
        "legend": {"y": 1.02, "yanchor": "bottom"},
    }
    return style.figure(traces, "training step", height=150 + ROW * len(rows), layout=layout)
