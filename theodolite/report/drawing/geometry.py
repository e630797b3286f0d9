"""Position and context as shapes: spirals, Gram matrices, frequencies, singular values.

Each figure of one layer has a companion that gives only its data for another layer (`*_traces`: one patch a
trace), so that a page can hold all layers and draw one. Nothing here computes a statistic: rows are chosen
and scaled for the eye only, and captions say so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from theodolite.report import published, style
from theodolite.report.data import Floats, array, blocks, column, evenly, need, need_column, provenance
from theodolite.report.style import Patch, order_colour
from theodolite.system.wording import for_plotly, number

if TYPE_CHECKING:
    from theodolite.passes.run import Run

SPIRAL_POSITIONS = 160
SPIRAL_CONTEXTS = 250
GRAM_CELLS = 900_000
CURVES = 13
ROUNDING = 1e-10  # of the largest singular value: less is no direction
DCT_DECADES = 4.0
CUTOFFS = (10, 5, 3, 1)
INHERITED = {
    "PPᵀ": ("layers", "pp_low_frequency_", style.POSITION, published.LOW_FREQUENCY),
    "PWPᵀ": ("heads", "pwp_low_frequency_", style.SKY, published.LOW_FREQUENCY_PWP),
    "QK matrix": ("heads", "qk_low_frequency_", style.MEASURED, published.LOW_FREQUENCY_QK),
}
"""Rows of Table 3 → where a run has them, their colour, and the numbers published for GPT-2."""


def _float32(values: Floats) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.ascontiguousarray(values, dtype=np.float32)


def spiral_traces(run: Run, layer: int) -> list[Patch]:
    """The data of `spiral` at `layer`: cvecs, then positions 1…T−1 in order, on components 1 and 2."""
    positions, cvecs = need(run, "positional_pca")[layer], array(run, "cvec_pca")
    shown = np.array(evenly(len(positions) - 1, SPIRAL_POSITIONS)) + 1
    points = _float32(positions[shown])
    no_points = np.zeros((0, 3))
    context_points = no_points if cvecs is None else cvecs[layer][evenly(cvecs.shape[1], SPIRAL_CONTEXTS)]
    context_points = _float32(context_points)
    return [
        {"x": context_points[:, 0], "y": context_points[:, 1]},
        {"x": points[:, 0], "y": points[:, 1], "customdata": shown.astype(np.int32)},
    ]


def _positions_marker(run: Run, size: float) -> dict[str, Any]:
    positions = need(run, "positional_pca").shape[1]
    return {
        "size": size,
        "color": np.array(evenly(positions - 1, SPIRAL_POSITIONS), dtype=np.int32) + 1,
        "colorscale": style.ORDER,
        "cmin": 1,
        "cmax": positions - 1,
        "showscale": False,
        "line": {"width": 0},
    }


def spiral(run: Run, layer: int = 0) -> go.Figure:
    """Positional basis and cvecs of one layer on the positional basis' first two principal components.

    Song & Zhong 2024, Fig. 1. Positions run from violet to green; cvecs are the red points.
    """
    cvecs, positions = spiral_traces(run, layer)
    traces = [
        go.Scatter(
            **cvecs,
            mode="markers",
            name="context vectors",
            marker={"size": 3.5, "color": style.CONTEXT, "opacity": 0.4},
            hovertemplate="a context vector<extra></extra>",
        ),
        go.Scatter(
            **positions,
            mode="lines+markers",
            name="positions",
            line={"width": 1, "color": style.GREY},
            marker=_positions_marker(run, 5.5),
            hovertemplate="position %{customdata}<br>%{x:.4g}, %{y:.4g}<extra></extra>",
        ),
    ]
    return style.figure(
        traces,
        "component 1",
        "component 2",
        height=400,
        layout={"showlegend": False, "xaxis": {"nticks": 5}, "yaxis": {"nticks": 5}},
    )


def waves_traces(run: Run, layer: int) -> list[Patch]:
    """The data of `waves` at `layer`."""
    positions = need(run, "positional_pca")[layer]
    shown = np.array(evenly(len(positions) - 1, SPIRAL_POSITIONS)) + 1
    points = _float32(positions[shown])
    return [{"x": shown.astype(np.int32), "y": points[:, component]} for component in range(3)]


def waves(run: Run, layer: int = 0) -> go.Figure:
    """The positional basis' first three principal components against position: waves of rising frequency."""
    colours = [order_colour(component / 2) for component in range(3)]
    traces = [
        go.Scatter(
            **patch,
            mode="lines",
            name=f"component {component + 1}",
            line={"color": colours[component], "width": 2},
            hovertemplate=f"position %{{x}}<br>component {component + 1}: %{{y:.4g}}<extra></extra>",
        )
        for component, patch in enumerate(waves_traces(run, layer))
    ]
    return style.figure(traces, "position", "projection", height=340)


