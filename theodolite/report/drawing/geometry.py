"""Position and context as shapes: spirals and Gram matrices.

Nothing here computes a statistic: rows are chosen and scaled for the eye only, and captions say so.
"""

from __future__ import annotations

import numpy as np
import plotly.graph_objects as go

from theodolite.passes.run import Run
from theodolite.report import style
from theodolite.report.data import array, evenly, grid_of, need, provenance
from theodolite.report.drawing.grammar import cosine_map, dots, line
from theodolite.report.exhibit import by_residual_layer, exhibit
from theodolite.system.wording import for_plotly

SPIRAL_POSITIONS = 160
SPIRAL_CONTEXTS = 250
GRAM_CELLS = 50_000


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


def _gram_rows(run: Run) -> tuple[list[int], list[int]]:
    """Choose the positions and contexts of a Gram matrix so that all layers stay under GRAM_CELLS."""
    layers, size, _ = need(run, "gram").shape
    positions = len(need(run, "gram_position"))
    share = min(1.0, max(40, int((GRAM_CELLS / layers) ** 0.5)) / size)
    contexts = evenly(size - positions, max(0, int((size - positions) * share)))
    return evenly(positions, max(2, int(positions * share))), [positions + i for i in contexts]


def _gram_names(run: Run, positions: list[int], contexts: list[int]) -> list[str]:
    """Name each row distinctly: its position, or its number and label as a context."""
    shown_positions, labels = need(run, "gram_position"), array(run, "gram_label")
    names = [for_plotly(name) for name in provenance(run, "corpus", "labels") or []]

    def of_context(number: int) -> str:
        label = -1 if labels is None else int(labels[number])
        return f"context {number}" + (f" of {names[label]}" if 0 <= label < len(names) else "")

    of_positions = [f"position {int(shown_positions[index])}" for index in positions]
    return of_positions + [of_context(index - len(shown_positions)) for index in contexts]


@exhibit(picker=by_residual_layer)
def gram(run: Run, layer: int = 0) -> go.Figure:
    """Draw the normalised Gram matrix [P̄, C̄]ᵀ[P̄, C̄] of positions and contexts at one layer.

    Song & Zhong 2024, Fig. 2. Positions first, then contexts ordered by label.
    """
    positions, contexts = _gram_rows(run)
    rows = [*positions, *contexts]
    ticks = [(len(positions) / 2, "positions →")]
    if contexts:
        ticks.append((len(positions) + len(contexts) / 2, "contexts, by label"))
    return cosine_map(
        need(run, "gram")[layer][np.ix_(rows, rows)],
        _gram_names(run, positions, contexts),
        "cosine",
        ticks,
        [len(positions)] if contexts else [],
        height=440,
        yaxis={"tickangle": -90},
    )
