"""The figure of pruning: what was lost in each matrix.

They take plain tables.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from theodolite.report import style
from theodolite.report.drawing.grammar import heat
from theodolite.system.wording import for_plotly

ROW = 26  # pixels


def error_map(table: pd.DataFrame, column: str) -> go.Figure:
    """A relative error of every matrix, blocks by names; the experts of a block as their mean.

    Args:
        table: one row per matrix. column: `error` or `error_scaled`.
    """
    names = list(dict.fromkeys(table["matrix"]))
    values = table.pivot_table(column, "layer", "matrix", aggfunc="mean", dropna=False, sort=False)[names]
    trace = heat(
        values.to_numpy(),
        0,
        float(np.nanmax([*table[column], 1e-3])),
        "block %{y}, %{x}: %{z:.3f}<extra></extra>",
        bar="relative error",
        x=[for_plotly(name) for name in names],
        y=[str(layer) for layer in values.index],
    )
    layout = {
        "yaxis": {"type": "category", "autorange": "reversed", "showgrid": False},
        "xaxis": {"type": "category", "showgrid": False, "automargin": True},
    }
    height = 130 + ROW * len(values)
    return style.figure([trace], "", "block", height=height, layout=layout)
