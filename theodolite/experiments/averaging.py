"""Averaging learned from scratch: does it take the sink, the outlier dimension, the low-rank weights of Theorem 4.1?

Claims of Zhang et al. 2025. The trainings are in `train.averaging`, the construction in `averaging_construction`.
They need no model and no text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from theodolite.experiments.averaging_construction import CONSTRUCTION, OUTLIER, RANK_ONE, SINK
from theodolite.experiments.base import (
    FAILS,
    HOLDS,
    UNTESTABLE,
    Comparison,
    Criterion,
    Experiment,
    Outcome,
    Verdict,
    judge,
)
from theodolite.experiments.layers import exhibit
from theodolite.report import figures_averaging as drawing
from theodolite.report.data import Floats
from theodolite.report.exhibit import Exhibit
from theodolite.report.measures import ZHANG
from theodolite.report.text import counted, listed, number, with_error
from theodolite.theory.averaging import mean_after
from theodolite.train.averaging import (
    HELD_BELOW,
    LENGTH,
    WIDTH,
    Kind,
    Look,
    Trained,
    attention_to_separator,
    draw,
    train_averaging,
)
from theodolite.train.loop import threads

if TYPE_CHECKING:
    from theodolite.experiments.study import Study

TESTED = 2000
"""Sequences that a trained model is measured on."""

EVALUATED = 1 << 31
"""Added to a seed for sequences that no training has seen."""

PAPERS, PAPERS_FAVOURED = "paper's, s_tag from N(0, 1)", "paper's, s_tag from N(5, 1)"
STANDARD, NORMED = f"standard, d = {WIDTH}", f"standard with QK-norm, d = {WIDTH}"
HELD = ", held from [SEP]"
KINDS = {
    Kind(PAPERS, 2, 3000, 64, 0.05): 8,
    Kind(PAPERS_FAVOURED, 2, 3000, 64, 0.05, favoured=True): 8,
    Kind(STANDARD, WIDTH, 1000, 64, 0.01): 5,
    Kind(STANDARD + HELD, WIDTH, 1000, 64, 0.01, held=True): 5,
    Kind(NORMED, WIDTH, 1000, 64, 0.01, normed=True): 5,
    Kind(NORMED + HELD, WIDTH, 1000, 64, 0.01, normed=True, held=True): 5,
}
"""What is trained, and with how many seeds."""

SOLVED = Criterion("at most", 0.1, "a tenth of the target's variance left (ours)")
NEEDED = Criterion("at least", SOLVED.limit, "no longer solved")


def measured(trained: Trained) -> pd.DataFrame:
    """One row a seed, on sequences that no training has seen.

    error is the mean square, left the same over the target's variance, which predicting 0 would leave (1).
    sink: mean attention of tokens after [SEP] to it; sinks: share of sequences in which it exceeds 0.3. outlier: RMS of
    the residual stream's largest coordinate over the median of the others, tokens after [SEP]. tag_share: share of
    the tag direction (difference of means of what the first layer writes after and before [SEP]) in its largest
    coordinate. eta: between over total sum of squares of what it writes, tokens grouped by before and after [SEP];
    eta_chance the same with the places of another sequence. second_…: second over first singular value, and as they
    began. left_blind, left_untagged: error with [SEP] hidden from later tokens in the first layer, and with the tag
    direction projected out of what it writes.
    """
    generators = [torch.Generator().manual_seed(EVALUATED + seed) for seed in trained.seeds]
    numbers, places = draw(generators, TESTED)
    place = torch.arange(LENGTH)
    after, here = place > places[..., None], place == places[..., None]
    wanted = mean_after(numbers, places)
    with torch.no_grad(), threads(1):
        look = trained.model(numbers, places)
        tag = torch.stack(
            [w[a].mean(0) - w[~a & ~h].mean(0) for w, a, h in zip(look.written, after, here, strict=True)]
        )
        tag = tag / tag.norm(dim=-1, keepdim=True)
        blind, untagged = (
            trained.model(numbers, places, blind=True).output,
            trained.model(numbers, places, without=tag).output,
        )
        variance = wanted.square().mean(-1)
        all_numbers = torch.where(here, 0.0, numbers).sum(-1) / (LENGTH - 1)
        error, left_blind, left_untagged, left_mean = (
            (output - wanted).square().mean(-1) for output in (look.output, blind, untagged, all_numbers)
        )
        paid = attention_to_separator(look, places) * after
        of_sequence = paid.sum(-1) / after.sum(-1)
        columns = {
            "seed": torch.tensor(trained.seeds),
            "error": error,
            "left": error / variance,
            "left_mean_of_all": left_mean / variance,
            "sink": paid.sum((1, 2)) / after.sum((1, 2)),
            "sinks": (of_sequence > SINK.limit).double().mean(-1),
            "outlier": _outlier(look, after),
            "tag_share": tag.square().amax(-1),
            "eta": _eta(look.written, after, ~here),
            "eta_chance": _eta(look.written, after.roll(1, 1), ~here),
            "left_blind": left_blind / variance,
            "left_untagged": left_untagged / variance,
        }
        for when, model in (("", trained.model), ("_begun", trained.begun)):
            for name, matrix in (("value", model.value_output()), ("query_key", model.query_key())):
                values = torch.linalg.svdvals(matrix.double())
                columns[f"second_{name}{when}"] = values[:, 1] / values[:, 0]
                columns[f"stable_rank_{name}{when}"] = values.square().sum(-1) / values[:, 0].square()
    table = pd.DataFrame({name: values.numpy() for name, values in columns.items()})
    table.insert(0, "kind", trained.kind.name)
    return table.assign(solved=np.asarray(SOLVED.met(table["left"].to_numpy(dtype=np.float64))))


def _outlier(look: Look, after: Tensor) -> Tensor:
    """RMS of the largest coordinate over the median RMS of the others, over tokens after [SEP], (seeds,)."""
    sizes = (look.hidden.square() * after[..., None]).sum((1, 2)) / after.sum((1, 2))[:, None]
    ordered = sizes.sqrt().sort(-1).values
    return ordered[:, -1] / ordered[:, :-1].median(-1).values


def _eta(written: Tensor, after: Tensor, counted: Tensor) -> Tensor:
    """η² of grouping the counted tokens by `after`, (seeds,)."""
    found = []
    for vectors, group, kept in zip(written.double(), after, counted, strict=True):
        vectors, group = vectors[kept], group[kept]
        mean = vectors.mean(0)
        between = sum(
            float(part.sum()) * (vectors[part].mean(0) - mean).square().sum() for part in (group, ~group)
        )
        found.append(between / (vectors - mean).square().sum())
    return torch.stack([torch.as_tensor(value) for value in found])


def _averaging(study: Study) -> Outcome:
    first = study.run.provenance["seed"]
    trained = []
    for done, (kind, count) in enumerate(KINDS.items(), 1):
        study.say(f"trainings {done} of {len(KINDS)}: {kind.name}, {counted(count, 'seed')}")
        trained.append(train_averaging(kind, range(first, first + count)))
    models = pd.concat([measured(each) for each in trained], ignore_index=True)
    exhibits = [
        _losses(trained, models),
        _maps(trained, models),
        _dots(models, "sink"),
        _dots(models, "outlier"),
    ]
    return Outcome(_compared(models), judged(models), {"models": models}, exhibits)


def _compared(models: pd.DataFrame) -> list[Comparison]:
    found = [
        Comparison(
            "variance left by predicting the mean of all numbers; by 0",
            "",
            f"{_range(models['left_mean_of_all'])}; 1",
        )
    ]
    shown = (("variance left", "left"), ("attention to [SEP]", "sink"), ("η²", "eta"), ("outlier", "outlier"))
    for kind, rows in models.groupby("kind", sort=False):
        parts = [f"{what} {_range(rows[column])}" for what, column in shown]
        seeds = f"{int(rows['solved'].sum())} of {len(rows)} seeds solve the task"
        unsolved = rows.loc[~rows["solved"], "seed"].astype(str).tolist()
        seeds += f" (not: {listed(unsolved, 10)})" if unsolved else ""
        found.append(Comparison(str(kind), "", "; ".join([seeds, *parts])))
    return found


def _range(values: pd.Series) -> str:
    return f"{number(values.min())} to {number(values.max())}"


def judged(models: pd.DataFrame) -> list[Verdict]:
    """Verdicts on `models`, rows as `measured` gives them: claims of section 4, for models that solve the task."""
    solved = models[models["solved"]]
    papers = solved[solved["kind"].isin([PAPERS, PAPERS_FAVOURED])]
    standard = solved[solved["kind"] == STANDARD]
    found = [_necessity(solved), _learned(models)]
    for name, rows in (("paper's architecture", papers), (f"standard one, d = {WIDTH}", standard)):
        where = f"; {name}, {counted(len(rows), 'trained model')} that solve{'s' * (len(rows) == 1)} the task"
        found += [
            _mean(
                f"[SEP] forms an attention sink{where}", "attention of later tokens to it", rows["sink"], SINK
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
            _mean(
                f"The tags are what the second layer reads (section 4.2){where}",
                "variance left with the tag direction projected out of what the first layer writes",
                rows["left_untagged"],
                NEEDED,
            ),
            _mean(
                f"The sink is what makes the tags (section 4.2){where}",
                "variance left with [SEP] hidden from later tokens in the first layer",
                rows["left_blind"],
                NEEDED,
            ),
        ]
    return found


def _mean(claim: str, what: str, values: pd.Series, criterion: Criterion) -> Verdict:
    """Judge a mean over seeds; its range is said."""
    spread = f" (from {_range(values)})" if len(values) else ""
    return judge(
        claim, f"{what}, mean over seeds{spread}", float(values.mean()), criterion, float(values.sem())
    )


def _mean_of(values: pd.Series) -> str:
    return with_error(float(values.mean()), float(values.sem()))


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
            part += f" (attention {_range(without['sink'])}, variance left {number(best['left'])} and "
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
    papers = models[models["kind"].isin([PAPERS, PAPERS_FAVOURED])]
    parts = [
        f"{kind}: {int(rows['solved'].sum())} of {len(rows)} seeds (variance left {_range(rows['left'])})"
        for kind, rows in papers.groupby("kind", sort=False)
    ]
    claim = "A two-layer attention model can be trained to average (section 1)"
    evidence = f"the paper's architecture: {'; '.join(parts)}; criterion: any, {SOLVED.source}"
    if papers.empty:
        return Verdict(claim, UNTESTABLE, "it was not trained")
    return Verdict(claim, HOLDS if papers["solved"].any() else FAILS, evidence)


def _losses(trained: Sequence[Trained], models: pd.DataFrame) -> Exhibit:
    steps, curves = {}, {}
    for each in trained:
        curves[each.kind.name] = each.losses.numpy()
        points = each.losses.shape[1]
        steps[each.kind.name] = (np.arange(points) + 0.5) * each.kind.steps / points
    variance = float((models["error"] / models["left"]).mean())
    marks = {"0": variance, "mean of all numbers": variance * float(models["left_mean_of_all"].mean())}
    return exhibit(
        "losses",
        "Training from scratch",
        drawing.losses(steps, curves, {f"predicting {name}": level for name, level in marks.items()}),
        f"Squared error of every seed, {LENGTH} tokens with N(0, 1) numbers. Held: attention to [SEP] above "
        f"{HELD_BELOW:g} of a sequence's mean is charged for.",
        "seeds that stay near the dotted lines have found no way to tell the tokens after [SEP].",
        f"{ZHANG}, section 4; the trainings are ours",
        wide=True,
    )


def _maps(trained: Sequence[Trained], models: pd.DataFrame) -> Exhibit:
    numbers, _ = draw([torch.Generator().manual_seed(EVALUATED - 1)], 1)
    middle = LENGTH // 2
    pictures: dict[str, Floats] = {}
    for each in trained:
        if each.kind.name in (PAPERS_FAVOURED, STANDARD, NORMED + HELD):
            rows = models[models["kind"] == each.kind.name].reset_index(drop=True)
            best = int(rows["error"].idxmin())
            count = len(each.seeds)
            with torch.no_grad(), threads(1):
                look = each.model(numbers.expand(count, -1, -1), torch.full((count, 1), middle))
            pictures[each.kind.name] = look.attention[best, 0].numpy()
    return exhibit(
        "attention",
        "First-layer attention of trained models",
        drawing.attention_maps(pictures, middle),
        "The best seed of three kinds reads the same sequence, [SEP] in the marked column.",
        "the sink below [SEP] where it was free to grow, and none where attention to it was charged for.",
        f"{ZHANG}, Fig. 6, for trained models",
        wide=True,
    )


def _dots(models: pd.DataFrame, column: str) -> Exhibit:
    title, limit, look = {
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
    return exhibit(
        column,
        f"Every trained model: error and {'the sink' if column == 'sink' else 'outliers'}",
        drawing.seeds(
            kinds,
            ("share of the variance left", title),
            (SOLVED.limit, limit.limit),
            logarithmic=column == "outlier",
        ),
        "A dot a seed, on sequences that no training has seen. Dotted: what counts as solved, and the criterion.",
        look,
        f"{ZHANG}, section 4; the trainings are ours",
        wide=True,
    )


AVERAGING = [
    CONSTRUCTION,
    Experiment(
        "sinks/averaging",
        "Averaging learned from scratch: does it take a sink, an outlier dimension, low-rank weights?",
        "Simple tasks, like averaging, necessitate the catch, tag, release mechanism (abstract, section 4)",
        (),
        _averaging,
    ),
]
