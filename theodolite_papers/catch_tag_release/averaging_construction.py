"""Figure 6 of Zhang et al. 2025 and Theorem 4.1: the construction that averages, and how fast it converges."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from theodolite.system.wording import number
from theodolite.theory import averaging_error, averaging_model, mean_after
from theodolite.theory.averaging import ABSENT
from theodolite_papers.catch_tag_release import averaging_figures as drawing
from theodolite_papers.catch_tag_release.averaging_training import LENGTH, draw
from theodolite_papers.experiment import ZHANG, Outcome, Study, experiment

S_TAGS = np.arange(2.0, 37.0, 2.0)
SHOWN_TAGS = (2.0, 4.0, 10.0)
SEQUENCES = 1000
PLAIN = "b = 0, d = 1"
VARIANTS = {PLAIN: (0.0, 1.0), "b = 3": (3.0, 1.0), "d = 0.1": (0.0, 0.1), "d = 5": (0.0, 5.0)}
"""Ours: the theorem lets b and d > 0 be anything, and its figure names none."""


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
    _maps(outcome, numbers)
    _convergence(outcome, numbers, places)
    _outside(outcome, numbers)
    _attention(outcome, numbers, places)


def _maps(outcome: Outcome, numbers: Tensor) -> None:
    middle = LENGTH // 2
    pictures = {
        f"s_tag = {tag:g}": averaging_model(tag)(numbers[:1], middle).attention[0].numpy()
        for tag in SHOWN_TAGS
    }
    outcome.figure(
        "attention",
        "Attention of the first layer, as in Figure 6",
        drawing.attention_maps(pictures, middle),
        f"A¹ of one sequence of {LENGTH} tokens with [SEP] in the marked column, at three sizes of its tag.",
        "rows from [SEP] on that attend to [SEP] alone, and unchanged rows above.",
        f"{ZHANG}, Fig. 6; its s_tag and numbers are not printed",
        wide=True,
    )


def _convergence(outcome: Outcome, numbers: Tensor, places: Tensor) -> None:
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
    outcome.figure(
        "convergence",
        "Error of the output against s_tag",
        drawing.convergence(S_TAGS, curves, "|f(x) − mean|"),
        f"Median over {SEQUENCES} sequences with [SEP] anywhere. Dotted: the leading term, `averaging_error`.",
        "lines that meet their dotted rate from s_tag ≈ 12 on; a larger d raises the error, b does not matter.",
        f"{ZHANG}, Theorem 4.1; the rate is ours",
        wide=True,
    )


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


def _outside(outcome: Outcome, numbers: Tensor) -> None:
    """Where the theorem says nothing: [SEP] in the last place, or absent."""
    model = averaging_model(SHOWN_TAGS[-1])
    last, absent = model(numbers, LENGTH - 1).output, model(numbers, ABSENT).output
    without_last = numbers[:, :-1].sum(-1) / LENGTH
    for what, difference in (
        ("[SEP] in the last place: largest |f(x) − sum of the numbers/T|", last - without_last),
        ("no [SEP]: largest |f(x) − mean of all numbers|", absent - numbers.mean(-1)),
    ):
        outcome.read(f"{what}, at s_tag = {SHOWN_TAGS[-1]:g}", number(float(difference.abs().max())))


def _attention(outcome: Outcome, numbers: Tensor, places: Tensor) -> None:
    table = outcome.tables["attention"] = _rest(numbers, places)
    curves = {
        "tokens after [SEP]": (table["rest"].to_numpy(), table["derived"].to_numpy()),
        "[SEP] itself": (table["rest_of_separator"].to_numpy(), table["derived_of_separator"].to_numpy()),
    }
    outcome.figure(
        "rest",
        "Attention that is not paid to [SEP]",
        drawing.convergence(S_TAGS, curves, "1 − A¹ to [SEP]"),
        "Medians over the same sequences; dotted S_j e^{−s} and (t − 1) e^{s − s²}.",
        "a straight line for the tokens after [SEP]; [SEP] itself stops attending to the others much faster.",
        f"{ZHANG}, eq. 4 and appendix A",
    )


def _rest(numbers: Tensor, places: Tensor) -> pd.DataFrame:
    """What queries after [SEP], and [SEP] itself, leave to other keys: medians by s_tag, against the derived ones."""
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
