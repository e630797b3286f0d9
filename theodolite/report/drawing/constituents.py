"""Constituents of the logits: their shares, and attention recomputed from each alone and without it.

Bars and maps of the tables `heads`, `constituents` and `attribution` as they are; nothing here computes a share
or a score. Source: Song & Zhong 2024, section 5.2, with constituents that add up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from theodolite.errors import UsageError
from theodolite.report import style
from theodolite.report.data import Floats, column, head_grid, heads_per_block, need_column
from theodolite.report.drawing.grammar import Panel, Sketch, Sketched, heat, panels
from theodolite.system.wording import head_name, number

if TYPE_CHECKING:
    from theodolite.passes.run import Run

SHARES = {
    "share_position": ("position", style.POSITION),
    "share_context": ("context", style.CONTEXT),
    "share_cross": ("position and context", style.BOTH),
    "share_constant": ("constant", style.REFERENCE),
    "share_additive": ("additive", style.GREEN),
}
"""Columns of the heads table that sum to 1 → their name and colour."""

PARTS = ("mean", "pos", "ctx", "resid", "bias")
ADDITIVE = "additive"
NAMED = 0.005  # a share below it has no number in its cell
PANELS = 6
"""Heads of one pattern that are drawn; the table has them all."""

PANEL, TITLE = 128, 22  # pixels of one panel with its title, and of its title


@Sketched
def head_shares(run: Run, layer: int = 0) -> Sketch:
    """Share of the logits' variance of every head of one block by constituent, stacked; negative ones below 0."""
    grids = _share_grids(run)
    traces = [
        {
            "type": "bar",
            "x": np.arange(heads_per_block(run), dtype=np.int32),
            "y": grid[layer].astype(np.float32),
            "name": SHARES[name][0],
            "marker": {"color": SHARES[name][1], "line": {"width": 0}},
            "hovertemplate": f"head %{{x}}<br>{SHARES[name][0]}: %{{y:.1%}}<extra></extra>",
        }
        for name, grid in grids
    ]
    stacked = np.stack([np.nan_to_num(grid) for _, grid in grids])
    high, low = np.clip(stacked, 0, None).sum(axis=0).max(), np.clip(stacked, None, 0).sum(axis=0).min()
    # All blocks share one axis, so that their bars compare.
    top, bottom = max(1.05, 1.02 * float(high)), min(0.0, 1.05 * float(low))
    unit_line = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": 1, "y1": 1}
    head_axis: dict[str, Any] = {"showgrid": False} | style.every_tick(heads_per_block(run))
    layout = {
        "barmode": "relative",
        "bargap": 0.18,
        "xaxis": head_axis,
        "yaxis": {"range": [bottom, top], "tickformat": ".0%"},
        "shapes": [unit_line | {"line": {"width": 1, "dash": "dot", "color": style.GREY}}],
    }
    return Sketch(traces, "head", "share of the logits' variance", 340, layout)


def _share_grids(run: Run) -> list[tuple[str, Floats]]:
    grids = [(name, grid) for name in SHARES if (grid := head_grid(run, name)) is not None]
    if not grids:
        raise UsageError("this run has no 'share_position'; survey the model on a text to get it")
    return [(name, grid) for name, grid in grids if name != "share_additive" or np.nansum(np.abs(grid)) > 0]


def _parts_of_head(run: Run, layer: int, head: int) -> tuple[Floats, Floats]:
    """Shares of query × key parts with their errors, and a last row that begins with those of the additive bias."""
    rows = run.constituents
    rows = rows[(rows["layer"] == layer) & (rows["head"] == head)]
    shares, errors = np.full((2, len(PARTS) + 1, len(PARTS)), np.nan)
    for query, key, share, error in zip(
        rows["query"], rows["key"], rows["share"], rows["standard_error"], strict=True
    ):
        cell = (-1, 0) if query == ADDITIVE else (PARTS.index(query), PARTS.index(key))
        shares[cell], errors[cell] = share, error
    return shares, errors


def _percentage(share: float) -> str:
    return f"{100 * share:.0f}".replace("-", "−") if abs(share) >= NAMED else ""


