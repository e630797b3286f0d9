"""Figures of one head on one prompt: attention, output by dimension, tokens coloured by principal components."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from theodolite.report import style
from theodolite.report.data import Floats, evenly
from theodolite.report.style import Patch
from theodolite.system.wording import for_plotly, token_text

LABELLED = 64
"""Tokens that can all be written at an axis; of more, only some are."""

DIMENSIONS = 64
STRIP = 34  # pixels: one row of coloured tokens
MARK = "▼"


def _axis(tokens: Sequence[str], sinks: Sequence[int]) -> dict[str, Any]:
    """Tick labels of tokens, `LABELLED` of them and the sinks, which are marked; no label lies over another's."""
    apart = -(-len(tokens) // LABELLED)  # tokens from one label to the next
    named: list[int] = []
    for sink in sorted(sinks):
        if not named or sink - named[-1] >= apart:
            named.append(sink)
    free = [i for i in range(0, len(tokens), apart) if all(abs(i - sink) >= apart for sink in sinks)]
    shown = sorted({*free, *sinks})
    names = [
        f"{MARK} {token_text(tokens[i])}" if i in named else MARK if i in sinks else token_text(tokens[i])
        for i in shown
    ]
    return {
        "tickmode": "array",
        "tickvals": shown,
        "ticktext": [for_plotly(name) for name in names],
        "tickfont": {"size": 8},
        "tickangle": -90,
        "showgrid": False,
        "zeroline": False,
    }


def _said(tokens: Sequence[str]) -> list[str]:
    return [for_plotly(f"{place}: {token_text(token)}") for place, token in enumerate(tokens)]


def attention(weights: Floats, tokens: Sequence[str], sinks: Sequence[int]) -> go.Figure:
    """A head's attention, queries down and keys across; `sinks` are marked at both axes."""
    visible = np.where(np.tri(len(tokens), dtype=bool) | (weights > 0), weights, np.nan)
    said = _said(tokens)
    heat = go.Heatmap(
        z=visible.astype(np.float32),
        customdata=[said] * len(said),
        text=[[name] * len(said) for name in said],
        zmin=0,
        zmax=1,
        colorscale=style.MAGNITUDE,
        colorbar=style.colour_bar("attention"),
        hovertemplate="query %{text}<br>key %{customdata}<br>%{z:.3f}<extra></extra>",
        hoverongaps=False,
    )
    layout = {
        "xaxis": _axis(tokens, sinks),
        "yaxis": _axis(tokens, sinks) | {"autorange": "reversed", "tickangle": 0},
        "margin": {"l": 90, "b": 90},
    }
    return style.figure([heat], "key", "query", height=760, layout=layout)


def by_dimension(
    vectors: Floats,
    tokens: Sequence[str],
    sinks: Sequence[int],
    y: str = "token",
    like: Floats | None = None,
) -> go.Figure:
    """Vectors (tokens, d), one row per token: the dimensions that are largest at any token, in their order.

    Those, and the colours, are of the vectors `like` (rows, d), if given: for figures that are to be compared.
    """
    largest = np.abs(vectors if like is None else like).max(axis=0)
    chosen = np.sort(np.argsort(-largest, kind="stable")[:DIMENSIONS])
    values = vectors[:, chosen]
    bound = float(largest.max()) or 1.0
    heat = go.Heatmap(
        z=values.astype(np.float32),
        x=list(range(len(chosen))),
        customdata=[[str(d) for d in chosen]] * len(values),
        text=[[name] * len(chosen) for name in _said(tokens)],
        zmin=-bound,
        zmax=bound,
        colorscale=style.SIGNED,
        colorbar=style.colour_bar("value"),
        hovertemplate="%{text}<br>dimension %{customdata}: %{z:.3g}<extra></extra>",
    )
    ticks = evenly(len(chosen), 16)
    layout = {
        "xaxis": {
            "tickmode": "array",
            "tickvals": ticks,
            "ticktext": [str(chosen[tick]) for tick in ticks],
            "showgrid": False,
        },
        "yaxis": _axis(tokens, sinks) | {"autorange": "reversed", "tickangle": 0},
        "margin": {"l": 90},
    }
    return style.figure([heat], "dimension of the residual stream", y, height=760, layout=layout)


def coloured(
    colours: np.ndarray, places: Sequence[str], tokens: Sequence[str], sinks: Sequence[int]
) -> go.Figure:
    """A row of coloured tokens for each place.

    Args:
        colours: (places, tokens, 3), 0 to 255. places: their names. sinks: tokens to mark.
    """
    image = go.Image(
        z=colours,
        text=[_said(tokens)] * len(places),
        hovertemplate="%{text}<extra></extra>",
    )
    layout = {
        "xaxis": _axis(tokens, sinks),
        "yaxis": {
            "tickmode": "array",
            "tickvals": list(range(len(places))),
            "ticktext": [for_plotly(name) for name in places],
            "showgrid": False,
            "zeroline": False,
            "scaleanchor": False,
        },
        "margin": {"l": 150, "b": 100},
    }
    return style.figure([image], height=160 + STRIP * len(places), layout=layout)


def clusters(scores: Floats, groups: Sequence[str], tokens: Sequence[str], names: Sequence[str]) -> go.Figure:
    """Tokens on two principal components, coloured by the sink that caught them.

    Args:
        scores: (tokens, 2). groups: of each token. names: all groups, in order.
    """
    said = np.array(_said(tokens))
    of = np.array(groups)
    dots = [
        go.Scatter(
            x=scores[of == name, 0].astype(np.float32),
            y=scores[of == name, 1].astype(np.float32),
            name=for_plotly(name),
            mode="markers",
            text=said[of == name].tolist(),
            marker={"size": 8, "color": style.CATEGORIES[number % len(style.CATEGORIES)], "opacity": 0.8},
            hovertemplate="%{text}<extra>" + for_plotly(name) + "</extra>",
        )
        for number, name in enumerate(names)
    ]
    return style.figure(dots, "first component", "second component", height=380)


def clusters_patch(scores: Floats, groups: Sequence[str], names: Sequence[str]) -> list[Patch]:
    """What changes in `clusters` at another place."""
    of = np.array(groups)
    return [
        {"x": scores[of == name, 0].astype(np.float32), "y": scores[of == name, 1].astype(np.float32)}
        for name in names
    ]


def received(values: Floats, tokens: Sequence[str], sinks: Sequence[int]) -> go.Figure:
    """By layer and token the attention that the keenest head pays it on average (blocks, tokens)."""
    heat = go.Heatmap(
        z=values.astype(np.float32),
        text=[_said(tokens)] * len(values),
        zmin=0,
        zmax=1,
        colorscale=style.MAGNITUDE,
        colorbar=style.colour_bar("attention"),
        hovertemplate="layer %{y}, %{text}<br>%{z:.3f}<extra></extra>",
    )
    layout = {
        "xaxis": _axis(tokens, sinks),
        "yaxis": {"showgrid": False, "dtick": max(1, len(values) // 12), "autorange": "reversed"},
    }
    height = min(640, max(260, 160 + 22 * len(values)))
    return style.figure([heat], "", "layer", height=height, layout=layout | {"margin": {"b": 100}})
