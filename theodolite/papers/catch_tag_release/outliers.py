"""Outlier dimensions and massive activations of the run's model on its text, and what the papers say of them."""

from __future__ import annotations

import numpy as np
import pandas as pd

from theodolite.corpus.corpus import Corpus
from theodolite.errors import UsageError
from theodolite.judging import Criterion
from theodolite.papers.experiment import Study, experiment
from theodolite.report import style
from theodolite.report.data import Floats
from theodolite.report.drawing import outliers as drawing
from theodolite.report.measures import ZHANG
from theodolite.report.outcome import Outcome
from theodolite.sinks.outliers import Outliers, find_outliers, position_0_as_one
from theodolite.system.wording import counted, head_name, listed, number, percent, shown_token
from theodolite.theory.outliers import GAUSSIAN_CONSISTENCY

SUN = "Sun et al. 2024"
DETTMERS = "Dettmers et al. 2022"

EVEN = 0.5 * GAUSSIAN_CONSISTENCY
CONSISTENT = Criterion(
    "at least", 0.5, f"of the dimensions; consistent: half as even as Gaussian numbers, {EVEN:.3f} (ours)"
)
FEW_TOKENS = Criterion("at most", 0.01, "“few” read as: one token in a hundred (ours)")
DELIMITED = Criterion("at least", 0.5, "most of them (ours)")
SUDDEN = Criterion("at least", 0.5, "half of the largest size in one block (ours)")
STAYS = Criterion("at least", 0.75, "three quarters of the layers from there on (ours)")

CLAIMS = {
    "tokens": f"Massive activations are few: they sit at few tokens ({SUN})",
    "delimiters": f"Massive activations sit at the first token and at delimiters ({SUN})",
    "dimensions": f"Massive activations sit in few, fixed dimensions ({SUN})",
    "sudden": f"Massive activations appear within one layer ({SUN})",
    "stays": f"Massive activations stay until the last layers ({SUN})",
    "at sinks": f"Massive activations are at tokens that are attention sinks ({SUN}; {ZHANG})",
    "sinks at": f"Attention sinks are at tokens with massive activations ({SUN}; {ZHANG})",
}


@experiment(
    "sinks/outliers",
    "Outlier dimensions and massive activations: where, which tokens carry them, how they grow",
    "“Unlike attention sinks, outlier feature dimensions are consistent across tokens” (section 1.2); massive "
    "activations are few, at the first token and delimiters, appear in one layer and stay (Sun et al. 2024)",
    needs=("model",),
)
def outliers(study: Study, outcome: Outcome) -> None:
    corpus, run = study.corpus, study.run
    if corpus is None:
        raise UsageError("this experiment reads the text of the run again: pass it as well")
    seed = int(run.provenance["seed"])
    outliers = study.cached("outliers", lambda: find_outliers(study.require_model(), corpus, seed=seed))
    flags = ["published", "adaptive", "large_rms", "massive"]
    flagged, heads = (
        table[table[flags].any(axis=1)].reset_index(drop=True)
        for table in (outliers.dimensions, outliers.head_dimensions)
    )
    outcome.tables |= {
        "layers": outliers.layers,
        "dimensions": flagged,
        "massive": position_0_as_one(outliers.massive),
        "growth": outliers.growth,
        "head_dimensions": heads,
        "head_massive": position_0_as_one(outliers.head_massive),
    }
    outcome.runs["outliers"] = outliers.numbers
    _read(outcome, outliers)
    judge_consistency(outcome, outliers)
    judge_massive(outcome, outliers)
    judge_sinks(outcome, outliers, run.sinks, corpus)
    _map(outcome, outliers)
    _growth(outcome, outliers)
    if not outliers.massive.empty:
        _carriers(outcome, outliers, len(corpus.contexts))
    _counts(outcome, outliers)
    _heads(outcome, outliers)


def judge_consistency(outcome: Outcome, outliers: Outliers) -> None:
    """Whether dimensions with a large RMS are large in most tokens, or by a few.

    Massive activations are another thing: where they make the RMS, the dimension is counted apart.
    """
    claim = f"Outlier feature dimensions are consistent across tokens ({ZHANG}, section 1.2)"
    large = outliers.dimensions[outliers.dimensions["large_rms"]]
    apart = f"{int(large['massive'].sum())} more carry massive activations after position 0"
    large = large[~large["massive"]]
    if large.empty:
        outcome.cannot_test(claim, f"no dimension's RMS stands out in its layer ({apart})")
        return
    even = large["consistency"] >= EVEN
    what = (
        f"share of {counted(len(large), 'dimension')} with an outlying RMS, over all layers, whose geometric mean is "
        f"not far below it (lowest: {number(large['consistency'].min())} of it; Gaussian numbers: "
        f"{number(GAUSSIAN_CONSISTENCY)}; {apart})"
    )
    outcome.claim(claim, what, float(even.mean()), CONSISTENT)


