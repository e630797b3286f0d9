"""Averaging learned from scratch: does it require a sink, an outlier dimension, low-rank weights (Theorem 4.1)?"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from theodolite.attention.sinks import SINK_THRESHOLD
from theodolite.estimates import Estimate, most_extreme
from theodolite.judging import Criterion, judge, mix_of
from theodolite.system.progress import shown
from theodolite.system.threads import using_threads
from theodolite.system.wording import counted, listed, number, percent, with_error
from theodolite.theory import mean_after, stable_rank
from theodolite.theory.grouping import variance_explained
from theodolite_papers.catch_tag_release import averaging_training as training
from theodolite_papers.catch_tag_release.averaging_figures import draw_attention, draw_losses, draw_scatter
from theodolite_papers.experiment import Outcome, Study, experiment

RANK_TOLERANCE = 1e-6
"""Of the largest singular value of what a layer writes: directions below it are not written along."""


def unexplained_variance(
    output: Float[Tensor, "models batch"], target: Float[Tensor, "models batch"]
) -> Float[Tensor, " models"]:
    """The mean square error over the mean square of the target: 1 for a model that always answers 0."""
    return (output - target).square().mean(-1) / target.square().mean(-1)


def error_of_ratio(
    parts: Float[Tensor, "models batch"], wholes: Float[Tensor, "models batch"]
) -> Float[Tensor, " models"]:
    """Standard error over sequences of Σ parts / Σ wholes: to first order, that of the mean of what is left by it."""
    left = parts - wholes * (parts.sum(-1) / wholes.sum(-1))[:, None]
    return left.std(-1) / left.shape[-1] ** 0.5 / wholes.mean(-1)


def tag_direction(
    written: Float[Tensor, "models batch length width"],
    tagged: Bool[Tensor, "models batch length"],
    others: Bool[Tensor, "models batch length"],
) -> Float[Tensor, "models width"]:
    """Unit difference of the means of what a layer writes to tagged tokens and to the others (section 4.2)."""
    means = [
        vectors[group].mean(0) - vectors[rest].mean(0)
        for vectors, group, rest in zip(written, tagged, others, strict=True)
    ]
    return torch.nn.functional.normalize(torch.stack(means), dim=-1)


def tag_strength(
    written: Float[Tensor, "models batch length width"],
    tagged: Bool[Tensor, "models batch length"],
    counted: Bool[Tensor, "models batch length"],
) -> Float[Tensor, " models"]:
    """η² of what a layer writes to the counted tokens, grouped by whether they are tagged; in [0, 1]."""
    parts = zip(written, tagged, counted, strict=True)
    return torch.tensor(
        [variance_explained(vectors[chosen], group[chosen].long()) for vectors, group, chosen in parts],
        dtype=torch.float64,
    )


def outlier_ratio(
    hidden: Float[Tensor, "models batch length width"], counted: Bool[Tensor, "models batch length"]
) -> Float[Tensor, " models"]:
    """RMS over the counted tokens of the largest coordinate, over the median RMS of the other coordinates."""
    sizes = (hidden.square() * counted[..., None]).sum((1, 2)) / counted.sum((1, 2))[:, None]
    ordered = sizes.sqrt().sort(-1).values
    return ordered[:, -1] / ordered[:, :-1].median(-1).values


def random_directions(
    written: Float[Tensor, "models batch length width"], count: int, seed: int
) -> Float[Tensor, "count models width"]:
    """Random unit vectors, uniform in the space that a layer's output spans, of each model."""
    _, sizes, spanned = torch.linalg.svd(written.double().flatten(1, 2), full_matrices=False)
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(count, *sizes.shape, generator=generator, dtype=torch.float64)
    normal = normal * (sizes > RANK_TOLERANCE * sizes[:, :1])
    directions = torch.einsum("csk,skw->csw", normal, spanned)
    return (directions / directions.norm(dim=-1, keepdim=True)).to(written.dtype)


_PAPERS = training.AveragingRecipe(training.PUBLISHED, 2, 3000, 64, 0.05)
_WIDE = training.AveragingRecipe(training.STANDARD, training.WIDTH, 1000, 64, 0.01)
_NORMED = replace(_WIDE, name=training.QK_NORM, normed=True)
RECIPES = {_PAPERS: 8, replace(_PAPERS, name=training.PUBLISHED_LARGE_TAG, large_tag=True): 8}
for _free in (_WIDE, _NORMED):
    RECIPES |= {_free: 5, replace(_free, name=_free.name + training.PENALISED, penalised=True): 5}
