"""Figure 6 of Zhang et al. 2025 and Theorem 4.1: the construction that averages, and how fast it converges.

It needs no model and no text. Trained models are in `averaging_models`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from theodolite.attention.summary import SINK_THRESHOLD
from theodolite.judging import Criterion, Verdict, judge
from theodolite.papers.catch_tag_release.averaging_training import LENGTH, draw
from theodolite.papers.experiment import experiment
from theodolite.report.drawing import averaging as drawing
from theodolite.report.exhibit import Exhibit
from theodolite.report.measures import ZHANG
from theodolite.report.outcome import Outcome, Reading
from theodolite.system.wording import number
from theodolite.theory.averaging import ABSENT, averaging_error, averaging_model, mean_after

if TYPE_CHECKING:
    from theodolite.papers.experiment import Study

S_TAGS = np.arange(2.0, 37.0, 2.0)
SHOWN_TAGS = (2.0, 4.0, 10.0)
SEQUENCES = 1000
VARIANTS = {"b = 0, d = 1": (0.0, 1.0), "b = 3": (3.0, 1.0), "d = 0.1": (0.0, 0.1), "d = 5": (0.0, 5.0)}
"""Ours: the theorem lets b and d > 0 be anything, and its figure names none."""

RATE = (20.0, 30.0)
"""s_tag between which rates are measured: below, sequences of large numbers are not yet in their limit."""

CONVERGED = Criterion("at most", 1e-6, "“→” read as: a millionth of the numbers' size at s_tag = 30 (ours)")
DECAY = Criterion("at most", -0.99, "“𝒪(e^{−s_tag})”: a slope of −1; the hundredth of leeway is ours")
UNMOVED = Criterion("at most", 1e-12, "“does not influence”: equal but for rounding")
SINK = Criterion("at least", SINK_THRESHOLD, "mean attention that makes a sink in the literature")
OUTLIER = Criterion(
    "at least", 6.0, "six times the other coordinates, as |x| ≥ 6 with numbers of size 1 (ours)"
)
RANK_ONE = Criterion(
    "at most", 0.1, "“low rank” read as: a second singular value of a tenth of the first (ours)"
)


@experiment(
    "sinks/figure6",
    "The averaging construction: first-layer attention, and how fast it converges",
    "[SEP] is a sink for the tokens after it, the rest of their attention falls as e^{−s_tag}, and the output "
    "tends to their mean (Theorem 4.1, Fig. 6)",
    needs=("nothing",),
)
def construction(study: Study, outcome: Outcome) -> None:
    numbers, places = draw([torch.Generator().manual_seed(study.provenance["seed"])], SEQUENCES)
    numbers, places = numbers[0].double(), places[0]
    errors = _errors(numbers, places)
    attention = _attention(numbers, places)
    at = {tag: int(np.searchsorted(S_TAGS, tag)) for tag in RATE}
    slope = math.log(attention["rest"][at[30.0]] / attention["rest"][at[20.0]]) / (RATE[1] - RATE[0])
    plain = errors[errors["b_d"] == "b = 0, d = 1"].set_index("s_tag")
    ratio = plain["median"] / plain["derived_median"]
    readings = [
        Reading(
            "median error over the median of d (s − 1)² e^{−s} |cov(S_j, x_j)|, at s = s_tag = 20",
            number(ratio[20.0], 5),
        ),
        *(
            Reading(
                f"error at s_tag = {tag:g}: median, mean, largest",
                ", ".join(number(plain.loc[tag, name]) for name in ("median", "mean", "largest")),
            )
            for tag in (10.0, 20.0, 30.0)
        ),
        *_outside(numbers),
    ]
    verdicts = _verdicts_6(numbers, places, plain, slope)
    exhibits = [_maps_6(numbers), _curve_6(errors), _rest_6(attention)]
    tables = {"errors": errors, "attention": attention}
    outcome.readings += readings
    outcome.verdicts += verdicts
    outcome.tables |= tables
    outcome.exhibits += exhibits


def _outside(numbers: Tensor) -> list[Reading]:
    """Where the theorem says nothing: [SEP] in the last place, or absent."""
    model = averaging_model(SHOWN_TAGS[-1])
    cases = (
        (
            "[SEP] in the last place: largest |f(x) − sum of the numbers/T|",
            LENGTH - 1,
            numbers[:, :-1].sum(-1) / LENGTH,
        ),
        ("no [SEP]: largest |f(x) − mean of all numbers|", ABSENT, numbers.mean(-1)),
    )
    return [
        Reading(
            f"{what}, at s_tag = {SHOWN_TAGS[-1]:g}",
            number(float((model(numbers, place).output - expected).abs().max())),
        )
        for what, place, expected in cases
    ]


def _errors(numbers: Tensor, places: Tensor) -> pd.DataFrame:
    """Errors of the construction by (b, d) and s_tag, over sequences, against the derived ones."""
    averages = mean_after(numbers, places)
    rows = []
    for name, (b, d) in VARIANTS.items():
        for tag in S_TAGS.tolist():
            error = (averaging_model(tag, b, d)(numbers, places).output - averages).abs()
            derived = averaging_error(numbers, places, tag, b, d).abs()
            rows.append(
                {"b_d": name, "s_tag": tag, "median": float(error.median()), "mean": float(error.mean())}
                | {"largest": float(error.max()), "derived_median": float(derived.median())}
            )
    return pd.DataFrame(rows)


def _attention(numbers: Tensor, places: Tensor) -> pd.DataFrame:
    """What queries after [SEP], and [SEP] itself, leave to other keys: medians by s_tag, against the derived ones."""
    place = torch.arange(numbers.shape[-1])
    after, is_separator = place > places[:, None], place == places[:, None]
    products = torch.where(is_separator[:, None], 0.0, (numbers[:, :, None] * numbers[:, None] + 1).exp())
    sums = products.tril().sum(-1)[after]
    index = places[:, None, None].expand(-1, numbers.shape[-1], 1)
    rows = []
    for tag in S_TAGS.tolist():
        model = averaging_model(tag)
        attention = model(numbers, places).attention
        off_separator = torch.where(place == index, 0.0, attention).sum(
            -1
        )  # summed, as 1 − A would be rounding
        rows.append(
            {
                "s_tag": tag,
                "rest": float(off_separator[after].median()),
                "derived": float((sums * math.exp(-tag)).median()),
            }
            | {"rest_of_separator": float(off_separator[is_separator].median())}
            | {"derived_of_separator": float(places.median()) * math.exp(tag - tag**2)}
        )
    return pd.DataFrame(rows)


def _verdicts_6(numbers: Tensor, places: Tensor, plain: pd.DataFrame, slope: float) -> list[Verdict]:
    at_ten, at_thirty = (averaging_model(tag)(numbers, places) for tag in (10.0, 30.0))
    place = torch.arange(LENGTH)
    before, after = place < places[:, None], place > places[:, None]
    to_separator = at_ten.attention.gather(-1, places[:, None, None].expand(-1, LENGTH, 1))[..., 0]
    moved = (at_ten.attention - at_thirty.attention).abs()[before].max()
    size = at_ten.hidden[after].square().mean(0).sqrt()
    model = averaging_model(10.0)
    ratios = [_second(matrix) for matrix in (model.value_1, model.query_key)]
    return [
        judge(
            "f(x) tends to the mean of the numbers after [SEP] (Theorem 4.1)",
            f"median |error| at s_tag = 30 over {SEQUENCES} sequences",
            float(plain.loc[30.0, "median"]),
            CONVERGED,
        ),
        judge(
            "Other keys' attention of tokens after [SEP] decays as 𝒪(e^{−s_tag}) (Fig. 6, eq. 4)",
            "slope of its logarithm, s_tag from 20 to 30",
            slope,
            DECAY,
        ),
        judge(
            "The sink does not influence the tokens before it (Fig. 6)",
            "largest change of their attention from s_tag = 10 to 30",
            float(moved),
            UNMOVED,
        ),
        judge(
            "[SEP] forms an attention sink (Theorem 4.1)",
            "mean attention of later queries to it at s_tag = 10",
            float(to_separator[after].mean()),
            SINK,
        ),
        judge(
            "The second coordinate is an outlier feature dimension (Theorem 4.1)",
            "its RMS over that of the first, tokens after [SEP], s_tag = 10",
            float(size[1] / size[0]),
            OUTLIER,
        ),
        judge(
            "The weights are low rank (Theorem 4.1)",
            "second over first singular value of W_V¹ and of W_Q² W_K², the larger",
            max(ratios),
            RANK_ONE,
        ),
    ]


def _second(matrix: Tensor) -> float:
    values = torch.linalg.svdvals(matrix.double())
    return float(values[1] / values[0])


def _maps_6(numbers: Tensor) -> Exhibit:
    middle = LENGTH // 2
    pictures = {
        f"s_tag = {tag:g}": averaging_model(tag)(numbers[:1], middle).attention[0].numpy()
        for tag in SHOWN_TAGS
    }
    return Exhibit(
        "attention",
        "Attention of the first layer, as in Figure 6",
        drawing.attention_maps(pictures, middle),
        f"A¹ of one sequence of {LENGTH} tokens with [SEP] in the marked column, at three sizes of its tag.",
        "rows from [SEP] on that attend to [SEP] alone, and unchanged rows above.",
        f"{ZHANG}, Fig. 6; its s_tag and numbers are not printed",
        wide=True,
    )


def _curve_6(errors: pd.DataFrame) -> Exhibit:
    curves = {
        str(name): (rows["median"].to_numpy(), rows["derived_median"].to_numpy())
        for name, rows in errors.groupby("b_d", sort=False)
    }
    largest = errors[errors["b_d"] == "b = 0, d = 1"]["largest"].to_numpy()
    curves["b = 0, d = 1, largest"] = (largest, np.full(len(largest), np.nan))
    return Exhibit(
        "convergence",
        "Error of the output against s_tag",
        drawing.convergence(S_TAGS, curves, "|f(x) − mean|"),
        f"Median over {SEQUENCES} sequences of N(0, 1) numbers with [SEP] anywhere, for several b and d; dotted the "
        "leading term of theory.averaging_error. The largest error is of the sequence with the largest numbers: the "
        "rate holds for given numbers, and its constant grows as exp(max x²).",
        "lines that meet their dotted rate from s_tag ≈ 12 on; a larger d raises the error, b does not matter.",
        f"{ZHANG}, Theorem 4.1; the rate is ours",
        wide=True,
    )


def _rest_6(attention: pd.DataFrame) -> Exhibit:
    names = {
        "tokens after [SEP]": ("rest", "derived"),
        "[SEP] itself": ("rest_of_separator", "derived_of_separator"),
    }
    return Exhibit(
        "rest",
        "Attention that is not paid to [SEP]",
        drawing.convergence(
            S_TAGS,
            {name: (attention[a].to_numpy(), attention[b].to_numpy()) for name, (a, b) in names.items()},
            "1 − A¹ to [SEP]",
        ),
        "Medians over the same sequences; dotted S_j e^{−s} and (t − 1) e^{s − s²}.",
        "a straight line for the tokens after [SEP]; [SEP] itself stops attending to the others much faster.",
        f"{ZHANG}, eq. 4 and appendix A",
    )
