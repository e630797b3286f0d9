"""Averaging (section 4 of Zhang et al. 2025): learned from scratch, and the construction of Theorem 4.1 (Fig. 6)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from theodolite.attention.sinks import SINK_THRESHOLD, is_sink
from theodolite.estimates import Estimate, Floats, most_extreme
from theodolite.judging import mix_of
from theodolite.report import style
from theodolite.report.drawing.grammar import dots, line
from theodolite.system.processor import using_threads
from theodolite.system.progress import shown
from theodolite.system.wording import counted, for_plotly, listed, number, percent, with_error
from theodolite.theory import stable_rank
from theodolite.theory.grouping import variance_explained
from theodolite_papers.catch_tag_release import averaging_training as training
from theodolite_papers.catch_tag_release.averaging_model import (
    ABSENT,
    averaging_error,
    averaging_model,
    mean_after,
)
from theodolite_papers.catch_tag_release.averaging_training import LENGTH, draw
from theodolite_papers.drawing import POWERS, maps
from theodolite_papers.experiment import Outcome, Study, criterion, declared

RANK_TOLERANCE = 1e-6
"""Of the largest singular value of what a layer writes: directions below it are not written along."""


def unexplained_variance(
    output: Float[Tensor, "models batch"], target: Float[Tensor, "models batch"]
) -> Float[Tensor, " models"]:
    """Compute the mean square error over the mean square of the target: 1 for a model that always answers 0."""
    return (output - target).square().mean(-1) / target.square().mean(-1)


def error_of_ratio(
    parts: Float[Tensor, "models batch"], wholes: Float[Tensor, "models batch"]
) -> Float[Tensor, " models"]:
    """Compute the standard error over sequences of Σ parts / Σ wholes: to first order, that of its residual's mean."""
    left = parts - wholes * (parts.sum(-1) / wholes.sum(-1))[:, None]
    return left.std(-1) / left.shape[-1] ** 0.5 / wholes.mean(-1)


def tag_direction(
    written: Float[Tensor, "models batch length width"],
    tagged: Bool[Tensor, "models batch length"],
    others: Bool[Tensor, "models batch length"],
) -> Float[Tensor, "models width"]:
    """Compute the unit difference of the means that a layer writes to tagged and to other tokens (section 4.2)."""
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
    """Compute η² of what a layer writes to the counted tokens, grouped by whether they are tagged; in [0, 1]."""
    parts = zip(written, tagged, counted, strict=True)
    return torch.tensor(
        [variance_explained(vectors[chosen], group[chosen].long()) for vectors, group, chosen in parts],
        dtype=torch.float64,
    )


def outlier_ratio(
    hidden: Float[Tensor, "models batch length width"], counted: Bool[Tensor, "models batch length"]
) -> Float[Tensor, " models"]:
    """Compute the RMS over counted tokens of the largest coordinate, over the median RMS of the other coordinates."""
    sizes = (hidden.square() * counted[..., None]).sum((1, 2)) / counted.sum((1, 2))[:, None]
    ordered = sizes.sqrt().sort(-1).values
    return ordered[:, -1] / ordered[:, :-1].median(-1).values


def random_directions(
    written: Float[Tensor, "models batch length width"], count: int, seed: int
) -> Float[Tensor, "count models width"]:
    """Draw random unit vectors, uniform in the space that a layer's output spans, of each model."""
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

SOLVED, OUTLIER = criterion("sinks/solved"), criterion("sinks/outlier")
SINK = criterion("sinks/sink", limit=SINK_THRESHOLD)

JUDGED = {
    "sink": "sink",
    "outlier": "outlier",
    "value-rank": "second_value",
    "query-key-rank": "second_query_key",
    "tags-read": "as_costly",
    "tags-made": "left_blind",
}
"""Claim on the models that solve the task → the column of `measured` that it is about."""


@declared("sinks/averaging")
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
    for column, axis, limit in (
        ("sink", "mean attention of tokens after [SEP] to it", SINK.limit),
        ("outlier", "largest coordinate over the median of the others", OUTLIER.limit),
    ):
        draw_scatter(outcome, models, column, axis, (SOLVED.limit, limit))