def _gram_rows(run: Run) -> tuple[list[int], list[int]]:
    """Which positions and contexts of a Gram matrix are kept, so that all layers stay under GRAM_CELLS."""
    layers, size, _ = need(run, "gram").shape
    positions = len(need(run, "gram_position"))
    most = max(48, int((GRAM_CELLS / layers) ** 0.5))
    share = min(1.0, most / size)
    return (
        evenly(positions, max(2, int(positions * share))),
        [positions + i for i in evenly(size - positions, max(0, int((size - positions) * share)))],
    )


def gram_traces(run: Run, layer: int) -> list[Patch]:
    """The data of `gram` at `layer`: cosines, positions first, then contexts ordered by label."""
    rows = np.array([*_gram_rows(run)[0], *_gram_rows(run)[1]])
    return [{"z": _float32(need(run, "gram")[layer][np.ix_(rows, rows)])}]


def _gram_names(run: Run) -> list[str]:
    """One distinct name a row: its position, or its number and label as a context."""
    positions, contexts = _gram_rows(run)
    shown_positions = need(run, "gram_position")
    labels = array(run, "gram_label")
    names = [for_plotly(name) for name in provenance(run, "corpus", "labels") or []]
    row_names = [f"position {int(shown_positions[index])}" for index in positions]
    for index in contexts:
        number = index - len(shown_positions)
        label = -1 if labels is None else int(labels[number])
        row_names.append(f"context {number}" + (f" of {names[label]}" if 0 <= label < len(names) else ""))
    return row_names


def gram(run: Run, layer: int = 0) -> go.Figure:
    """Normalised Gram matrix [P̄, C̄]ᵀ[P̄, C̄] of positions and contexts at one layer.

    Song & Zhong 2024, Fig. 2.
    """
    positions, contexts = _gram_rows(run)
    names = _gram_names(run)
    heat = go.Heatmap(
        **gram_traces(run, layer)[0],
        x=names,
        y=names,
        zmin=-1,
        zmax=1,
        colorscale=style.SIGNED,
        colorbar=style.colour_bar("cosine"),
        hovertemplate="%{y}<br>%{x}<br>cosine %{z:.2f}<extra></extra>",
    )
    block_centres = [len(positions) / 2, len(positions) + len(contexts) / 2]
    axis = {
        "type": "category",
        "showgrid": False,
        "tickmode": "array",
        "tickvals": block_centres if contexts else block_centres[:1],
        "ticktext": ["positions →", "contexts, by label"],
        "ticks": "",
        "constrain": "domain",
    }
    border, end = len(positions) - 0.5, len(names) - 0.5
    line = {"type": "line", "line": {"width": 1, "color": style.GREY}}
    shapes = [
        line | {"x0": border, "x1": border, "y0": -0.5, "y1": end},
        line | {"y0": border, "y1": border, "x0": -0.5, "x1": end},
    ]
    return style.figure(
        [heat],
        height=440,
        layout={
            "xaxis": axis,
            "yaxis": axis | {"autorange": "reversed", "scaleanchor": "x", "tickangle": -90},
            "shapes": shapes if contexts else [],
        },
    )


def dct_traces(run: Run, layer: int) -> list[Patch]:
    """The data of `dct` at `layer`: log10 of each magnitude over the layer's largest, cut at −4."""
    magnitudes = np.abs(need(run, "dct")[layer])
    largest = magnitudes.max()
    with np.errstate(divide="ignore", invalid="ignore"):
        decades = np.log10(magnitudes / largest) if largest > 0 else np.full_like(magnitudes, np.nan)
    return [{"z": _float32(np.clip(decades, -DCT_DECADES, 0)), "customdata": _float32(magnitudes)}]


def dct(run: Run, layer: int = 0) -> go.Figure:
    """Lowest 10 × 10 coefficients of the 2-D DCT of the positional Gram matrix.

    Song & Zhong 2024, Fig. 3, right.
    """
    ticks = [-4, -3, -2, -1, 0]
    heat = go.Heatmap(
        **dct_traces(run, layer)[0],
        zmin=-DCT_DECADES,
        zmax=0,
        colorscale=style.MAGNITUDE,
        colorbar=style.colour_bar(
            "share of the largest",
            tickvals=ticks,
            ticktext=["≤ 1/10 000", "1/1000", "1/100", "1/10", "1"],
        ),
        xgap=1,
        ygap=1,
        hovertemplate="frequencies %{y}, %{x}<br>magnitude %{customdata:.4g}<extra></extra>",
    )
    axis = {"showgrid": False, "zeroline": False, "dtick": 1, "ticks": "", "constrain": "domain"}
    return style.figure(
        [heat],
        "frequency",
        "frequency",
        height=440,
        layout={"xaxis": axis, "yaxis": axis | {"autorange": "reversed", "scaleanchor": "x"}},
    )


