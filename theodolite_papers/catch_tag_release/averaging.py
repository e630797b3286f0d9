"""The construction of Theorem 4.1, which averages what follows a separator (Zhang et al. 2025, section 4, Fig. 6)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import product
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch
from torch import Tensor

from theodolite.estimates import Floats
from theodolite.report import style
from theodolite.report.drawing.grammar import line
from theodolite.system.wording import for_plotly, number
from theodolite_papers.catch_tag_release.averaging_model import (
    ABSENT,
    averaging_error,
    averaging_model,
    mean_after,
)
from theodolite_papers.drawing import POWERS, maps
from theodolite_papers.experiment import Outcome, Study, declared

LENGTH = 20
"""Tokens of a sequence, [SEP] among them."""

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
    curves = {
        str(name): (rows["median"].to_numpy(), rows["derived_median"].to_numpy())
        for name, rows in errors.groupby("b_d", sort=False)
    }
    curves[f"{PLAIN}, largest"] = (by_tag["largest"].to_numpy(), np.full(len(by_tag), np.nan))
    outcome.draw("convergence", convergence(S_TAGS, curves, "|f(x) − mean|"))
    # Where the theorem says nothing: [SEP] in the last place, or absent.
    last, absent = (averaging_model(numbers, place, SHOWN_TAGS[-1]).output for place in (LENGTH - 1, ABSENT))
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
