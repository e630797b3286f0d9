"""Figures of images' tokens, laid out as they lie: the positional basis over rows and columns, values on pictures.

Tokens before the patches ([CLS], registers) are cells above a picture, in their order.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import plotly.graph_objects as go
from plotly import express

from theodolite.attention.sinks import SINK_THRESHOLD
from theodolite.corpus.patches import PatchGrid
from theodolite.errors import UsageError
from theodolite.estimates import Floats
from theodolite.passes.run import Run
from theodolite.report import style
from theodolite.report.data import grid_of, need
from theodolite.report.drawing.geometry import spectrum_sketch
from theodolite.report.drawing.grammar import Panel, heat, panels
from theodolite.report.exhibit import by_block, by_residual_layer, exhibit
from theodolite.system.wording import for_plotly

BEFORE = "Cells above a picture: [CLS], then registers."
COMPONENTS = 3
MAP, PICTURE = 270, 180  # pixels: the height of a row of maps, and of one of pictures
STRIP = 1.6  # cells: how far above a picture the tokens before its patches are
LEAST_RATIO = 2.0  # of a norm to the layer's median: where none is above, colours end there
MOST_PIXELS = 224  # of a side: larger pictures are thinned
GAPS = (0.03, 0.1)


def _need_grid(run: Run) -> PatchGrid:
    grid = grid_of(run)
    if grid is None:
        raise UsageError("this run has no images; survey a model of images to get them")
    return grid


@exhibit(picker=by_residual_layer)
def patch_components(run: Run, layer: int = 0) -> go.Figure:
    """Draw the positional basis' first principal components over the rows and columns of the patches."""
    grid, basis = _need_grid(run), need(run, "positional_pca")[layer]
    shown = []
    for component in range(COMPONENTS):
        values = basis[grid.leading :, component].reshape(grid.shape)
        most = float(np.abs(values).max()) or 1.0
        hover = f"row %{{y}}, column %{{x}}<br>component {component + 1}: %{{z:.4g}}<extra></extra>"
        cells = heat(values, -most, most, hover, scale=style.SIGNED)
        shown.append(_panel(f"component {component + 1}", [cells], grid))
    return panels(shown, COMPONENTS, height=MAP, gaps=GAPS)


@exhibit(picker=by_residual_layer)
def patch_frequencies(run: Run, layer: int = 0) -> go.Figure:
    """Draw how much of the positional basis each frequency of rows and columns holds, over the largest."""
    rows, columns = _need_grid(run).shape
    lowest = need(run, "dct")[layer][:rows, :columns]
    return spectrum_sketch(lowest, "frequency of columns", "frequency of rows")


@exhibit(picker=by_block)
def received_on_pictures(run: Run, layer: int = 0) -> go.Figure:
    """Draw on a few images the attention that each token receives, from the head of a block that pays it most."""
    received = need(run, "example_received")[layer]
    most = max(SINK_THRESHOLD, float(received.max()))
    return _on_pictures(run, received, (0.0, most), "receives %{z:.3f}", "attention received")


@exhibit(picker=by_residual_layer)
def norms_on_pictures(run: Run, layer: int = 0) -> go.Figure:
    """Draw on a few images each token's norm at one layer, over the median of the layer's patches."""
    grid, norms = _need_grid(run), need(run, "example_norm")[layer]
    ratios = norms / (float(np.median(norms[:, grid.leading :])) or 1.0)
    most = max(LEAST_RATIO, float(ratios.max()))
    return _on_pictures(run, ratios, (1.0, most), "%{z:.2f} × the median norm", "norm over the median")


def _on_pictures(run: Run, values: Floats, ends: tuple[float, float], hover: str, title: str) -> go.Figure:
    """Draw values (images, tokens) on the run's pictures, side by side; `ends`: where there is no colour, and full."""
    grid, pictures = _need_grid(run), need(run, "example_picture")
    names = np.array([for_plotly(grid.token_text(position)) for position in range(grid.length)])
    hover = f"%{{customdata}}<br>{hover}<extra></extra>"

    def cells(of_tokens: Floats, named: Any, **more: Any) -> dict[str, Any]:
        return heat(of_tokens, *ends, hover, scale=style.OVERLAY, customdata=named, **more)

    shown = []
    for number, of_tokens in enumerate(values):
        bar = title if number == len(values) - 1 else None
        others, patches = np.split(of_tokens, [grid.leading])
        traces = [cells(patches.reshape(grid.shape), names[grid.leading :].reshape(grid.shape), bar=bar)]
        if grid.leading:
            traces.append(cells(others[None], [names[: grid.leading]], y=[-STRIP], dy=1))
        shown.append(_panel(f"image {number}", traces, grid))
    above = STRIP + 0.2 if grid.leading else 0.0
    drawn = panels(shown, len(shown), height=round(PICTURE * (1 + above / grid.rows)), gaps=GAPS)
    place = {"x": -0.5, "y": -0.5, "sizex": grid.columns, "sizey": grid.rows}
    for number, picture in enumerate(pictures[: len(shown)], 1):
        axes = {f"{axis}ref": axis if number == 1 else f"{axis}{number}" for axis in "xy"}
        drawn.add_layout_image(source=_data_uri(picture), sizing="stretch", layer="below", **place, **axes)
    return drawn


def _panel(title: str, cells: list[Any], grid: PatchGrid) -> Panel:
    top = -0.5 if len(cells) == 1 else -STRIP - 0.7
    axis = {"ticks": "", "showticklabels": False}
    across = {"range": [-0.5, max(grid.columns, grid.leading if len(cells) > 1 else 0) - 0.5]}
    return Panel(
        title, cells, xaxis=axis | across, yaxis=axis | {"range": [grid.rows - 0.5, top]}, square=True
    )


def _data_uri(picture: Any) -> str:
    """Encode a picture (rows, columns, colours) as a PNG in a link, thinned where it is large."""
    step = -(-max(picture.shape[:2]) // MOST_PIXELS)
    pixels = np.ascontiguousarray(picture[::step, ::step], dtype=np.uint8)
    image = express.imshow(pixels, binary_string=True, binary_backend="pypng", binary_compression_level=9)
    return str(image.data[0].source)
