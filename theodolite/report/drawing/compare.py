"""Figures of two models compared, and of measures over training."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from theodolite.report import style
from theodolite.report.drawing.grammar import HEADROOM, Panel, dots, line, panels, reference
from theodolite.report.drawing.heads import sink_name
from theodolite.system.wording import for_plotly, head_name, number, percent

SIDES = ("before", "after")
COLOURS = {"survived": style.BLUE, "lost": style.VERMILLION, "new": style.GREEN, "undecided": style.GREY}
FEWEST = 0.004  # where a share of 0 is drawn on a logarithmic axis


@dataclass(frozen=True)
class Dots:
    """A table with one row per unit, of which two columns are drawn against each other, coloured by `status`."""

    before: str
    after: str
    title: str  # of both axes, before "before" and "after"
    limits: tuple[float, float] | None = None  # of both axes; None: as wide as the dots need
    scale: str = "linear"  # or "log", or "shares": logarithmic, with a place for 0


SINK_DOTS = Dots("before", "after", "share of contexts", scale="shares")
TAG_DOTS = Dots("before", "after", "η² in the head's output", (-0.03, 1.0))
OUTLIER_DOTS = Dots("before", "after", "size over the layer's median", scale="log")
OUTPUT_DOTS = Dots("norm_before", "norm_after", "norm of the head's output")
ENTROPY_DOTS = Dots("share_before", "share_after", "entropy over its maximum", (-0.03, 1.03))
SPECTRUM_DOTS = Dots("frobenius_before", "frobenius_after", "‖W_QK‖")


def scatter(table: pd.DataFrame, shown: Dots) -> go.Figure:
    """Draw one dot per unit, before on x and after on y; on the dotted line nothing changed."""
    values = table[[shown.before, shown.after]].to_numpy(np.float64)
    least, largest = 0.0, float(np.nanmax(values, initial=0.1))
    show: Callable[[float], str] = number
    axis: dict[str, Any] = {}
    if shown.limits:
        largest, axis = 1.0, {"range": list(shown.limits)}
    elif shown.scale == "log":
        least, axis = float(np.nanmin(values, initial=largest)), {"type": "log"}
    elif shown.scale == "shares":
        least, largest, show = FEWEST, 1.0, percent
        values, ticks = np.maximum(values, FEWEST), [0.01, 0.03, 0.1, 0.3, 1.0]
        axis = {"type": "log", "range": np.log10([FEWEST * 0.8, 1.25]).tolist()}
        axis |= {"tickvals": [FEWEST, *ticks], "ticktext": ["none", *map(percent, ticks)]}

    def hover(row: pd.Series) -> str:
        if "dimension" in row:
            name = f"layer {row['layer']}, dimension {row['dimension']}"
        else:
            name = sink_name(row) if "kind" in row else head_name(row["layer"], row["head"])
        text = f"{for_plotly(name)}<br>{shown.title}: {show(row[shown.before])} → {show(row[shown.after])}"
        return f"{text}<br>cosine of the directions {number(row['cosine'])}" if "cosine" in row else text

    traces: list[Any] = reference([least, largest], [least, largest], "unchanged", showlegend=False)
    for status, colour in COLOURS.items():
        rows = (table["status"] == status).to_numpy()
        texts = [hover(row) for _, row in table[rows].iterrows()]
        look = (texts, status, colour, f"%{{text}}<extra>{status}</extra>")
        x, y = values[rows].T
        traces.append(dots(x, y, *look, marker={"size": 9, "opacity": 0.75}))
    titles = (f"{shown.title}, before", f"{shown.title}, after")
    return style.figure(traces, *titles, height=420, layout={"xaxis": axis, "yaxis": axis})


def positions(table: pd.DataFrame) -> go.Figure:
    """Draw rank, relative norm and retained directions of the positional basis by layer, before and after."""
    colours = {"before": style.REFERENCE, "after": style.MEASURED, "overlap": style.GREEN}
    shown: list[Panel] = []
    for title, prefix, names in (
        ("rank", "rank_", SIDES),
        ("relative norm", "relative_norm_", SIDES),
        ("overlap of the directions", "", ("overlap",)),
    ):
        traces: list[Any] = []
        look: dict[str, Any] = {"width": 2, "marker": 6, "showlegend": title != "relative norm"}  # named once
        for name in names:
            hovered = f"layer %{{x}}, {title}, {name}: %{{y:.3g}}<extra></extra>"
            traces += line(table["layer"], table[prefix + name], name, colours[name], hover=hovered, **look)
        across = {"showgrid": False, "zeroline": False, "dtick": max(1, len(table) // 8)}
        down = {"rangemode": "tozero", "zeroline": False}
        shown.append(Panel(title, traces, "residual layer", "", across, down))
    return panels(shown, 3, height=340 - HEADROOM, gaps=(0.07, 0), layout={"legend": {"y": 1.12}})


def over_training(table: pd.DataFrame, measures: Mapping[str, str]) -> go.Figure:
    """Draw a panel per measure (column → its title, and after a comma what it is of) over the column `step`."""
    shown, hovered = [], "%{text}, step %{x}: %{y:.4g}<extra></extra>"
    look: dict[str, Any] = {"marker": 6, "text": table["name"].tolist(), "showlegend": False}
    for name, title in measures.items():
        errors = table[f"{name}_se"].to_numpy(np.float64) if f"{name}_se" in table else None
        traces = line(table["step"], table[name], title, style.MEASURED, errors=errors, hover=hovered, **look)
        short, _, of = title.partition(", ")
        shown.append(Panel(short, traces, "step", of))
    down = 0.13 if len(shown) <= 6 else 0.09  # two rows, or more
    return panels(shown, 3, height=210, gaps=(0.09, down))
