"""Figures of contexts by label: Gram matrices of contexts and positions, and which cluster each label falls into.

They take plain arrays and return Plotly figures. Nothing here computes a statistic or reads a run.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go

from theodolite.report import style
from theodolite.report.data import Floats
from theodolite.report.style import Patch
from theodolite.system.wording import for_plotly

LEAST_NAMED = 0.04  # of a map's side, below which a block has no room for its name


def gram_by_label(cosines: Floats, labels: Sequence[str], positions: Sequence[int] = ()) -> go.Figure:
    """Cosines between positions, if any, then between contexts in blocks of one label, with lines between the blocks.

    Args:
        cosines: (n + m, n + m), n positions before m contexts.
        labels: the label of each of the m contexts, equal ones together.
        positions: the n positions.
    """
    first, size = len(positions), len(positions) + len(labels)
    starts = [first + i for i, label in enumerate(labels) if i == 0 or labels[i - 1] != label]
    ticks = [(first / 2, "positions")] if first else []
    for start, end in zip(starts, [*starts[1:], size], strict=True):
        if end - start >= LEAST_NAMED * size:
            ticks.append(((start + end - 1) / 2, for_plotly(_short(labels[start - first]))))
    rows = [f"position {position}" for position in positions]
    rows += [f"context {i} of {for_plotly(label)}" for i, label in enumerate(labels)]
    drawn = cosine_map(cosines, rows, "cosine", ticks)
    for border in (start - 0.5 for start in starts if start):
        drawn.add_vline(border, line={"width": 1, "color": style.GREY})
        drawn.add_hline(border, line={"width": 1, "color": style.GREY})
    if first:
        centres = [first / 2, first + len(labels) / 2]
        drawn.update_xaxes(tickvals=centres, ticktext=["positions →", "contexts"], tickangle=0)
    else:
        drawn.update_xaxes(showticklabels=False)
    return drawn


def cosine_map(
    cosines: Floats, rows: Sequence[str], quantity: str, ticks: Sequence[tuple[float, str]]
) -> go.Figure:
    """A square map of cosines, rows from top to bottom; `ticks` of both axes."""
    heat = go.Heatmap(
        z=cosines.astype(np.float32),
        x=list(rows),
        y=list(rows),
        zmin=-1,
        zmax=1,
        colorscale=style.SIGNED,
        colorbar=style.colour_bar(quantity),
        hovertemplate=f"%{{y}}<br>%{{x}}<br>{quantity} %{{z:.2f}}<extra></extra>",
    )
    axis = {
        "type": "category",
        "showgrid": False,
        "tickmode": "array",
        "tickvals": [position for position, _ in ticks],
        "ticktext": [name for _, name in ticks],
        "ticks": "",
        "constrain": "domain",
    }
    layout = {"xaxis": axis, "yaxis": axis | {"autorange": "reversed", "scaleanchor": "x"}}
    return style.figure([heat], height=470, layout=layout)


def cosine_patch(cosines: Floats) -> list[Patch]:
    """What changes in `gram_by_label` for another layer."""
    return [{"z": cosines.astype(np.float32)}]


def cluster_table(shares: Floats, labels: Sequence[str]) -> go.Figure:
    """Which cluster the contexts of each label fall into, (labels, clusters), rows of shares."""
    heat = go.Heatmap(
        z=shares.astype(np.float32),
        x=[str(cluster + 1) for cluster in range(shares.shape[1])],
        y=[for_plotly(_short(label)) for label in labels],
        zmin=0,
        zmax=1,
        colorscale=style.MAGNITUDE,
        colorbar=style.colour_bar("share of the label's contexts"),
        xgap=1,
        ygap=1,
        hovertemplate="%{y}<br>cluster %{x}: %{z:.2f} of its contexts<extra></extra>",
    )
    axis = {"type": "category", "showgrid": False, "ticks": ""}
    return style.figure(
        [heat],
        "cluster of k-means",
        height=min(900, 110 + max(8, 18) * len(labels)),
        layout={"xaxis": axis, "yaxis": axis | {"autorange": "reversed"}},
    )


def cluster_patch(shares: Floats) -> list[Patch]:
    """What changes in `cluster_table` for another layer."""
    return [{"z": shares.astype(np.float32)}]


def _short(label: str, limit: int = 16) -> str:
    return label if len(label) <= limit else label[: limit - 1] + "…"
