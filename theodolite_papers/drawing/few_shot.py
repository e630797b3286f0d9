"""Accuracy against the number of examples, one line per model, as in Fig. 3 of Zhang, Khan & Papyan 2025.

It takes tables and returns Plotly figures. Nothing here computes a statistic or reads a model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from theodolite.report import style
from theodolite.report.drawing.grammar import line
from theodolite.system.wording import for_plotly, percent, with_error

FIGURE_HEIGHT = 380
ASIDE = 0.05
"""Of an example, between the markers of neighbouring models: their intervals must not hide each other."""


def accuracy_by_shots(
    means: pd.DataFrame,
    by_seed: pd.DataFrame | None = None,
    *,
    chance: float = math.nan,
    best: Sequence[float] = (),
) -> go.Figure:
    """Accuracy of several models after k examples, with intervals.

    Args:
        means: `model shots accuracy low high`, one line per model (at most seven), in the order of the table.
        by_seed: `model seed shots accuracy accuracy_se`, one small marker per row; None: no markers.
        chance: accuracy of guessing, a dotted line; best: the best possible after 0, 1, … examples, a dashed one.
    """
    models = list(dict.fromkeys(means["model"]))
    lines: list[Any] = []
    for index, (model, colour) in enumerate(zip(models, style.CATEGORIES, strict=False)):
        shift = ASIDE * (index - (len(models) - 1) / 2)
        if by_seed is not None:
            lines.append(_marks(by_seed[by_seed["model"] == model], colour, shift))
        lines += _line(model, means[means["model"] == model], colour, shift)
    shots = sorted(set(means["shots"]))
    if len(best):
        lines += _bound("best possible", list(range(len(best))), best, "dash")
    if math.isfinite(chance):
        lines += _bound("chance", shots, [chance] * len(shots), "dot")
    layout = {
        "xaxis": {"tickmode": "array", "tickvals": shots, "zeroline": False},
        "yaxis": {"tickformat": ".0%", "zeroline": False},
    }
    return style.figure(lines, "examples in the prompt", "accuracy", height=FIGURE_HEIGHT, layout=layout)


def _line(model: str, rows: pd.DataFrame, colour: str, shift: float) -> list[go.Scatter]:
    accuracy, low, high = (rows[name].to_numpy(np.float64) for name in ("accuracy", "low", "high"))
    name = for_plotly(model)
    whiskers = {"type": "data", "symmetric": False, "thickness": 1.2, "width": 3}
    whiskers |= {
        "array": (high - accuracy).astype(np.float32),
        "arrayminus": (accuracy - low).astype(np.float32),
    }
    return line(
        rows["shots"].to_numpy(np.float64) + shift,
        accuracy,
        model,
        colour,
        error_y=whiskers,
        legendgroup=name,
        marker=6,
        customdata=[
            [shots, *map(percent, values)]
            for shots, *values in zip(rows["shots"], accuracy, low, high, strict=True)
        ],
        hover=f"{name}, %{{customdata[0]}} examples: %{{customdata[1]}} "
        "(%{customdata[2]} to %{customdata[3]})<extra></extra>",
    )


def _marks(rows: pd.DataFrame, colour: str, shift: float) -> go.Scatter:
    """One open circle a seed."""
    name = for_plotly(rows["model"].iloc[0]) if len(rows) else ""
    return go.Scatter(
        x=(rows["shots"].to_numpy(dtype=np.float64) + shift).astype(np.float32),
        y=rows["accuracy"].to_numpy(dtype=np.float32),
        mode="markers",
        marker={"size": 4, "symbol": "circle-open", "color": colour},
        opacity=0.6,
        legendgroup=name,
        showlegend=False,
        customdata=[
            [row.shots, row.seed, with_error(row.accuracy, row.accuracy_se)] for row in rows.itertuples()
        ],
        hovertemplate=f"{name}, seed %{{customdata[1]}}, %{{customdata[0]}} examples: "
        "%{customdata[2]}<extra></extra>",
    )


def _bound(name: str, shots: Sequence[int], values: Sequence[float], dash: str) -> list[go.Scatter]:
    hover = f"{name}, %{{x}} examples: %{{y:.1%}}<extra></extra>"
    return line(shots, values, name, style.GREY, dash=dash, width=1.2, hover=hover)
