"""Figures over depth: one small figure of curves per layer measure, with the published ranges as bands, and outliers.

Layer 0 is the input of the first block, layer ℓ the residual stream after block ℓ; position 0 is left out of
every curve except those that name it. Whiskers are one standard error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from theodolite.errors import UsageError
from theodolite.measure.publications import BAO, SONG, ZHANG
from theodolite.passes.run import Run
from theodolite.report import published, style
from theodolite.report.data import (
    Floats,
    column,
    columns_of,
    error_of,
    layer_numbers,
    limit_of,
    need,
    need_column,
    own_columns,
)
from theodolite.report.drawing.grammar import (
    bars,
    heat,
    level,
    line,
    map_height,
    reference,
    rows_down,
    sentence,
)
from theodolite.report.exhibit import Choice, Draw, Option, exhibit
from theodolite.system.wording import for_plotly, with_error

_DASHES = dict(zip(published.MODELS, ("solid", "dash", "dot", "dashdot"), strict=True))
WIDE_RANGE = 8.0  # stable ranks above it need a log axis; learned positions have about 2
DIMENSIONS = 40  # of a map at most
NAMED: dict[str, Any] = {"type": "category"}  # an axis of dimensions or tokens
TURNED = {"tickangle": -90, "tickfont": {"size": 10}}  # its names, where there are many
FROM_ZERO = {"rangemode": "tozero"}
SHARES = {"range": [0, 1.05]}
LOG = {"type": "log", "dtick": "D2", "tickformat": "~g"}
Look = tuple[str, ...]  # a curve's name in the legend, and where they are not the model's own: dash, colour


def _chart(
    run: Run, y: str, curves: Mapping[str, Look], yaxis: dict[str, Any], below: Sequence[Any] = ()
) -> go.Figure:
    """Draw columns of the layer table against the layer, those that the run has, over the traces `below`.

    Raises:
        UsageError: the run has none of them.
    """
    drawn = [
        trace
        for name, look in curves.items()
        if column(run.layers, name) is not None
        for trace in _curve(run, name, *look)
    ]
    if not drawn:
        need_column(run.layers, next(iter(curves)))
    layout = {"xaxis": style.layer_axis(layer_numbers(run)), "yaxis": yaxis}
    return style.figure([*below, *drawn], "layer", y, layout=layout)


def _curve(run: Run, name: str, label: str, dash: str = "solid", colour: str = style.MEASURED) -> list[Any]:
    errors, told, hover = _whiskers(run, name, label)
    look: dict[str, Any] = {"dash": dash, "width": 2.2, "marker": 5, "hover": hover, "customdata": told}
    return line(layer_numbers(run), need_column(run.layers, name), label, colour, errors=errors, **look)


def _whiskers(run: Run, name: str, label: str) -> tuple[Floats | None, list[str] | None, str]:
    """Return a measure's standard errors, its values with them in words (None: it has none), and the hover text."""
    errors = error_of(run, name)
    if np.nansum(errors) == 0:
        return None, None, f"layer %{{x}}<br>{label}: %{{y:.4g}}<extra></extra>"
    told = [with_error(*pair) for pair in zip(need_column(run.layers, name), errors, strict=True)]
    return errors, told, f"layer %{{x}}<br>{label}: %{{customdata}}<extra></extra>"


def _last(run: Run) -> float:
    return float(layer_numbers(run).max())


def _band(
    run: Run, model: str, low: Sequence[float], high: Sequence[float], what: str, **more: Any
) -> dict[str, Any]:
    """A published range as a shaded band over relative depth: its layers are stretched onto this model's."""
    x = np.linspace(0, _last(run), len(low)).round(4).tolist()
    edge = style.translucent(style.REFERENCE, style.BAND_EDGE)
    return {
        "type": "scatter",
        "x": x + x[::-1],
        "y": [*high, *low[::-1]],
        "name": model,
        "mode": "lines",
        "fill": "toself",
        "fillcolor": style.translucent(style.REFERENCE, style.BAND),
        "line": {"width": 0.8, "color": edge, "dash": _DASHES[model]},
        "hoveron": "fills",
        "text": f"{model}: {what}",
        "hoverinfo": "text",
        "legendrank": 2000,
        "visible": True if model == published.closest(run) else "legendonly",
    } | more


def _layer_bands(run: Run, table: published.Rows, what: str) -> list[Any]:
    return [_band(run, model, *published.layer_range(table[model]), what) for model in published.MODELS]


