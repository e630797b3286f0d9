"""Figures of a model's outlier dimensions and massive activations: where they are, how they grow, who carries them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from theodolite.measure.publications import ZHANG
from theodolite.report import style
from theodolite.report.data import Floats, evenly
from theodolite.report.drawing.grammar import heat, line, reference, rows_down
from theodolite.report.drawing.layers import largest_columns
from theodolite.report.outcome import Outcome
from theodolite.sinks.outliers import Outliers, position_0_as_one
from theodolite.system.wording import counted, for_plotly, head_name, listed, number, shown_token
from theodolite_papers.drawing.localization import Line, curves

LINES = 12
TOKENS = 20
SMALLEST = 1e-6  # of the largest value: below it the logarithmic axis of the growth ends
NAMED: dict[str, Any] = {"type": "category", "showgrid": False}  # an axis of dimensions or tokens
TURNED = {"tickangle": -90, "tickfont": {"size": 10}}  # its names, where there are many
DASHES = ("solid", "dash", "dot", "dashdot")


def ratio_map(ratios: Floats, columns: Sequence[object], titles: tuple[str, str, str]) -> go.Figure:
    """Ratios to a median, rows by columns, coloured by their logarithm from 1 up."""
    shown = np.maximum(np.nan_to_num(ratios, nan=1.0), 1.0)
    top = max(float(shown.max()), 10.0)
    ticks = [amount for power in range(8) for amount in (10**power, 3 * 10**power) if amount <= top * 1.001]
    named = {"tickvals": np.log10(ticks).tolist(), "ticktext": [str(tick) for tick in ticks]}
    cells = heat(
        np.log10(shown),
        0,
        float(np.log10(top)),
        f"{titles[1]} %{{y}}, {titles[0]} %{{x}}<br>%{{customdata:.3g}} {titles[2]}<extra></extra>",
        bar=style.colour_bar(titles[2], **named),
        cells=True,
        customdata=ratios.astype(np.float32),
        x=[str(name) for name in columns],
    )
    layout = {"xaxis": NAMED | (TURNED if len(columns) > LINES else {}), "yaxis": rows_down(len(shown))}
    height = min(640, max(260, 140 + 22 * len(shown)))
    return style.figure([cells], titles[0], titles[1], height=height, layout=layout)


def growth(
    lines: Mapping[tuple[str, str], Floats], references: Mapping[str, Floats], threshold: float
) -> go.Figure:
    """|value| by layer on a logarithmic axis: one line per massive activation, against the usual magnitudes."""
    drawn = dict(list(lines.items())[:LINES])
    dimensions = list(dict.fromkeys(dimension for dimension, _ in drawn))
    drawn_of_dimension: dict[str, int] = dict.fromkeys(dimensions, 0)
    traces: list[Any] = []
    for (dimension, token), values in drawn.items():
        colour = style.CATEGORIES[dimensions.index(dimension) % (len(style.CATEGORIES) - 1)]
        dash = DASHES[drawn_of_dimension[dimension] % len(DASHES)]
        traces += _by_layer(f"{dimension}, {token}", values, colour, dash)
        drawn_of_dimension[dimension] += 1
    for (name, values), dash in zip(references.items(), DASHES[1:], strict=False):
        traces += _by_layer(name, values, style.GREY, dash)
    all_values = np.concatenate([*drawn.values(), *references.values(), [threshold]])
    top = float(np.nanmax(all_values))
    low = max(float(np.nanmin(all_values[all_values > 0])), SMALLEST * top)
    length = max(len(values) for values in references.values())
    traces += reference([0, length - 1], threshold, f"published threshold, {threshold:g}")
    layout = {
        "xaxis": {"zeroline": False} | style.every_tick(length),
        "yaxis": {"type": "log", "dtick": 1, "range": [np.log10(low / 2), np.log10(2 * top)]},
    }
    return style.figure(traces, "layer", "|value|", height=420, layout=layout)


def _by_layer(name: str, values: Floats, colour: str, dash: str) -> list[Any]:
    hover = f"{for_plotly(name)}<br>layer %{{x}}: %{{y:.4g}}<extra></extra>"
    positive = np.where(values > 0, values, np.nan)
    return line(np.arange(len(values)), positive, name, colour, dash=dash, width=2, marker=5, hover=hover)


def carriers(names: Sequence[str], contexts: Floats, notes: Sequence[str]) -> go.Figure:
    """Share of contexts in which a token carries a massive activation, one bar a token, at most `TOKENS` of them."""
    names, notes = list(names[:TOKENS]), list(notes[:TOKENS])
    bars = go.Bar(
        x=contexts[:TOKENS].astype(np.float32),
        # Numbered, since two tokens may look alike.
        y=list(range(len(names))),
        orientation="h",
        marker={"color": style.BLUE},
        customdata=[[for_plotly(name), for_plotly(note)] for name, note in zip(names, notes, strict=True)],
        hovertemplate="%{customdata[0]}: %{x:.1%} of contexts<br>%{customdata[1]}<extra></extra>",
    )
    down = {"autorange": "reversed", "tickmode": "array", "showgrid": False}
    down |= {"tickvals": list(range(len(names))), "ticktext": [for_plotly(name) for name in names]}
    layout = {"yaxis": down, "xaxis": {"tickformat": ".0%", "rangemode": "tozero"}}
    return style.figure([bars], "share of contexts", "", height=110 + 24 * max(3, len(names)), layout=layout)


SUN = "Sun et al. 2024"
DETTMERS = "Dettmers et al. 2022"


def draw(outcome: Outcome, outliers: Outliers, contexts: int) -> None:
    """All figures of the page, of a text of so many contexts."""
    _map(outcome, outliers)
    _growth(outcome, outliers)
    if not outliers.massive.empty:
        _carriers(outcome, outliers, contexts)
    _counts(outcome, outliers)
    _heads(outcome, outliers)


def typical_rms(outliers: Outliers) -> pd.Series:
    """RMS of the median dimension of each row's layer."""
    return outliers.dimensions["rms"] / outliers.dimensions["rms_ratio"]


