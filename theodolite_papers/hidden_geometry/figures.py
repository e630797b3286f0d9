"""The figures of positional bases and of logits' constituents that experiments draw of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from theodolite import Run
from theodolite.errors import UsageError
from theodolite.estimates import Floats
from theodolite.measure.constituents import ADDITIVE
from theodolite.report import style
from theodolite.report.data import (
    array,
    attributed,
    column,
    error_of,
    evenly,
    layer_numbers,
    need,
    provenance,
    value_of,
)
from theodolite.report.drawing.constituents import GROUP_COLOURS
from theodolite.report.drawing.grammar import Panel, bars, cosine_map, heat, line, panels
from theodolite.report.style import order_colour
from theodolite.system.wording import for_plotly, head_name, number
from theodolite_papers import drawing
from theodolite_papers.drawing import Line
from theodolite_papers.hidden_geometry import published

WAVE_POSITIONS = 160
CURVES = 13
GRAM_CELLS = 50_000
ROUNDING = 1e-10  # of the largest singular value: less is no direction
DCT_DECADES = 4
PANELS = 6
"""Heads of one pattern that are drawn; the table has them all."""

STANDS_OUT = 2.0
"""A head follows a pattern, weakly at least, where it pays it so many times what uniform attention does."""

PANEL, TITLE = 128, 22  # pixels of one panel with its title, and of its title


def waves(run: Run, layer: int = 0) -> go.Figure:
    """Draw the positional basis' first three principal components against position: waves of rising frequency."""
    basis = need(run, "positional_pca")[layer, 1:]
    rows = evenly(len(basis), WAVE_POSITIONS)
    positions, points = np.array(rows, dtype=np.int32) + 1, basis[rows].astype(np.float32)
    traces: list[dict[str, Any]] = []
    for component in range(3):
        name, colour = f"component {component + 1}", order_colour(component / 2)
        hover = f"position %{{x}}<br>{name}: %{{y:.4g}}<extra></extra>"
        traces += line(positions, points[:, component], name, colour, width=2, hover=hover)
    return style.figure(traces, "position", "projection", height=340)


def singular_values(run: Run) -> go.Figure:
    """Draw the singular values of P over the first, at evenly chosen layers, with the ScreeNOT rank marked.

    What is nothing but rounding, such as the last value (P's columns sum to 0), is not drawn. Song & Zhong 2024,
    Fig. 3, left.
    """
    values, ranks = need(run, "singular_values"), column(run.layers, "rank_screenot")
    traces: list[Any] = [drawing.depth_bar(len(values))]
    index = np.arange(1, values.shape[1] + 1, dtype=np.int32)
    for layer in evenly(len(values), CURVES):
        of_layer, largest = values[layer], values[layer].max()
        if not largest > 0:
            continue
        colour = order_colour(layer / max(1, len(values) - 1))
        rank = 0 if ranks is None or np.isnan(ranks[layer]) else int(ranks[layer])
        hover = f"layer {layer}, number %{{x}}<br>singular value %{{customdata:.4g}}"
        hover += (f"<br>rank {rank}" if rank else "") + "<extra></extra>"
        look: dict[str, Any] = {
            "marker": {"size": np.where(index == rank, 10, 3), "color": colour},
            "showlegend": False,
        }
        relative = np.where(of_layer > ROUNDING * largest, of_layer / largest, np.nan)
        absolute = of_layer.astype(np.float32)
        traces += line(
            index, relative, f"layer {layer}", colour, width=1.3, hover=hover, customdata=absolute, **look
        )
    powers = {"type": "log", "dtick": 1, "exponentformat": "power"}
    titles = ("number", "singular value over the largest")
    return style.figure(traces, *titles, height=360, layout={"yaxis": powers})


def dct(run: Run, layer: int = 0) -> go.Figure:
    """Draw the lowest 10 × 10 coefficients of the 2-D DCT of the positional Gram matrix, over the layer's largest.

    Song & Zhong 2024, Fig. 3, right.
    """
    magnitudes = np.abs(need(run, "dct")[layer])
    largest = magnitudes.max()
    with np.errstate(divide="ignore", invalid="ignore"):
        decades = np.log10(magnitudes / largest) if largest > 0 else np.full_like(magnitudes, np.nan)
    ticks = {
        "tickvals": list(range(-DCT_DECADES, 1)),
        "ticktext": ["≤ 1/10 000", "1/1000", "1/100", "1/10", "1"],
    }
    cells = heat(
        np.clip(decades, -DCT_DECADES, 0),
        -DCT_DECADES,
        0,
        "frequencies %{y}, %{x}<br>magnitude %{customdata:.4g}<extra></extra>",
        bar=style.colour_bar("share of the largest", **ticks),
        cells=True,
        customdata=magnitudes.astype(np.float32),
    )
    axis = {"dtick": 1, "ticks": "", "constrain": "domain"}
    layout = {"xaxis": axis, "yaxis": axis | {"autorange": "reversed", "scaleanchor": "x"}}
    return style.figure([cells], "frequency", "frequency", height=440, layout=layout)


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


