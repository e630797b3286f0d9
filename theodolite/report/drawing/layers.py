"""Curves over depth: one small figure per layer measure, with the published ranges as bands.

Layer 0 is the input of the first block, layer ℓ the residual stream after block ℓ; position 0 is left out of
every curve except those that name it. Every figure needs only the run's layer table. Whiskers are one standard error.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import plotly.graph_objects as go

from theodolite.errors import UsageError
from theodolite.passes.run import Run
from theodolite.report import published, style
from theodolite.report.data import Floats, column, columns_of, error_of, layer_numbers, limit_of, need_column
from theodolite.report.drawing.grammar import line, reference
from theodolite.system.wording import for_plotly, with_error

_DASHES = dict(zip(published.MODELS, ("solid", "dash", "dot", "dashdot"), strict=True))
WIDE_RANGE = 8.0  # stable ranks above it need a log axis; learned positions have about 2


def _curve_if_any(run: Run, name: str, label: str, colour: str, dash: str = "solid") -> list[Any]:
    """A curve that its figure can do without."""
    return [] if column(run.layers, name) is None else _curve(run, name, label, colour, dash)


def _curve(run: Run, name: str, label: str, colour: str, dash: str = "solid") -> list[Any]:
    values, (errors, told, hover) = need_column(run.layers, name), _whiskers(run, name, label)
    look: dict[str, Any] = {"dash": dash, "width": 2.2, "marker": 5, "hover": hover, "customdata": told}
    return line(layer_numbers(run), values, label, colour, errors=errors, **look)


def _whiskers(run: Run, name: str, label: str) -> tuple[Floats | None, list[str] | None, str]:
    """The standard errors of a layer measure, None where it has none; its values with them; what hovering tells."""
    errors = error_of(run, name)
    if np.nansum(errors) == 0:
        return None, None, f"layer %{{x}}<br>{label}: %{{y:.4g}}<extra></extra>"
    told = [with_error(*pair) for pair in zip(need_column(run.layers, name), errors, strict=True)]
    return errors, told, f"layer %{{x}}<br>{label}: %{{customdata}}<extra></extra>"


def _band(run: Run, model: str, low: list[float], high: list[float], what: str) -> list[Any]:
    """A shaded range over relative depth: the published layers are stretched onto this model's."""
    last = float(layer_numbers(run).max())
    x = [round(float(step), 4) for step in np.linspace(0, last, len(low))]
    is_closest, edge = model == published.closest(run), style.translucent(style.REFERENCE, style.BAND_EDGE)
    return [
        go.Scatter(
            x=x + x[::-1],
            y=high + low[::-1],
            name=model,
            mode="lines",
            fill="toself",
            fillcolor=style.translucent(style.REFERENCE, style.BAND),
            line={"width": 0.8, "color": edge, "dash": _DASHES[model]},
            hoveron="fills",
            text=f"{model}: {what}",
            hoverinfo="text",
            legendrank=2000,
            visible=True if is_closest else "legendonly",
        )
    ]


def _layer_bands(run: Run, table: published.Rows, what: str) -> list[Any]:
    return [
        trace
        for model in published.MODELS
        for trace in _band(run, model, *published.layer_range(table[model]), what)
    ]


def _average_bands(run: Run, name: str, what: str) -> list[Any]:
    traces: list[Any] = []
    for model, average in published.AVERAGES.items():
        mean, deviation = getattr(average, name)
        low, high = max(mean - deviation, 0.0), min(mean + deviation, 1.0)
        traces += _band(run, model, [low, low], [high, high], f"{what} {mean:g} ({deviation:g})")
    return traces


def _chart(run: Run, traces: list[Any], y: str, **layout: Any) -> go.Figure:
    return style.figure(traces, "layer", y, layout={"xaxis": style.layer_axis(layer_numbers(run))} | layout)