def measured(trained: training.TrainedModels) -> pd.DataFrame:
    """Measure the models on sequences not used in training, one row per seed.

    left: error over the target's variance, 1 for predicting 0. …_se: over sequences. …_begun: before training.
    sink: mean attention of tokens after [SEP] to it; sinks: share of sequences where it exceeds SINK. tag_share: share
    of the tag direction in its largest coordinate. eta: of what the first layer writes, grouped by before and after
    [SEP]; eta_chance: with the places of another sequence. second_…: second over first singular value. left_blind: with
    [SEP] hidden in the first layer. left_untagged: with the tag direction projected out; left_random, left_random_sd,
    as_costly: of random directions, mean, deviation, and the share that leave as much.
    """
    generators = [torch.Generator().manual_seed(training.HELD_OUT_SEED + seed) for seed in trained.seeds]
    numbers, places = draw(generators, HELD_OUT_SEQUENCES)
    place, targets = torch.arange(LENGTH), mean_after(numbers, places)
    after, is_separator = place > places[..., None], place == places[..., None]

    def left(output: Tensor) -> Tensor:
        return unexplained_variance(output, targets)

    def left_se(output: Tensor) -> Tensor:
        return error_of_ratio((output - targets).square(), targets.square())

    def caught(of: training.ForwardPass) -> Tensor:
        return training.attention_to_separator(of, places) * after

    with torch.no_grad(), using_threads(1):
        done, before = trained.model(numbers, places), trained.initial(numbers, places)
        blind = trained.model(numbers, places, hide_separator=True).output
        tag = tag_direction(done.written, after, ~after & ~is_separator)
        random = random_directions(done.written, DIRECTIONS, training.HELD_OUT_SEED)
        left_untagged, *of_random = (
            left(trained.model(numbers, places, ablated=direction).output) for direction in (tag, *random)
        )
        left_random = torch.stack(of_random)
        mean_of_all = torch.where(is_separator, 0.0, numbers).sum(-1) / (LENGTH - 1)
        columns = {
            "seed": torch.tensor(trained.seeds),
            "error": (done.output - targets).square().mean(-1),
            "left": left(done.output),
            "left_se": left_se(done.output),
            "left_mean_of_all": left(mean_of_all),
            "sink": caught(done).sum((1, 2)) / after.sum((1, 2)),
            "sink_se": error_of_ratio(caught(done).sum(-1), after.sum(-1).float()),
            "sink_begun": caught(before).sum((1, 2)) / after.sum((1, 2)),
            "sinks": is_sink(caught(done).sum(-1) / after.sum(-1)).double().mean(-1),
            "outlier": outlier_ratio(done.hidden, after),
            "tag_share": tag.square().amax(-1),
            "eta": tag_strength(done.written, after, ~is_separator),
            "eta_chance": tag_strength(done.written, after.roll(1, 1), ~is_separator),
            "left_blind": left(blind),
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
    """Report each kind of model; rows as `measured` gives them."""
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
    """Judge the claims of section 4, on models that solve the task: rows as `measured` gives them."""
    solved = models[models["solved"]]
    of_paper = [training.PUBLISHED, training.PUBLISHED_LARGE_TAG]
    papers = solved[solved["kind"].isin(of_paper)]
    standard = solved[solved["kind"] == training.STANDARD]
    _necessity(outcome, solved)
    _learned(outcome, models[models["kind"].isin(of_paper)])
    for name, rows in (("paper's architecture", papers), (f"standard one, d = {training.WIDTH}", standard)):
        where = f"; {name}, {counted(len(rows), 'trained model')} that solve{'s' * (len(rows) == 1)} the task"
        for claim, column in JUDGED.items():
            if claim == "tags-read":
                _tag_is_read(outcome, where, rows)
                continue
            begun = f"{column}_begun"
            before = f" (before training {_mean_of(rows[begun])})" if begun in rows else ""
            seeds = f" (from {_range(rows[column])})" if len(rows) else ""
            mean = Estimate.mean(rows[column], "models") if len(rows) else math.nan
            limit = SINK.limit  # of the claim that there is a sink; the others have their own
            outcome.judge(claim, mean, where=where, before=before, seeds=seeds, limit=limit)


def _mean_of(values: pd.Series) -> str:
    return with_error(float(values.mean()), float(values.sem()))


def _tag_is_read(outcome: Outcome, where: str, rows: pd.DataFrame) -> None:
    """Judge whether models need the tag's direction more than a random direction of what the layer writes."""
    if rows.empty:
        outcome.cannot_judge("tags-read", "no model solves the task", where=where)
        return
    fails = criterion("sinks/unsolved").met(rows["left_untagged"].to_numpy(dtype=np.float64))
    costly = rows["as_costly"]
    specific = fails & (costly <= SPECIFIC_SHARE).to_numpy()
    values = {"fails": int(fails.sum()), "models": len(rows), "left": _mean_of(rows["left_untagged"])}
    values |= {"share": percent(SPECIFIC_SHARE), "directions": DIRECTIONS}
    values |= {"random": _mean_of(rows["left_random"]), "spread": number(rows["left_random_sd"].mean())}
    values |= {"least": percent(costly.min()), "most": percent(costly.max())}
    share = Estimate.share(float(specific.mean()), len(rows), "models")
    outcome.judge("tags-read", share, where=where, **values)


def _necessity(outcome: Outcome, solved: pd.DataFrame) -> None:
    """Judge whether a sink is needed: one model that solves the task without a strong sink refutes it."""
    if solved.empty:
        outcome.cannot_judge("necessary", "no model solves the task")
        return
    kinds = []
    for kind, rows in solved.groupby("kind", sort=False):
        without = rows[~SINK.met(rows["sink"].to_numpy(dtype=np.float64))]
        kinds.append(f"{kind}: {len(without)} of {len(rows)}")
        if len(without):
            left = number(without["left"].min())
            kinds[-1] += f" (attention {_range(without['sink'])}, residual variance {left} and more)"
    values = {"solved": SOLVED, "limit": SINK.limit, "kinds": "; ".join(kinds)}
    strong = outcome.verdict("necessary.strong", _least(solved, "sink"), **values)
    weak = outcome.verdict("necessary.weak", _least(solved, "left_blind"))
    outcome.verdicts.append(mix_of(outcome.sentence("necessary"), [strong, weak]))


def _least(models: pd.DataFrame, column: str) -> Estimate:
    """Return the least of a column over models, with an error over sequences that allows for the choice."""
    row = models.loc[models[column].idxmin()]
    error = most_extreme(len(models)) * float(row[f"{column}_se"])
    return Estimate(float(row[column]), error, HELD_OUT_SEQUENCES, "sequences")


def _learned(outcome: Outcome, papers: pd.DataFrame) -> None:
    """Judge whether the paper's own architecture learns the task, from either start."""
    if papers.empty:
        outcome.cannot_judge("learned", "it was not trained")
        return
    kinds = [
        f"{kind}: {int(rows['solved'].sum())} of {len(rows)} seeds (residual variance {_range(rows['left'])})"
        for kind, rows in papers.groupby("kind", sort=False)
    ]
    outcome.judge("learned", _least(papers, "left"), kinds="; ".join(kinds))


S_TAGS = np.arange(2.0, 37.0, 2.0)
SHOWN_TAGS = (2.0, 4.0, 10.0)
SEQUENCES = 1000
PLAIN = "b = 0, d = 1"
VARIANTS = {PLAIN: (0.0, 1.0), "b = 3": (3.0, 1.0), "d = 0.1": (0.0, 0.1), "d = 5": (0.0, 5.0)}
"""Ours: the theorem lets b and d > 0 be anything, and its figure names none."""


@declared("sinks/figure6")
def construction(study: Study, outcome: Outcome) -> None:
    numbers, places = draw([torch.Generator().manual_seed(study.provenance["seed"])], SEQUENCES)
    numbers, places = numbers[0].double(), places[0]
    middle = LENGTH // 2
    pictures = {
        f"s_tag = {tag:g}": averaging_model(tag)(numbers[:1], middle).attention[0].numpy()
        for tag in SHOWN_TAGS
    }
    outcome.draw("attention", attention_maps(pictures, middle))
    errors = outcome.tables["errors"] = _errors(numbers, places)
    by_tag = errors[errors["b_d"] == PLAIN].set_index("s_tag")
    ratio = by_tag["median"][20.0] / by_tag["derived_median"][20.0]
    derived = "median error over the median of d (s − 1)² e^{−s} |cov(S_j, x_j)|, at s = s_tag = 20"
    outcome.read(derived, number(ratio, 5))
    for tag in (10.0, 20.0, 30.0):
        shown = ", ".join(number(by_tag.loc[tag, name]) for name in ("median", "mean", "largest"))
        outcome.read(f"error at s_tag = {tag:g}: median, mean, largest", shown)
    curves = {
        str(name): (rows["median"].to_numpy(), rows["derived_median"].to_numpy())
        for name, rows in errors.groupby("b_d", sort=False)
    }
    curves[f"{PLAIN}, largest"] = (by_tag["largest"].to_numpy(), np.full(len(by_tag), np.nan))
    outcome.draw("convergence", convergence(S_TAGS, curves, "|f(x) − mean|"))
    # Where the theorem says nothing: [SEP] in the last place, or absent.
    model = averaging_model(SHOWN_TAGS[-1])
    last, absent = (model(numbers, place).output for place in (LENGTH - 1, ABSENT))
    for what, difference in (
        (
            "[SEP] in the last place: largest |f(x) − sum of the numbers/T|",
            last - numbers[:, :-1].sum(-1) / LENGTH,
        ),
        ("no [SEP]: largest |f(x) − mean of all numbers|", absent - numbers.mean(-1)),
    ):
        outcome.read(f"{what}, at s_tag = {SHOWN_TAGS[-1]:g}", number(float(difference.abs().max())))
    table = outcome.tables["attention"] = _rest(numbers, places)
    curves = {
        "tokens after [SEP]": (table["rest"].to_numpy(), table["derived"].to_numpy()),
        "[SEP] itself": (table["rest_of_separator"].to_numpy(), table["derived_of_separator"].to_numpy()),
    }
    outcome.draw("rest", convergence(S_TAGS, curves, "1 − A¹ to [SEP]"))


def _errors(numbers: Tensor, places: Tensor) -> pd.DataFrame:
    """Tabulate errors of the construction by (b, d) and s_tag, over sequences, against the derived ones."""
    averages = mean_after(numbers, places)
    rows = []
    for (name, (b, d)), tag in product(VARIANTS.items(), S_TAGS.tolist()):
        error = (averaging_model(tag, b, d)(numbers, places).output - averages).abs()
        derived = averaging_error(numbers, places, tag, b, d).abs()
        values = error.median(), error.mean(), error.max(), derived.median()
        rows.append((name, tag, *map(float, values)))
    return pd.DataFrame(rows, columns=["b_d", "s_tag", "median", "mean", "largest", "derived_median"])


def _rest(numbers: Tensor, places: Tensor) -> pd.DataFrame:
    """Tabulate the attention that does not go to [SEP], of later queries and its own: medians by s_tag, and derived."""
    place = torch.arange(numbers.shape[-1])
    after, is_separator = place > places[:, None], place == places[:, None]
    products = torch.where(is_separator[:, None], 0.0, (numbers[:, :, None] * numbers[:, None] + 1).exp())
    sums = products.tril().sum(-1)[after].median()
    rows = []
    for tag in S_TAGS.tolist():
        attention = averaging_model(tag)(numbers, places).attention
        # Summed, as 1 − A would be rounding.
        off_separator = attention.masked_fill(is_separator[:, None], 0.0).sum(-1)
        rest, of_separator = (float(off_separator[of].median()) for of in (after, is_separator))
        derived = float(sums) * math.exp(-tag), float(places.median()) * math.exp(tag - tag**2)
        rows.append((tag, rest, derived[0], of_separator, derived[1]))
    columns = ["s_tag", "rest", "derived", "rest_of_separator", "derived_of_separator"]
    return pd.DataFrame(rows, columns=columns)


BELOW = 1e-16
"""Errors under it are rounding and are not drawn."""


def attention_maps(pictures: Mapping[str, Floats], separator: int) -> go.Figure:
    """Draw the attention of one sequence, side by side, queries down and keys to the right, both from 1."""
    positions = np.arange(1.0, len(next(iter(pictures.values()))) + 1)
    seen = np.tri(len(positions), dtype=bool)
    causal = {name: np.where(seen, picture, np.nan) for name, picture in pictures.items()}
    drawn = maps(causal, (positions, positions), ("key", "query", "attention"), (0.0, 1.0), square=True)
    edges = {"x0": separator + 0.5, "x1": separator + 1.5, "y0": 0.5, "y1": len(positions) + 0.5}
    look = {"width": 1.5, "color": style.VERMILLION}
    return drawn.add_shape(type="rect", **edges, line=look, row="all", col="all")


def convergence(s_tag: Floats, curves: Mapping[str, tuple[Floats, Floats]], y: str) -> go.Figure:
    """Draw measured sizes against s_tag, logarithmic, each with its derived rate dotted in the same colour."""
    traces: list[Any] = []
    for (name, pair), colour in zip(curves.items(), style.CATEGORIES, strict=False):
        looks = (name, "solid", 5), (f"{name}, derived", "dot", 0)
        for values, (label, dash, marker) in zip(pair, looks, strict=True):
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


def draw_losses(outcome: Outcome, trained: Sequence[training.TrainedModels], models: pd.DataFrame) -> None:
    """Draw the squared error of every seed while it was trained."""
    traces: list[Any] = []
    last = 0.0
    for colour, each in zip(style.CATEGORIES, trained, strict=False):
        name, losses = each.recipe.name, each.losses.numpy()
        steps = (np.arange(losses.shape[1]) + 0.5) * each.recipe.steps / losses.shape[1]
        last = max(last, float(steps[-1]))
        hover = f"{for_plotly(name)}<br>step %{{x}}: %{{y:.3g}}<extra></extra>"
        for seed, row in enumerate(losses):
            traces += line(steps, row, name, colour, width=1.2, hover=hover, showlegend=seed == 0)
    variance = float((models["error"] / models["left"]).mean())
    of_all = variance * float(models["left_mean_of_all"].mean())
    for dash, name, level in (
        ("dot", "predicting 0", variance),
        ("dash", "predicting mean of all numbers", of_all),
    ):
        hover = f"{for_plotly(name)}: {level:.3g}<extra></extra>"
        traces += line([0, last], [level, level], name, style.GREY, dash=dash, width=1.5, hover=hover)
    layout = {"yaxis": POWERS, "legend": {"y": 1.04}}
    outcome.draw("losses", style.figure(traces, "step", "mean squared error", height=430, layout=layout))


def draw_attention(outcome: Outcome, trained: Sequence[training.TrainedModels], models: pd.DataFrame) -> None:
    """Draw the first-layer attention of the best seed of three kinds, in one sequence."""
    numbers, _ = draw([torch.Generator().manual_seed(training.HELD_OUT_SEED - 1)], 1)
    middle, pictures = LENGTH // 2, {}
    kinds = training.PUBLISHED_LARGE_TAG, training.STANDARD, training.QK_NORM + training.PENALISED
    for name, each in ((one.recipe.name, one) for one in trained if one.recipe.name in kinds):
        errors, count = models.loc[models["kind"] == name, "error"].to_numpy(), len(each.seeds)
        with torch.no_grad(), using_threads(1):
            forward_pass = each.model(numbers.expand(count, -1, -1), torch.full((count, 1), middle))
        pictures[name] = forward_pass.attention[errors.argmin(), 0].numpy()
    outcome.draw("attention", attention_maps(pictures, middle))


def draw_scatter(
    outcome: Outcome, models: pd.DataFrame, column: str, axis: str, limits: tuple[float, float]
) -> None:
    """Draw every trained model as a dot: its error to the right (logarithmic), a column upwards; `limits` of both."""
    titles = "residual variance", axis
    looks = zip(style.CATEGORIES, ("circle", "diamond", "square", "triangle-up", "x", "cross"), strict=False)
    hover = f"%{{text}}<br>{titles[0]} %{{x:.3g}}<br>{titles[1]} %{{y:.3g}}<extra></extra>"
    traces: list[Any] = []
    for (kind, rows), (colour, symbol) in zip(models.groupby("kind", sort=False), looks, strict=False):
        marker = {"size": 9, "symbol": symbol, "line": {"width": 1}}
        names = [for_plotly(f"{kind}, seed {seed}") for seed in rows["seed"]]
        at = rows["left"].to_numpy(), rows[column].to_numpy()
        traces.append(dots(*at, names, for_plotly(str(kind)), colour, hover, marker=marker))
    y = POWERS if column == "outlier" else {"range": [-0.05, 1.05]}
    layout: dict[str, Any] = {"xaxis": POWERS, "yaxis": y, "legend": {"y": 1.04}}
    drawn = style.figure(traces, *titles, height=430, layout=layout)
    limit = {"color": style.GREY, "dash": "dot", "width": 1.5}
    outcome.draw(column, drawn.add_vline(limits[0], line=limit).add_hline(limits[1], line=limit))
