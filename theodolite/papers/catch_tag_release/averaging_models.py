"""Averaging learned from scratch: does it require the sink, the outlier dimension, the low-rank weights of Theorem 4.1?

Claims of Zhang et al. 2025. The training runs are in `averaging_training`, the construction in
`averaging_construction`. They need no model and no text.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from theodolite.attention.summary import SINK_THRESHOLD
from theodolite.judging import Criterion, Estimate
from theodolite.measure.averaging import (
    outlier_ratio,
    random_directions,
    second_over_first,
    tag_direction,
    tag_strength,
    unexplained_variance,
)
from theodolite.papers.catch_tag_release.averaging_training import (
    FREE_ATTENTION,
    LENGTH,
    WIDTH,
    AveragingRecipe,
    ForwardPass,
    TrainedModels,
    attention_to_separator,
    draw,
    train_averaging,
)
from theodolite.papers.experiment import Study, experiment
from theodolite.papers.training.training_loop import threads
from theodolite.report.data import Floats
from theodolite.report.drawing import averaging as drawing
from theodolite.report.measures import ZHANG
from theodolite.report.outcome import Outcome
from theodolite.system.progress import shown
from theodolite.system.wording import counted, listed, number, percent, with_error
from theodolite.theory.averaging import mean_after
from theodolite.theory.singular import stable_rank

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

HELD_OUT_SEQUENCES = 2000
"""Sequences that a trained model is measured on."""

HELD_OUT_SEED = 1 << 31
"""Added to a seed for sequences not used in training."""

DIRECTIONS = 64
"""Random directions that the tag's own is compared with."""

SPECIFIC_SHARE = 0.05
"""The tag's direction is what counts where at most this share of random directions cost as much (ours)."""

SOLVED = Criterion("at most", 0.1, "a tenth of the target's variance (ours)")
UNSOLVED = Criterion("at least", SOLVED.limit, "no longer solved")
MOST = Criterion("at least", 0.5, "most of the models (ours)")
SINK = Criterion("at least", SINK_THRESHOLD, "mean attention that makes a sink in the literature")
OUTLIER = Criterion(
    "at least", 6.0, "six times the other coordinates, as |x| ≥ 6 with numbers of size 1 (ours)"
)
RANK_ONE = Criterion(
    "at most", 0.1, "“low rank” read as: a second singular value of a tenth of the first (ours)"
)


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
    for recipe, count in shown([*RECIPES.items()], "training", study.show):
        trained.append(train_averaging(recipe, range(first, first + count)))
    models = outcome.tables["models"] = pd.concat(map(measured, trained), ignore_index=True)
    read_levels(outcome, models)
    judge_models(outcome, models)
    _losses(outcome, trained, models)
    _maps(outcome, trained, models)
    _scatter(
        outcome,
        models,
        "sink",
        ("the sink", "mean attention of tokens after [SEP] to it"),
        SINK,
        "dots in the lower left: the task solved without a sink.",
    )
    _scatter(
        outcome,
        models,
        "outlier",
        ("outliers", "largest coordinate over the median of the others"),
        OUTLIER,
        "whether models that solve the task have one coordinate far above the others.",
    )


