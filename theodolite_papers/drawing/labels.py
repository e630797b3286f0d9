"""Figures of contexts and their labels: cosines in blocks, and which cluster each label falls into."""

from __future__ import annotations

from collections.abc import Sequence

from theodolite.report.data import Floats
from theodolite.report.drawing.grammar import Sketch, Sketched, cosine_map, heat
from theodolite.system.wording import for_plotly

LEAST_NAMED = 0.04  # of a map's side, below which a block has no room for its name


@Sketched
def gram_by_label(cosines: Floats, labels: Sequence[str], positions: Sequence[int] = ()) -> Sketch:
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
    centres = [first / 2, first + len(labels) / 2]
    of_positions = {"tickvals": centres, "ticktext": ["positions →", "contexts"], "tickangle": 0}
    return cosine_map.sketch(
        cosines,
        [f"position {position}" for position in positions]
        + [f"context {i} of {for_plotly(label)}" for i, label in enumerate(labels)],
        "cosine",
        ticks,
        [start for start in starts if start],
        xaxis=of_positions if first else {"showticklabels": False},
    )


@Sketched
def cluster_table(shares: Floats, labels: Sequence[str]) -> Sketch:
    """Which cluster the contexts of each label fall into, (labels, clusters), rows of shares."""
    cells = heat(
        shares,
        0,
        1,
        "%{y}<br>cluster %{x}: %{z:.2f} of its contexts<extra></extra>",
        bar="share of the label's contexts",
        cells=True,
        x=[str(cluster + 1) for cluster in range(shares.shape[1])],
        y=[for_plotly(_short(label)) for label in labels],
        plain=True,
    )
    axis = {"type": "category", "showgrid": False, "ticks": ""}
    layout = {"xaxis": axis, "yaxis": axis | {"autorange": "reversed"}}
    return Sketch([cells], "cluster of k-means", height=min(900, 110 + 18 * len(labels)), layout=layout)


def _short(label: str, limit: int = 16) -> str:
    return label if len(label) <= limit else label[: limit - 1] + "…"
