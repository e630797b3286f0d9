"""Positional locality of every head: the argmax property (Fig. 25), and whether attention is local where it holds."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd

from theodolite import Run
from theodolite.estimates import Estimate
from theodolite.judging import Criterion
from theodolite.measure.rank_correlation import error_under_independence, rank_correlation
from theodolite.report.data import Floats, column, head_grid, need_column
from theodolite.report.measures import SONG
from theodolite.report.outcome import Outcome
from theodolite.system.wording import number, percent
from theodolite_papers.drawing import theory as drawing
from theodolite_papers.experiment import Study, experiment
from theodolite_papers.hidden_geometry.layer_columns import share_of_heads

MOSTLY = 0.8
"""“for more than 80 % positions t” (section 4.2)."""

MANY_HEADS = Criterion("at least", 0.43, "section 4.2: “more than 43% heads in GPT-2”")
TOGETHER = Criterion(
    "more than", 0.0, "“consequence” read as: heads that have the property more attend more locally (ours)"
)
EARLIER = Criterion("less than", 0.0, "“especially among early layers” read as: falling with depth (ours)")

TRENDS = (
    (
        "The argmax property is satisfied especially in early layers (appendix D.2)",
        "layer",
        "its layer",
        EARLIER,
    ),
    (
        "Local attention is a consequence of smoothness (section 4.2)",
        "previous_token",
        "the attention that it pays to the previous token",
        TOGETHER,
    ),
)
"""Claim, column of the heads table, its name, criterion: of the rank correlation over heads."""

LEAST_HEADS = 8  # below that, a rank correlation over heads says nothing

LOCALITY = {
    "previous_token": "attention to the previous token",
    "entropy": "entropy of attention",
}
"""How local a head's attention is on the text: high, and low."""

MEANT = {
    "argmax_property": "raw vectors, as published",
    "argmax_property_normed": "behind the layer's norm",
}
BEHIND = {"argmax_property_normed": ", as the head reads it: each row sent through the layer's norm"}


def _over_heads(x: Floats, y: Floats) -> tuple[float, int]:
    """Rank correlation over the heads that have both, and their number; NaN where they are too few."""
    both = np.isfinite(x) & np.isfinite(y)
    count = int(both.sum())
    return float(rank_correlation(x[both], y[both])) if count >= LEAST_HEADS else math.nan, count


def _by_layers(run: Run, correlation: float) -> Estimate:
    """As good as that of as many layers: heads of one layer may be alike."""
    layers = len(np.unique(need_column(run.heads, "layer")))
    error = error_under_independence(layers) if layers > 1 else math.nan
    return Estimate(correlation, error, layers, "layers", by_chance=True)


def _correlations(run: Run, shares: dict[str, Floats]) -> pd.DataFrame:
    """Rank correlation over heads of each share with local attention, entropy and depth."""
    rows: list[tuple[str, str, float, int]] = []
    for name, values in shares.items():
        for measure in ("previous_token", "entropy", "layer"):
            other = column(run.heads, measure)
            correlation, count = (math.nan, 0) if other is None else _over_heads(values, other)
            rows.append((name, measure, correlation, count))
    return pd.DataFrame(rows, columns=["share", "with", "rank_correlation", "heads"])


@experiment(
    "geometry/figure25",
    "The argmax property of every head, and local attention",
    "More than 43 % of the heads of GPT-2 satisfy it at more than 80 % of the positions (section 4.2, Fig. 25)",
    needs=("heads.argmax_property", "heads.previous_token"),
)
def figure_25(study: Study, outcome: Outcome) -> None:
    run = study.run
    shares = {name: values for name in MEANT if (values := column(run.heads, name)) is not None}
    published = shares["argmax_property"]
    for name, values in shares.items():
        outcome.read(
            f"heads above {percent(MOSTLY)} of the positions, {MEANT[name]}",
            percent(float((values > MOSTLY).mean())),
            "GPT-2: more than 43 %" if name == "argmax_property" else "",
        )
    correlations = _correlations(run, shares)
    for name, measure, correlation, _ in correlations.itertuples(index=False):
        if label := LOCALITY.get(measure):
            outcome.read(f"rank correlation with {label}, {MEANT[name]}", number(correlation))
    outcome.claim(
        "Many heads satisfy the argmax property at most positions (section 4.2, appendix D.2)",
        f"share of {len(published)} heads above {MOSTLY:g}",
        share_of_heads((published[np.isfinite(published)] > MOSTLY).tolist(), MANY_HEADS),
        MANY_HEADS,
    )
    of_published = correlations[correlations["share"] == "argmax_property"].set_index("with")
    for claim, measure, what, criterion in TRENDS:
        correlation, count = of_published.loc[measure, ["rank_correlation", "heads"]]
        what = f"rank correlation of the head's share with {what}"
        if measure == "layer" and not (published > MOSTLY).any():
            outcome.cannot_test(claim, f"no head has it at more than {percent(MOSTLY)} of the positions")
            continue
        if math.isnan(correlation):
            outcome.cannot_test(claim, f"{what}: {count:g} heads with both, or no difference between them")
            continue
        outcome.claim(claim, what, _by_layers(run, float(correlation)), criterion)
    outcome.tables["heads"] = run.heads.filter(["layer", "head", *shares, *LOCALITY])
    outcome.tables["correlations"] = correlations
    for name in shares:
        grid = head_grid(run, name)
        assert grid is not None
        outcome.figure(
            name.replace("_", "-"),
            f"The argmax property of every head, {MEANT[name]}",
            drawing.head_values(grid, "share of positions"),
            "Share of the positions t at which the largest of the entries t' ≤ t of row t of P̃WP̃ᵀ is the t-th, "
            f"P̃ = pos + μ{BEHIND.get(name, '')}.",
            "heads above 0.8, mostly in early layers.",
            f"{SONG}, Fig. 25 and appendix D.2",
        )
    outcome.figure(
        "locality",
        "The argmax property against local attention",
        drawing.head_scatter(
            published,
            need_column(run.heads, "previous_token"),
            need_column(run.heads, "layer"),
            need_column(run.heads, "head"),
            ("argmax property", "attention to the previous token"),
        ),
        "Every head by its share of positions (as published) and by the mean attention that its queries pay to the "
        "previous token; violet blocks are early, green ones late.",
        "a rise to the right, if local attention followed from position.",
        f"{SONG}, section 4.2; the comparison is ours",
    )
