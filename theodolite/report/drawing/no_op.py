"""The figure of models with and without a no-op option. It takes a plain table."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from theodolite.report import style
from theodolite.report.drawing.grammar import Panel, line, panels

COLUMNS = 3
ROW = 250  # pixels
TITLE_WIDTH = 34  # characters


def by_no_op(table: pd.DataFrame, names: Mapping[str, str], measures: Mapping[str, str]) -> go.Figure:
    """One panel per measure: one dot per model, one line per seed.

    Args:
        table: one row per model, `escape`, `seed` and the measures. names: what `escape` holds → its title, in order.
        measures: column → title.
    """
    shown: list[Panel] = []
    for measure, title in measures.items():
        traces: list[Any] = []
        for number, seed in enumerate(sorted(table["seed"].unique())):
            of_seed = table[table["seed"] == seed].set_index("escape")[measure].reindex(list(names))
            traces += line(
                list(names.values()),
                of_seed.to_numpy(np.float64),
                f"seed {seed}",
                style.CATEGORIES[number % len(style.CATEGORIES)],
                width=1,
                marker=9,
                hover=f"%{{x}}: %{{y:.4g}}<extra>seed {seed}</extra>",
                showlegend=not shown,
            )
        shown.append(Panel(title, traces))
    layout = {"margin": {"t": 90}, "legend": {"y": 1.08}}
    drawn = panels(shown, COLUMNS, height=ROW, gaps=(0.07, 0.12), layout=layout)
    drawn.for_each_annotation(
        lambda title: title.update(text="<br>".join(textwrap.wrap(title.text, TITLE_WIDTH)))
    )
    return drawn