def _average_bands(run: Run, name: str, what: str, **more: Any) -> list[Any]:
    bands = []
    for model, average in published.AVERAGES.items():
        mean, deviation = getattr(average, name)
        low, high = max(mean - deviation, 0.0), min(mean + deviation, 1.0)
        told = f"{what}, Table 1: {mean:g} ({deviation:g})"
        bands.append(_band(run, model, [low, low], [high, high], told, legendgroup=model, **more))
    return bands


@exhibit(
    "position",
    "Rank of the positional basis",
    "layers.rank",
    shows="Singular values above the noise level. Whiskers, here and below: one standard error over contexts.",
    look_for="about ten, falling slowly with depth.",
    source=f"ScreeNOT; {SONG}, Table 4",
)
def rank(run: Run) -> go.Figure:
    """ScreeNOT rank of the positional basis at every layer, beside Table 4."""
    bands = _layer_bands(run, published.RANK, "rank at this depth, Table 4")
    return _chart(run, "dimensions", {"rank": ("this model",)}, FROM_ZERO, bands)


@exhibit(
    "position",
    "Stable rank",
    "layers.stable_rank",
    shows="‖P‖_F²/‖P‖₂²: the number of directions, weighted by energy.",
    look_for="about 2 with learned positions, near 1 with ALiBi or RoPE after layer 0.",
    source=f"{SONG}, Table 5",
)
def stable_rank(run: Run) -> go.Figure:
    """Stable rank ‖P‖_F²/‖P‖₂² of the positional basis at every layer, beside Table 5."""
    bands = _layer_bands(run, published.STABLE_RANK, "stable rank at this depth, Table 5")
    is_wide = np.nanmax(need_column(run.layers, "stable_rank")) > WIDE_RANGE
    return _chart(run, "stable rank", {"stable_rank": ("this model",)}, LOG if is_wide else FROM_ZERO, bands)


@exhibit(
    "position",
    "Relative norm of the positional basis",
    "layers.relative_norm",
    shows="The largest singular value of the positional basis over that of all centred hidden states.",
    look_for="a large value that drops in the last layers, where position is no longer needed.",
    source=f"{SONG}, Table 6",
)
def relative_norm(run: Run) -> go.Figure:
    """Relative norm ‖P‖₂/‖M‖₂ of the positional basis at every layer, beside Table 6."""
    bands = _layer_bands(run, published.RELATIVE_NORM, "relative norm at this depth, Table 6")
    return _chart(run, "relative norm", {"relative_norm": ("this model",)}, SHARES, bands)


@exhibit(
    "position",
    "Smoothness of the positional basis",
    "layers.low_frequency_10",
    shows="How smoothly the vector changes with position: 1 smooth, 0 noise. Energy in the K × K lowest frequencies.",
    look_for="K = 10 close to 1.",
    source=f"{SONG}, Tables 2 and 3",
    unhealthy="K = 10 near one half, as in models trained on addition.",
)
def low_frequency(run: Run) -> go.Figure:
    """Share of the Gram matrix's energy in its K×K lowest frequencies, K = 1, 3, 5, 10, beside Table 3."""
    colours = {size: style.order_colour(index / 3) for index, size in enumerate((1, 3, 5, 10))}
    levels: list[Any] = []
    for size, colour in colours.items():
        share, named = published.LOW_FREQUENCY[size], size == 10
        levels += level([0, _last(run)], share, "GPT-2", f"K = {size}, Table 3", colour, showlegend=named)
    for model, share in published.LOW_FREQUENCY_OTHER_TEXT.items():
        levels += level(
            [0, _last(run)], share, model, "K = 10, Table 2", style.REFERENCE, visible="legendonly"
        )
    curves = {f"low_frequency_{size}": (f"K = {size}", "solid", colour) for size, colour in colours.items()}
    return _chart(run, "share of energy", curves, SHARES, levels)


@exhibit(
    "context",
    "Similarity of contexts within and between labels",
    "layers.similarity_within",
    shows="Mean |cosine| between context vectors: solid within labels, dashed between labels.",
    look_for="a wide gap between the two lines.",
    source=f"{SONG}, Table 1",
    unhealthy="both lines near 1: contexts are almost indistinguishable.",
)
def similarity(run: Run) -> go.Figure:
    """Mean |cosine| of context vectors within and between labels at every layer, beside Table 1."""
    bands = _average_bands(run, "within", "within one document")
    bands += _average_bands(run, "between", "between documents", showlegend=False)
    curves = {"similarity_within": ("within labels",), "similarity_between": ("between labels", "dash")}
    return _chart(run, "mean |cosine|", curves, SHARES, bands)