def measured(trained: TrainedModels) -> pd.DataFrame:
    """One row per seed, on sequences not used in training.

    error is the mean square, left the same over the target's variance, which predicting 0 would leave (1).
    sink: mean attention of tokens after [SEP] to it; sinks: share of sequences where it exceeds SINK. outlier: RMS of
    the residual stream's largest coordinate over the median of the others, over tokens after [SEP]. tag_share: share of
    the tag direction (difference of means of what the first layer writes after and before [SEP]) in its largest
    coordinate. eta: between over total sum of squares of what it writes, tokens grouped by before and after [SEP];
    eta_chance the same with the places of another sequence. second_…: second over first singular value. …_begun: the
    same before training. left_blind, left_untagged: error with [SEP] hidden from later tokens in the first layer, and
    with the tag direction projected out of what it writes; left_random, left_random_sd: mean and standard deviation of
    the latter over `DIRECTIONS` random directions of what it writes; as_costly: share of these that leave as much.
    """
    generators = [torch.Generator().manual_seed(HELD_OUT_SEED + seed) for seed in trained.seeds]
    numbers, places = draw(generators, HELD_OUT_SEQUENCES)
    place, targets = torch.arange(LENGTH), mean_after(numbers, places)
    after, is_separator = place > places[..., None], place == places[..., None]

    def left(hide_separator: bool = False, ablated: Tensor | None = None) -> Tensor:
        output = trained.model(numbers, places, hide_separator=hide_separator, ablated=ablated).output
        return unexplained_variance(output, targets)

    def caught(forward_pass: ForwardPass) -> Tensor:
        return attention_to_separator(forward_pass, places) * after

    with torch.no_grad(), threads(1):
        forward_pass, initial_pass = trained.model(numbers, places), trained.initial(numbers, places)
        written = forward_pass.written
        tag = tag_direction(written, after, ~after & ~is_separator)
        left_untagged = left(ablated=tag)
        directions = random_directions(written, DIRECTIONS, HELD_OUT_SEED)
        left_random = torch.stack([left(ablated=direction) for direction in directions])
        mean_of_all = torch.where(is_separator, 0.0, numbers).sum(-1) / (LENGTH - 1)
        by_sequence = caught(forward_pass).sum(-1) / after.sum(-1)
        columns = {
            "seed": torch.tensor(trained.seeds),
            "error": (forward_pass.output - targets).square().mean(-1),
            "left": left(),
            "left_mean_of_all": unexplained_variance(mean_of_all, targets),
            "sink": caught(forward_pass).sum((1, 2)) / after.sum((1, 2)),
            "sink_begun": caught(initial_pass).sum((1, 2)) / after.sum((1, 2)),
            "sinks": (by_sequence > SINK.limit).double().mean(-1),
            "outlier": outlier_ratio(forward_pass.hidden, after),
            "tag_share": tag.square().amax(-1),
            "eta": tag_strength(written, after, ~is_separator),
            "eta_chance": tag_strength(written, after.roll(1, 1), ~is_separator),
            "left_blind": left(hide_separator=True),
            "left_untagged": left_untagged,
            "left_random": left_random.mean(0),
            "left_random_sd": left_random.std(0),
            "as_costly": (left_random >= left_untagged).double().mean(0),
        }
        for when, model in (("", trained.model), ("_begun", trained.initial)):
            for name, matrix in (("value", model.value_output()), ("query_key", model.query_key())):
                columns[f"second_{name}{when}"] = second_over_first(matrix)
                columns[f"stable_rank_{name}{when}"] = stable_rank(matrix)
    table = pd.DataFrame({name: values.numpy() for name, values in columns.items()})
    table.insert(0, "kind", trained.recipe.name)
    return table.assign(solved=SOLVED.met(table["left"].to_numpy(dtype=np.float64)))


def read_levels(outcome: Outcome, models: pd.DataFrame) -> None:
    """What each kind of model came to, rows as `measured` gives them."""
    outcome.read(
        "residual variance by predicting the mean of all numbers; by 0",
        f"{_range(models['left_mean_of_all'])}; 1",
    )
    for kind, rows in models.groupby("kind", sort=False):
        seeds = f"{int(rows['solved'].sum())} of {len(rows)} seeds solve the task"
        unsolved = rows.loc[~rows["solved"], "seed"].astype(str).tolist()
        seeds += f" (not: {listed(unsolved, 10)})" if unsolved else ""
        outcome.read(
            str(kind),
            f"{seeds}; attention to [SEP] {_range(rows['sink'])}, before training {_range(rows['sink_begun'])}; "
            f"residual variance {_range(rows['left'])}; η² {_range(rows['eta'])}; outlier {_range(rows['outlier'])}",
        )


def _range(values: pd.Series) -> str:
    return f"{number(values.min())} to {number(values.max())}"


def judge_models(outcome: Outcome, models: pd.DataFrame) -> None:
    """Claims of section 4, on models that solve the task: rows as `measured` gives them."""
    solved = models[models["solved"]]
    papers = solved[solved["kind"].isin([PUBLISHED, PUBLISHED_LARGE_TAG])]
    standard = solved[solved["kind"] == STANDARD]
    _necessity(outcome, solved)
    _learned(outcome, models)
    for name, rows in (("paper's architecture", papers), (f"standard one, d = {WIDTH}", standard)):
        where = f"; {name}, {counted(len(rows), 'trained model')} that solve{'s' * (len(rows) == 1)} the task"
        _mean(
            outcome,
            f"[SEP] forms an attention sink{where}",
            f"attention of later tokens to it (before training {_mean_of(rows['sink_begun'])})",
            rows["sink"],
            SINK,
        )
        _mean(
            outcome,
            f"There is an outlier feature dimension{where}",
            "RMS of the largest coordinate after [SEP] over the median of the others",
            rows["outlier"],
            OUTLIER,
        )
        for printed, column in (("W_V¹", "second_value"), ("W_Q² W_K²", "second_query_key")):
            _mean(
                outcome,
                f"{printed} is low rank{where}",
                f"second over first singular value (before training {_mean_of(rows[f'{column}_begun'])})",
                rows[column],
                RANK_ONE,
            )
        _tag_is_read(outcome, f"The tags are what the second layer reads (section 4.2){where}", rows)
        _mean(
            outcome,
            f"The sink is what makes the tags (section 4.2){where}",
            "residual variance with [SEP] hidden from later tokens in the first layer",
            rows["left_blind"],
            UNSOLVED,
        )


def _mean(outcome: Outcome, claim: str, what: str, values: pd.Series, criterion: Criterion) -> None:
    """Judge a mean over seeds; the evidence gives its range."""
    what = f"{what}, mean over seeds" + (f" (from {_range(values)})" if len(values) else "")
    mean = Estimate.mean(values, "models") if len(values) else math.nan
    outcome.claim(claim, what, mean, criterion)


