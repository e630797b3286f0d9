"""Curves over training: one small panel per measure. They take a plain table."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from theodolite.report import style
from theodolite.report.drawing.grammar import Panel, line, panels

ACROSS = 3


def over_training(table: pd.DataFrame, measures: Mapping[str, str]) -> go.Figure:
    """A panel per measure over the training step.

    Args:
        table: `step`, `name`, each measure, and its standard error `…_se` where it has one.
        measures: column → its title, and after a comma what it is of, in order.
    """
    shown = []
    for name, title in measures.items():
        errors = table.get(f"{name}_se")
        traces = line(
            table["step"],
            table[name],
            title,
            style.MEASURED,
            errors=None if errors is None else errors.to_numpy(dtype=np.float64),
            marker=6,
            text=table["name"].tolist(),
            hover="%{text}, step %{x}: %{y:.4g}<extra></extra>",
            showlegend=False,
        )
        short, _, of = title.partition(", ")
        shown.append(Panel(short, traces, "step", of))
    return panels(shown, ACROSS, height=210, gaps=(0.09, 0.13 if len(shown) <= 2 * ACROSS else 0.09))