@exhibit(
    "context",
    "Incoherence of position and context",
    "layers.incoherence_mean",
    shows="|cosine| between positional and context vectors, with the random baseline for the same dimensions.",
    look_for="a mean close to the random baseline: position and context occupy nearly orthogonal subspaces.",
    source=f"{SONG}, section 5 and Table 1",
    unhealthy="a mean of 0.3 or more: reading one interferes with the other.",
)
def incoherence(run: Run) -> go.Figure:
    """|cosine| of positional and context directions at every layer, its random baseline, and Table 1."""
    curves = {
        "incoherence_mean": ("mean",),
        "incoherence_max": ("largest", "dot"),
        "incoherence_random": ("mean, random", "dash", style.REFERENCE),
        "incoherence_max_random": ("largest, random", "dot", style.REFERENCE),
    }
    return _chart(run, "|cosine|", curves, FROM_ZERO, _average_bands(run, "incoherence", "mean incoherence"))


@exhibit(
    "context",
    "Do context vectors cluster by label?",
    "layers.silhouette",
    shows="Silhouette of the labels (1: compact and separated, 0: no structure), and how well k-means finds them "
    "(adjusted Rand index; 1: perfect, 0: chance), for labels with at least two contexts.",
    look_for="both well above 0; many labels with few contexts each make that harder.",
    source=f"{SONG}, claim 2 of section 2; both indices are ours",
)
def clusters(run: Run) -> go.Figure:
    """Silhouette of the labels, and agreement of k-means with them, at every layer; no published numbers."""
    curves = {
        "silhouette": ("silhouette of the labels",),
        "cluster_ari": ("k-means against labels (ARI)", "dash"),
    }
    if all(column(run.layers, name) is None for name in curves):
        raise UsageError("this run has no 'silhouette'; survey the model on a text with labels to get it")
    return _chart(run, "agreement", curves, {"zeroline": True})


@exhibit(
    "depth",
    "Norm of the hidden states",
    "layers.norm",
    shows="Mean norm of the hidden states, with the first token shown separately.",
    look_for="steady growth; a first token far above the others carries massive activations.",
    source=f"{SONG}, Fig. 8",
)
def norm(run: Run) -> go.Figure:
    """Mean ‖h‖₂ of tokens at every layer, and apart of the first and of a special token at the end (log axis)."""
    curves = {
        "norm": ("positions ≥ 1",),
        "norm_first": ("first token", "dash"),
        "norm_last": ("end token", "dot"),
    }
    return _chart(run, "mean ‖h‖₂", curves, LOG | {"tickformat": "~s"})


@exhibit(
    "depth",
    "Cosine similarity between consecutive layers",
    "layers.cosine_previous",
    key="cosine",
    shows="Mean cosine between a token's hidden states before and after a block.",
    look_for="a low value at the first block, then values close to 1.",
    source=f"{SONG}, Fig. 8",
    unhealthy="1 throughout: blocks that do nothing.",
)
def cosine_previous(run: Run) -> go.Figure:
    """Mean cosine between a token's hidden state at a layer and at the layer before."""
    curves = {"cosine_previous": ("to the previous layer",)}
    return _chart(run, "mean cosine", curves, {"range": [-0.1, 1.05]})


@exhibit(
    "depth",
    "Distance from rank collapse",
    "layers.rank_collapse",
    shows="How far a context's tokens are from being one vector, ‖X − 1x̄ᵀ‖_F/‖X‖_F; dashed: the health check's limit.",
    look_for="a curve well above the dashed line.",
    source=f"{BAO}, section 5",
    unhealthy="a decay to 0: all tokens become the same vector, and depth adds nothing.",
)
def rank_collapse(run: Run) -> go.Figure:
    """Distance of the token matrix to rank one at every layer, and the line below which it counts as lost."""
    limit = reference(
        [-0.3, _last(run) + 0.3], limit_of("layers", "rank_collapse").limit, "collapsed below", dash="dash"
    )
    return _chart(run, "residual", {"rank_collapse": ("‖X − 1x̄ᵀ‖/‖X‖",)}, SHARES, limit)


def _by_own(run: Run, draw: Draw) -> Choice:
    options = [Option(one.name, one.title, one.group, one.meaning) for one in own_columns(run, "layers")]
    return Choice("column", options, lambda name: draw(name=name))


