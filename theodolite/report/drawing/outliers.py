"""The figure of outlier dimensions. What does not fit a screen is thinned by keeping the largest."""

from __future__ import annotations

from typing import Any

import numpy as np
import plotly.graph_objects as go

from theodolite.passes.run import Run
from theodolite.report import style
from theodolite.report.data import Floats, need
from theodolite.report.drawing.grammar import heat, rows_down, sentence

DIMENSIONS = 40
NAMED: dict[str, Any] = {"type": "category", "showgrid": False}  # an axis of dimensions or tokens
TURNED = {"tickangle": -90, "tickfont": {"size": 10}}  # its names, where there are many


def largest_columns(values: Floats, most: int = DIMENSIONS) -> list[int]:
    """The columns with the largest maxima, at most so many, in their order."""
    highest = np.nan_to_num(values).max(axis=0)
    return sorted(np.argsort(-highest, kind="stable")[:most].tolist())


def outlier_shares(run: Run) -> go.Figure:
    """Share of tokens with |x| ≥ 6 in the dimensions where it is highest, over layers; a sentence where it is 0 in all.

    Colours run to the highest share: outliers in one token of a hundred are seen, too.
    """
    shares = np.nan_to_num(need(run, "outlier_share"))
    if not shares.any():
        return sentence("No dimension has |x| ≥ 6 in any token past the first.")
    dimensions = [dimension for dimension in largest_columns(shares) if shares[:, dimension].any()]
    cells = heat(
        shares[:, dimensions],
        0,
        float(shares.max()),
        "layer %{y}, dimension %{x}<br>%{z:.1%} of tokens<extra></extra>",
        bar=style.colour_bar("share of tokens", tickformat="~%"),
        cells=True,
        x=[str(dimension) for dimension in dimensions],
    )
    layout = {"xaxis": NAMED | TURNED, "yaxis": rows_down(len(shares))}
    height = min(640, max(240, 120 + 22 * len(shares)))
    return style.figure([cells], "feature dimension", "layer", height=height, layout=layout)