def carrier_name(token: str, first: bool) -> str:
    """A token in quotation marks; what stands at position 0 is one place, whatever it is."""
    return "position 0" if first else f"“{shown_token(token)}”"


def _grid(table: pd.DataFrame, name: str, rows: str, columns: str) -> Floats:
    return table.pivot(index=rows, columns=columns, values=name).to_numpy(dtype=np.float64)


def _map(outcome: Outcome, outliers: Outliers) -> None:
    ratios = _grid(outliers.dimensions, "rms_ratio", "layer", "dimension")
    chosen = largest_columns(ratios)
    outcome.figure(
        "dimensions",
        "RMS of the largest dimensions, by layer",
        ratio_map(ratios[:, chosen], chosen, ("dimension", "layer", "times the median")),
        "RMS over positions from 1 on, relative to the layer's median dimension; the largest dimensions of any layer.",
        "columns that are strong from top to bottom: outlier dimensions persist across layers.",
        f"{DETTMERS}; {ZHANG}, section 1.2",
        wide=True,
    )


def _growth(outcome: Outcome, outliers: Outliers) -> None:
    layers = outliers.dimensions.groupby("layer")
    typical = typical_rms(outliers).groupby(outliers.dimensions["layer"]).median()
    references = {
        "RMS of the median dimension": typical.to_numpy(dtype=np.float64),
        "largest |x|, positions 1 on": layers["maximum"].max().to_numpy(dtype=np.float64),
        "largest |x| at position 0": layers["maximum_first"].max().to_numpy(dtype=np.float64),
    }
    by, rising = ["places", "dimension", "layer"], [False, True, True]
    order = outliers.growth.sort_values(by, ascending=rising, kind="stable")
    keys = ["dimension", "token_id", "token", "first"]
    lines = {
        (f"dimension {dimension}", carrier_name(token, first)): rows["value"].abs().to_numpy(dtype=np.float64)
        for (dimension, _, token, first), rows in order.groupby(keys, sort=False)
    }
    outcome.figure(
        "growth",
        "Massive activations through the layers",
        growth(lines, references, outliers.numbers["thresholds"]["massive"]),
        "Mean magnitude in the tokens with a massive activation. Grey: typical sizes, and the layer's largest value.",
        "lines that jump within one block and then stay level until the last ones.",
        SUN,
        wide=True,
    )


