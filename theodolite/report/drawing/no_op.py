"""The figure of models with and without a no-op option. It takes a plain table."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from theodolite.report import style

COLUMNS = 3
ROW = 250  # pixels
TITLE_WIDTH = 34  # characters


def by_no_op(table: pd.DataFrame, names: Mapping[str, str], measures: Mapping[str, str]) -> go.Figure:
    """One panel per measure: one dot per model, one line per seed.

    Args:
        table: one row per model, `escape`, `seed` and the measures. names: what `escape` holds → its title, in order.
        measures: column → title.
    """
    rows = -(-len(measures) // COLUMNS)
    figure = make_subplots(
        rows=rows,
        cols=COLUMNS,
        subplot_titles=["<br>".join(textwrap.wrap(title, TITLE_WIDTH)) for title in measures.values()],
        vertical_spacing=0.12,
    )
    seeds = sorted(table["seed"].unique())
    for panel, name in enumerate(measures):
        for number, seed in enumerate(seeds):
            of_seed = table[table["seed"] == seed].set_index("escape")[name].reindex(list(names))
            line = go.Scatter(
                x=list(names.values()),
                y=of_seed.to_numpy(np.float64),
                mode="lines+markers",
                name=f"seed {seed}",
                legendgroup=str(seed),
                showlegend=panel == 0,
                marker={"size": 9},
                line={"width": 1, "color": style.CATEGORIES[number % len(style.CATEGORIES)]},
                hovertemplate="%{x}: %{y:.4g}<extra>seed " + str(seed) + "</extra>",
            )
            figure.add_trace(line, row=panel // COLUMNS + 1, col=panel % COLUMNS + 1)
    figure.update_layout(
        template=style.template(), height=ROW * rows + 80, margin={"t": 90}, legend={"y": 1.08}
    )
    figure.update_annotations(font_size=12)
    return figure
