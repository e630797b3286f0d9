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
from theodolite.report.style import Patch
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

PANEL = 128  # pixels of one panel with its title


def head_shares_traces(run: Run, layer: int) -> list[Patch]:
    """The data of `head_shares` for another block: the shares of its heads, one trace a constituent."""
    return [
        {"x": np.arange(heads_per_block(run), dtype=np.int32), "y": grid[layer].astype(np.float32)}
        for _, grid in _share_grids(run)
    ]


def head_shares(run: Run, layer: int = 0) -> go.Figure:
    """Share of the logits' variance of every head of one block by constituent, stacked; negative ones below 0."""
    grids = _share_grids(run)
    traces = [
        go.Bar(
            **patch,
            name=SHARES[name][0],
            marker={"color": SHARES[name][1], "line": {"width": 0}},
            hovertemplate=f"head %{{x}}<br>{SHARES[name][0]}: %{{y:.1%}}<extra></extra>",
        )
        for (name, _), patch in zip(grids, head_shares_traces(run, layer), strict=True)
    ]
    stacked = np.stack([np.nan_to_num(grid) for _, grid in grids])
    high, low = np.clip(stacked, 0, None).sum(axis=0).max(), np.clip(stacked, None, 0).sum(axis=0).min()
    # All blocks share one axis, so that their bars compare.
    top, bottom = max(1.05, 1.02 * float(high)), min(0.0, 1.05 * float(low))
    unit_line = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": 1, "y1": 1}
    head_axis: dict[str, Any] = {"showgrid": False} | style.every_tick(heads_per_block(run))
    return style.figure(
        traces,
        "head",
        "share of the logits' variance",
        height=340,
        layout={
            "barmode": "relative",
            "bargap": 0.18,
            "xaxis": head_axis,
            "yaxis": {"range": [bottom, top], "tickformat": ".0%"},
            "shapes": [unit_line | {"line": {"width": 1, "dash": "dot", "color": style.GREY}}],
        },
    )


def _share_grids(run: Run) -> list[tuple[str, Floats]]:
    grids = [(name, grid) for name in SHARES if (grid := head_grid(run, name)) is not None]
    if not grids:
        raise UsageError("this run has no 'share_position'; survey the model on a text to get it")
    return [(name, grid) for name, grid in grids if name != "share_additive" or np.nansum(np.abs(grid)) > 0]


def constituents_traces(run: Run, layer: int, head: int) -> list[Patch]:
    """The data of `constituents` for another head: shares of query × key parts, then of the additive bias."""
    rows = run.constituents
    rows = rows[(rows["layer"] == layer) & (rows["head"] == head)]
    shares, errors = np.full((2, len(PARTS) + 1, len(PARTS)), np.nan)
    for query, key, share, error in zip(
        rows["query"], rows["key"], rows["share"], rows["standard_error"], strict=True
    ):
        cell = (-1, 0) if query == ADDITIVE else (PARTS.index(query), PARTS.index(key))
        shares[cell], errors[cell] = share, error
    patches = []
    for rows_shown in (slice(None, -1), slice(-1, None)):
        block, block_errors = shares[rows_shown], errors[rows_shown]
        if rows_shown.start == -1:
            block, block_errors = block[:, :1], block_errors[:, :1]
        texts = [[_percentage(value) for value in row] for row in block]
        patches.append(
            {"z": block.astype(np.float32), "text": texts, "customdata": block_errors.astype(np.float32)}
        )
    return patches if _has_additive(run) else patches[:1]


def _percentage(share: float) -> str:
    return f"{100 * share:.0f}".replace("-", "−") if abs(share) >= NAMED else ""


def _has_additive(run: Run) -> bool:
    rows = run.constituents
    return bool((rows.loc[rows["query"] == ADDITIVE, "share"].abs() > 0).any())


