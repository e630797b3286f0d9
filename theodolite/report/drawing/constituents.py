"""Figures of the constituents of the logits (Song & Zhong 2024, section 5.2, with constituents that add up)."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from itertools import chain, zip_longest
from typing import Any

import numpy as np
import plotly.graph_objects as go

from theodolite.errors import UsageError
from theodolite.estimates import Floats
from theodolite.measure.constituents import (
    ADDITIVE,
    ATTENTION,
    CONSTANT,
    MOST_POSITIONS,
    QK,
    Constituents,
    HeadMatrix,
    head_matrices,
)
from theodolite.passes.run import Run
from theodolite.report import style
from theodolite.report.data import blocks, column, head_grid, heads_per_block, need_column
from theodolite.report.drawing import grammar
from theodolite.report.drawing.grammar import Panel, bars, heat, panels, saturation
from theodolite.report.exhibit import Choice, Draw, by_block, by_head, exhibit
from theodolite.system.wording import number, percent

GROUP_COLOURS = {
    "position": style.POSITION,
    "context": style.CONTEXT,
    "cross": style.BOTH,
    "constant": style.REFERENCE,
    "pos-pos": style.SKY,
    "cvec-cvec": style.ORANGE,
    "additive": style.GREEN,
}
SHARES = {
    "share_position": "position",
    "share_context": "context",
    "share_cross": "position with context",
    "share_constant": "constant",
    "share_additive": "additive bias",
}
"""Columns of the heads table that sum to 1 → what they are shares of, in words."""

PARTS = ("mean", "pos", "ctx", "resid", "bias")
COLUMNS = (
    ("position", "pos-pos", "cvec-pos", CONSTANT),
    ("pos-cvec", "context", "cvec-cvec", ADDITIVE),
    (QK, ATTENTION),
)
"""Where the matrices that are there stand, column by column: query position above context, key position left of it."""

MAP, MAP_GAPS = 330, (0.035, 34)  # pixels: a row of matrices; between them: of the width, and pixels
LABELS: dict[str, Any] = {"labels": 32, "letters": 9}  # of tokens at an axis: more could not be read


@exhibit(picker=functools.partial(by_block, grid=True))
def head_shares(run: Run, layer: int = 0) -> go.Figure:
    """Draw the share of every head's logit variance in one block by constituent, stacked; negative ones below 0."""
    need_column(run.heads, "share_position")
    heads, traces, drawn = np.arange(heads_per_block(run), dtype=np.int32), [], []
    for name, words in SHARES.items():
        if (grid := head_grid(run, name)) is None or not np.nan_to_num(grid).any():
            continue
        hover = f"head %{{x}}<br>{words}: %{{y:.1%}}<extra></extra>"
        traces.append(bars(heads, grid[layer], words, GROUP_COLOURS[name.removeprefix("share_")], hover))
        drawn.append(grid)
    stacked = np.nan_to_num(np.stack(drawn))
    # All blocks share one axis, so that their bars compare.
    top = max(1.05, 1.02 * float(np.clip(stacked, 0, None).sum(axis=0).max()))
    bottom = min(0.0, 1.05 * float(np.clip(stacked, None, 0).sum(axis=0).min()))
    layout = {
        "barmode": "relative",
        "bargap": 0.18,
        "xaxis": {"showgrid": False, **style.every_tick(len(heads))},
        "yaxis": {"range": [bottom, top], "tickformat": ".0%"},
    }
    figure = style.figure(traces, "head", "share of the logits' variance", height=340, layout=layout)
    return figure.add_hline(1, line={"width": 1, "dash": "dot", "color": style.GREY})


def _parts_of_heads(run: Run) -> Floats:
    """Return shares and errors of query × key parts, (2, L, H, …); a last row begins with the additive bias's."""
    rows = run.constituents
    need_column(rows, "share")
    of_pairs = np.full((2, blocks(run), heads_per_block(run), len(PARTS) + 1, len(PARTS)), np.nan)
    place = {name: number for number, name in enumerate(PARTS)}
    query, key = rows["query"].map(place | {ADDITIVE: len(PARTS)}), rows["key"].map(place)
    key = key.where(rows["query"] != ADDITIVE, 0).astype(int)
    of_pairs[:, rows["layer"], rows["head"], query, key] = rows[["share", "standard_error"]].to_numpy().T
    return of_pairs


def _percentage(share: float) -> str:
    return f"{100 * share:.0f}".replace("-", "−") if abs(share) >= 0.005 else ""


def _by_head(run: Run, draw: Draw) -> Choice:
    return by_head(run, functools.partial(draw, of_heads=_parts_of_heads(run)))