def judge_massive(outcome: Outcome, outliers: Outliers) -> None:
    """What Sun et al. 2024 say of massive activations, of those found by either rule."""
    if outliers.massive.empty:
        for name in ("tokens", "delimiters", "dimensions", "sudden", "stays"):
            outcome.cannot_test(CLAIMS[name], _nothing(outliers))
        return
    tokens = _by_token(outliers.massive)
    places = tokens["places"].to_numpy(dtype=np.float64)
    marked = tokens["first"] | tokens["token"].map(is_delimiter)
    dimensions = sorted(set(outliers.massive["dimension"]))
    width = len(set(outliers.dimensions["dimension"]))
    few = Criterion("at most", max(4.0, 0.01 * width), "“few” read as: 4, or 1 % of them (ours)")
    lives = outliers.growth.drop_duplicates(["dimension", "token_id", "first"])
    staying = stays(outliers.growth)
    followed = f"median of {len(lives)} dimensions of tokens"
    gone = int(lives["vanishes"].notna().sum())
    outcome.claim(
        CLAIMS["tokens"],
        "largest share over layers of the tokens after position 0 that carry one (position 0: "
        f"{percent(float(outliers.layers['tokens_first'].max()))})",
        float(outliers.layers["tokens"].max()),
        FEW_TOKENS,
    )
    outcome.claim(
        CLAIMS["delimiters"],
        f"share at position 0 or at tokens without a letter or digit ({_carrier_names(tokens)})",
        float(places[marked].sum() / places.sum()),
        DELIMITED,
    )
    outcome.claim(
        CLAIMS["dimensions"],
        f"dimensions of {width} ({listed([str(dimension) for dimension in dimensions], 8)})",
        float(len(dimensions)),
        few,
    )
    outcome.claim(
        CLAIMS["sudden"],
        f"largest growth in one block over the largest size, {followed}",
        float(lives["rise"].median()),
        SUDDEN,
    )
    outcome.claim(
        CLAIMS["stays"],
        f"share of the layers, from the one where it appears, in which it is massive, {followed} ({gone} vanish "
        "before the last)",
        float(np.median(staying)) if len(staying) else np.nan,
        STAYS,
    )


def judge_sinks(outcome: Outcome, outliers: Outliers, sinks: pd.DataFrame, corpus: Corpus) -> None:
    """Whether massive activations and sinks (the run's table) are at the same tokens, by token and first position."""
    if outliers.massive.empty or sinks.empty:
        missing = _nothing(outliers) if outliers.massive.empty else "no attention sink in this run"
        for name in ("at sinks", "sinks at"):
            outcome.cannot_test(CLAIMS[name], missing)
        return
    carriers = _by_token(outliers.massive)
    caught = sinks.groupby(["token_id", "first"], as_index=False)["contexts"].max()
    pairs = {
        "at sinks": (carriers, caught, "places", "massive activations at tokens that are sinks of some head"),
        "sinks at": (caught, carriers, "contexts", "sinks at tokens that carry massive activations"),
    }
    for name, (tokens, others, weight, what) in pairs.items():
        amount = tokens[weight].to_numpy(dtype=np.float64)
        share = float((amount * _among(tokens, others)).sum() / amount.sum())
        chance = _chance(others, corpus)
        criterion = Criterion("at least", max(0.5, chance), "half, and more than of all tokens (ours)")
        what = f"share of {what} (baseline: {percent(chance)} of all tokens of the text)"
        outcome.claim(CLAIMS[name], what, share, criterion)


def _typical(outliers: Outliers) -> pd.Series:
    """RMS of the median dimension of each row's layer."""
    return outliers.dimensions["rms"] / outliers.dimensions["rms_ratio"]


def _nothing(outliers: Outliers) -> str:
    largest = float(outliers.dimensions[["maximum", "maximum_first"]].to_numpy().max())
    ratio = float((outliers.dimensions[["maximum", "maximum_first"]].max(axis=1) / _typical(outliers)).max())
    return (
        f"no massive activation by either rule: the largest |x| is {number(largest)}, and no value more than "
        f"{number(ratio)} times the RMS of its layer's median dimension"
    )


