"""One head at a time: its spectrum, what the spectrum predicts, its entropy; and entropy over all layers.

Curves are thinned to a bounded number of positions, never smoothed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import plotly.graph_objects as go

from theodolite.errors import UsageError
from theodolite.passes.run import Run
from theodolite.report import style
from theodolite.report.data import array, blocks, entropy_limits, evenly, heads_per_block, need
from theodolite.report.drawing.grammar import Sketch, Sketched, line
from theodolite.report.style import order_colour

CURVE_POINTS = 128
MANY_HEADS = 400
FEW_CURVE_POINTS = 48
LAYER_CURVES = 12


@Sketched
def spectrum(run: Run, layer: int = 0, head: int = 0, name: str = "spectrum") -> Sketch:
    """The d_h eigenvalues of one head's W_QK (`name="spectrum"`) or W_QK Σ̂ (`"spectrum_data"`), complex
    plane.

    The other d − d_h eigenvalues are 0 and not drawn.
    """
    values = need(run, name)[layer, head].astype(np.float32)
    marker = {"size": 7, "color": style.PREDICTED, "opacity": 0.8, "line": {"width": 0}}
    points = {"type": "scatter", "x": values[:, 0], "y": values[:, 1], "mode": "markers", "marker": marker}
    points |= {"hovertemplate": "%{x:.4g} + %{y:.4g} i<extra></extra>"}
    layout = {"yaxis": {"scaleanchor": "x", "scaleratio": 1}, "xaxis": {"zeroline": True}}
    return Sketch([points], "real part", "imaginary part", 360, layout)


def _thinned(run: Run, length: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    many = blocks(run) * heads_per_block(run) > MANY_HEADS
    return np.array(evenly(length, FEW_CURVE_POINTS if many else CURVE_POINTS), dtype=np.int32)


_PROPAGATION = (
    ("propagation_by_position", "measured", style.MEASURED, 2.2, "solid"),
    ("propagation_predicted_data", "predicted from W_QK Σ̂", style.PREDICTED, 1.8, "solid"),
    ("propagation_predicted", "predicted from W_QK", style.PREDICTED, 1.8, "dash"),
)


@Sketched
def propagation(run: Run, layer: int = 0, head: int = 0) -> Sketch:
    """ρ(θ) of one head, θ = i/T: the share of inputs whose signal propagates, predicted and measured.

    Bao et al. 2024, eq. 6 and Figs. 2, 3 and 7, with the corrected variance of Lemma 1.
    """
    traces: list[dict[str, Any]] = []
    for name, label, colour, width, dash in _PROPAGATION:
        values = array(run, name)
        if values is None:
            continue
        length = values.shape[2]
        shown = _thinned(run, length)
        hover = f"θ %{{x:.3f}}<br>{label}: %{{y:.3f}}<extra></extra>"
        rho = values[layer, head, shown]
        traces += line((shown + 1) / length, rho, label, colour, dash=dash, width=width, hover=hover)
    if not traces:
        raise UsageError("this run has no propagation curve of any head")
    layout = {"yaxis": {"range": [-0.02, 1.05]}, "xaxis": {"range": [0, 1.01]}}
    return Sketch(traces, "position in the context, θ = i/T", "propagation probability ρ", 360, layout)


def _uniform(positions: Any, limits: Any, hover: str) -> list[dict[str, Any]]:
    """Entropy of uniform attention, the limit of all."""
    return line(positions, limits, "uniform attention", style.GREY, dash="dash", width=1.5, hover=hover)


@Sketched
def head_entropy(run: Run, layer: int = 0, head: int = 0) -> Sketch:
    """Mean attention entropy of one head's queries by position, under the limit ln(keys that they see)."""
    values = need(run, "entropy_by_position")
    shown = _thinned(run, values.shape[2])
    hover = "position %{x}<br>%{y:.3f} nats<extra></extra>"
    measured = values[layer, head, shown]
    traces = line(shown, measured, "this head", style.MEASURED, width=2.2, hover=hover)
    traces += _uniform(shown, entropy_limits(run)[layer, shown], hover)
    layout = {"yaxis": {"rangemode": "tozero"}}
    return Sketch(traces, "position of the query", "entropy in nats", 360, layout)


def entropy_by_position(run: Run) -> go.Figure:
    """Median over each layer's heads of the attention entropy at every position, under its limit."""
    values = need(run, "entropy_by_position")
    shown = np.array(evenly(values.shape[2], CURVE_POINTS), dtype=np.int32)
    limits = entropy_limits(run).max(axis=0)[shown]
    traces: list[Any] = _uniform(shown, limits, "position %{x}<br>at most %{y:.3f} nats<extra></extra>")
    traces.append(style.depth_bar(len(values)))
    for layer in evenly(len(values), LAYER_CURVES):
        rows = values[layer][~np.isnan(values[layer]).all(axis=1)]
        if not len(rows):
            continue
        traces += line(
            shown,
            np.median(rows, axis=0)[shown],
            f"layer {layer}",
            order_colour(layer / max(1, len(values) - 1)),
            width=1.6,
            hover=f"layer {layer}, position %{{x}}<br>median %{{y:.3f}} nats<extra></extra>",
            showlegend=False,
        )
    layout = {"yaxis": {"rangemode": "tozero"}}
    return style.figure(traces, "position of the query", "entropy in nats", height=380, layout=layout)