def low_frequency(run: Run) -> go.Figure:
    """Draw the share of the Gram matrix's energy in its K×K lowest frequencies, K = 1, 3, 5, 10, beside Table 3."""
    layers, sizes = layer_numbers(run), (1, 3, 5, 10)
    colours = {size: order_colour(index / 3) for index, size in enumerate(sizes)}
    drawn = drawing.curves(
        layers,
        [Line(f"K = {size}", colour, marker=5) for size, colour in colours.items()],
        [value_of(run, f"low_frequency_{size}") for size in sizes],
        ("layer", "share of energy"),
        errors=[error_of(run, f"low_frequency_{size}") for size in sizes],
        xaxis=style.layer_axis(layers),
        yaxis={"range": [0, 1.05]},
    )
    ends = layers[[0, -1]]
    for size, colour in colours.items():
        hover = f"GPT-2: %{{y:.3f}} (K = {size}, Table 3)<extra></extra>"
        own: dict[str, Any] = {"dash": "dot", "width": 1.2, "hover": hover, "showlegend": size == 10}
        drawn.add_traces(line(ends, [published.LOW_FREQUENCY[size]] * 2, "GPT-2", colour, **own))
    return drawn


def standing_out(run: Run, pattern: str) -> list[pd.DataFrame]:
    """Keep the heads that pay the pattern `STANDS_OUT` times what uniform attention does: the rest is noise."""
    return [
        of_head
        for of_head in attributed(run, pattern)
        if of_head["score"].iloc[0] >= STANDS_OUT * of_head["uniform"].iloc[0]
    ]


def attribution(run: Run, pattern: str) -> go.Figure:
    """Draw attention along a pattern by its strongest heads: from one group of constituents alone, and with it ablated.

    One panel per head that stands out, the strongest first; where none does, the strongest. Lines: the score as it is
    (solid) and of uniform attention (dotted).
    """
    heads = standing_out(run, pattern)[:PANELS] or attributed(run, pattern)[:1]
    if not heads:
        raise UsageError(
            f"this run has no attribution of {pattern!r}; survey a language model on a text to get it"
        )
    rows = pd.concat(heads)
    if not (rows.loc[rows["group"] == ADDITIVE, "share"].abs() > 0).any():
        heads = [of_head[of_head["group"] != ADDITIVE] for of_head in heads]
    end = 1.06 * float(rows[["score", "only", "without"]].to_numpy().max())
    last = len(heads) - 1
    drawn = [_attribution_panel(of_head, end, n == 0, n == last) for n, of_head in enumerate(heads)]
    gap = TITLE / (PANEL * len(heads))
    layout = {"barmode": "group", "bargap": 0.28, "margin": {"l": 84, "r": 12, "b": 44}}
    return panels(drawn, 1, height=PANEL, gaps=(0, gap), layout=layout | {"legend": {"traceorder": "normal"}})


def _attribution_panel(rows: pd.DataFrame, end: float, first: bool, last: bool) -> Panel:
    """Draw one head's bars, its score and that of uniform attention; `end` of the axis of scores, named in the last."""
    drawn = [
        bars(
            rows[name],
            rows["group"].tolist(),
            label,
            colour,
            f"%{{y}}<br>{label}: %{{x:.3f}}<br>%{{customdata:.1%}} of the logits' variance<extra></extra>",
            customdata=rows["share"].to_numpy(dtype=np.float32),
            orientation="h",
            legendgroup=name,
            showlegend=first,
        )
        for name, label, colour in (("only", "alone", style.MEASURED), ("without", "ablated", style.SKY))
    ]
    layer, head, score, uniform = rows.iloc[0][["layer", "head", "score", "uniform"]]
    return Panel(
        head_name(int(layer), int(head)),
        drawn,
        "mean attention along the pattern" if last else "",
        xaxis={"range": [0, end], "showticklabels": last, "ticks": "outside" if last else ""},
        yaxis={"autorange": "reversed", "ticks": "", "showgrid": False, "dtick": 1, "tickfont": {"size": 11}},
        # Short, since a panel may be as narrow as a phone and Plotly cuts what is longer.
        note=f"{number(score, 2)}, uniform {number(uniform, 2)}",
        marks=[
            (float(score), {"width": 1.6, "color": style.GREY}),
            (float(uniform), {"width": 1.2, "dash": "dot", "color": style.GREY}),
        ],
    )


def shares_by_layer(layers: Floats, shares: Mapping[str, Floats]) -> go.Figure:
    """Draw mean shares of logit variance at every layer, stacked; negative ones below zero. `shares`: group → (L)."""
    drawn = [
        bars(
            layers, values, group, GROUP_COLOURS[group], f"layer %{{x}}<br>{group}: %{{y:.3f}}<extra></extra>"
        )
        for group, values in shares.items()
    ]
    axis = {"zeroline": False} | style.every_tick(len(layers))
    layout = {"barmode": "relative", "bargap": 0.25, "xaxis": axis}
    return style.figure(drawn, "layer", "mean share of logit variance", height=340, layout=layout)
