"""Position and context as shapes; attention on pictures."""

from __future__ import annotations

from typing import Any

import numpy as np
import plotly.graph_objects as go

from theodolite.attention.sinks import SINK_THRESHOLD
from theodolite.errors import UsageError
from theodolite.passes.run import Run
from theodolite.report import style
from theodolite.report.data import array, evenly, grid_of, need
from theodolite.report.drawing.grammar import Panel, dots, heat, line, panels
from theodolite.report.exhibit import by_block, by_residual_layer, exhibit

SPIRAL_POSITIONS = 160
SPIRAL_CONTEXTS = 250
PICTURE = 180  # pixels: the height of a row of pictures
MOST_PIXELS = 224  # of a side: larger pictures are thinned
PICTURE_GAPS = (0.03, 0.1)


@exhibit(picker=by_residual_layer)
def spiral(run: Run, layer: int = 0) -> go.Figure:
    """Draw the positional basis (violet to green) and cvecs (red) of one layer on the basis' two main components.

    Song & Zhong 2024, Fig. 1.
    """
    basis, grid = need(run, "positional_pca")[layer], grid_of(run)
    first = grid.leading if grid else 1
    positions = np.array(evenly(len(basis) - first, SPIRAL_POSITIONS), dtype=np.int32) + first
    points = basis[positions].astype(np.float32)
    names = [grid.token_text(position) if grid else f"position {position}" for position in positions.tolist()]
    cvecs = array(run, "cvec_pca")
    contexts = np.zeros((0, 2)) if cvecs is None else cvecs[layer][evenly(cvecs.shape[1], SPIRAL_CONTEXTS)]
    x, y = contexts[:, :2].T
    hover, look = "a context vector<extra></extra>", {"size": 3.5, "opacity": 0.4}
    traces = [dots(x, y, None, "context vectors", style.CONTEXT, hover, marker=look)]
    coloured = {"size": 5.5, "color": positions, "colorscale": style.ORDER, "showscale": False}
    hover, drawn = "%{customdata}<br>%{x:.4g}, %{y:.4g}<extra></extra>", coloured | {"line": {"width": 0}}
    named: dict[str, Any] = {"hover": hover, "customdata": names}
    traces += line(points[:, 0], points[:, 1], "positions", style.GREY, width=1, marker=drawn, **named)
    few = {"nticks": 5}
    layout = {"showlegend": False, "xaxis": few, "yaxis": few}
    return style.figure(traces, "component 1", "component 2", height=400, layout=layout)


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