"""Recipe → number of seeds."""

HELD_OUT_SEQUENCES = 2000
"""Sequences that a trained model is measured on."""

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

_SECOND = "second over first singular value"
CLAIMS = (
    ("[SEP] forms an attention sink", "sink", "attention of later tokens to it", SINK),
    (
        "There is an outlier feature dimension",
        "outlier",
        "RMS of the largest coordinate after [SEP] over the median of the others",
        OUTLIER,
    ),
    ("W_V¹ is low rank", "second_value", _SECOND, RANK_ONE),
    ("W_Q² W_K² is low rank", "second_query_key", _SECOND, RANK_ONE),
    (
        "The sink is what makes the tags (section 4.2)",
        "left_blind",
        "residual variance with [SEP] hidden from later tokens in the first layer",
        UNSOLVED,
    ),
)
"""Claims on a mean over models: claim, column, what it is, criterion."""


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
        trained.append(training.train_averaging(recipe, range(first, first + count)))
    models = outcome.tables["models"] = pd.concat(map(measured, trained), ignore_index=True)
    read_levels(outcome, models)
    judge_models(outcome, models)
    draw_losses(outcome, trained, models)
    draw_attention(outcome, trained, models)
    sink = "the sink", "mean attention of tokens after [SEP] to it", SINK
    outlier = "outliers", "largest coordinate over the median of the others", OUTLIER
    without = "dots in the lower left: the task solved without a sink."
    above = "whether models that solve the task have one coordinate far above the others."
    for column, (what, axis, criterion), look_for in (("sink", sink, without), ("outlier", outlier, above)):
        draw_scatter(outcome, models, column, (what, axis), (SOLVED.limit, criterion.limit), look_for)