def is_delimiter(token: str) -> bool:
    """Whether a token has no letter and no digit, or is a special one such as ⟨s⟩."""
    inner = token.strip()
    special = len(inner) > 2 and (inner[0], inner[-1]) in {("<", ">"), ("[", "]")}
    return special or not any(character.isalnum() for character in inner)


def stays(growth: pd.DataFrame) -> Floats:
    """Share of massive layers from the first to the last of the model, of each activation that appears at all."""
    shares = []
    for _, activation in growth[growth["appears"].notna()].groupby(["dimension", "token_id", "first"]):
        later = activation[activation["layer"] >= activation["appears"]]
        shares.append(float((later["share"] >= 0.5).mean()))
    return np.array(shares)


def _by_token(massive: pd.DataFrame) -> pd.DataFrame:
    """Each (token, first) with the most contexts and places that it has in any layer and dimension."""
    keys = ["token_id", "token", "first"]
    table = massive.groupby(keys, as_index=False)[["contexts", "places"]].max()
    return table.sort_values(["contexts", "token_id"], ascending=[False, True], ignore_index=True)


def _among(tokens: pd.DataFrame, others: pd.DataFrame) -> Floats:
    """1 for each of `tokens` that is among `others` too; position 0 is one place, whatever its token."""
    later = set(others.loc[~others["first"], "token_id"])
    present = np.where(tokens["first"], bool(others["first"].any()), tokens["token_id"].isin(later))
    return present.astype(np.float64)


def _chance(tokens: pd.DataFrame, corpus: Corpus) -> float:
    """The share of all tokens of the text that are such tokens."""
    ids = corpus.contexts.numpy()
    present = np.isin(ids, tokens.loc[~tokens["first"], "token_id"].to_numpy())
    present[:, 0] = bool(tokens["first"].any())
    return float(present.mean())


def _name(token: str, first: bool) -> str:
    return "position 0" if first else f"“{shown_token(token)}”"


def _carrier_names(tokens: pd.DataFrame) -> str:
    """The most frequent carriers by name, position 0 once."""
    names = [_name(row.token, row.first) for row in tokens.itertuples()]
    return listed(list(dict.fromkeys(names)), 5)


def _read(outcome: Outcome, outliers: Outliers) -> None:
    layers, dimensions = outliers.layers, outliers.dimensions
    largest = dimensions[["maximum", "maximum_first"]].max(axis=1)
    ratio = largest / _typical(outliers)
    top = int(ratio.to_numpy().argmax())
    for name, quantity, paper in (
        ("published", "outlier dimensions, |x| ≥ 6 in 6 % of tokens and 25 % of layers", ""),
        ("adaptive", "outlier dimensions, by comparison with their layer", ""),
        ("massive_published", "dimensions with massive activations, published rule", "“few”"),
        ("massive_adaptive", "dimensions with massive activations, by comparison with their layer", "“few”"),
    ):
        mean, most = float(layers[name].mean()), float(layers[name].max())
        outcome.read(quantity, f"{number(mean)} per layer, at most {number(most)}", paper)
    carrying, carrying_first = (percent(float(layers[name].max())) for name in ("tokens", "tokens_first"))
    outcome.read(
        "tokens after position 0 that carry one, layer with most",
        f"{carrying}; of position 0 {carrying_first}",
        "“few”",
    )
    outcome.read("largest |x|", number(float(largest.max())), "above 100")
    outcome.read(
        "largest |x| over the RMS of its layer's median dimension",
        f"{number(float(ratio[top]))} (layer {dimensions['layer'][top]}, dimension {dimensions['dimension'][top]})",
        "above 1000 times the median",
    )


def _grid(table: pd.DataFrame, name: str, rows: str, columns: str) -> Floats:
    grid: Floats = table.pivot(index=rows, columns=columns, values=name).to_numpy(dtype=np.float64)
    return grid


def _map(outcome: Outcome, outliers: Outliers) -> None:
    ratios = _grid(outliers.dimensions, "rms_ratio", "layer", "dimension")
    chosen = drawing.largest_columns(ratios)
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
    typical = _typical(outliers).groupby(outliers.dimensions["layer"]).median()
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
        (f"dimension {dimension}", _name(token, first)): rows["value"].abs().to_numpy(dtype=np.float64)
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
        name = _name(token_rows["token"].iloc[0], token_rows["first"].iloc[0])
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
