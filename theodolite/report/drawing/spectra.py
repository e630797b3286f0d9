"""One head at a time: its spectrum, what the spectrum predicts, its entropy; and entropy over all layers.

Figures of one head have a companion that gives only its data for another head (`*_traces`: one patch a
trace), so that a page can hold all heads and draw one. Curves are thinned to a bounded number of positions,
never smoothed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import plotly.graph_objects as go

from theodolite.errors import UsageError
from theodolite.report import style
from theodolite.report.data import array, blocks, entropy_limits, evenly, heads_per_block, need
from theodolite.report.style import Patch, order_colour

if TYPE_CHECKING:
    from theodolite.passes.run import Run

CURVE_POINTS = 128
MANY_HEADS = 400
FEW_CURVE_POINTS = 48
LAYER_CURVES = 12


def spectrum_traces(run: Run, layer: int, head: int, name: str = "spectrum") -> list[Patch]:
    """The data of `spectrum` for another head."""
    values = need(run, name)[layer, head].astype(np.float32)
    return [{"x": np.ascontiguousarray(values[:, 0]), "y": np.ascontiguousarray(values[:, 1])}]


def spectrum(run: Run, layer: int = 0, head: int = 0, name: str = "spectrum") -> go.Figure:
    """The d_h eigenvalues of one head's W_QK (`name="spectrum"`) or W_QK Σ̂ (`"spectrum_data"`), complex
    plane.

    The other d − d_h eigenvalues are 0 and not drawn.
    """
    points = go.Scatter(
        **spectrum_traces(run, layer, head, name)[0],
        mode="markers",
        marker={"size": 7, "color": style.PREDICTED, "opacity": 0.8, "line": {"width": 0}},
        hovertemplate="%{x:.4g} + %{y:.4g} i<extra></extra>",
    )
    return style.figure(
        [points],
        "real part",
        "imaginary part",
        height=360,
        layout={"yaxis": {"scaleanchor": "x", "scaleratio": 1}, "xaxis": {"zeroline": True}},
    )


def _thinned(run: Run, length: int) -> np.ndarray[Any, np.dtype[np.intp]]:
    many = blocks(run) * heads_per_block(run) > MANY_HEADS
    return np.array(evenly(length, FEW_CURVE_POINTS if many else CURVE_POINTS), dtype=np.intp)


_PROPAGATION = (
    ("propagation_by_position", "measured", {"color": style.MEASURED, "width": 2.2}),
    ("propagation_predicted_data", "predicted from W_QK Σ̂", {"color": style.PREDICTED, "width": 1.8}),
    (
        "propagation_predicted",
        "predicted from W_QK",
        {"color": style.PREDICTED, "width": 1.8, "dash": "dash"},
    ),
)


def propagation_traces(run: Run, layer: int, head: int) -> list[Patch]:
    """The data of `propagation` for another head, at most CURVE_POINTS positions."""
    patches = []
    for name, _, _ in _PROPAGATION:
        values = array(run, name)
        if values is not None:
            positions = _thinned(run, values.shape[2])
            patches.append({"y": values[layer, head, positions].astype(np.float32)})
    return patches


def propagation(run: Run, layer: int = 0, head: int = 0) -> go.Figure:
    """ρ(θ) of one head, θ = i/T: the share of inputs whose signal propagates, predicted and measured.

    Bao et al. 2024, eq. 6 and Figs. 2, 3 and 7, with the corrected variance of Lemma 1.
    """
    curves = [(name, label, line) for name, label, line in _PROPAGATION if array(run, name) is not None]
    if not curves:
        raise UsageError("this run has no propagation curve of any head")
    traces = []
    for (name, label, line), patch in zip(curves, propagation_traces(run, layer, head), strict=True):
        length = need(run, name).shape[2]
        theta = (_thinned(run, length) + 1) / length
        traces.append(
            go.Scatter(
                x=theta.astype(np.float32),
                **patch,
                mode="lines",
                name=label,
                line=line,
                hovertemplate=f"θ %{{x:.3f}}<br>{label}: %{{y:.3f}}<extra></extra>",
            )
        )
    return style.figure(
        traces,
        "position in the context, θ = i/T",
        "propagation probability ρ",
        height=360,
        layout={"yaxis": {"range": [-0.02, 1.05]}, "xaxis": {"range": [0, 1.01]}},
    )


def head_entropy_traces(run: Run, layer: int, head: int) -> list[Patch]:
    """The data of `head_entropy` for another head; the second trace, the limit, is the same for all."""
    values = need(run, "entropy_by_position")
    positions = _thinned(run, values.shape[2])
    return [{"y": values[layer, head, positions].astype(np.float32)}, {}]


def head_entropy(run: Run, layer: int = 0, head: int = 0) -> go.Figure:
    """Mean attention entropy of one head's queries by position, under the limit ln(keys that they see)."""
    length = need(run, "entropy_by_position").shape[2]
    positions = _thinned(run, length)
    measured, _ = head_entropy_traces(run, layer, head)
    hover = "position %{x}<br>%{y:.3f} nats<extra></extra>"
    traces = [
        go.Scatter(
            x=positions.astype(np.int32),
            **measured,
            mode="lines",
            name="this head",
            line={"color": style.MEASURED, "width": 2.2},
            hovertemplate=hover,
        ),
        go.Scatter(
            x=positions.astype(np.int32),
            y=entropy_limits(run)[layer, positions].astype(np.float32),
            mode="lines",
            name="uniform attention",
            line={"color": style.GREY, "width": 1.5, "dash": "dash"},
            hovertemplate=hover,
        ),
    ]
    return style.figure(
        traces,
        "position of the query",
        "entropy in nats",
        height=360,
        layout={"yaxis": {"rangemode": "tozero"}},
    )


def entropy_by_position(run: Run) -> go.Figure:
    """Median over each layer's heads of the attention entropy at every position, under its limit."""
    values = need(run, "entropy_by_position")
    length = values.shape[2]
    positions = np.array(evenly(length, CURVE_POINTS), dtype=np.intp)
    limit = go.Scatter(
        x=positions.astype(np.int32),
        y=entropy_limits(run).max(axis=0)[positions].astype(np.float32),
        mode="lines",
        name="uniform attention",
        line={"color": style.GREY, "width": 1.5, "dash": "dash"},
        hovertemplate="position %{x}<br>at most %{y:.3f} nats<extra></extra>",
    )
    traces = [limit, style.depth_bar(len(values))]
    for layer in evenly(len(values), LAYER_CURVES):
        rows = values[layer][~np.isnan(values[layer]).all(axis=1)]
        if not len(rows):
            continue
        traces.append(
            go.Scatter(
                x=positions.astype(np.int32),
                y=np.median(rows, axis=0)[positions].astype(np.float32),
                mode="lines",
                name=f"layer {layer}",
                showlegend=False,
                line={"color": order_colour(layer / max(1, len(values) - 1)), "width": 1.6},
                hovertemplate=f"layer {layer}, position %{{x}}<br>median %{{y:.3f}} nats<extra></extra>",
            )
        )
    return style.figure(
        traces,
        "position of the query",
        "entropy in nats",
        height=380,
        layout={"yaxis": {"rangemode": "tozero"}},
    )