def own_column(run: Run, name: str) -> go.Figure:
    """A column of the layers table that the caller declared, at every layer."""
    declared = columns_of(run, "layers")[name]
    return _chart(
        run, _curve(run, name, for_plotly(declared.title), style.MEASURED), for_plotly(declared.title)
    )


def rank(run: Run) -> go.Figure:
    """ScreeNOT rank of the positional basis at every layer, beside Table 4."""
    traces = _layer_bands(run, published.RANK, "rank at this depth, Table 4")
    traces += _curve(run, "rank", "this model", style.MEASURED)
    return _chart(run, traces, "dimensions", yaxis={"rangemode": "tozero"})


def stable_rank(run: Run) -> go.Figure:
    """Stable rank ‖P‖_F²/‖P‖₂² of the positional basis at every layer, beside Table 5."""
    traces = _layer_bands(run, published.STABLE_RANK, "stable rank at this depth, Table 5")
    traces += _curve(run, "stable_rank", "this model", style.MEASURED)
    highest = np.nanmax(need_column(run.layers, "stable_rank"))
    wide = {"type": "log", "dtick": "D2", "tickformat": "~g"}
    return _chart(run, traces, "stable rank", yaxis=wide if highest > WIDE_RANGE else {"rangemode": "tozero"})


def relative_norm(run: Run) -> go.Figure:
    """Relative norm ‖P‖₂/‖M‖₂ of the positional basis at every layer, beside Table 6."""
    traces = _layer_bands(run, published.RELATIVE_NORM, "relative norm at this depth, Table 6")
    traces += _curve(run, "relative_norm", "this model", style.MEASURED)
    return _chart(run, traces, "relative norm", yaxis={"range": [0, 1.05]})


def _level(
    last: float, level: float, model: str, what: str, colour: str, *, shown: bool = True, legend: bool = True
) -> list[Any]:
    """A published number that holds for all layers, as a dotted line; `shown`: before a reader asks for it."""
    return line(
        [0, last],
        [level] * 2,
        model,
        colour,
        dash="dot",
        width=1.2,
        hover=f"{model}: %{{y:.3f}} ({what})<extra></extra>",
        showlegend=legend,
        legendrank=2000,
        visible=True if shown else "legendonly",
    )


def low_frequency(run: Run) -> go.Figure:
    """Share of the Gram matrix's energy in its K×K lowest frequencies, K = 1, 3, 5, 10, beside Table 3."""
    traces: list[Any] = []
    colours = {size: style.order_colour(index / 3) for index, size in enumerate((1, 3, 5, 10))}
    last = float(layer_numbers(run).max())
    for size, colour in colours.items():
        traces += _curve(run, f"low_frequency_{size}", f"K = {size}", colour)
        share = published.LOW_FREQUENCY[size]
        traces += _level(last, share, "GPT-2", f"K = {size}, Table 3", colour, legend=size == 10)
    for model, share in published.LOW_FREQUENCY_OTHER_TEXT.items():
        traces += _level(last, share, model, "K = 10, Table 2", style.REFERENCE, shown=False)
    return _chart(run, traces, "share of energy", yaxis={"range": [0, 1.05]})


def similarity(run: Run) -> go.Figure:
    """Mean |cosine| of context vectors within and between labels at every layer, beside Table 1."""
    traces = _average_bands(run, "within", "within one document, Table 1:")
    between = _average_bands(run, "between", "between documents, Table 1:")
    for low, high in zip(between, traces, strict=True):
        low.legendgroup = high.legendgroup = high.name
        low.showlegend = False
    traces += between
    traces += _curve(run, "similarity_within", "within labels", style.MEASURED)
    traces += _curve_if_any(run, "similarity_between", "between labels", style.MEASURED, dash="dash")
    return _chart(run, traces, "mean |cosine|", yaxis={"range": [0, 1.05]})


