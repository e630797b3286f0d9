"""Figures of models that were trained to average: their losses, first-layer attention, and what error goes with."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch

from theodolite.measure.publications import ZHANG
from theodolite.report import style
from theodolite.report.data import Floats
from theodolite.report.drawing.grammar import dots, line
from theodolite.report.outcome import Outcome
from theodolite.system.threads import using_threads
from theodolite.system.wording import for_plotly
from theodolite_papers.catch_tag_release import averaging_training as training
from theodolite_papers.drawing.localization import POWERS, maps

BELOW = 1e-16
"""Errors under it are rounding and are not drawn."""


def attention_maps(pictures: Mapping[str, Floats], separator: int) -> go.Figure:
    """Attention of one sequence, side by side, queries down and keys to the right, both from 1."""
    positions = np.arange(1.0, len(next(iter(pictures.values()))) + 1)
    seen = np.tri(len(positions), dtype=bool)
    causal = {name: np.where(seen, picture, np.nan) for name, picture in pictures.items()}
    drawn = maps(causal, (positions, positions), ("key", "query", "attention"), (0.0, 1.0), square=True)
    edges = {"x0": separator + 0.5, "x1": separator + 1.5, "y0": 0.5, "y1": len(positions) + 0.5}
    look = {"width": 1.5, "color": style.VERMILLION}
    return drawn.add_shape(type="rect", **edges, line=look, row="all", col="all")


def convergence(s_tag: Floats, curves: Mapping[str, tuple[Floats, Floats]], y: str) -> go.Figure:
    """Measured sizes against s_tag, logarithmic, each with its derived rate dotted in the same colour."""
    traces: list[Any] = []
    for index, (name, (measured, derived)) in enumerate(curves.items()):
        colour = style.CATEGORIES[index % len(style.CATEGORIES)]
        for label, values, dash, marker in (
            (name, measured, "solid", 5),
            (f"{name}, derived", derived, "dot", 0),
        ):
            shown = np.where(values > BELOW, values, np.nan)
            if np.isfinite(shown).any():
                hover = f"{for_plotly(label)}<br>s_tag %{{x:g}}: %{{y:.3g}}<extra></extra>"
                own: dict[str, Any] = {"hover": hover, "legendgroup": name, "showlegend": label == name}
                traces += line(s_tag, shown, label, colour, dash=dash, marker=marker, **own)
    highest = max(float(np.nanmax(measured)) for measured, _ in curves.values())
    lowest = min(float(np.nanmin(np.where(size > BELOW, size, np.nan))) for size, _ in curves.values())
    # A rate means nothing where it exceeds all errors.
    window = {"range": [math.log10(lowest) - 0.3, math.log10(highest) + 0.7]}
    layout = {"yaxis": POWERS | window, "legend": {"y": 1.04}}
    return style.figure(traces, "s_tag", y, height=420, layout=layout)


def losses(
    steps: Mapping[str, Floats], curves: Mapping[str, Floats], marks: Mapping[str, float]
) -> go.Figure:
    """The squared error of every seed against training step, one colour a kind, with levels to compare it with."""
    traces: list[Any] = []
    for colour, (name, rows) in zip(style.CATEGORIES, curves.items(), strict=False):
        hover = f"{for_plotly(name)}<br>step %{{x}}: %{{y:.3g}}<extra></extra>"
        for seed, row in enumerate(rows):
            traces += line(steps[name], row, name, colour, width=1.2, hover=hover, showlegend=seed == 0)
    last = max(float(at[-1]) for at in steps.values())
    for dash, (name, level) in zip(("dot", "dash"), marks.items(), strict=False):
        hover = f"{for_plotly(name)}: {level:.3g}<extra></extra>"
        traces += line([0, last], [level, level], name, style.GREY, dash=dash, width=1.5, hover=hover)
    layout = {"yaxis": POWERS, "legend": {"y": 1.04}}
    return style.figure(traces, "step", "mean squared error", height=430, layout=layout)


def seeds(
    kinds: Mapping[str, tuple[Floats, Floats, Sequence[str]]],
    titles: tuple[str, str],
    limits: tuple[float, float],
    *,
    logarithmic: bool = False,
) -> go.Figure:
    """Every trained model as a dot: error to the right (logarithmic), a measure upwards, one colour a kind."""
    looks = zip(style.CATEGORIES, ("circle", "diamond", "square", "triangle-up", "x", "cross"), strict=False)
    hover = f"%{{text}}<br>{titles[0]} %{{x:.3g}}<br>{titles[1]} %{{y:.3g}}<extra></extra>"
    traces: list[Any] = []
    for (kind, (errors, values, names)), (colour, symbol) in zip(kinds.items(), looks, strict=False):
        marker, texts = {"size": 9, "symbol": symbol, "line": {"width": 1}}, list(map(for_plotly, names))
        traces.append(dots(errors, values, texts, for_plotly(kind), colour, hover, marker=marker))
    y = POWERS if logarithmic else {"range": [-0.05, 1.05]}
    layout: dict[str, Any] = {"xaxis": POWERS, "yaxis": y, "legend": {"y": 1.04}}
    drawn = style.figure(traces, *titles, height=430, layout=layout)
    limit = {"color": style.GREY, "dash": "dot", "width": 1.5}
    drawn.add_vline(limits[0], line=limit)
    drawn.add_hline(limits[1], line=limit)
    return drawn


def draw_losses(outcome: Outcome, trained: Sequence[training.TrainedModels], models: pd.DataFrame) -> None:
    """The squared error of every seed while it was trained."""
    steps, curves = {}, {}
    for each in trained:
        curves[each.recipe.name] = each.losses.numpy()
        points = each.losses.shape[1]
        steps[each.recipe.name] = (np.arange(points) + 0.5) * each.recipe.steps / points
    variance = float((models["error"] / models["left"]).mean())
    marks = {
        "predicting 0": variance,
        "predicting mean of all numbers": variance * float(models["left_mean_of_all"].mean()),
    }
    outcome.figure(
        "losses",
        "Training from scratch",
        losses(steps, curves, marks),
        f"One curve per seed. Sink penalised: attention to [SEP] above {training.FREE_ATTENTION:g} adds to the loss.",
        "seeds that stay near the dotted lines have not learned to identify the tokens after [SEP].",
        f"{ZHANG}, section 4; the training runs are ours",
        wide=True,
    )


def draw_attention(outcome: Outcome, trained: Sequence[training.TrainedModels], models: pd.DataFrame) -> None:
    """What the best seed of three kinds pays attention to, in one sequence."""
    numbers, _ = training.draw([torch.Generator().manual_seed(training.HELD_OUT_SEED - 1)], 1)
    middle = training.LENGTH // 2
    pictures: dict[str, Floats] = {}
    kinds = training.PUBLISHED_LARGE_TAG, training.STANDARD, training.QK_NORM + training.PENALISED
    for name, each in ((one.recipe.name, one) for one in trained if one.recipe.name in kinds):
        errors, count = models.loc[models["kind"] == name, "error"].to_numpy(), len(each.seeds)
        with torch.no_grad(), using_threads(1):
            forward_pass = each.model(numbers.expand(count, -1, -1), torch.full((count, 1), middle))
        pictures[name] = forward_pass.attention[errors.argmin(), 0].numpy()
    title = "First-layer attention of trained models"
    shows = "The best seed of three kinds reads the same sequence, [SEP] in the marked column."
    look_for = "a sink at [SEP] where it was free to form, and none where attention to it was penalised."
    source = f"{ZHANG}, Fig. 6, for trained models"
    outcome.figure("attention", title, attention_maps(pictures, middle), shows, look_for, source, wide=True)


def draw_scatter(
    outcome: Outcome,
    models: pd.DataFrame,
    column: str,
    names: tuple[str, str],
    limits: tuple[float, float],
    look_for: str,
) -> None:
    """Each model's error against a column, which `names` names in the title and on the axis; `limits` of both."""
    what, axis = names
    kinds = {}
    for kind, rows in models.groupby("kind", sort=False):
        seeds_of = [f"{kind}, seed {seed}" for seed in rows["seed"]]
        kinds[str(kind)] = rows["left"].to_numpy(), rows[column].to_numpy(), seeds_of
    title = f"Every trained model: error and {what}"
    drawn = seeds(kinds, ("residual variance", axis), limits, logarithmic=column == "outlier")
    shows = "One dot per seed, on sequences not used in training. Dotted: what counts as solved, and the criterion."
    source = f"{ZHANG}, section 4; the training runs are ours"
    outcome.figure(column, title, drawn, shows, look_for, source, wide=True)
