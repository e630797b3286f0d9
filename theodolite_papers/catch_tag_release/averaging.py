"""The construction of Theorem 4.1, which averages what follows a separator (Zhang et al. 2025, section 4, Fig. 6)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from typing import NamedTuple

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch
from jaxtyping import Float, Int
from torch import Tensor

from theodolite.estimates import Floats
from theodolite.report import style
from theodolite.system.wording import number
from theodolite_papers.drawing import POWERS, Line, by_category, curves, maps
from theodolite_papers.experiment import Outcome, Study, declared

ABSENT = -1  # as the place of [SEP]: there is none


class AveragingOutput(NamedTuple):
    """The output f(x) of the construction, and its hidden parts.

    attention: A¹, rows are queries, causal. hidden: H = A¹ E W_V¹ + E, of numbers and tags.
    """

    output: Float[Tensor, "*batch"]
    attention: Float[Tensor, "*batch length length"]
    hidden: Float[Tensor, "*batch length 2"]


def averaging_model(
    numbers: Float[Tensor, "*batch length"],
    separator: Int[Tensor, "*#batch"] | int,
    s_tag: float,
    b: float = 0.0,
    d: float = 1.0,
) -> AveragingOutput:
    """Compute the construction of Theorem 4.1 (eqs. 1 to 3) on sequences.

    Numbers are embedded as (x, −1) and [SEP] as (0, −s_tag); what `numbers` has at its place is not read. Logits of the
    first layer are E Eᵀ, W_V¹ = diag(0, −1); the last query h meets a key h' as (b h_0 + d h_1) h'_1 (W_Q² W_K² as
    printed, W_Q² (W_K²)ᵀ in eq. 2), and W_V² reads coordinate 0.

    With k ≤ t < j, and up to what vanishes as e^{−s²}, the second coordinates of H are τ_k = 0 and
    τ_j = (s − 1) A¹_jt, and the last query's logits are (b x_T + d τ_T) τ. So the output tends to the mean of the
    numbers after [SEP] as s_tag → ∞, and `averaging_error` says how fast. With [SEP] in the last place it is the sum of
    the numbers over T in the limit, and without [SEP] their mean, for any s_tag: nothing is tagged.

    Args:
        numbers: any finite values. separator: place of [SEP] from 0 on, the paper's t − 1; `ABSENT` for none.
        s_tag, b, d > 0: of the theorem.
    """
    here = torch.arange(numbers.shape[-1]) == torch.as_tensor(separator)[..., None]
    values = numbers.masked_fill(here, 0.0)
    tags = torch.full_like(values, -1.0).masked_fill(here, -s_tag)
    embedded = torch.stack([values, tags], -1)
    logits = embedded @ embedded.mT
    later = torch.ones_like(logits, dtype=torch.bool).triu(1)
    attention = logits.masked_fill(later, -torch.inf).softmax(-1)
    hidden = torch.stack([values, tags - (attention @ tags[..., None])[..., 0]], -1)
    slope = b * hidden[..., -1, 0] + d * hidden[..., -1, 1]
    last = (slope[..., None] * hidden[..., 1]).softmax(-1)  # the last query sees all keys
    return AveragingOutput((last * hidden[..., 0]).sum(-1), attention, hidden)


def mean_after(
    numbers: Float[Tensor, "*batch length"], separator: Int[Tensor, "*#batch"] | int
) -> Float[Tensor, "*batch"]:
    """Average the numbers after [SEP], 1/(T − t) Σ_{i>t} x_i; NaN where nothing follows."""
    after = torch.arange(numbers.shape[-1]) > torch.as_tensor(separator)[..., None]
    return torch.where(after, numbers, 0.0).sum(-1) / after.sum(-1)


def averaging_error(
    numbers: Float[Tensor, "*batch length"],
    separator: Int[Tensor, "*#batch"] | int,
    s_tag: float,
    b: float = 0.0,
    d: float = 1.0,
) -> Float[Tensor, "*batch"]:
    """Compute the leading term of f(x) − mean as s_tag → ∞, signed; ours, the paper has no rate.

        −(s − 1)(b x_T + d (s − 1)) e^{−s} cov_{j>t}(S_j, x_j),   S_j = Σ_{k≤j, k≠t} exp(x_j x_k + 1)

    with the covariance over the tokens after [SEP], each counted once. Derivation: A¹_jt = 1/(1 + S_j e^{−s}), so the
    last query's logits of tagged tokens differ by −(s − 1)(b x_T + d (s − 1)) S_j e^{−s}; to first order a softmax
    with logits ℓ_j averages x to its mean plus cov(ℓ_j, x_j). What untagged tokens get is of the order of e^{−d s²}.
    The error is therefore of the order s² e^{−s} for given numbers, but not uniformly: the constant grows as
    exp(max x²), and its mean over normal numbers does not exist.
    """
    place, separator = torch.arange(numbers.shape[-1]), torch.as_tensor(separator)[..., None]
    is_number = place != separator
    products = (numbers[..., :, None] * numbers[..., None, :] + 1).exp()
    sums = torch.where(is_number[..., None, :], products, 0.0).tril().sum(-1)
    after = place > separator
    count = after.sum(-1)
    mean = torch.where(after, sums, 0.0).sum(-1) / count
    deviation = torch.where(after, sums - mean[..., None], 0.0)
    covariance = (deviation * torch.where(after, numbers, 0.0)).sum(-1) / count
    logit = (s_tag - 1) * (b * numbers[..., -1] + d * (s_tag - 1))  # of a tagged token, but for e^(−s)
    return -logit * math.exp(-s_tag) * covariance


LENGTH = 20  # tokens of a sequence, [SEP] among them
S_TAGS = np.arange(2.0, 37.0, 2.0)
SHOWN_TAGS = (2.0, 4.0, 10.0)
SEQUENCES = 1000
PLAIN = "b = 0, d = 1"
VARIANTS = {PLAIN: (0.0, 1.0), "b = 3": (3.0, 1.0), "d = 0.1": (0.0, 0.1), "d = 5": (0.0, 5.0)}
"""Ours: the theorem lets b and d > 0 be anything, and its figure names none."""


@declared("sinks/figure6")
def construction(study: Study, outcome: Outcome) -> None:
    generator = torch.Generator().manual_seed(study.provenance["seed"])
    numbers = torch.randn(SEQUENCES, LENGTH, generator=generator, dtype=torch.float64)
    places = torch.randint(LENGTH - 1, (SEQUENCES,), generator=generator)
    middle = LENGTH // 2
    pictures = {
        f"s_tag = {tag:g}": averaging_model(numbers[:1], middle, tag).attention[0].numpy()
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
    by_variant = {
        str(name): (rows["median"].to_numpy(), rows["derived_median"].to_numpy())
        for name, rows in errors.groupby("b_d", sort=False)
    }
    by_variant[f"{PLAIN}, largest"] = (by_tag["largest"].to_numpy(), np.full(len(by_tag), np.nan))
    outcome.draw("convergence", convergence(by_variant, "|f(x) − mean|"))
    # Where the theorem says nothing: [SEP] in the last place, or absent.
    last, absent = (averaging_model(numbers, place, SHOWN_TAGS[-1]).output for place in (LENGTH - 1, ABSENT))
    to_sum = last - numbers[:, :-1].sum(-1) / LENGTH
    for what, difference in (
        ("[SEP] in the last place: largest |f(x) − sum of the numbers/T|", to_sum),
        ("no [SEP]: largest |f(x) − mean of all numbers|", absent - numbers.mean(-1)),
    ):
        outcome.read(f"{what}, at s_tag = {SHOWN_TAGS[-1]:g}", number(float(difference.abs().max())))
    table = outcome.tables["attention"] = _rest(numbers, places)
    by_query = {
        "tokens after [SEP]": (table["rest"].to_numpy(), table["derived"].to_numpy()),
        "[SEP] itself": (table["rest_of_separator"].to_numpy(), table["derived_of_separator"].to_numpy()),
    }
    outcome.draw("rest", convergence(by_query, "1 − A¹ to [SEP]"))


def _errors(numbers: Tensor, places: Tensor) -> pd.DataFrame:
    """Tabulate errors of the construction by (b, d) and s_tag, over sequences, against the derived ones."""
    averages = mean_after(numbers, places)
    rows = []
    for (name, (b, d)), tag in product(VARIANTS.items(), S_TAGS.tolist()):
        error = (averaging_model(numbers, places, tag, b, d).output - averages).abs()
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
        attention = averaging_model(numbers, places, tag).attention
        # Summed, as 1 − A would be rounding.
        off_separator = attention.masked_fill(is_separator[:, None], 0.0).sum(-1)
        rest, of_separator = (float(off_separator[of].median()) for of in (after, is_separator))
        derived = float(sums) * math.exp(-tag), float(places.median()) * math.exp(tag - tag**2)
        rows.append((tag, rest, derived[0], of_separator, derived[1]))
    columns = ["s_tag", "rest", "derived", "rest_of_separator", "derived_of_separator"]
    return pd.DataFrame(rows, columns=columns)


BELOW = 1e-16  # errors under it are rounding and are not drawn


def attention_maps(pictures: Mapping[str, Floats], separator: int) -> go.Figure:
    """Draw the attention of one sequence, side by side, queries down and keys to the right, both from 1."""
    positions = np.arange(1.0, len(next(iter(pictures.values()))) + 1)
    seen = np.tri(len(positions), dtype=bool)
    causal = {name: np.where(seen, picture, np.nan) for name, picture in pictures.items()}
    drawn = maps(causal, (positions, positions), ("key", "query", "attention"), (0.0, 1.0), square=True)
    edges = {"x0": separator + 0.5, "x1": separator + 1.5, "y0": 0.5, "y1": len(positions) + 0.5}
    look = {"width": 1.5, "color": style.VERMILLION}
    return drawn.add_shape(type="rect", **edges, line=look, row="all", col="all")


def convergence(measured: Mapping[str, tuple[Floats, Floats]], y: str) -> go.Figure:
    """Draw measured sizes against s_tag, logarithmic, each with its derived rate dotted in the same colour."""
    lines: list[Line] = []
    for line in by_category(measured, marker=5):
        derived = replace(line, name=f"{line.name}, derived", dash="dot", width=1.8, marker=0, legend=False)
        lines += [line, derived]
    values = [np.where(each > BELOW, each, np.nan) for pair in measured.values() for each in pair]
    lowest, highest = (float(of([of(each) for each in values[::2]])) for of in (np.nanmin, np.nanmax))
    # A rate means nothing where it exceeds all errors.
    axis = POWERS | {"range": [math.log10(lowest) - 0.3, math.log10(highest) + 0.7]}
    return curves(S_TAGS, lines, values, ("s_tag", y), height=420, yaxis=axis, legend={"y": 1.04})
