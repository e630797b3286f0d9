"""Loss against the number of tokens that a cache keeps, one line per policy.

It takes a table and returns a Plotly figure. Nothing here computes a statistic or reads a model.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from theodolite.report import style
from theodolite.report.drawing.grammar import line
from theodolite.system.wording import with_error

FULL = "full"
"""The policy that is a bound, not a line over sizes."""


def loss_by_cache(table: pd.DataFrame) -> go.Figure:
    """Loss of several policies at each size of the cache, with standard errors, and that of the whole context.

    Args:
        table: `policy size loss loss_se`, as `evaluate.cache_policies` gives; at most seven policies and `full`.
    """
    sizes = sorted(set(table["size"][table["policy"] != FULL]))
    lines: list[Any] = []
    policies = [policy for policy in dict.fromkeys(table["policy"]) if policy != FULL]
    for policy, colour in zip(policies, style.CATEGORIES, strict=False):
        own = table[table["policy"] == policy]
        lines += line(
            own["size"].to_numpy(np.float64),
            own["loss"].to_numpy(np.float64),
            policy,
            colour,
            errors=own["loss_se"].to_numpy(np.float64),
            marker=6,
            customdata=[with_error(row.loss, row.loss_se) for row in own.itertuples()],
            hover=f"{policy}, %{{x}} tokens: %{{customdata}} nats<extra></extra>",
        )
    for row in table[table["policy"] == FULL].itertuples():
        hover = f"the whole context: {with_error(row.loss, row.loss_se)} nats<extra></extra>"
        lines += line(
            sizes,
            [row.loss] * len(sizes),
            "the whole context",
            style.GREY,
            dash="dot",
            width=1.2,
            hover=hover,
        )
    layout = {"xaxis": {"type": "log", "tickmode": "array", "tickvals": sizes}, "yaxis": {"zeroline": False}}
    return style.figure(lines, "tokens kept in each layer", "loss, nats per token", layout=layout)