def constituents(run: Run, layer: int = 0, head: int = 0) -> go.Figure:
    """Shares of one head's logit variance by part of the query (rows) and of the key (columns), in per cent.

    A bias on logits, where there is one, is the bar below. Hovering gives the standard errors.
    """
    need_column(run.constituents, "share")
    reach = float(run.constituents["share"].abs().max()) or 1.0
    has_errors = column(run.constituents, "standard_error") is not None
    share = "share %{z:.4f}" + (" ± %{customdata:.2g}" if has_errors else "")
    axes: list[dict[str, Any]] = [
        {"x": list(range(len(PARTS))), "y": list(range(len(PARTS)))},
        {"x": [-0.5, len(PARTS) - 0.5], "y": [len(PARTS) - 0.2, len(PARTS) + 0.6]},
    ]
    cell_labels = [[[f"{query} · {key}" for key in PARTS] for query in PARTS], [[ADDITIVE]]]
    traces = [
        go.Heatmap(
            **patch,
            **axis_values,
            hovertext=labels,
            zmin=-reach,
            zmax=reach,
            colorscale=style.SIGNED,
            colorbar=style.colour_bar("share", tickformat=".0%"),
            showscale=index == 0,
            texttemplate="%{text}",
            xgap=1,
            ygap=1,
            hoverongaps=False,
            hovertemplate=f"%{{hovertext}}<br>{share}<extra></extra>",
        )
        for index, (patch, axis_values, labels) in enumerate(
            zip(constituents_traces(run, layer, head), axes, cell_labels, strict=False)
        )
    ]
    axis = {"showgrid": False, "zeroline": False, "ticks": "", "tickmode": "array", "constrain": "domain"}
    axis |= {"showline": True, "mirror": True}
    ticks = list(range(len(PARTS)))
    with_additive = {"tickvals": [*ticks, len(PARTS) + 0.2], "ticktext": [*PARTS, ADDITIVE]}
    return style.figure(
        traces,
        "part of the key",
        "part of the query",
        height=380,
        layout={
            "xaxis": axis | {"tickvals": ticks, "ticktext": list(PARTS), "side": "top"},
            "yaxis": axis
            | {"tickvals": ticks, "ticktext": list(PARTS), "autorange": "reversed", "scaleanchor": "x"}
            | (with_additive if len(traces) > 1 else {}),
            "margin": {"t": 56, "b": 16},
        },
    )


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
    traces: list[Any] = []
    layout: dict[str, Any] = {"shapes": [], "annotations": [], "barmode": "group", "bargap": 0.28}
    for index, of_head in enumerate(heads):
        rows = of_head if has_additive else of_head[of_head["group"] != ADDITIVE]
        suffix = style.axis_suffix(index)
        traces += _attribution_bars(rows, suffix, legend=index == 0)
        top = 1 - index / len(heads)
        domain = [top - (1 - 22 / PANEL) / len(heads), top - 22 / PANEL / len(heads)]
        _add_panel(layout, of_head, suffix, [max(domain[0], 0.0), domain[1]], last=index + 1 == len(heads))
        layout[f"xaxis{suffix}"]["range"] = [0, 1.06 * largest]
    layout |= {"margin": {"l": 84, "r": 12, "t": 34, "b": 44}, "legend": {"traceorder": "normal"}}
    return style.figure(traces, height=len(heads) * PANEL + 96, layout=layout)


def _attribution_bars(rows: pd.DataFrame, suffix: str, *, legend: bool) -> list[go.Bar]:
    labels = {"only": "alone", "without": "ablated"}
    colours = {"only": style.MEASURED, "without": style.SKY}
    return [
        go.Bar(
            x=rows[name].to_numpy(dtype=np.float32),
            y=rows["group"].tolist(),
            customdata=rows["share"].to_numpy(dtype=np.float32),
            orientation="h",
            name=labels[name],
            legendgroup=name,
            showlegend=legend,
            marker={"color": colours[name], "line": {"width": 0}},
            xaxis=f"x{suffix}",
            yaxis=f"y{suffix}",
            hovertemplate=f"%{{y}}<br>{labels[name]}: %{{x:.3f}}<br>"
            "%{customdata:.1%} of the logits' variance<extra></extra>",
        )
        for name in labels
    ]


def _add_panel(
    layout: dict[str, Any], rows: pd.DataFrame, suffix: str, domain: list[float], *, last: bool
) -> None:
    """Axes, lines and title of one head's panel."""
    first = rows.iloc[0]
    score, uniform = float(first["score"]), float(first["uniform"])
    line = {
        "type": "line",
        "xref": f"x{suffix}",
        "yref": f"y{suffix} domain",
        "y0": 0,
        "y1": 1,
        "layer": "above",
    }
    layout["shapes"] += [
        line | {"x0": score, "x1": score, "line": {"width": 1.6, "color": style.GREY}},
        line | {"x0": uniform, "x1": uniform, "line": {"width": 1.2, "dash": "dot", "color": style.GREY}},
    ]
    name = head_name(int(first["layer"]), int(first["head"]))
    layout["annotations"].append(
        {
            "text": f"<b>{name}</b>  as measured {number(score, 2)}, uniform attention {number(uniform, 2)}",
            "xref": "paper",
            "yref": "paper",
            "x": 0,
            "y": domain[1],
            "xanchor": "left",
            "yanchor": "bottom",
            "showarrow": False,
        }
    )
    layout[f"yaxis{suffix}"] = {"domain": domain, "autorange": "reversed", "ticks": "", "showgrid": False}
    layout[f"yaxis{suffix}"] |= {"dtick": 1, "tickfont": {"size": 11}}
    layout[f"xaxis{suffix}"] = {
        "anchor": f"y{suffix}",
        "showticklabels": last,
        "ticks": "outside" if last else "",
        "title": {"text": "mean attention along the pattern" if last else ""},
    }