def measured(trained: training.TrainedModels) -> pd.DataFrame:
    """One row per seed, on sequences not used in training.

    left: error over the target's variance, 1 for predicting 0. …_se: over sequences. …_begun: before training.
    sink: mean attention of tokens after [SEP] to it; sinks: share of sequences where it exceeds SINK. tag_share: share
    of the tag direction in its largest coordinate. eta: of what the first layer writes, grouped by before and after
    [SEP]; eta_chance: with the places of another sequence. second_…: second over first singular value. left_blind: with
    [SEP] hidden in the first layer. left_untagged: with the tag direction projected out; left_random, left_random_sd,
    as_costly: of random directions, mean, deviation, and the share that leave as much.
    """
    generators = [torch.Generator().manual_seed(training.HELD_OUT_SEED + seed) for seed in trained.seeds]
    numbers, places = training.draw(generators, HELD_OUT_SEQUENCES)
    place, targets = torch.arange(training.LENGTH), mean_after(numbers, places)
    after, is_separator = place > places[..., None], place == places[..., None]

    def output(hide_separator: bool = False, ablated: Tensor | None = None) -> Tensor:
        return trained.model(numbers, places, hide_separator=hide_separator, ablated=ablated).output

    def left(ablated: Tensor) -> Tensor:
        return unexplained_variance(output(ablated=ablated), targets)

    def left_se(output: Tensor) -> Tensor:
        return error_of_ratio((output - targets).square(), targets.square())

    def caught(forward_pass: training.ForwardPass) -> Tensor:
        return training.attention_to_separator(forward_pass, places) * after

    with torch.no_grad(), using_threads(1):
        forward_pass, initial_pass = trained.model(numbers, places), trained.initial(numbers, places)
        written = forward_pass.written
        tag = tag_direction(written, after, ~after & ~is_separator)
        left_untagged, blind = left(tag), output(hide_separator=True)
        directions = random_directions(written, DIRECTIONS, training.HELD_OUT_SEED)
        left_random = torch.stack([left(direction) for direction in directions])
        mean_of_all = torch.where(is_separator, 0.0, numbers).sum(-1) / (training.LENGTH - 1)
        by_sequence = caught(forward_pass).sum(-1) / after.sum(-1)
        columns = {
            "seed": torch.tensor(trained.seeds),
            "error": (forward_pass.output - targets).square().mean(-1),
            "left": unexplained_variance(forward_pass.output, targets),
            "left_se": left_se(forward_pass.output),
            "left_mean_of_all": unexplained_variance(mean_of_all, targets),
            "sink": caught(forward_pass).sum((1, 2)) / after.sum((1, 2)),
            "sink_se": error_of_ratio(caught(forward_pass).sum(-1), after.sum(-1).float()),
            "sink_begun": caught(initial_pass).sum((1, 2)) / after.sum((1, 2)),
            "sinks": (by_sequence > SINK.limit).double().mean(-1),
            "outlier": outlier_ratio(forward_pass.hidden, after),
            "tag_share": tag.square().amax(-1),
            "eta": tag_strength(written, after, ~is_separator),
            "eta_chance": tag_strength(written, after.roll(1, 1), ~is_separator),
            "left_blind": unexplained_variance(blind, targets),
            "left_blind_se": left_se(blind),
            "left_untagged": left_untagged,
            "left_random": left_random.mean(0),
            "left_random_sd": left_random.std(0),
            "as_costly": (left_random >= left_untagged).double().mean(0),
        }
        for when, model in (("", trained.model), ("_begun", trained.initial)):
            for name, matrix in (("value", model.value_output()), ("query_key", model.query_key())):
                values = torch.linalg.svdvals(matrix.double())
                columns[f"second_{name}{when}"] = values[..., 1] / values[..., 0]
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
    papers = solved[solved["kind"].isin([training.PUBLISHED, training.PUBLISHED_LARGE_TAG])]
    standard = solved[solved["kind"] == training.STANDARD]
    _necessity(outcome, solved)
    _learned(outcome, models)
    for name, rows in (("paper's architecture", papers), (f"standard one, d = {training.WIDTH}", standard)):
        where = f"; {name}, {counted(len(rows), 'trained model')} that solve{'s' * (len(rows) == 1)} the task"
        for claim, column, what, criterion in CLAIMS:
            if column == "left_blind":
                _tag_is_read(outcome, f"The tags are what the second layer reads (section 4.2){where}", rows)
            begun = f"{column}_begun"
            what += f" (before training {_mean_of(rows[begun])})" if begun in rows else ""
            what += ", mean over seeds" + (f" (from {_range(rows[column])})" if len(rows) else "")
            mean = Estimate.mean(rows[column], "models") if len(rows) else math.nan
            outcome.claim(f"{claim}{where}", what, mean, criterion)


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
    """One trained model that solves the task without a sink refutes a strong one; a weak catch is another question."""
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
            left = number(best["left"])
            part += f" (attention {_range(without['sink'])}, residual variance {left} and more)"
        parts.append(part)
    strong = (
        f"models that solve the task ({SOLVED}) and pay [SEP] less than {SINK.limit:g}: {'; '.join(parts)}; least "
        "attention that any of them pays it"
    )
    weak = "least residual variance of any of them with [SEP] hidden from later tokens in the first layer"
    needs = [
        judge(claim, strong, _least(solved, "sink"), SINK),
        judge(claim, weak, _least(solved, "left_blind"), UNSOLVED),
    ]
    outcome.verdicts.append(mix_of(claim, needs))


def _least(models: pd.DataFrame, column: str) -> Estimate:
    """The least of a column over models, with an error over sequences that allows for the choice."""
    row = models.loc[models[column].idxmin()]
    error = most_extreme(len(models)) * float(row[f"{column}_se"])
    return Estimate(float(row[column]), error, HELD_OUT_SEQUENCES, "sequences")


def _learned(outcome: Outcome, models: pd.DataFrame) -> None:
    """Whether the paper's own architecture learns the task, from either start."""
    claim = "A two-layer attention model can be trained to average (section 1)"
    papers = models[models["kind"].isin([training.PUBLISHED, training.PUBLISHED_LARGE_TAG])]
    if papers.empty:
        outcome.cannot_test(claim, "it was not trained")
        return
    parts = [
        f"{kind}: {int(rows['solved'].sum())} of {len(rows)} seeds (residual variance {_range(rows['left'])})"
        for kind, rows in papers.groupby("kind", sort=False)
    ]
    what = f"the paper's architecture: {'; '.join(parts)}; least residual variance of any seed"
    outcome.claim(claim, what, _least(papers, "left"), SOLVED)
