"""Outlier dimensions and massive activations of the run's model on its text, and what the papers say of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch

from theodolite import Corpus, OpenModel, find_outliers
from theodolite.corpus.groups import GROUPS, Groups
from theodolite.estimates import Estimate
from theodolite.jobs.job import Stage, run_stages
from theodolite.judging import Criterion
from theodolite.measure.heads import sinks_table
from theodolite.models.token_texts import text_of_tokens
from theodolite.passes.corpus_pass import batch_of
from theodolite.passes.survey_pass import HeadsPass
from theodolite.report import style
from theodolite.report.data import Floats, evenly
from theodolite.report.drawing.grammar import heat, line, reference, rows_down
from theodolite.report.drawing.layers import largest_columns
from theodolite.sinks.outliers import Outliers, position_0_as_one
from theodolite.system.wording import counted, for_plotly, head_name, listed, number, percent, shown_token
from theodolite.theory.outliers import GAUSSIAN_CONSISTENCY
from theodolite_papers.drawing import Line, curves
from theodolite_papers.experiment import ZHANG, Outcome, Study, declared

SUN = "Sun et al. 2024"

EVEN = 0.5 * GAUSSIAN_CONSISTENCY
CONSISTENT = Criterion(
    "at least", 0.5, f"of the dimensions; consistent: half as even as Gaussian numbers, {EVEN:.3f} (ours)"
)
FEW_TOKENS = Criterion("at most", 0.01, "“few” read as: one token in a hundred (ours)")
DELIMITED = Criterion("at least", 0.5, "most of them (ours)")
SUDDEN = Criterion("at least", 0.5, "half of the largest size in one block (ours)")
STAYS = Criterion("at least", 0.75, "three quarters of the layers from there on (ours)")

LIFE = ["dimension", "token_id", "first"]
"""What tells one massive activation from another."""

CLAIMS = {
    "tokens": f"Massive activations are few: they sit at few tokens ({SUN})",
    "delimiters": f"Massive activations sit at the first token and at delimiters ({SUN})",
    "dimensions": f"Massive activations sit in few, fixed dimensions ({SUN})",
    "sudden": f"Massive activations appear within one layer ({SUN})",
    "stays": f"Massive activations stay until the last layers ({SUN})",
    "at sinks": f"Massive activations are at tokens that are attention sinks ({SUN}; {ZHANG})",
    "sinks at": f"Attention sinks are at tokens with massive activations ({SUN}; {ZHANG})",
}


@declared("sinks/outliers")
def outliers(study: Study, outcome: Outcome) -> None:
    corpus, run = study.require_corpus(), study.run
    seed = int(run.provenance["seed"])
    outliers = study.cached("outliers", lambda: find_outliers(study.require_model(), corpus, seed=seed))
    texts = parts_of(corpus)
    parts = [find_outliers(study.require_model(), part, seed=seed) for part in texts]
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
    judge_consistency(outcome, outliers, parts)
    judge_massive(outcome, outliers, parts)
    sinks = [sinks_of(study.require_model(), part) for part in texts]
    judge_sinks(outcome, (outliers, run.sinks), list(zip(parts, sinks, strict=True)), corpus)
    draw(outcome, outliers, len(corpus.contexts))


def parts_of(corpus: Corpus) -> list[Corpus]:
    """The text in `GROUPS` parts, by whose spread errors are taken; none where a part would have a single context."""
    group = Groups(len(corpus.contexts)).of(torch.arange(len(corpus.contexts)))
    parts = [corpus.subset((group == number).nonzero().flatten()) for number in range(GROUPS)]
    return parts if min(len(part.contexts) for part in parts) > 1 else []


def sinks_of(model: OpenModel, corpus: Corpus) -> pd.DataFrame:
    """The table of sinks that a survey of this text has."""
    stage = Stage(
        "corpus", "reading sinks", lambda states: HeadsPass(model, corpus, 0, batch_of(corpus, None))
    )
    states = run_stages([stage], lambda what, done, total: None)
    return sinks_table(states.of("corpus.attention"), text_of_tokens(model, corpus))


def _estimate(whole: float, of_parts: Sequence[float], contexts: int) -> Estimate:
    """A share or count of the whole text, with the error of a mean over its parts; of parts that have none, fewer."""
    values = np.array(of_parts, dtype=np.float64)
    values = values[np.isfinite(values)]
    if len(values) < 2:
        return Estimate(whole)
    error = float(values.std(ddof=1)) / len(values) ** 0.5
    return Estimate(whole, error, len(values), "parts").floored(count=contexts)


def judge_consistency(outcome: Outcome, outliers: Outliers, parts: Sequence[Outliers] = ()) -> None:
    """Judge whether dimensions with a large RMS are large in most tokens, or in a few."""

    def even(each: Outliers) -> float:
        large = each.dimensions[each.dimensions["large_rms"] & ~each.dimensions["massive"]]
        return float((large["consistency"] >= EVEN).mean())

    claim = f"Outlier feature dimensions are consistent across tokens ({ZHANG}, section 1.2)"
    large = outliers.dimensions[outliers.dimensions["large_rms"]]
    apart = f"{int(large['massive'].sum())} more carry massive activations after position 0"
    large = large[~large["massive"]]
    if large.empty:
        outcome.cannot_test(claim, f"no dimension's RMS stands out in its layer ({apart})")
        return
    what = (
        f"share of {counted(len(large), 'dimension')} with an outlying RMS, over all layers, whose geometric mean is "
        f"not far below it (lowest: {number(large['consistency'].min())} of it; Gaussian numbers: "
        f"{number(GAUSSIAN_CONSISTENCY)}; {apart})"
    )
    estimate = _estimate(even(outliers), [even(part) for part in parts], _contexts(outliers))
    outcome.claim(claim, what, estimate, CONSISTENT)


def _at_delimiters(outliers: Outliers) -> float:
    if outliers.massive.empty:
        return math.nan
    tokens = _by_token(outliers.massive)
    places = tokens["places"].to_numpy(dtype=np.float64)
    return float(places[tokens["first"] | tokens["token"].map(is_delimiter)].sum() / places.sum())


def _staying(outliers: Outliers) -> float:
    shares = stays(outliers.growth)
    return float(np.median(shares)) if len(shares) else math.nan


def judge_massive(outcome: Outcome, outliers: Outliers, parts: Sequence[Outliers] = ()) -> None:
    """Judge what Sun et al. 2024 claim, on massive activations of either rule, where theirs finds any."""
    if missing := _nothing(outliers):
        for name in ("tokens", "delimiters", "dimensions", "sudden", "stays"):
            outcome.cannot_test(CLAIMS[name], missing)
        return
    dimensions = sorted(set(outliers.massive["dimension"]))
    width = len(set(outliers.dimensions["dimension"]))
    few = Criterion("at most", max(4.0, 0.01 * width), "“few” read as: 4, or 1 % of them (ours)")
    lives = outliers.growth.drop_duplicates(LIFE)
    followed = f"median of {counted(len(lives), 'pair')} of token and dimension"
    gone = int(lives["vanishes"].notna().sum())
    names = [carrier_name(row.token, row.first) for row in _by_token(outliers.massive).itertuples()]
    first = percent(float(outliers.layers["tokens_first"].max()))
    measures: dict[str, tuple[str, Callable[[Outliers], float], Criterion]] = {
        "tokens": (
            f"largest share over layers of the tokens after position 0 that carry one (position 0: {first})",
            lambda each: float(each.layers["tokens"].max()),
            FEW_TOKENS,
        ),
        "delimiters": (
            "share at position 0 or at tokens without a letter or digit "
            f"({listed(list(dict.fromkeys(names)), 5)})",
            _at_delimiters,
            DELIMITED,
        ),
        "dimensions": (
            f"dimensions of {width} ({listed([str(dimension) for dimension in dimensions], 8)})",
            lambda each: float(each.massive["dimension"].nunique()),
            few,
        ),
        "sudden": (
            f"largest growth in one block over the largest size, {followed}",
            lambda each: float(each.growth.drop_duplicates(LIFE)["rise"].median()),
            SUDDEN,
        ),
        "stays": (
            "share of the layers, from the one where it appears, in which it is massive, "
            f"{followed} ({gone} vanish before the last)",
            _staying,
            STAYS,
        ),
    }
    for name, (what, measure, criterion) in measures.items():
        of_parts = [measure(part) for part in parts]
        if name == "sudden" and len(set(of_parts)) == 1:
            of_parts = []  # of position 0 with one token, by causality: no context can tell how far off it is
        outcome.claim(
            CLAIMS[name], what, _estimate(measure(outliers), of_parts, _contexts(outliers)), criterion
        )


def judge_sinks(
    outcome: Outcome,
    whole: tuple[Outliers, pd.DataFrame],
    parts: Sequence[tuple[Outliers, pd.DataFrame]],
    corpus: Corpus,
) -> None:
    """Judge whether massive activations and sinks are at the same tokens, by token and first position."""
    if missing := _nothing(whole[0]) or ("no attention sink in this run" if whole[1].empty else ""):
        for name in ("at sinks", "sinks at"):
            outcome.cannot_test(CLAIMS[name], missing)
        return

    def tables(each: tuple[Outliers, pd.DataFrame]) -> tuple[pd.DataFrame, pd.DataFrame]:
        return _by_token(each[0].massive), _caught(each[1])

    for name, one, other, weight, what in (
        ("at sinks", 0, 1, "places", "massive activations at tokens that are sinks of some head"),
        ("sinks at", 1, 0, "contexts", "sinks at tokens that carry massive activations"),
    ):
        chance = _chance(tables(whole)[other], corpus)
        criterion = Criterion("at least", max(0.5, chance), "half, and more than of all tokens (ours)")
        what = f"share of {what} (baseline: {percent(chance)} of all tokens of the text)"
        shares = [_share_among(of[one], of[other], weight) for of in map(tables, (whole, *parts))]
        outcome.claim(CLAIMS[name], what, _estimate(shares[0], shares[1:], len(corpus.contexts)), criterion)


def _caught(sinks: pd.DataFrame) -> pd.DataFrame:
    """Count, for each (token, first), the contexts of the head in which it is a sink most often."""
    return sinks.groupby(["token_id", "first"], as_index=False)["contexts"].max()


def _share_among(tokens: pd.DataFrame, others: pd.DataFrame, weight: str) -> float:
    """Share of `tokens`, by `weight`, that are among `others` (NaN of none); position 0 is one place."""
    amount, later = tokens[weight].to_numpy(dtype=np.float64), set(others.loc[~others["first"], "token_id"])
    present = np.where(tokens["first"], bool(others["first"].any()), tokens["token_id"].isin(later))
    return float((amount * present).sum() / amount.sum()) if len(tokens) else math.nan


def _contexts(outliers: Outliers) -> int:
    return int(outliers.numbers["contexts"])


def _nothing(outliers: Outliers) -> str:
    """Why nothing can be said of massive activations: the published rule finds none; empty: it does."""
    if outliers.layers["massive_published"].any():
        return ""
    by_layer = outliers.massive[["token_id", "first", "dimension"]]
    tokens = len(by_layer[~by_layer["first"]]["token_id"].unique()) + bool(by_layer["first"].any())
    others = (
        f"{counted(tokens, 'token')} (position 0 as one), {counted(by_layer['dimension'].nunique(), 'dimension')}"
        if tokens
        else "none either"
    )
    sizes = outliers.dimensions[["maximum", "maximum_first"]].max(axis=1)
    largest, ratio = float(sizes.max()), float((sizes / typical_rms(outliers)).max())
    return (
        f"no massive activation by the published rule: the largest |x| is {number(largest)}, and no value more than "
        f"{number(ratio)} times the RMS of its layer's median dimension; by comparison with its layer: {others}"
    )


def is_delimiter(token: str) -> bool:
    """Return whether a token has no letter and no digit, or is a special one such as ⟨s⟩."""
    inner = token.strip()
    special = len(inner) > 2 and (inner[0], inner[-1]) in {("<", ">"), ("[", "]")}
    return special or not any(character.isalnum() for character in inner)


def stays(growth: pd.DataFrame) -> Floats:
    """Share of massive layers from the first to the last of the model, of each activation that appears at all."""
    shares = []
    for _, activation in growth[growth["appears"].notna()].groupby(LIFE):
        later = activation[activation["layer"] >= activation["appears"]]
        shares.append(float((later["share"] >= 0.5).mean()))
    return np.array(shares)


def _by_token(massive: pd.DataFrame) -> pd.DataFrame:
    """Find, for each (token, first), the most contexts and places that it has in any layer and dimension."""
    keys = ["token_id", "token", "first"]
    table = massive.groupby(keys, as_index=False)[["contexts", "places"]].max()
    return table.sort_values(["contexts", "token_id"], ascending=[False, True], ignore_index=True)


def _chance(tokens: pd.DataFrame, corpus: Corpus) -> float:
    """The share of all tokens of the text that are such tokens."""
    ids = corpus.contexts.numpy()
    present = np.isin(ids, tokens.loc[~tokens["first"], "token_id"].to_numpy())
    present[:, 0] = bool(tokens["first"].any())
    return float(present.mean())


def _read(outcome: Outcome, outliers: Outliers) -> None:
    layers, dimensions = outliers.layers, outliers.dimensions
    largest = dimensions[["maximum", "maximum_first"]].max(axis=1)
    ratio = largest / typical_rms(outliers)
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


LINES = 12
TOKENS = 20
SMALLEST = 1e-6  # of the largest value: below it the logarithmic axis of the growth ends
NAMED: dict[str, Any] = {"type": "category", "showgrid": False}  # an axis of dimensions or tokens
TURNED = {"tickangle": -90, "tickfont": {"size": 10}}  # its names, where there are many
DASHES = ("solid", "dash", "dot", "dashdot")


def ratio_map(ratios: Floats, columns: Sequence[object], titles: tuple[str, str, str]) -> go.Figure:
    """Ratios to a median, rows by columns, coloured by their logarithm from 1 up."""
    shown = np.maximum(np.nan_to_num(ratios, nan=1.0), 1.0)
    top = max(float(shown.max()), 10.0)
    ticks = [amount for power in range(8) for amount in (10**power, 3 * 10**power) if amount <= top * 1.001]
    named = {"tickvals": np.log10(ticks).tolist(), "ticktext": [str(tick) for tick in ticks]}
    cells = heat(
        np.log10(shown),
        0,
        float(np.log10(top)),
        f"{titles[1]} %{{y}}, {titles[0]} %{{x}}<br>%{{customdata:.3g}} {titles[2]}<extra></extra>",
        bar=style.colour_bar(titles[2], **named),
        cells=True,
        customdata=ratios.astype(np.float32),
        x=[str(name) for name in columns],
    )
    layout = {"xaxis": NAMED | (TURNED if len(columns) > LINES else {}), "yaxis": rows_down(len(shown))}
    height = min(640, max(260, 140 + 22 * len(shown)))
    return style.figure([cells], titles[0], titles[1], height=height, layout=layout)


def _by_layer(name: str, values: Floats, colour: str, dash: str) -> list[Any]:
    hover = f"{for_plotly(name)}<br>layer %{{x}}: %{{y:.4g}}<extra></extra>"
    positive = np.where(values > 0, values, np.nan)
    return line(np.arange(len(values)), positive, name, colour, dash=dash, width=2, marker=5, hover=hover)


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
    return table.pivot(index=rows, columns=columns, values=name).to_numpy(dtype=np.float64)


def _map(outcome: Outcome, outliers: Outliers) -> None:
    ratios = _grid(outliers.dimensions, "rms_ratio", "layer", "dimension")
    chosen = largest_columns(ratios)
    outcome.draw(
        "dimensions", ratio_map(ratios[:, chosen], chosen, ("dimension", "layer", "times the median"))
    )


def _growth(outcome: Outcome, outliers: Outliers) -> None:
    """|value| by layer on a logarithmic axis: one line per massive activation, against the usual magnitudes."""
    layers = outliers.dimensions.groupby("layer")
    typical = typical_rms(outliers).groupby(outliers.dimensions["layer"]).median()
    references = {
        "RMS of the median dimension": typical.to_numpy(dtype=np.float64),
        "largest |x|, positions 1 on": layers["maximum"].max().to_numpy(dtype=np.float64),
        "largest |x| at position 0": layers["maximum_first"].max().to_numpy(dtype=np.float64),
    }
    by, rising = ["places", "dimension", "layer"], [False, True, True]
    order = outliers.growth.sort_values(by, ascending=rising, kind="stable")
    keys = ["dimension", "token_id", "token", "first"]
    lines = {
        (f"dimension {dimension}", carrier_name(token, first)): rows["value"].abs().to_numpy(dtype=np.float64)
        for (dimension, _, token, first), rows in order.groupby(keys, sort=False)
    }
    threshold = outliers.numbers["thresholds"]["massive"]
    drawn = dict(list(lines.items())[:LINES])
    dimensions = list(dict.fromkeys(dimension for dimension, _ in drawn))
    drawn_of_dimension: dict[str, int] = dict.fromkeys(dimensions, 0)
    traces: list[Any] = []
    for (dimension, token), values in drawn.items():
        colour = style.CATEGORIES[dimensions.index(dimension) % (len(style.CATEGORIES) - 1)]
        dash = DASHES[drawn_of_dimension[dimension] % len(DASHES)]
        traces += _by_layer(f"{dimension}, {token}", values, colour, dash)
        drawn_of_dimension[dimension] += 1
    for (name, values), dash in zip(references.items(), DASHES[1:], strict=False):
        traces += _by_layer(name, values, style.GREY, dash)
    all_values = np.concatenate([*drawn.values(), *references.values(), [threshold]])
    top = float(np.nanmax(all_values))
    low = max(float(np.nanmin(all_values[all_values > 0])), SMALLEST * top)
    length = max(len(values) for values in references.values())
    traces += reference([0, length - 1], threshold, f"published threshold, {threshold:g}")
    layout = {
        "xaxis": {"zeroline": False} | style.every_tick(length),
        "yaxis": {"type": "log", "dtick": 1, "range": [np.log10(low / 2), np.log10(2 * top)]},
    }
    outcome.draw("growth", style.figure(traces, "layer", "|value|", height=420, layout=layout))


def _carriers(outcome: Outcome, outliers: Outliers, contexts: int) -> None:
    """Share of contexts in which a token carries a massive activation, one bar a token, at most `TOKENS` of them."""
    rows = []
    for _, token_rows in position_0_as_one(outliers.massive).groupby("token_id"):
        name = carrier_name(token_rows["token"].iloc[0], token_rows["first"].iloc[0])
        dimensions = listed([str(dimension) for dimension in sorted(set(token_rows["dimension"]))], 6)
        largest = number(max(token_rows["extreme"], key=abs))
        share = token_rows["contexts"].max() / contexts
        rows.append((name, share, f"dimensions {dimensions}; up to {largest}"))
    rows.sort(key=lambda row: (-row[1], row[0]))
    names, shares, notes = zip(*rows[:TOKENS], strict=True)
    bars = go.Bar(
        x=np.array(shares, dtype=np.float32),
        # Numbered, since two tokens may look alike.
        y=list(range(len(names))),
        orientation="h",
        marker={"color": style.BLUE},
        customdata=[[for_plotly(name), for_plotly(note)] for name, note in zip(names, notes, strict=True)],
        hovertemplate="%{customdata[0]}: %{x:.1%} of contexts<br>%{customdata[1]}<extra></extra>",
    )
    down = {"autorange": "reversed", "tickmode": "array", "showgrid": False}
    down |= {"tickvals": list(range(len(names))), "ticktext": [for_plotly(name) for name in names]}
    layout = {"yaxis": down, "xaxis": {"tickformat": ".0%", "rangemode": "tozero"}}
    height = 110 + 24 * max(3, len(names))
    outcome.draw("tokens", style.figure([bars], "share of contexts", "", height=height, layout=layout))


def _counts(outcome: Outcome, outliers: Outliers) -> None:
    lines = {
        "adaptive": Line("outlier dimensions, from data", style.BLUE, marker=5),
        "published": Line("outlier dimensions, published", style.SKY, "dash", marker=5),
        "massive_adaptive": Line(
            "dimensions with massive activations, from data", style.VERMILLION, marker=5
        ),
        "massive_published": Line(
            "dimensions with massive activations, published", style.ORANGE, "dash", marker=5
        ),
    }
    values = [outliers.layers[name].to_numpy(dtype=np.float64) for name in lines]
    at = np.arange(len(outliers.layers), dtype=np.float64)
    layers = {"tickmode": "array", "tickvals": evenly(len(at), 16), "zeroline": False}
    titles, zero = ("layer", "dimensions"), {"rangemode": "tozero"}
    outcome.draw(
        "counts", curves(at, list(lines.values()), values, titles, height=360, xaxis=layers, yaxis=zero)
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
    drawn = ratio_map(grid, range(grid.shape[1]), ("head", "block", "times the median"))
    outcome.draw("heads", drawn, heads=sentence + (f": {listed(names, 8)}" if names else ""))