def singular_values(run: Run) -> go.Figure:
    """Singular values of P over the first, at evenly chosen layers, with the ScreeNOT rank marked.

    What is nothing but rounding, such as the last value (P's columns sum to 0), is not drawn. Song & Zhong 2024,
    Fig. 3, left.
    """
    values, ranks = need(run, "singular_values"), column(run.layers, "rank")
    layers = evenly(len(values), CURVES)
    traces = [style.depth_bar(len(values))]
    for layer in layers:
        largest = values[layer].max()
        if not largest > 0:
            continue
        relative = np.where(values[layer] > ROUNDING * largest, values[layer] / largest, np.nan)
        colour = order_colour(layer / max(1, len(values) - 1))
        index = np.arange(1, len(relative) + 1, dtype=np.int32)
        rank = 0 if ranks is None or np.isnan(ranks[layer]) else int(ranks[layer])
        size = np.where(index == rank, 10, 3)
        traces.append(
            go.Scatter(
                x=index,
                y=_float32(relative),
                customdata=_float32(values[layer]),
                mode="lines+markers",
                name=f"layer {layer}",
                showlegend=False,
                line={"color": colour, "width": 1.3},
                marker={"size": size.astype(np.int32), "color": colour, "symbol": "circle"},
                hovertemplate=f"layer {layer}, number %{{x}}<br>singular value %{{customdata:.4g}}"
                + (f"<br>rank {rank}" if rank else "")
                + "<extra></extra>",
            )
        )
    return style.figure(
        traces,
        "number",
        "singular value over the largest",
        height=360,
        layout={"yaxis": {"type": "log", "dtick": 1, "exponentformat": "power"}},
    )


def _smoothness_rows(run: Run) -> list[str]:
    return [
        name
        for name, (table, prefix, _, _) in INHERITED.items()
        if column(getattr(run, table), f"{prefix}{CUTOFFS[0]}") is not None
    ]


def inherited_smoothness_traces(run: Run, cutoff: int) -> list[Patch]:
    """The data of `inherited_smoothness` at another cutoff: each curve, then its published level."""
    patches: list[Patch] = []
    for name in _smoothness_rows(run):
        table, prefix, _, paper = INHERITED[name]
        frame = getattr(run, table)
        values = pd.Series(need_column(frame, f"{prefix}{cutoff}"))
        by_layer = values.groupby(frame["layer"].to_numpy(dtype=int))
        medians = by_layer.median()
        spans = zip(by_layer.min(), by_layer.max(), strict=True)
        patches += [
            {
                "x": medians.index.to_numpy(dtype=np.int32),
                "y": medians.to_numpy(dtype=np.float32),
                "customdata": [f"{number(low)} to {number(high)}" for low, high in spans],
            },
            {"y": np.full(2, paper[cutoff], dtype=np.float32)},
        ]
    return patches


def inherited_smoothness(run: Run, cutoff: int = CUTOFFS[0]) -> go.Figure:
    """Share of energy in the K×K lowest frequencies of PPᵀ, and of PWPᵀ and the QK logits over a layer's heads.

    Beside the numbers of Song & Zhong 2024, Table 3, dotted. `cutoff`: K.
    """
    need_column(run.heads, f"pwp_low_frequency_{cutoff}")
    layers, patches = blocks(run), inherited_smoothness_traces(run, cutoff)
    traces: list[go.Scatter] = []
    for curve, level, name in zip(patches[::2], patches[1::2], _smoothness_rows(run), strict=True):
        table, _, colour, _ = INHERITED[name]
        spread = "<br>%{customdata} by head" if table == "heads" else ""
        traces += [
            go.Scatter(
                **curve,
                name=name,
                mode="lines+markers",
                line={"color": colour, "width": 2.2},
                marker={"size": 5},
                hovertemplate=f"layer %{{x}}<br>{name}: %{{y:.3f}}{spread}<extra></extra>",
            ),
            go.Scatter(
                **level,
                x=[0, layers],
                name="GPT-2",
                legendgroup="GPT-2",
                showlegend=not traces,
                legendrank=2000,
                mode="lines",
                line={"color": colour, "width": 1.2, "dash": "dot"},
                hovertemplate=f"GPT-2: %{{y:.3f}} ({name}, Table 3)<extra></extra>",
            ),
        ]
    axis: dict[str, Any] = {"range": [-0.3, layers + 0.3], "zeroline": False}
    return style.figure(
        traces,
        "layer",
        "share of energy",
        layout={"xaxis": axis | style.every_tick(layers), "yaxis": {"range": [0, 1.05]}},
    )
