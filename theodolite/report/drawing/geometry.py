"""Position and context as shapes.

Nothing here computes a statistic: rows are chosen and scaled for the eye only, and captions say so.
"""

from __future__ import annotations

import numpy as np
import plotly.graph_objects as go

from theodolite.passes.run import Run
from theodolite.report import style
from theodolite.report.data import array, evenly, grid_of, need
from theodolite.report.drawing.grammar import dots, line
from theodolite.report.exhibit import by_residual_layer, exhibit

SPIRAL_POSITIONS = 160
SPIRAL_CONTEXTS = 250


@exhibit(picker=by_residual_layer)
def spiral(run: Run, layer: int = 0) -> go.Figure:
    """Draw the positional basis and cvecs of one layer on the positional basis' first two principal components.

    Song & Zhong 2024, Fig. 1. Positions run from violet to green, the patches of images in reading order; cvecs are
    the red points.
    """
    basis, grid = need(run, "positional_pca")[layer], grid_of(run)
    first = grid.leading if grid else 1
    positions = np.array(evenly(len(basis) - first, SPIRAL_POSITIONS), dtype=np.int32) + first
    points = basis[positions].astype(np.float32)
    names = [grid.token_text(position) if grid else f"position {position}" for position in positions.tolist()]
    cvecs = array(run, "cvec_pca")
    contexts = np.zeros((0, 2)) if cvecs is None else cvecs[layer][evenly(cvecs.shape[1], SPIRAL_CONTEXTS)]
    x, y = contexts[:, :2].T
    hover, look = "a context vector<extra></extra>", {"size": 3.5, "opacity": 0.4}
    traces = [dots(x, y, None, "context vectors", style.CONTEXT, hover, marker=look)]
    coloured = {"size": 5.5, "color": positions, "colorscale": style.ORDER}
    traces += line(
        points[:, 0],
        points[:, 1],
        "positions",
        style.GREY,
        width=1,
        marker=coloured | {"showscale": False, "line": {"width": 0}},
        hover="%{customdata}<br>%{x:.4g}, %{y:.4g}<extra></extra>",
        customdata=names,
    )
    few = {"nticks": 5}
    layout = {"showlegend": False, "xaxis": few, "yaxis": few}
    return style.figure(traces, "component 1", "component 2", height=400, layout=layout)
