"""Averaging learned from scratch: does it require the sink, the outlier dimension, the low-rank weights of Theorem 4.1?

Claims of Zhang et al. 2025. The training runs are in `averaging_training`, the construction in
`averaging_construction`.
They need no model and no text.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
import torch

from theodolite.judging import FAILS, HOLDS, UNTESTABLE, Criterion, Estimate, Verdict, error_of_share, judge
from theodolite.papers.catch_tag_release.averaging_construction import OUTLIER, RANK_ONE, SINK
from theodolite.papers.catch_tag_release.averaging_measures import DIRECTIONS, HELD_OUT_SEED, SOLVED, measured
from theodolite.papers.catch_tag_release.averaging_training import (
    FREE_ATTENTION,
    LENGTH,
    WIDTH,
    AveragingRecipe,
    TrainedModels,
    draw,
    train_averaging,
)
from theodolite.papers.experiment import Study, experiment
from theodolite.papers.training.training_loop import threads
from theodolite.report.data import Floats
from theodolite.report.drawing import averaging as drawing
from theodolite.report.exhibit import Exhibit
from theodolite.report.measures import ZHANG
from theodolite.report.outcome import Outcome, Reading
from theodolite.system.wording import counted, listed, number, percent, with_error

PUBLISHED, PUBLISHED_LARGE_TAG = "paper's, s_tag from N(0, 1)", "paper's, s_tag from N(5, 1)"
STANDARD, QK_NORM = f"standard, d = {WIDTH}", f"standard with QK-norm, d = {WIDTH}"
PENALISED = ", sink penalised"
RECIPES = {
    AveragingRecipe(PUBLISHED, 2, 3000, 64, 0.05): 8,
    AveragingRecipe(PUBLISHED_LARGE_TAG, 2, 3000, 64, 0.05, large_tag=True): 8,
    AveragingRecipe(STANDARD, WIDTH, 1000, 64, 0.01): 5,
    AveragingRecipe(STANDARD + PENALISED, WIDTH, 1000, 64, 0.01, penalised=True): 5,
    AveragingRecipe(QK_NORM, WIDTH, 1000, 64, 0.01, normed=True): 5,
    AveragingRecipe(QK_NORM + PENALISED, WIDTH, 1000, 64, 0.01, normed=True, penalised=True): 5,
}
"""Recipe → number of seeds."""

UNSOLVED = Criterion("at least", SOLVED.limit, "no longer solved")
SPECIFIC_SHARE = 0.05
"""The tag's direction is what counts where at most this share of random directions cost as much (ours)."""

MOST = Criterion("at least", 0.5, "most of the models (ours)")


@experiment(
    "sinks/averaging",
    "Averaging learned from scratch: does it require a sink, an outlier dimension, low-rank weights?",
    "Simple tasks, like averaging, necessitate the catch, tag, release mechanism (abstract, section 4)",
    needs=("nothing",),
    scaled_down="36 small models",
)
def averaging(study: Study, outcome: Outcome) -> None:
    first = study.provenance["seed"]
    trained = []
    for index, (recipe, count) in enumerate(RECIPES.items(), 1):
        study.say(f"training runs {index} of {len(RECIPES)}: {recipe.name}, {counted(count, 'seed')}")
        trained.append(train_averaging(recipe, range(first, first + count)))
    models = pd.concat([measured(models_of_recipe) for models_of_recipe in trained], ignore_index=True)
    exhibits = [
        _losses(trained, models),
        _maps(trained, models),
        _scatter(models, "sink"),
        _scatter(models, "outlier"),
    ]
    outcome.readings += _compared(models)
    outcome.verdicts += judged(models)
    outcome.tables |= {"models": models}
    outcome.exhibits += exhibits


def _compared(models: pd.DataFrame) -> list[Reading]:
    readings = [
        Reading(
            "residual variance by predicting the mean of all numbers; by 0",
            f"{_range(models['left_mean_of_all'])}; 1",
        )
    ]
    shown = (("residual variance", "left"), ("η²", "eta"), ("outlier", "outlier"))
    for kind, rows in models.groupby("kind", sort=False):
        sink = f"attention to [SEP] {_range(rows['sink'])}, before training {_range(rows['sink_begun'])}"
        parts = [sink, *(f"{what} {_range(rows[column])}" for what, column in shown)]
        seeds = f"{int(rows['solved'].sum())} of {len(rows)} seeds solve the task"
        unsolved = rows.loc[~rows["solved"], "seed"].astype(str).tolist()
        seeds += f" (not: {listed(unsolved, 10)})" if unsolved else ""
        readings.append(Reading(str(kind), "; ".join([seeds, *parts])))
    return readings


