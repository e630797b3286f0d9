"""The figure of an ablation test: what each ablation changes, against its controls. It takes a plain table."""

from __future__ import annotations

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from theodolite.report import style
from theodolite.system.wording import for_plotly


def changes(table: pd.DataFrame, measures: list[str]) -> go.Figure:
    """Bars with standard errors: one group per ablation and measure, ablation and control side by side."""
    shown = table[table["measure"].isin(measures)]
    names = [for_plotly(f"{row.ablation}: {row.measure}") for row in shown.itertuples()]
    bars = [
        go.Bar(
            y=names,
            x=shown[column].to_numpy(np.float32),
            error_x=style.error_bars(shown[f"{column}_se"]),
            orientation="h",
            name=name,
            marker={"color": colour},
            hovertemplate="%{y}<br>" + name + ": %{x:.4g}<extra></extra>",
        )
        for column, name, colour in (
            ("control", "control", style.GREY),
            ("change", "ablation", style.VERMILLION),
        )
    ]
    layout = {
        "yaxis": {"autorange": "reversed", "automargin": True},
        "barmode": "group",
        "margin": {"l": 300},
    }
    return style.figure(bars, "change", height=150 + 46 * len(names), layout=layout)
