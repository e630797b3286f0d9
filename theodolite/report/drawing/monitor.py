"""The figure of who notices first that a training fails. It takes plain arrays; nothing is computed here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import plotly.graph_objects as go

from theodolite.report import style
from theodolite.report.data import Floats
from theodolite.system.wording import for_plotly

ROW = 26  # pixels


def moments(rows: Sequence[str], found: Mapping[str, Floats], last: int) -> go.Figure:
    """A line for each training, from step 0 to `last`, and on it a dot for each kind of moment.

    Args:
        rows: R names of training runs. found: kind → R steps, NaN where it never came. last: the last step.
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
            found.items(), style.CATEGORIES, ("circle", "diamond", "x"), strict=False
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
    return style.figure(traces, "step of the training", height=150 + ROW * len(rows), layout=layout)