def _range(values: pd.Series) -> str:
    return f"{number(values.min())} to {number(values.max())}"


def judged(models: pd.DataFrame) -> list[Verdict]:
    """Verdicts on `models`, rows as `measured` gives them: claims of section 4, for models that solve the task."""
    solved = models[models["solved"]]
    papers = solved[solved["kind"].isin([PUBLISHED, PUBLISHED_LARGE_TAG])]
    standard = solved[solved["kind"] == STANDARD]
    verdicts = [_necessity(solved), _learned(models)]
    for name, rows in (("paper's architecture", papers), (f"standard one, d = {WIDTH}", standard)):
        where = f"; {name}, {counted(len(rows), 'trained model')} that solve{'s' * (len(rows) == 1)} the task"
        verdicts += [
            _mean(
                f"[SEP] forms an attention sink{where}",
                f"attention of later tokens to it (before training {_mean_of(rows['sink_begun'])})",
                rows["sink"],
                SINK,
            ),
            _mean(
                f"There is an outlier feature dimension{where}",
                "RMS of the largest coordinate after [SEP] over the median of the others",
                rows["outlier"],
                OUTLIER,
            ),
            *(
                _mean(
                    f"{printed} is low rank{where}",
                    f"second over first singular value (before training {_mean_of(rows[f'{column}_begun'])})",
                    rows[column],
                    RANK_ONE,
                )
                for printed, column in (("W_V¹", "second_value"), ("W_Q² W_K²", "second_query_key"))
            ),
            _tag_is_read(f"The tags are what the second layer reads (section 4.2){where}", rows),
            _mean(
                f"The sink is what makes the tags (section 4.2){where}",
                "residual variance with [SEP] hidden from later tokens in the first layer",
                rows["left_blind"],
                UNSOLVED,
            ),
        ]
    return verdicts


def _mean(claim: str, what: str, values: pd.Series, criterion: Criterion) -> Verdict:
    """Judge a mean over seeds; the evidence gives its range."""
    spread = f" (from {_range(values)})" if len(values) else ""
    return judge(
        claim,
        f"{what}, mean over seeds{spread}",
        Estimate(float(values.mean()), float(values.sem())),
        criterion,
    )


def _mean_of(values: pd.Series) -> str:
    return with_error(float(values.mean()), float(values.sem()))


def _tag_is_read(claim: str, rows: pd.DataFrame) -> Verdict:
    """Whether models need the tag's direction more than a random direction of what the layer writes."""
    if rows.empty:
        return Verdict(claim, UNTESTABLE, "no model solves the task")
    fails = UNSOLVED.met(rows["left_untagged"].to_numpy(dtype=np.float64))
    tag_specific = fails & (rows["as_costly"] <= SPECIFIC_SHARE).to_numpy()
    what = (
        f"share of the models that no longer solve it with the tag direction projected out of what the first layer "
        f"writes (here {int(fails.sum())} of {len(rows)}; residual variance {_mean_of(rows['left_untagged'])}), and of "
        f"which at most {percent(SPECIFIC_SHARE)} of {DIRECTIONS} random directions of what it writes cost as much "
        f"(residual variance {_mean_of(rows['left_random'])}, spread over directions "
        f"{number(rows['left_random_sd'].mean())}; as "
        f"costly or more: {_shares(rows['as_costly'])} of them)"
    )
    share = float(tag_specific.mean())
    return judge(claim, what, Estimate(share, error_of_share(len(rows))), MOST)


def _shares(values: pd.Series) -> str:
    return f"{percent(values.min())} to {percent(values.max())}"


def _necessity(solved: pd.DataFrame) -> Verdict:
    """One trained model that solves the task without a sink is enough."""
    claim = "Simple tasks, like averaging, necessitate the mechanism (abstract, section 6)"
    if solved.empty:
        return Verdict(claim, UNTESTABLE, "no model solves the task")
    parts = []
    for kind, rows in solved.groupby("kind", sort=False):
        without = rows[rows["sink"] < SINK.limit]
        part = f"{kind}: {len(without)} of {len(rows)}"
        if len(without):
            best = without.loc[without["left"].idxmin()]
            part += f" (attention {_range(without['sink'])}, residual variance {number(best['left'])} and "
            part += f"more, {number(without['left_blind'].min())} and more with [SEP] hidden)"
        parts.append(part)
    any_without = bool((solved["sink"] < SINK.limit).any())
    evidence = (
        f"models that solve the task and pay [SEP] less than {SINK.limit:g}: {'; '.join(parts)}; {SOLVED}; "
        "Theorem 4.1 itself shows that the mechanism is enough, not that it is needed"
    )
    return Verdict(claim, FAILS if any_without else HOLDS, evidence)


