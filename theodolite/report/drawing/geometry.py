"""Position and context as shapes: spirals, Gram matrices, frequencies, singular values; attention on pictures.

Nothing here computes a statistic: rows are chosen and scaled for the eye only, and captions say so.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import plotly.graph_objects as go

from theodolite.attention.sinks import SINK_THRESHOLD
from theodolite.errors import UsageError
from theodolite.estimates import Floats
from theodolite.passes.run import Run
from theodolite.report import style
from theodolite.report.data import array, column, evenly, grid_of, need, provenance
from theodolite.report.drawing.grammar import Panel, cosine_map, dots, heat, line, panels
from theodolite.report.exhibit import by_block, by_residual_layer, exhibit
from theodolite.report.style import order_colour
from theodolite.system.wording import for_plotly

SPIRAL_POSITIONS = 160
SPIRAL_CONTEXTS = 250
GRAM_CELLS = 50_000
CURVES = 13
ROUNDING = 1e-10  # of the largest singular value: less is no direction
DCT_DECADES = 4
PICTURE = 180  # pixels: the height of a row of pictures
MOST_PIXELS = 224  # of a side: larger pictures are thinned
PICTURE_GAPS = (0.03, 0.1)


def _components(run: Run, layer: int) -> tuple[Any, Any]:
    """Return at most SPIRAL_POSITIONS positions, and the positional basis there on its first components.

    Of a text, positions 1…T−1; of images, the patches.
    """
    basis, grid = need(run, "positional_pca")[layer], grid_of(run)
    first = grid.leading if grid else 1
    positions = np.array(evenly(len(basis) - first, SPIRAL_POSITIONS), dtype=np.int32) + first
    return positions, basis[positions].astype(np.float32)


@exhibit(picker=by_residual_layer)
def spiral(run: Run, layer: int = 0) -> go.Figure:
    """Draw the positional basis and cvecs of one layer on the positional basis' first two principal components.

    Song & Zhong 2024, Fig. 1. Positions run from violet to green, the patches of images in reading order; cvecs are
    the red points.
    """
    positions, points = _components(run, layer)
    grid = grid_of(run)
    names = [grid.token_text(position) if grid else f"position {position}" for position in positions.tolist()]
    cvecs = array(run, "cvec_pca")
    contexts = np.zeros((0, 2)) if cvecs is None else cvecs[layer][evenly(cvecs.shape[1], SPIRAL_CONTEXTS)]
    x, y = contexts[:, :2].T
    hover, look = "a context vector<extra></extra>", {"size": 3.5, "opacity": 0.4}
    traces = [dots(x, y, None, "context vectors", style.CONTEXT, hover, marker=look)]
    coloured = {"size": 5.5, "color": positions, "colorscale": style.ORDER}
    traces += line(
        points[:, 0],
        points[:, 1],
        "positions",
        style.GREY,
        width=1,
        marker=coloured | {"showscale": False, "line": {"width": 0}},
        hover="%{customdata}<br>%{x:.4g}, %{y:.4g}<extra></extra>",
        customdata=names,
    )
    few = {"nticks": 5}
    layout = {"showlegend": False, "xaxis": few, "yaxis": few}
    return style.figure(traces, "component 1", "component 2", height=400, layout=layout)


@exhibit(picker=by_residual_layer, when=lambda run: grid_of(run) is None)
def waves(run: Run, layer: int = 0) -> go.Figure:
    """Draw the positional basis' first three principal components against position: waves of rising frequency."""
    positions, points = _components(run, layer)
    traces: list[dict[str, Any]] = []
    for component in range(3):
        name, colour = f"component {component + 1}", order_colour(component / 2)
        hover = f"position %{{x}}<br>{name}: %{{y:.4g}}<extra></extra>"
        traces += line(positions, points[:, component], name, colour, width=2, hover=hover)
    return style.figure(traces, "position", "projection", height=340)


@exhibit()
def singular_values(run: Run) -> go.Figure:
    """Draw the singular values of P over the first, at evenly chosen layers, with the ScreeNOT rank marked.

    What is nothing but rounding, such as the last value (P's columns sum to 0), is not drawn. Song & Zhong 2024,
    Fig. 3, left.
    """
    values, ranks = need(run, "singular_values"), column(run.layers, "rank_screenot")
    traces: list[Any] = [style.depth_bar(len(values))]
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


@exhibit(picker=by_residual_layer)
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


@exhibit(picker=by_residual_layer, when=lambda run: grid_of(run) is None)
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


@exhibit(picker=by_block)
def received_on_pictures(run: Run, layer: int = 0) -> go.Figure:
    """Draw on a few images the attention that each patch receives, from the head of a block that pays it most."""
    grid = grid_of(run)
    if grid is None:
        raise UsageError("this run has no images; survey a model of images to get them")
    received = need(run, "example_received")[layer, :, grid.leading :]
    most = max(SINK_THRESHOLD, float(received.max()))
    axis = {"ticks": "", "showticklabels": False}
    hover = "row %{y}, column %{x}<br>receives %{z:.3f}<extra></extra>"
    shown = []
    for number, patches in enumerate(received):
        bar = "attention received" if number == len(received) - 1 else None
        cells = heat(patches.reshape(grid.shape), 0, most, hover, scale=style.OVERLAY, bar=bar)
        down = axis | {"autorange": "reversed"}
        shown.append(Panel(f"image {number}", [cells], xaxis=axis, yaxis=down, square=True))
    drawn = panels(shown, len(shown), height=PICTURE, gaps=PICTURE_GAPS)
    place = {"x": -0.5, "y": -0.5, "sizex": grid.columns, "sizey": grid.rows}
    for number, picture in enumerate(need(run, "example_picture")[: len(shown)], 1):
        axes = {f"{axis}ref": axis if number == 1 else f"{axis}{number}" for axis in "xy"}
        drawn.add_layout_image(source=_data_uri(picture), sizing="stretch", layer="below", **place, **axes)
    return drawn


def _data_uri(picture: Any) -> str:
    """Encode a picture (rows, columns, colours) as a PNG in a link, thinned where it is large."""
    from plotly import express  # takes 0.4 s to import, and few pages have pictures

    step = -(-max(picture.shape[:2]) // MOST_PIXELS)
    pixels = np.ascontiguousarray(picture[::step, ::step], dtype=np.uint8)
    image = express.imshow(pixels, binary_string=True, binary_backend="pypng", binary_compression_level=9)
    return str(image.data[0].source)