@Sketched
def constituents(run: Run, layer: int = 0, head: int = 0) -> Sketch:
    """Shares of one head's logit variance by part of the query (rows) and of the key (columns), in per cent.

    A bias on logits, where there is one, is the bar below. Hovering gives the standard errors.
    """
    every_share = need_column(run.constituents, "share")
    reach = float(np.nanmax(np.abs(every_share))) or 1.0
    shares, errors = _parts_of_head(run, layer, head)
    has_errors = column(run.constituents, "standard_error") is not None
    error = " ± %{customdata:.2g}" if has_errors else ""

    def cells(block: tuple[slice, slice], labels: list[list[str]], **more: Any) -> dict[str, Any]:
        drawn: dict[str, Any] = heat(
            shares[block],
            -reach,
            reach,
            f"%{{hovertext}}<br>share %{{z:.4f}}{error}<extra></extra>",
            scale=style.SIGNED,
            cells=True,
            plain=True,
            text=[[_percentage(share) for share in row] for row in shares[block]],
            texttemplate="%{text}",
            customdata=errors[block].astype(np.float32),
            hovertext=labels,
            **more,
        )
        return drawn

    count = len(PARTS)
    ticks, names = list(range(count)), list(PARTS)
    pairs = [[f"{query} · {key}" for key in PARTS] for query in PARTS]
    traces = [cells(np.s_[:-1, :], pairs, x=ticks, y=ticks, bar=style.colour_bar("share", tickformat=".0%"))]
    row_ticks: list[float] = [*ticks]
    row_names = names
    if every_share[(run.constituents["query"] == ADDITIVE).to_numpy()].any():
        traces.append(
            cells(np.s_[-1:, :1], [[ADDITIVE]], x=[-0.5, count - 0.5], y=[count - 0.2, count + 0.6])
        )
        row_ticks, row_names = [*ticks, count + 0.2], [*names, ADDITIVE]
    axis = {"showgrid": False, "zeroline": False, "ticks": "", "tickmode": "array", "constrain": "domain"}
    axis |= {"showline": True, "mirror": True}
    rows = {"tickvals": row_ticks, "ticktext": row_names, "autorange": "reversed", "scaleanchor": "x"}
    layout = {
        "xaxis": axis | {"tickvals": ticks, "ticktext": names, "side": "top"},
        "yaxis": axis | rows,
        "margin": {"t": 56, "b": 16},
    }
    return Sketch(traces, "part of the key", "part of the query", 380, layout)


def attributed(run: Run, pattern: str) -> list[pd.DataFrame]:
    """The rows of each head of a pattern in the attribution table, strongest head first."""
    table = run.attribution
    if table is None or not len(table):
        return []
    rows = table[table["pattern"] == pattern]
    heads = [of_head for _, of_head in rows.groupby(["layer", "head"], sort=True)]
    return sorted(heads, key=lambda of_head: -float(of_head["score"].iloc[0]))


def attribution(run: Run, pattern: str) -> go.Figure:
    """Attention along a pattern by its strongest heads: from one group of constituents alone, and with it ablated.

    One panel per head, the strongest first. Lines: the score as it is (solid) and of uniform attention (dotted).
    """
    heads = attributed(run, pattern)[:PANELS]
    if not heads:
        raise UsageError(
            f"this run has no attribution of {pattern!r}; survey a language model on a text to get it"
        )
    has_additive = any(
        (of_head.loc[of_head["group"] == ADDITIVE, "share"].abs() > 0).any() for of_head in heads
    )
    largest = max(float(of_head[["score", "only", "without"]].to_numpy().max()) for of_head in heads)
    drawn = [
        _attribution_panel(
            of_head if has_additive else of_head[of_head["group"] != ADDITIVE],
            1.06 * largest,
            first=index == 0,
            last=index + 1 == len(heads),
        )
        for index, of_head in enumerate(heads)
    ]
    gap = TITLE / (PANEL * len(heads))
    layout = {"barmode": "group", "bargap": 0.28, "margin": {"l": 84, "r": 12, "b": 44}}
    return panels(drawn, 1, height=PANEL, gaps=(0, gap), layout=layout | {"legend": {"traceorder": "normal"}})


def _attribution_panel(rows: pd.DataFrame, end: float, *, first: bool, last: bool) -> Panel:
    """One head's bars, its score and that of uniform attention; `end` of the axis of scores, named in the last."""
    labels = {"only": ("alone", style.MEASURED), "without": ("ablated", style.SKY)}
    bars = [
        go.Bar(
            x=rows[name].to_numpy(dtype=np.float32),
            y=rows["group"].tolist(),
            customdata=rows["share"].to_numpy(dtype=np.float32),
            orientation="h",
            name=label,
            legendgroup=name,
            showlegend=first,
            marker={"color": colour, "line": {"width": 0}},
            hovertemplate=f"%{{y}}<br>{label}: %{{x:.3f}}<br>"
            "%{customdata:.1%} of the logits' variance<extra></extra>",
        )
        for name, (label, colour) in labels.items()
    ]
    layer, head, score, uniform = rows.iloc[0][["layer", "head", "score", "uniform"]]
    return Panel(
        head_name(int(layer), int(head)),
        bars,
        "mean attention along the pattern" if last else "",
        xaxis={"range": [0, end], "showticklabels": last, "ticks": "outside" if last else ""},
        yaxis={"autorange": "reversed", "ticks": "", "showgrid": False, "dtick": 1, "tickfont": {"size": 11}},
        note=f"as measured {number(score, 2)}, uniform attention {number(uniform, 2)}",
        marks=[
            (float(score), {"width": 1.6, "color": style.GREY}),
            (float(uniform), {"width": 1.2, "dash": "dot", "color": style.GREY}),
        ],
    )