def _mean_of(values: pd.Series) -> str:
    return with_error(float(values.mean()), float(values.sem()))


def _tag_is_read(outcome: Outcome, claim: str, rows: pd.DataFrame) -> None:
    """Whether models need the tag's direction more than a random direction of what the layer writes."""
    if rows.empty:
        outcome.cannot_test(claim, "no model solves the task")
        return
    fails = UNSOLVED.met(rows["left_untagged"].to_numpy(dtype=np.float64))
    tag_specific = fails & (rows["as_costly"] <= SPECIFIC_SHARE).to_numpy()
    costly = rows["as_costly"]
    what = (
        f"share of the models that no longer solve it with the tag direction projected out of what the first layer "
        f"writes (here {int(fails.sum())} of {len(rows)}; residual variance {_mean_of(rows['left_untagged'])}), and of "
        f"which at most {percent(SPECIFIC_SHARE)} of {DIRECTIONS} random directions of what it writes cost as much "
        f"(residual variance {_mean_of(rows['left_random'])}, spread over directions "
        f"{number(rows['left_random_sd'].mean())}; as costly or more: {percent(costly.min())} to "
        f"{percent(costly.max())} of them)"
    )
    share = Estimate.share(float(tag_specific.mean()), len(rows), "models")
    outcome.claim(claim, what, share, MOST)


def _necessity(outcome: Outcome, solved: pd.DataFrame) -> None:
    """One trained model that solves the task without a sink is enough."""
    claim = "Simple tasks, like averaging, necessitate the mechanism (abstract, section 6)"
    if solved.empty:
        outcome.cannot_test(claim, "no model solves the task")
        return
    parts = []
    for kind, rows in solved.groupby("kind", sort=False):
        without = rows[rows["sink"] < SINK.limit]
        part = f"{kind}: {len(without)} of {len(rows)}"
        if len(without):
            best = without.loc[without["left"].idxmin()]
            part += f" (attention {_range(without['sink'])}, residual variance {number(best['left'])} and "
            part += f"more, {number(without['left_blind'].min())} and more with [SEP] hidden)"
        parts.append(part)
    what = (
        f"models that solve the task ({SOLVED}) and pay [SEP] less than {SINK.limit:g}: {'; '.join(parts)}; least "
        "attention that any of them pays it"
    )
    enough = "; Theorem 4.1 itself shows that the mechanism is enough, not that it is needed"
    outcome.claim(claim, what, float(solved["sink"].min()), SINK, enough)


def _learned(outcome: Outcome, models: pd.DataFrame) -> None:
    """Whether the paper's own architecture learns the task, from either start."""
    claim = "A two-layer attention model can be trained to average (section 1)"
    papers = models[models["kind"].isin([PUBLISHED, PUBLISHED_LARGE_TAG])]
    if papers.empty:
        outcome.cannot_test(claim, "it was not trained")
        return
    parts = [
        f"{kind}: {int(rows['solved'].sum())} of {len(rows)} seeds (residual variance {_range(rows['left'])})"
        for kind, rows in papers.groupby("kind", sort=False)
    ]
    what = f"the paper's architecture: {'; '.join(parts)}; least residual variance of any seed"
    outcome.claim(claim, what, float(papers["left"].min()), SOLVED)


def _losses(outcome: Outcome, trained: Sequence[TrainedModels], models: pd.DataFrame) -> None:
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


def _maps(outcome: Outcome, trained: Sequence[TrainedModels], models: pd.DataFrame) -> None:
    numbers, _ = draw([torch.Generator().manual_seed(HELD_OUT_SEED - 1)], 1)
    middle = LENGTH // 2
    pictures: dict[str, Floats] = {}
    for each in trained:
        if each.recipe.name in (PUBLISHED_LARGE_TAG, STANDARD, QK_NORM + PENALISED):
            errors = models.loc[models["kind"] == each.recipe.name, "error"].to_numpy()
            count = len(each.seeds)
            with torch.no_grad(), threads(1):
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


def _scatter(
    outcome: Outcome,
    models: pd.DataFrame,
    column: str,
    names: tuple[str, str],
    limit: Criterion,
    look_for: str,
) -> None:
    """Each model's error against a column, which `names` names in the title and on the axis."""
    what, axis = names
    kinds = {
        str(kind): (
            rows["left"].to_numpy(),
            rows[column].to_numpy(),
            [f"{kind}, seed {seed}" for seed in rows["seed"]],
        )
        for kind, rows in models.groupby("kind", sort=False)
    }
    limits = (SOLVED.limit, limit.limit)
    outcome.figure(
        column,
        f"Every trained model: error and {what}",
        drawing.seeds(kinds, ("residual variance", axis), limits, logarithmic=column == "outlier"),
        "One dot per seed, on sequences not used in training. Dotted: what counts as solved, and the criterion.",
        look_for,
        f"{ZHANG}, section 4; the training runs are ours",
        wide=True,
    )