def incoherence(run: Run) -> go.Figure:
    """|cosine| of positional and context directions at every layer, its random baseline, and Table 1."""
    traces = _average_bands(run, "incoherence", "mean incoherence, Table 1:")
    traces += _curve_if_any(run, "incoherence_max", "largest", style.MEASURED, dash="dot")
    traces += _curve(run, "incoherence_mean", "mean", style.MEASURED)
    for name, label, dash in (("_random", "mean, random", "dash"), ("_max_random", "largest, random", "dot")):
        traces += _curve_if_any(run, f"incoherence{name}", label, style.REFERENCE, dash)
    return _chart(run, traces, "|cosine|", yaxis={"rangemode": "tozero"})


def clusters(run: Run) -> go.Figure:
    """Silhouette of the labels, and agreement of k-means with them, at every layer; no published numbers."""
    traces = _curve_if_any(run, "silhouette", "silhouette of the labels", style.MEASURED)
    agreement = "k-means against labels (ARI)"
    traces += _curve_if_any(run, "cluster_ari", agreement, style.MEASURED, dash="dash")
    if not traces:
        raise UsageError("this run has no 'silhouette'; survey the model on a text with labels to get it")
    return _chart(run, traces, "agreement", yaxis={"zeroline": True})


def norm(run: Run) -> go.Figure:
    """Mean ‖h‖₂ of tokens at every layer, and apart of the first and of a special token at the end (log axis)."""
    traces = _curve(run, "norm", "positions ≥ 1", style.MEASURED)
    traces += _curve_if_any(run, "norm_first", "first token", style.MEASURED, dash="dash")
    traces += _curve_if_any(run, "norm_last", "end token", style.MEASURED, dash="dot")
    return _chart(run, traces, "mean ‖h‖₂", yaxis={"type": "log", "dtick": "D2", "tickformat": "~s"})


def cosine_previous(run: Run) -> go.Figure:
    """Mean cosine between a token's hidden state at a layer and at the layer before."""
    traces = _curve(run, "cosine_previous", "to the previous layer", style.MEASURED)
    return _chart(run, traces, "mean cosine", yaxis={"range": [-0.1, 1.05]})


def rank_collapse(run: Run) -> go.Figure:
    """Distance of the token matrix to rank one at every layer, and the line below which it counts as lost."""
    last = float(layer_numbers(run).max())
    traces = _curve(run, "rank_collapse", "‖X − 1x̄ᵀ‖/‖X‖", style.MEASURED)
    traces += reference(
        [-0.3, last + 0.3], limit_of("layers", "rank_collapse").limit, "collapsed below", dash="dash"
    )
    return _chart(run, traces, "residual", yaxis={"range": [0, 1.05]})


def massive_activations(run: Run) -> go.Figure:
    """How many activations are massive (|x| > 100 and > 1000 × the layer's median), first token apart."""
    traces: list[Any] = []
    for name, label, colour in (
        ("massive_activations", "positions ≥ 1", style.MEASURED),
        ("massive_activations_first", "first token", "rgba(0,0,0,0)"),
        ("massive_activations_last", "end token", style.GREY),
    ):
        if traces and column(run.layers, name) is None:
            continue
        errors, told, hover = _whiskers(run, name, label)
        traces.append(
            go.Bar(
                x=layer_numbers(run),
                y=need_column(run.layers, name).astype(np.float32),
                error_y=None if errors is None else style.error_bars(errors),
                customdata=told,
                name=label,
                hovertemplate=hover,
                marker={"color": colour, "line": {"width": 1.2, "color": style.MEASURED}},
            )
        )
    return _chart(run, traces, "count", barmode="group", yaxis={"rangemode": "tozero"})


def outlier_dimensions(run: Run) -> go.Figure:
    """How many feature dimensions are outliers (|x| ≥ 6 for a share of tokens) at every layer."""
    traces = _curve(run, "outlier_dimensions", "outlier dimensions", style.MEASURED)
    return _chart(run, traces, "dimensions", yaxis={"rangemode": "tozero"})