def _learned(models: pd.DataFrame) -> Verdict:
    """Whether the paper's own architecture learns the task, from either start."""
    papers = models[models["kind"].isin([PUBLISHED, PUBLISHED_LARGE_TAG])]
    parts = [
        f"{kind}: {int(rows['solved'].sum())} of {len(rows)} seeds (residual variance {_range(rows['left'])})"
        for kind, rows in papers.groupby("kind", sort=False)
    ]
    claim = "A two-layer attention model can be trained to average (section 1)"
    evidence = f"the paper's architecture: {'; '.join(parts)}; criterion: any, {SOLVED.source}"
    if papers.empty:
        return Verdict(claim, UNTESTABLE, "it was not trained")
    return Verdict(claim, HOLDS if papers["solved"].any() else FAILS, evidence)


def _losses(trained: Sequence[TrainedModels], models: pd.DataFrame) -> Exhibit:
    steps, curves = {}, {}
    for models_of_recipe in trained:
        curves[models_of_recipe.recipe.name] = models_of_recipe.losses.numpy()
        points = models_of_recipe.losses.shape[1]
        steps[models_of_recipe.recipe.name] = (
            (np.arange(points) + 0.5) * models_of_recipe.recipe.steps / points
        )
    variance = float((models["error"] / models["left"]).mean())
    marks = {"0": variance, "mean of all numbers": variance * float(models["left_mean_of_all"].mean())}
    return Exhibit(
        "losses",
        "Training from scratch",
        drawing.losses(steps, curves, {f"predicting {name}": level for name, level in marks.items()}),
        f"Squared error of every seed, {LENGTH} tokens with N(0, 1) numbers. Sink penalised: a mean attention to "
        f"[SEP] above {FREE_ATTENTION:g} is added to the loss.",
        "seeds that stay near the dotted lines have not learned to identify the tokens after [SEP].",
        f"{ZHANG}, section 4; the training runs are ours",
        wide=True,
    )


def _maps(trained: Sequence[TrainedModels], models: pd.DataFrame) -> Exhibit:
    numbers, _ = draw([torch.Generator().manual_seed(HELD_OUT_SEED - 1)], 1)
    middle = LENGTH // 2
    pictures: dict[str, Floats] = {}
    for models_of_recipe in trained:
        if models_of_recipe.recipe.name in (PUBLISHED_LARGE_TAG, STANDARD, QK_NORM + PENALISED):
            rows = models[models["kind"] == models_of_recipe.recipe.name].reset_index(drop=True)
            best = int(rows["error"].idxmin())
            count = len(models_of_recipe.seeds)
            with torch.no_grad(), threads(1):
                forward_pass = models_of_recipe.model(
                    numbers.expand(count, -1, -1), torch.full((count, 1), middle)
                )
            pictures[models_of_recipe.recipe.name] = forward_pass.attention[best, 0].numpy()
    return Exhibit(
        "attention",
        "First-layer attention of trained models",
        drawing.attention_maps(pictures, middle),
        "The best seed of three kinds reads the same sequence, [SEP] in the marked column.",
        "a sink at [SEP] where it was free to form, and none where attention to it was penalised.",
        f"{ZHANG}, Fig. 6, for trained models",
        wide=True,
    )


def _scatter(models: pd.DataFrame, column: str) -> Exhibit:
    title, limit, look_for = {
        "sink": (
            "mean attention of tokens after [SEP] to it",
            SINK,
            "dots in the lower left: the task solved without a sink.",
        ),
        "outlier": (
            "largest coordinate over the median of the others",
            OUTLIER,
            "whether models that solve the task have one coordinate far above the others.",
        ),
    }[column]
    kinds = {
        str(kind): (
            rows["left"].to_numpy(),
            rows[column].to_numpy(),
            [f"{kind}, seed {seed}" for seed in rows["seed"]],
        )
        for kind, rows in models.groupby("kind", sort=False)
    }
    return Exhibit(
        column,
        f"Every trained model: error and {'the sink' if column == 'sink' else 'outliers'}",
        drawing.seeds(
            kinds,
            ("residual variance", title),
            (SOLVED.limit, limit.limit),
            logarithmic=column == "outlier",
        ),
        "One dot per seed, on sequences not used in training. Dotted: what counts as solved, and the criterion.",
        look_for,
        f"{ZHANG}, section 4; the training runs are ours",
        wide=True,
    )