def _carriers(outcome: Outcome, outliers: Outliers, contexts: int) -> None:
    rows = []
    for _, token_rows in position_0_as_one(outliers.massive).groupby("token_id"):
        name = carrier_name(token_rows["token"].iloc[0], token_rows["first"].iloc[0])
        dimensions = listed([str(dimension) for dimension in sorted(set(token_rows["dimension"]))], 6)
        largest = number(max(token_rows["extreme"], key=abs))
        share = token_rows["contexts"].max() / contexts
        rows.append((name, share, f"dimensions {dimensions}; up to {largest}"))
    rows.sort(key=lambda row: (-row[1], row[0]))
    names, shares, notes = zip(*rows, strict=True)
    outcome.figure(
        "tokens",
        "Which tokens carry massive activations",
        carriers(names, np.array(shares), notes),
        "Share of contexts in which the token carries a massive activation, in its most frequent layer and dimension.",
        "position 0 and delimiters at the top, and not much else.",
        SUN,
    )


def _counts(outcome: Outcome, outliers: Outliers) -> None:
    lines = {
        "adaptive": Line("outlier dimensions, from data", style.BLUE, marker=5),
        "published": Line("outlier dimensions, published", style.SKY, "dash", marker=5),
        "massive_adaptive": Line(
            "dimensions with massive activations, from data", style.VERMILLION, marker=5
        ),
        "massive_published": Line(
            "dimensions with massive activations, published", style.ORANGE, "dash", marker=5
        ),
    }
    values = [outliers.layers[name].to_numpy(dtype=np.float64) for name in lines]
    at = np.arange(len(outliers.layers), dtype=np.float64)
    layers = {"tickmode": "array", "tickvals": evenly(len(at), 16), "zeroline": False}
    titles, zero = ("layer", "dimensions"), {"rangemode": "tozero"}
    outcome.figure(
        "counts",
        "Published thresholds against those from data",
        curves(at, list(lines.values()), values, titles, height=360, xaxis=layers, yaxis=zero),
        "Dashed: published thresholds, |x| ≥ 6 and |x| > 100. Solid: relative to the layer; 1 % by chance.",
        "dashed lines at 0 or at the whole width: the published thresholds do not fit this model's scale.",
        f"{DETTMERS}; {SUN}; the rules from data are ours",
    )


def _heads(outcome: Outcome, outliers: Outliers) -> None:
    largest = outliers.head_dimensions.groupby(["layer", "head"], as_index=False)["rms_ratio"].max()
    grid = _grid(largest, "rms_ratio", "layer", "head")
    table = outliers.head_dimensions
    flagged = table[table["adaptive"]].drop_duplicates(["layer", "head"])
    names = [head_name(row.layer, row.head) for row in flagged.itertuples()]
    sentence = (
        f"{counted(len(names), 'head')} with an outlier dimension by comparison with the head's own others"
    )
    outcome.figure(
        "heads",
        "Largest dimension of every head's output",
        ratio_map(grid, range(grid.shape[1]), ("head", "block", "times the median")),
        f"RMS of the output, largest dimension over median. {sentence}{': ' + listed(names, 8) if names else ''}.",
        "strong heads: those that may tag the tokens that a sink caught with an outlier dimension.",
        f"{ZHANG}, Fig. 1(b)",
    )
