"""Figures of logits by constituent: one head's panels on a prompt, all heads' positional logits, shares by layer.

The panels take a split of logits; of it they centre rows, sum parts and take shares of variance, as their titles
say. The other figures take plain arrays. Nothing here reads a run or a model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import plotly.graph_objects as go
import torch

from theodolite.errors import UsageError
from theodolite.measure.attribution import chosen_heads
from theodolite.measure.constituents import Constituents, share_sums
from theodolite.report import style
from theodolite.report.data import Floats
from theodolite.report.drawing.theory import TILE_GAP, TILE_HEADROOM, TILES_ACROSS
from theodolite.system.wording import for_plotly, number, percent, shown_token
from theodolite.theory.decomposition import PARTS

MOST_POSITIONS = 128
"""Positions drawn: seven panels of so many squared are under a megabyte of page."""

MOST_LABELS = 32
"""Tokens written at an axis at most, evenly chosen: more could not be read. Hovering names every one."""

SATURATED = 99.5
"""Percentile of |logit| at which the colours of the centred panels saturate."""

QK, ATTENTION, CONSTANT, ADDITIVE = "QK", "attention", "constant", "additive"
COLUMNS = (
    ("position", "pos-pos", "cvec-pos", CONSTANT),
    ("pos-cvec", "context", "cvec-cvec", ADDITIVE),
    (QK, ATTENTION),
)
"""Where the panels that are there stand, column by column: query position above context, key position left of it."""

WITH_CONSTANTS = {
    ("pos", "pos"): "position",
    ("pos", CONSTANT): "position",
    (CONSTANT, "pos"): "position",
    ("cvec", "cvec"): "context",
    ("cvec", CONSTANT): "context",
    (CONSTANT, "cvec"): "context",
}
"""Panels that mean and bias are within, by what is on the other side; all others are named after their sides."""

GROUP_COLOURS = {
    "position": style.POSITION,
    "context": style.CONTEXT,
    "cross": style.BOTH,
    "constant": style.REFERENCE,
    "pos-pos": style.SKY,
    "cvec-cvec": style.ORANGE,
    "additive": style.GREEN,
}
PANEL, HEADROOM, FOOTROOM = 330, 26, 8  # pixels: a row of panels, of it its title, and the space below
GAP = 0.035  # between columns, of the width
NAMED = 9  # characters of a token at the axes


@dataclass(frozen=True)
class Panel:
    """One picture of a head: values (n, n) of queries by keys, NaN where the query does not see the key.

    `share`: of the variance of the logits that the softmax sees; those of the constituents sum to 1. NaN for
    attention, and where logits do not vary.
    """

    name: str
    values: Floats
    share: float


def constituent_panels(
    split: Constituents, head: int, *, context: int = 0, first: int = 1, raw: bool = False
) -> list[Panel]:
    """A head's four constituents, what is in neither, their sum, and the attention.

    "position" is pos × pos with the pairs of pos and a constant part (mean or bias), "context" the same of cvec;
    "constant" has the pairs of constant parts, "additive" is there where the family adds a bias to its logits.
    They sum to "QK", the model's own logits before a cap. `raw`, as published: "pos-pos" and "cvec-cvec"
    without the constant parts, which are then all in "constant".

    Args:
        split: from `constituents`, or made coarser into "pos", "cvec" and "constant".
        head, context: which.
        first: the first position shown, as query and key; `MOST_POSITIONS` are shown at most.
        raw: the logits as they are, and constant parts apart; else every row less its mean over the keys that
            the query sees (without position 0, unless it is shown), which the softmax does not notice.

    Shares are those of a survey: over all positions but position 0, whatever is shown.

    Raises:
        UsageError: no such head, context or position, or a split into other parts.
    """
    of_head = _single_head(split, head, context)
    length = of_head.query.shape[3]
    if not 0 <= first < length:
        raise UsageError(f"position {first} does not exist: this context has positions 0 to {length - 1}")
    sums = share_sums(of_head.query, of_head.key, of_head.inputs)
    shares, additive_share = sums.shares()
    matrices: dict[str, torch.Tensor] = {}
    shares_of: dict[str, float] = {}
    logits = of_head.logits_of(0).cpu()
    for a, query in enumerate(of_head.names):
        for b, key in enumerate(of_head.names):
            name = _panel_name(query, key, raw)
            matrices[name] = matrices.get(name, 0) + logits[a, b]
            shares_of[name] = shares_of.get(name, 0.0) + float(shares[0, a, b])
    if of_head.inputs.bias is not None:
        matrices[ADDITIVE], shares_of[ADDITIVE] = of_head.additive[0].cpu(), float(additive_share[0])
    matrices[QK], shares_of[QK] = of_head.total[0].cpu(), float(sum(shares_of.values()))
    visible = of_head.visible[0].cpu()
    centred_over = visible.clone()
    centred_over[:, : min(first, 1)] = False
    window = slice(first, first + MOST_POSITIONS)

    def panel(name: str, values: torch.Tensor) -> Panel:
        if not raw and name != ATTENTION:
            mean = (values * centred_over).sum(-1, keepdim=True) / centred_over.sum(
                -1, keepdim=True
            ).clamp_min(1)
            values = values - mean
        visible_values = values.masked_fill(~visible, math.nan)[window, window]
        return Panel(name, visible_values.numpy(), shares_of.get(name, math.nan))

    return [
        panel(name, values) for name, values in (matrices | {ATTENTION: of_head.attention[0].cpu()}).items()
    ]


def _panel_name(query: str, key: str, raw: bool) -> str:
    if raw:
        return CONSTANT if CONSTANT in (query, key) else f"{query}-{key}"
    return CONSTANT if query == key == CONSTANT else WITH_CONSTANTS.get((query, key), f"{query}-{key}")


def qk_panels(
    split: Constituents,
    head: int,
    tokens: Sequence[str],
    *,
    context: int = 0,
    first: int = 1,
    raw: bool = False,
) -> go.Figure:
    """`constituent_panels` as heat maps: Song & Zhong 2024, Fig. 6 and Figs. 30 to 34.

    Titles give the shares of variance. Centred panels have one colour scale, so that they can be compared; raw
    ones each their own, from the lowest to the highest value, which the title names. Zooming in one zooms all.

    Args:
        tokens: the text of each of the context's T tokens, shown as it is: nothing in it is taken for markup.
        split, head, context, first, raw: as for `constituent_panels`.

    Raises:
        UsageError: no such head, context or position, a split into other parts, or not T tokens.
    """
    panels = {
        panel.name: panel for panel in constituent_panels(split, head, context=context, first=first, raw=raw)
    }
    length = split.query.shape[3]
    if len(tokens) != length:
        raise UsageError(f"{len(tokens)} tokens for a context of {length}")
    positions = range(first, min(length, first + MOST_POSITIONS))
    texts = [shown_token(tokens[position]) for position in positions]
    names = [f"{position} {for_plotly(text)}" for position, text in zip(positions, texts, strict=True)]
    short = [for_plotly(text if len(text) <= NAMED else text[: NAMED - 1] + "…") for text in texts]
    limit = _limit([panel.values for panel in panels.values() if panel.name != ATTENTION])
    traces: list[Any] = []
    layout: dict[str, Any] = {"annotations": [], "margin": {"l": 70, "t": 8, "r": 70, "b": 70}}
    cells = _panel_positions(panels)
    rows = max(row + 1 for _, row, _ in cells)
    occupied = {(column, row) for column, row, _ in cells}
    for index, (column, row, name) in enumerate(cells):
        panel = panels[name]
        suffix = style.axis_suffix(index)
        traces.append(_heat(panel, names, suffix, raw))
        bottom = (column, row + 1) not in occupied
        layout |= _axes(suffix, (column, row, rows), short, bottom=bottom)
        layout["annotations"].append(_title(panel, suffix, raw))
    bars = _colour_axes(limit, _range(panels[ATTENTION].values)[1], rows, raw)
    drawn = style.figure(traces, height=78 + PANEL * rows, layout=layout | bars)
    drawn.update_layout(xaxis_title_text="", yaxis_title_text="")
    drawn.update_xaxes(title_text="key", selector={"showticklabels": True})
    drawn.update_yaxes(title_text="query", selector={"showticklabels": True})
    return drawn


def _single_head(split: Constituents, head: int, context: int) -> Constituents:
    """The split of one context and head, into position, context and constants."""
    _, contexts, heads, _, _ = split.query.shape
    if not 0 <= head < heads:
        raise UsageError(f"head {head} does not exist: this layer has heads 0 to {heads - 1}")
    if not 0 <= context < contexts:
        raise UsageError(f"context {context} does not exist: the split has contexts 0 to {contexts - 1}")
    if split.names == PARTS:
        split = split.coarse()
    if set(split.names) != {"pos", "cvec", CONSTANT}:
        raise UsageError(
            f"the parts are {', '.join(split.names)}: give all of them, or pos, cvec and constant"
        )
    inputs, own = chosen_heads(split.inputs, [head]), slice(context, context + 1)

    def of_context(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return tensor if tensor is None or len(tensor) == 1 else tensor[own]

    inputs = replace(
        inputs,
        query=inputs.query[own].double(),
        key=inputs.key[own].double(),
        value=inputs.value[own],
        mask=of_context(inputs.mask),
        bias=of_context(inputs.bias),
    )
    query, key = (side[:, own, head : head + 1] for side in (split.query, split.key))
    return replace(split, query=query, key=key, inputs=inputs)


def _panel_positions(panels: Mapping[str, Panel]) -> list[tuple[int, int, str]]:
    """Column, row and name of the panels that are there."""
    present = [[name for name in names if name in panels] for names in COLUMNS]
    return [(column, row, name) for column, names in enumerate(present) for row, name in enumerate(names)]


def _limit(values: Sequence[Floats]) -> float:
    magnitudes = np.abs(np.concatenate([panel[np.isfinite(panel)] for panel in values]))
    return float(np.percentile(magnitudes, SATURATED)) if magnitudes.size and magnitudes.any() else 1.0


def _heat(panel: Panel, names: list[str], suffix: str, raw: bool) -> go.Heatmap:
    if panel.name == ATTENTION:
        colours: dict[str, Any] = {"coloraxis": "coloraxis2"}
    elif raw:
        low, high = _range(panel.values)
        colours = {"zmin": low, "zmax": high, "colorscale": style.MAGNITUDE, "showscale": False}
    else:
        colours = {"coloraxis": "coloraxis"}
    quantity = panel.name if panel.name == ATTENTION else f"{panel.name} logit"
    return go.Heatmap(
        z=panel.values.astype(np.float32),
        x=names,
        y=names,
        xaxis=f"x{suffix}",
        yaxis=f"y{suffix}",
        hoverongaps=False,
        hovertemplate=f"query %{{y}}<br>key %{{x}}<br>{quantity} %{{z:.3g}}<extra></extra>",
        **colours,
    )


def _range(values: Floats) -> tuple[float, float]:
    finite = values[np.isfinite(values)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)
    return low, high if high > low else low + 1.0


def _axes(suffix: str, cell: tuple[int, int, int], texts: list[str], *, bottom: bool) -> dict[str, Any]:
    column, row, rows = cell
    step = max(1, math.ceil(len(texts) / MOST_LABELS))
    ticks = list(range(0, len(texts), step))
    width, height = (1 - GAP * 2) / len(COLUMNS), 1 / rows
    axis: dict[str, Any] = {
        "type": "category",
        "showgrid": False,
        "zeroline": False,
        "ticks": "",
        "tickmode": "array",
        "tickvals": ticks,
        "ticktext": [texts[tick] for tick in ticks],
        "tickfont": {"size": 8 if len(ticks) > 20 else 10},
        "constrain": "domain",
    }
    left, top = column * (width + GAP), 1 - row * height
    key_axis = axis | {
        "anchor": f"y{suffix}",
        "domain": [left, left + width],
        "tickangle": -90,
        "showticklabels": bottom,
        "constraintoward": "left",
    }
    query_axis = axis | {
        "anchor": f"x{suffix}",
        "domain": [top - height + FOOTROOM / (PANEL * rows), top - HEADROOM / (PANEL * rows)],
        "autorange": "reversed",
        "showticklabels": column == 0,
        "constraintoward": "top",
    }
    if suffix:  # all move with the first, whose cells are square
        key_axis["matches"], query_axis["matches"] = "x", "y"
    else:
        query_axis["scaleanchor"] = "x"
    return {f"xaxis{suffix}": key_axis, f"yaxis{suffix}": query_axis}


def _title(panel: Panel, suffix: str, raw: bool) -> dict[str, Any]:
    text = f"<b>{panel.name}</b>"
    if panel.name == QK:
        text += ", the model's own logits"
    elif math.isfinite(panel.share):
        text += f" {percent(panel.share)}"
    if raw and panel.name != ATTENTION:
        low, high = _range(panel.values)
        text += f", {number(low)} to {number(high)}"
    return {
        "text": text,
        "xref": f"x{suffix} domain",
        "yref": f"y{suffix} domain",
        "x": 0,
        "y": 1,
        "xanchor": "left",
        "yanchor": "bottom",
        "showarrow": False,
        "font": {"size": 12},
    }


def _colour_axes(limit: float, most: float, rows: int, raw: bool) -> dict[str, Any]:
    length = 0.8 / rows

    def bar(title: str, row: int) -> dict[str, Any]:
        placing = {"x": 1.01, "y": 1 - (row + 0.1) / rows, "yanchor": "top", "len": length}
        return style.colour_bar(title) | placing

    signed = {"cmin": -limit, "cmax": limit, "colorscale": style.SIGNED}
    weight = {"cmin": 0, "cmax": most, "colorscale": style.MAGNITUDE, "colorbar": bar("attention", 1)}
    if raw:
        return {"coloraxis2": weight}
    return {
        "coloraxis": signed | {"colorbar": bar("logit, less its row's mean", 0)},
        "coloraxis2": weight,
    }


def positional_tiles(logits: Floats) -> Floats:
    """One layer's heads as tiles of one picture: rows less their means, over the head's own largest magnitude.

    Args:
        logits: (H, n, n).

    Laid out as `figures_theory.weight_tiles`, for `weight_maps`; NaN separates the tiles.
    """
    heads, side, _ = logits.shape
    across = min(heads, TILES_ACROSS)
    step, tall = side + TILE_GAP, side + TILE_HEADROOM
    picture = np.full((math.ceil(heads / across) * tall, across * step - TILE_GAP), np.nan)
    for head, matrix in enumerate(logits):
        centred = matrix - matrix.mean(axis=-1, keepdims=True)
        row, column = divmod(head, across)
        top = row * tall + TILE_HEADROOM
        tile = np.clip(centred / _limit([centred]), -1, 1)
        picture[top : top + side, column * step : column * step + side] = tile
    return picture


def shares_by_layer(layers: Floats, shares: Mapping[str, Floats]) -> go.Figure:
    """Mean shares of logit variance at every layer, stacked; negative ones below zero. `shares`: group → (L)."""
    bars = [
        go.Bar(
            x=layers.astype(np.float32),
            y=values.astype(np.float32),
            name=group,
            marker={"color": GROUP_COLOURS[group]},
            hovertemplate=f"layer %{{x}}<br>{group}: %{{y:.3f}}<extra></extra>",
        )
        for group, values in shares.items()
    ]
    axis = {"zeroline": False} | style.every_tick(len(layers))
    layout = {"barmode": "relative", "bargap": 0.25, "xaxis": axis}
    return style.figure(bars, "layer", "mean share of logit variance", height=340, layout=layout)
