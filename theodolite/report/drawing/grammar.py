"""The grammar of figures, which take plain arrays: lines with errors, dots, bars, maps, attention, panels of them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import plotly.graph_objects as go
from numpy.typing import ArrayLike
from plotly.subplots import make_subplots

from theodolite.estimates import Floats
from theodolite.report import style
from theodolite.system.wording import for_plotly, shown_token

PANEL_HEIGHT, HEADROOM = 230, 90  # pixels: of a row of panels, and above the first
SATURATED = 99.5  # percentile of magnitudes at which the colours of signed maps saturate
MAP_HEIGHTS, ROW = (240, 640), 22  # pixels: of a map, least and most, and of each of its rows
TITLE = 24  # pixels: of a panel's title, above which the legend stands
FAINTEST = 1e-5  # attention below it is drawn as this much on a logarithmic scale
MARK = "▼"


def line(
    x: Any,
    y: Any,
    name: str,
    colour: str,
    *,
    errors: Floats | None = None,
    dash: str = "solid",
    width: float = 1.8,
    marker: float | dict[str, Any] = 0,
    hover: str = "",
    **more: Any,
) -> list[dict[str, Any]]:
    """Return the traces of a line through `x` and `y`, (n,): a list, as of a `band`.

    Args:
        name: in the legend, where lines of one name are switched together. errors: half the whiskers' lengths, (n,).
        marker: the points, or their size in pixels; 0: none. hover: what hovering tells, Plotly's template.
    """
    label = for_plotly(name)
    own: dict[str, Any] = _points("scatter", x, y) | {"name": label, "legendgroup": name}
    own["error_y"] = None if errors is None else style.error_bars(errors)
    own["line"] = {"color": colour, "width": width, "dash": dash}
    own["mode"] = "lines+markers" if marker else "lines"
    own["marker"] = {"size": marker} if marker and not isinstance(marker, dict) else marker or None
    own["hovertemplate"] = hover or f"{label}<br>%{{x}}: %{{y:.4g}}<extra></extra>"
    return [own | more]


def _points(kind: str, x: ArrayLike, y: ArrayLike) -> dict[str, Any]:
    return {"type": kind, "x": _numbers(x), "y": _numbers(y)}


def band(x: Any, low: Any, high: Any, colour: str, **more: Any) -> list[dict[str, Any]]:
    """Return the traces of the area between two curves over `x`, all (n,); none where there is none."""
    x, low, high = map(_numbers, (x, low, high))
    own = _points("scatter", np.concatenate([x, x[::-1]]), np.concatenate([high, low[::-1]]))
    own |= {"mode": "lines", "line": {"width": 0}, "hoverinfo": "skip", "showlegend": False}
    own |= {"fill": "toself", "fillcolor": style.translucent(colour, style.BAND)}
    return [own | more] if (high > low).any() else []


def dots(
    x: Any, y: Any, texts: Sequence[str] | None, name: str | None, colour: Any, hover: str, **more: Any
) -> dict[str, Any]:
    """Return the trace of points of one kind; `texts`: what hovering calls each of them, `%{text}` in `hover`."""
    own = _points("scatter", x, y) | {"name": name, "mode": "markers", "hovertemplate": hover}
    marker = {"size": 8, "color": colour} | more.pop("marker", {})
    return own | {"marker": marker, "text": None if texts is None else list(texts)} | more


def bars(x: Any, y: Any, name: str, colour: str, hover: str, **more: Any) -> dict[str, Any]:
    """Return the trace of bars of one kind."""
    own = _points("bar", x, y) | {"name": name, "hovertemplate": hover}
    return own | {"marker": {"color": colour, "line": {"width": 0}}} | more


def reference(x: Any, y: Any, name: str, *, dash: str = "dot", **more: Any) -> list[dict[str, Any]]:
    """Return the traces of a thin grey line without hover text, such as a threshold; `y` may be one number."""
    heights = np.broadcast_to(y, np.shape(x))
    return line(x, heights, name, style.REFERENCE, dash=dash, width=1, hoverinfo="skip", **more)


def heat(
    z: Floats,
    low: float,
    high: float,
    hover: str,
    *,
    scale: style.Scale = style.MAGNITUDE,
    bar: str | dict[str, Any] | None = None,
    cells: bool = False,
    **more: Any,
) -> dict[str, Any]:
    """Return the trace of a heat map (rows, columns), NaN left blank.

    Args:
        low, high: where the colours saturate. hover: what hovering tells, Plotly's template.
        bar: its `style.colour_bar`, or the title of a plain one. cells: a hairline between cells.
    """
    own: dict[str, Any] = {"type": "heatmap", "z": _numbers(z), "zmin": low, "zmax": high}
    own |= {"colorscale": scale, "showscale": bar is not None, "hovertemplate": hover, "hoverongaps": False}
    own["colorbar"] = style.colour_bar(bar) if isinstance(bar, str) else bar
    return own | ({"xgap": 1, "ygap": 1} if cells else {}) | more


def saturation(values: Sequence[Floats]) -> float:
    """Return the `SATURATED` percentile of the magnitudes in all maps; 1 where there are none."""
    magnitudes = np.abs(np.concatenate([of_map[np.isfinite(of_map)] for of_map in values]))
    return float(np.percentile(magnitudes, SATURATED)) if magnitudes.size and magnitudes.any() else 1.0


def rows_down(count: int) -> dict[str, Any]:
    """Make the vertical axis of a map with `count` numbered rows, the first on top."""
    return {"autorange": "reversed"} | style.every_tick(count)


def map_height(rows: int, most: int | None = MAP_HEIGHTS[1]) -> int:
    """Return the height in pixels of a map with so many rows: `most` at most, which fits a screen."""
    height = max(MAP_HEIGHTS[0], 130 + ROW * rows)
    return height if most is None else min(most, height)


def head_cells(z: Floats, low: float, high: float, hover: str, **more: Any) -> go.Figure:
    """Draw a map with a cell per head: blocks down, heads across; arguments as of `heat`."""
    cells = heat(z, low, high, hover, cells=True, **more)
    return style.figure([cells], "head", "block", layout=style.head_map_layout(*np.shape(z)))


def token_names(tokens: Sequence[str], first: int = 0) -> list[str]:
    """Name each token for hovering: its position, counted from `first`, and its text."""
    return [for_plotly(f"{place} {shown_token(token)}") for place, token in enumerate(tokens, first)]


def token_axis(
    tokens: Sequence[str], sinks: Sequence[int] = (), *, labels: int = 64, letters: int | None = None
) -> dict[str, Any]:
    """Make an axis of tokens: about `labels` of them are written, none over another, and the sinks with a mark."""
    spacing = -(-len(tokens) // labels)  # tokens from one label to the next
    marked: list[int] = []
    for sink in sorted(sinks):
        if not marked or sink - marked[-1] >= spacing:
            marked.append(sink)
    others = [i for i in range(0, len(tokens), spacing) if all(abs(i - sink) >= spacing for sink in marked)]
    ticks = sorted({*others, *marked})

    def label(place: int) -> str:
        text = shown_token(tokens[place])
        text = text if letters is None or len(text) <= letters else text[: letters - 1] + "…"
        return for_plotly(f"{MARK} {text}" if place in sinks else text)

    look = {"type": "category", "ticks": "", "tickfont": {"size": 8}, "tickangle": -90}
    return look | {"tickvals": ticks, "ticktext": [label(tick) for tick in ticks]}


def attention(
    weights: Floats,
    tokens: Sequence[str],
    sinks: Sequence[int],
    *,
    highest: float = 1.0,
    log: bool = False,
    **labels: int,
) -> go.Figure:
    """Draw a head's attention (T, T), queries down and keys across, its `sinks` marked at both axes.

    Args:
        weights: NaN, or 0 at a later key, where the query does not see the key. highest: where colours end.
        log: colours by log₁₀ of the weight, from `FAINTEST` on. labels: as for `token_axis`.
    """
    values = np.where(np.tri(len(tokens), dtype=bool) | (weights > 0), weights, np.nan)
    low, value = 0.0, "%{z:.3g}"
    if log:
        values, low = np.log10(np.maximum(values, FAINTEST)), math.log10(FAINTEST)
        highest, value = max(math.log10(highest), low + 1), "10^%{z:.2f}"
    names = token_names(tokens)
    hover = f"query %{{y}}<br>key %{{x}}<br>attention {value}<extra></extra>"
    bar = style.colour_bar("attention", tickprefix="10^" if log else "")
    axis = token_axis(tokens, sinks, **labels)
    down = axis | {"autorange": "reversed", "tickangle": 0}
    layout = {"xaxis": axis, "yaxis": down, "margin": {"l": 90, "b": 90}}
    trace = heat(values, low, highest, hover, bar=bar, x=names, y=names)
    return style.figure([trace], "key", "query", height=760, layout=layout)


@dataclass(frozen=True)
class Panel:
    """One of several figures side by side: its title, its traces, and what its axes are besides their titles.

    `note`: what stands after the title, which is then bold. `marks`: vertical lines, each its x and how it looks.
    `square`: cells of a map as wide as high.
    """

    title: str
    traces: Sequence[Any]
    x: str = ""
    y: str = ""
    xaxis: dict[str, Any] = field(default_factory=dict)
    yaxis: dict[str, Any] = field(default_factory=dict)
    note: str | None = None
    marks: Sequence[tuple[float, dict[str, Any]]] = ()
    square: bool = False


def panels(
    shown: Sequence[Panel | None],
    across: int,
    *,
    height: int = PANEL_HEIGHT,
    gaps: tuple[float, float] = (0.11, 0.14),
    layout: dict[str, Any] | None = None,
) -> go.Figure:
    """Draw panels side by side, row by row, `across` in a row of `height` pixels, each under its title; None: no panel.

    `gaps`: between them, of the width and of the height of all.
    """
    rows = math.ceil(len(shown) / across)
    places = {divmod(number, across): panel for number, panel in enumerate(shown) if panel}
    named = [(for_plotly(panel.title), panel.note) for panel in places.values()]
    titled = [title if note is None else f"<b>{title}</b>  {note}".rstrip() for title, note in named]
    drawn = make_subplots(
        rows,
        across,
        specs=[[{} if (row, column) in places else None for column in range(across)] for row in range(rows)],
        subplot_titles=titled,
        horizontal_spacing=gaps[0] if across > 1 else None,
        vertical_spacing=gaps[1] if rows > 1 else None,
    )
    titles = itertools.count()
    for (row, column), panel in places.items():
        place = {"row": row + 1, "col": column + 1}
        drawn.add_traces(list(panel.traces), rows=row + 1, cols=column + 1)
        drawn.update_xaxes(panel.xaxis, title_text=panel.x, **place)
        drawn.update_yaxes(panel.yaxis, title_text=panel.y, **place)
        (x_axis,), (y_axis,) = drawn.select_xaxes(**place), drawn.select_yaxes(**place)
        if panel.square:
            x_axis.update(constrain="domain", constraintoward="left")
            y_axis.update(constrain="domain", constraintoward="top", scaleanchor=y_axis.anchor)
        for x, look in panel.marks:
            drawn.add_vline(x, line=look, **place)
        if panel.title:
            title = drawn.layout.annotations[next(titles)]
            title.update(x=x_axis.domain[0], xanchor="left", yshift=4, font_size=12)
    if drawn.layout.annotations:
        top = style.template().layout.margin.t + TITLE
        drawn.update_layout(margin_t=top, legend_y=1 + TITLE / (height * rows))
    frame = style.frame_of(drawn.data)
    drawn.update_xaxes(frame).update_yaxes(frame)
    shared = {"template": style.template(), "height": HEADROOM + height * rows}
    return drawn.update_layout(shared | (layout or {}))


def _numbers(values: ArrayLike) -> Any:
    """Convert numbers to float32; keep whole numbers and words."""
    array = np.asarray(values)
    return array.astype(np.float32) if array.dtype.kind == "f" else array