@exhibit(picker=_by_head)
def constituents(run: Run, layer: int = 0, head: int = 0, of_heads: Floats | None = None) -> go.Figure:
    """Draw the shares of one head's logit variance by part of the query (rows) and of the key (columns)."""
    every_share = need_column(run.constituents, "share")
    reach = float(np.nanmax(np.abs(every_share))) or 1.0
    shares, errors = (_parts_of_heads(run) if of_heads is None else of_heads)[:, layer, head]
    has_bias = bool(every_share[(run.constituents["query"] == ADDITIVE).to_numpy()].any())
    rows = [*PARTS, ADDITIVE] if has_bias else list(PARTS)
    error = "" if column(run.constituents, "standard_error") is None else " ± %{customdata:.2g}"
    cells = heat(
        shares[: len(rows)],
        -reach,
        reach,
        f"%{{hovertext}}<br>share %{{z:.4f}}{error}<extra></extra>",
        scale=style.SIGNED,
        bar=style.colour_bar("share", tickformat=".0%"),
        cells=True,
        x=list(PARTS),
        y=rows,
        text=[[_percentage(share) for share in row] for row in shares[: len(rows)]],
        texttemplate="%{text}",
        customdata=errors[: len(rows)].astype(np.float32),
        hovertext=[[row if row == ADDITIVE else f"{row} · {key}" for key in PARTS] for row in rows],
    )
    axis = {"type": "category", "ticks": "", "constrain": "domain"}
    layout = {
        "xaxis": axis | {"side": "top"},
        "yaxis": axis | {"autorange": "reversed", "scaleanchor": "x"},
        "margin": {"t": 56, "b": 16},
    }
    return style.figure([cells], "part of the key", "part of the query", height=380, layout=layout)


def qk_panels(
    split: Constituents, head: int, tokens: Sequence[str], *, first: int = 1, raw: bool = False
) -> go.Figure:
    """Map one head's logits by constituent (`head_matrices`): Song & Zhong 2024, Fig. 6 and Figs. 30 to 34.

    Titles give the shares of variance. Centred logits have one colour scale; raw ones each their own, from the lowest
    to the highest value, which the title names. `tokens`: the text of each of the context's T tokens.

    Raises:
        UsageError: no such head or position, a split into other parts, or not T tokens.
    """
    of_head = head_matrices(split, head, first=first, raw=raw)
    matrices = {matrix.name: matrix for matrix in of_head}
    length = split.query.shape[3]
    if len(tokens) != length:
        raise UsageError(f"{len(tokens)} tokens for a context of {length}")
    shown_tokens = tokens[first : first + MOST_POSITIONS]
    names = grammar.token_names(shown_tokens, first)
    axis = grammar.token_axis(shown_tokens, **LABELS) | {"constrain": "domain"}
    columns = [[name for name in column if name in matrices] for column in COLUMNS]
    lowest = {column[-1] for column in columns}
    shown: list[Panel | None] = []
    for name in chain.from_iterable(zip_longest(*columns)):
        if name is None:
            shown.append(None)
            continue
        below, left, linked = name in lowest, name in columns[0], bool(shown)  # all move with the first
        keys = axis | {"showticklabels": below} | ({"matches": "x"} if linked else {})
        queries = axis | {"showticklabels": left} | ({"matches": "y"} if linked else {})
        queries |= {"autorange": "reversed", "tickangle": 0}
        traces, note = [_matrix(matrices[name], names, raw)], _note(matrices[name], raw)
        titles = ("key" if below else "", "query" if left else "")
        shown.append(Panel(name, traces, *titles, keys, queries, note, square=True))
    rows = len(shown) // len(columns)
    limit = saturation([matrix.values for matrix in of_head if matrix.name != ATTENTION])
    layout = {"margin": {"l": 70, "t": 34, "r": 70, "b": 70}}
    layout |= _colour_axes(limit, _colour_range(matrices[ATTENTION].values)[1], rows, raw)
    gaps = (MAP_GAPS[0], MAP_GAPS[1] / (MAP * rows))
    return panels(shown, len(columns), height=MAP, gaps=gaps, layout=layout)


def _matrix(matrix: HeadMatrix, names: list[str], raw: bool) -> dict[str, Any]:
    quantity = f"{matrix.name} logit"
    shared: dict[str, Any] = {} if raw else {"coloraxis": "coloraxis"}
    if matrix.name == ATTENTION:
        quantity, shared = matrix.name, {"coloraxis": "coloraxis2"}
    hover = f"query %{{y}}<br>key %{{x}}<br>{quantity} %{{z:.3g}}<extra></extra>"
    return heat(matrix.values, *_colour_range(matrix.values), hover, x=names, y=names, **shared)


def _range(values: Floats) -> tuple[float, float]:
    finite = values[np.isfinite(values)]
    return (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)


def _colour_range(values: Floats) -> tuple[float, float]:
    low, high = _range(values)
    return low, high if high > low else low + 1.0


def _note(matrix: HeadMatrix, raw: bool) -> str:
    """Title a matrix with its share of the variance, and the range of raw logits."""
    share = percent(matrix.share) if math.isfinite(matrix.share) else ""
    notes = ["the model's own logits" if matrix.name == QK else share]
    if raw and matrix.name != ATTENTION:
        notes.append(" to ".join(map(number, _range(matrix.values))))
    return ", ".join(filter(None, notes))


def _colour_axes(limit: float, most: float, rows: int, raw: bool) -> dict[str, Any]:
    def bar(title: str, row: int) -> dict[str, Any]:
        return style.colour_bar(title, x=1.01, y=1 - (row + 0.1) / rows, yanchor="top", len=0.8 / rows)

    weight = {"cmin": 0, "cmax": most, "colorscale": style.MAGNITUDE, "colorbar": bar("attention", 1)}
    signed = {"cmin": -limit, "cmax": limit, "colorscale": style.SIGNED}
    signed |= {"colorbar": bar("logit, less its row's mean", 0)}
    return {"coloraxis2": weight} | ({} if raw else {"coloraxis": signed})
