"""Figures of a model's outlier dimensions and massive activations: where they are, how they grow, who carries them."""

from __future__ import annotations

import numpy as np
import pandas as pd

from theodolite.report import style
from theodolite.report.data import Floats
from theodolite.report.drawing.outliers import largest_columns
from theodolite.report.measures import ZHANG
from theodolite.report.outcome import Outcome
from theodolite.sinks.outliers import Outliers, position_0_as_one
from theodolite.system.wording import counted, head_name, listed, number, shown_token
from theodolite_papers.drawing import outliers as drawing

SUN = "Sun et al. 2024"
DETTMERS = "Dettmers et al. 2022"


def draw(outcome: Outcome, outliers: Outliers, contexts: int) -> None:
    """All figures of the page, of a text of so many contexts."""
    _map(outcome, outliers)
    _growth(outcome, outliers)
    if not outliers.massive.empty:
        _carriers(outcome, outliers, contexts)
    _counts(outcome, outliers)
    _heads(outcome, outliers)


def typical_rms(outliers: Outliers) -> pd.Series:
    """RMS of the median dimension of each row's layer."""
    return outliers.dimensions["rms"] / outliers.dimensions["rms_ratio"]


def carrier_name(token: str, first: bool) -> str:
    """A token in quotation marks; what stands at position 0 is one place, whatever it is."""
    return "position 0" if first else f"“{shown_token(token)}”"


def _grid(table: pd.DataFrame, name: str, rows: str, columns: str) -> Floats:
    grid: Floats = table.pivot(index=rows, columns=columns, values=name).to_numpy(dtype=np.float64)
    return grid


def _map(outcome: Outcome, outliers: Outliers) -> None:
    ratios = _grid(outliers.dimensions, "rms_ratio", "layer", "dimension")
    chosen = largest_columns(ratios)
    outcome.figure(
        "dimensions",
        "RMS of the largest dimensions, by layer",
        drawing.ratio_map(ratios[:, chosen], chosen, ("dimension", "layer", "times the median")),
        f"RMS over positions 1 on, over that of the layer's median dimension, of the {len(chosen)} dimensions that are "
        "largest in any layer.",
        "columns that are strong from top to bottom: outlier dimensions keep their place through the layers, since the "
        "residual stream does.",
        f"{DETTMERS}; {ZHANG}, section 1.2",
        wide=True,
    )


def _growth(outcome: Outcome, outliers: Outliers) -> None:
    layers = outliers.dimensions.groupby("layer")
    typical = typical_rms(outliers).groupby(outliers.dimensions["layer"]).median()
    references = {
        "RMS of the median dimension": typical.to_numpy(dtype=np.float64),
        "largest |x|, positions 1 on": layers["maximum"].max().to_numpy(dtype=np.float64),
        "largest |x| at position 0": layers["maximum_first"].max().to_numpy(dtype=np.float64),
    }
    order = outliers.growth.sort_values(
        ["places", "dimension", "layer"], ascending=[False, True, True], kind="stable"
    )
    keys = ["dimension", "token_id", "token", "first"]
    lines = {
        (f"dimension {dimension}", carrier_name(token, first)): rows["value"].abs().to_numpy(dtype=np.float64)
        for (dimension, _, token, first), rows in order.groupby(keys, sort=False)
    }
    outcome.figure(
        "growth",
        "Massive activations through the layers",
        drawing.growth(lines, references, outliers.numbers["thresholds"]["massive"]),
        "Mean value, in size, of each dimension in the tokens where it is massive in some layer, by either rule; the "
        f"{drawing.LINES} with most places. Grey: typical sizes, and the largest value of the layer in any dimension.",
        "lines that jump within one block and then stay level until the last ones.",
        SUN,
        wide=True,
    )


def _carriers(outcome: Outcome, outliers: Outliers, contexts: int) -> None:
    rows = []
    for _, token_rows in position_0_as_one(outliers.massive).groupby("token_id"):
        name = carrier_name(token_rows["token"].iloc[0], token_rows["first"].iloc[0])
        dimensions = listed([str(dimension) for dimension in sorted(set(token_rows["dimension"]))], 6)
        largest = number(max(token_rows["extreme"], key=abs))
        rows.append(
            (name, token_rows["contexts"].max() / contexts, f"dimensions {dimensions}; up to {largest}")
        )
    rows.sort(key=lambda row: (-row[1], row[0]))
    names, shares, notes = zip(*rows, strict=True)
    outcome.figure(
        "tokens",
        "Which tokens carry massive activations",
        drawing.carriers(names, np.array(shares), notes),
        "Share of contexts in which the token carries a massive activation, in the layer and dimension where it "
        f"does most often, by either rule; the {min(drawing.TOKENS, len(rows))} most frequent of {len(rows)}.",
        "position 0 and delimiters at the top, and not much else.",
        SUN,
    )


def _counts(outcome: Outcome, outliers: Outliers) -> None:
    def of(name: str) -> Floats:
        return outliers.layers[name].to_numpy(dtype=np.float64)

    columns = {
        "outlier dimensions, from data": (of("adaptive"), style.BLUE, "solid"),
        "outlier dimensions, published": (of("published"), style.SKY, "dash"),
        "dimensions with massive activations, from data": (of("massive_adaptive"), style.VERMILLION, "solid"),
        "dimensions with massive activations, published": (of("massive_published"), style.ORANGE, "dash"),
    }
    outcome.figure(
        "counts",
        "Published thresholds against those from data",
        drawing.counts(columns, "dimensions"),
        "Dashed: |x| ≥ 6 in 6 % of the tokens and a quarter of the layers; |x| > 100 and > 1000 times the median. "
        "Solid: what stands out in its own layer; 1 % of healthy layers have such a value by chance.",
        "dashed lines at 0 under solid ones, or at the whole width: this model's activations are of another size than "
        "those for which the thresholds were published.",
        f"{DETTMERS}; {SUN}; the rules from data are ours",
    )


def _heads(outcome: Outcome, outliers: Outliers) -> None:
    largest = outliers.head_dimensions.groupby(["layer", "head"], as_index=False)["rms_ratio"].max()
    grid = _grid(largest, "rms_ratio", "layer", "head")
    table = outliers.head_dimensions
    flagged = table[table["adaptive"]].drop_duplicates(["layer", "head"])
    names = [head_name(row.layer, row.head) for row in flagged.itertuples()]
    sentence = (
        f"{counted(len(names), 'head')} with an outlier dimension by comparison with the head's own others"
    )
    outcome.figure(
        "heads",
        "Largest dimension of every head's output",
        drawing.ratio_map(grid, range(grid.shape[1]), ("head", "block", "times the median")),
        "RMS over positions 1 on of the head's output before the output projection, its largest dimension over its "
        f"median one. {sentence}{': ' + listed(names, 8) if names else ''}.",
        "strong heads: those that may tag the tokens that a sink caught with an outlier dimension.",
        f"{ZHANG}, Fig. 1(b)",
    )