@exhibit(
    "depth",
    "Columns of your own",
    key="own-columns",
    shows="What was added to this survey, by layer.",
    look_for="what its declaration says.",
    source="given with each column",
    picker=_by_own,
    when=lambda run: bool(own_columns(run, "layers")),
    alone=False,
    given={"name": lambda run: own_columns(run, "layers")[0].name},
)
def own_column(run: Run, name: str) -> go.Figure:
    """A column of the layers table that the caller declared, at every layer."""
    title = for_plotly(columns_of(run, "layers")[name].title)
    return _chart(run, title, {name: (title,)}, {})


@exhibit(
    "outliers",
    "Massive activations",
    "layers.massive_activations",
    shows="Values over 100 and over 1000 × the layer's median, summed over the contexts.",
    look_for="the layers where they appear and disappear; usually they are at the first token only.",
    source=f"{ZHANG}, section 2",
    unhealthy="many at later tokens.",
    when=lambda run: (
        run.layers.filter(["massive_activations", "massive_activations_first"]).sum().gt(0).any()
    ),
)
def massive_activations(run: Run) -> go.Figure:
    """How many activations are massive (|x| > 100 and > 1000 × the layer's median), first token apart."""
    need_column(run.layers, "massive_activations")
    drawn = []
    for name, label, colour in (
        ("massive_activations", "positions ≥ 1", style.MEASURED),
        ("massive_activations_first", "first token", "rgba(0,0,0,0)"),
        ("massive_activations_last", "end token", style.GREY),
    ):
        if (values := column(run.layers, name)) is None:
            continue
        errors, told, hover = _whiskers(run, name, label)
        look: dict[str, Any] = {"customdata": told, "error_y": style.error_bars(errors)}
        look["marker"] = {"color": colour, "line": {"width": 1.2, "color": style.MEASURED}}
        drawn.append(bars(layer_numbers(run), values, label, colour, hover, **look))
    layout = {"xaxis": style.layer_axis(layer_numbers(run)), "barmode": "group", "yaxis": FROM_ZERO}
    return style.figure(drawn, "layer", "count", layout=layout)


@exhibit(
    "outliers",
    "Outlier dimensions",
    "layers.outlier_dimensions",
    shows="Feature dimensions in which |x| ≥ 6 for a minimum share of the tokens.",
    look_for="a handful of dimensions. Growth with depth often just follows the growth of the norm.",
    source=f"{ZHANG}, section 1",
)
def outlier_dimensions(run: Run) -> go.Figure:
    """How many feature dimensions are outliers (|x| ≥ 6 for a share of tokens) at every layer."""
    return _chart(run, "dimensions", {"outlier_dimensions": ("outlier dimensions",)}, FROM_ZERO)


def largest_columns(values: Floats, most: int = DIMENSIONS) -> list[int]:
    """Pick the columns with the largest maxima, `most` at most, and return them in order."""
    highest = np.nan_to_num(values).max(axis=0)
    return sorted(np.argsort(-highest, kind="stable")[:most].tolist())


@exhibit(
    "outliers",
    "Outlier dimensions by layer",
    "arrays.outlier_share",
    shows="Share of tokens with |x| ≥ 6, for the dimensions with the highest shares.",
    look_for="columns that persist across many layers: one dimension shared by all tokens, as a tag would be.",
    source=f"{ZHANG}, Fig. 2(b)",
    wide=True,
)
def outlier_shares(run: Run) -> go.Figure:
    """Map the share of tokens with |x| ≥ 6 in the dimensions where it is highest; a sentence where it is 0 in all.

    Colours run to the highest share: outliers in one token of a hundred are seen, too.
    """
    shares = np.nan_to_num(need(run, "outlier_share"))
    if not shares.any():
        return sentence("No dimension has |x| ≥ 6 in any token past the first.")
    dimensions = [dimension for dimension in largest_columns(shares) if shares[:, dimension].any()]
    cells = heat(
        shares[:, dimensions],
        0,
        float(shares.max()),
        "layer %{y}, dimension %{x}<br>%{z:.1%} of tokens<extra></extra>",
        bar=style.colour_bar("share of tokens", tickformat="~%"),
        cells=True,
        x=[str(dimension) for dimension in dimensions],
    )
    layout = {"xaxis": NAMED | TURNED, "yaxis": rows_down(len(shares))}
    return style.figure([cells], "feature dimension", "layer", height=map_height(len(shares)), layout=layout)
