"""Figures of the context basis by label: its Gram matrix, and which cluster each label falls into.

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


def context_gram(cosines: Floats, labels: Sequence[str]) -> go.Figure:
    """Cosines between contexts, (n, n), those of one label together with lines between the labels."""
    size = len(labels)
    starts = [i for i, label in enumerate(labels) if i == 0 or labels[i - 1] != label]
    ends = [*starts[1:], size]
    rows = [f"context {i} of {for_plotly(label)}" for i, label in enumerate(labels)]
    named = [
        ((start + end - 1) / 2, for_plotly(_short(labels[start])))
        for start, end in zip(starts, ends, strict=True)
        if end - start >= LEAST_NAMED * size
    ]
    line = {"type": "line", "line": {"width": 1, "color": style.GREY}}
    shapes = []
    for border in (start - 0.5 for start in starts[1:]):
        shapes += [
            line | {"x0": border, "x1": border, "y0": -0.5, "y1": size - 0.5},
            line | {"y0": border, "y1": border, "x0": -0.5, "x1": size - 0.5},
        ]
    heat = go.Heatmap(
        z=cosines.astype(np.float32),
        x=rows,
        y=rows,
        zmin=-1,
        zmax=1,
        colorscale=style.SIGNED,
        colorbar=style.colour_bar("cosine"),
        hovertemplate="%{y}<br>%{x}<br>cosine %{z:.2f}<extra></extra>",
    )
    axis = {"type": "category", "showgrid": False, "ticks": "", "constrain": "domain"}
    down = axis | {
        "autorange": "reversed",
        "scaleanchor": "x",
        "tickmode": "array",
        "tickvals": [place for place, _ in named],
        "ticktext": [name for _, name in named],
    }
    return style.figure(
        [heat],
        height=470,
        layout={"xaxis": axis | {"showticklabels": False}, "yaxis": down, "shapes": shapes},
    )


def cosine_patch(cosines: Floats) -> list[Patch]:
    """What changes in `context_gram` for another layer."""
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
