"""Figures of models that were trained to average: their losses, first-layer attention, and what error goes with."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
import torch

from theodolite.report.data import Floats
from theodolite.report.measures import ZHANG
from theodolite.report.outcome import Outcome
from theodolite.system.threads import using_threads
from theodolite_papers.catch_tag_release.averaging_training import (
    FREE_ATTENTION,
    HELD_OUT_SEED,
    LENGTH,
    PENALISED,
    PUBLISHED_LARGE_TAG,
    QK_NORM,
    STANDARD,
    TrainedModels,
    draw,
)
from theodolite_papers.drawing import averaging as drawing


def draw_losses(outcome: Outcome, trained: Sequence[TrainedModels], models: pd.DataFrame) -> None:
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
        drawing.losses(steps, curves, marks),
        f"Squared error of every seed, {LENGTH} tokens with N(0, 1) numbers. Sink penalised: a mean attention to "
        f"[SEP] above {FREE_ATTENTION:g} is added to the loss.",
        "seeds that stay near the dotted lines have not learned to identify the tokens after [SEP].",
        f"{ZHANG}, section 4; the training runs are ours",
        wide=True,
    )


def draw_attention(outcome: Outcome, trained: Sequence[TrainedModels], models: pd.DataFrame) -> None:
    """What the best seed of three kinds pays attention to, in one sequence."""
    numbers, _ = draw([torch.Generator().manual_seed(HELD_OUT_SEED - 1)], 1)
    middle = LENGTH // 2
    pictures: dict[str, Floats] = {}
    for each in trained:
        if each.recipe.name in (PUBLISHED_LARGE_TAG, STANDARD, QK_NORM + PENALISED):
            errors = models.loc[models["kind"] == each.recipe.name, "error"].to_numpy()
            count = len(each.seeds)
            with torch.no_grad(), using_threads(1):
                forward_pass = each.model(numbers.expand(count, -1, -1), torch.full((count, 1), middle))
            pictures[each.recipe.name] = forward_pass.attention[errors.argmin(), 0].numpy()
    outcome.figure(
        "attention",
        "First-layer attention of trained models",
        drawing.attention_maps(pictures, middle),
        "The best seed of three kinds reads the same sequence, [SEP] in the marked column.",
        "a sink at [SEP] where it was free to form, and none where attention to it was penalised.",
        f"{ZHANG}, Fig. 6, for trained models",
        wide=True,
    )


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
    kinds = {
        str(kind): (
            rows["left"].to_numpy(),
            rows[column].to_numpy(),
            [f"{kind}, seed {seed}" for seed in rows["seed"]],
        )
        for kind, rows in models.groupby("kind", sort=False)
    }
    outcome.figure(
        column,
        f"Every trained model: error and {what}",
        drawing.seeds(kinds, ("residual variance", axis), limits, logarithmic=column == "outlier"),
        "One dot per seed, on sequences not used in training. Dotted: what counts as solved, and the criterion.",
        look_for,
        f"{ZHANG}, section 4; the training runs are ours",
        wide=True,
    )
