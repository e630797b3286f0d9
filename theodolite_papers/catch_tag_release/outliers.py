"""Outlier dimensions and massive activations of the run's model on its text, and what the papers say of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch
from torch import Tensor

from theodolite import Corpus, OpenModel, find_outliers
from theodolite.corpus.groups import GROUPS, Groups
from theodolite.estimates import Estimate, Floats
from theodolite.jobs.job import Stage, run_stages
from theodolite.measure.heads import sinks_table
from theodolite.models.guard import measures
from theodolite.models.hooks import Hooks, hooked
from theodolite.models.texts import text_of_tokens
from theodolite.passes.corpus_pass import batch_of
from theodolite.passes.survey_pass import HeadsPass
from theodolite.report import style
from theodolite.report.drawing.grammar import bars, heat, reference, rows_down
from theodolite.report.drawing.layers import largest_columns
from theodolite.sinks.outliers import Outliers, position_0_as_one
from theodolite.system.wording import counted, for_plotly, head_name, listed, number, percent, shown_token
from theodolite.theory.outliers import GAUSSIAN_CONSISTENCY
from theodolite_papers.drawing import Line, curves
from theodolite_papers.experiment import Outcome, Study, declared

FOLLOWED_CONTEXTS = 64  # contexts in which massive activations are followed, at most: a fixed cost
MASSIVE_SHARE = 0.5  # a followed activation is massive in a layer where at least this share of its places are
ANY_TOKEN = -1  # token id of what is followed at position 0: it is massive there whatever the token
LIFE = ["dimension", "token_id", "first"]  # what tells one massive activation from another
GROWTH = [*LIFE[:2], "token", "first", "places", "layer", "value", "share", "appears", "vanishes", "rise"]


class _Values(Hooks):
    """Values of the residual stream at some places of a batch (context, position, dimension), layer by layer."""

    def __init__(self, places: tuple[Tensor, ...]) -> None:
        self.places = places
        self.layers: list[Tensor] = []

    def stream(self, layer: int, hidden: Tensor) -> None:
        self.layers.append(hidden[self.places].double().cpu())


@measures("model")
def follow(model: OpenModel, corpus: Corpus, found: Outliers) -> pd.DataFrame:
    """Follow every massive (dimension, token) that was found in a text through all layers.

    In `FOLLOWED_CONTEXTS` contexts at most, which hold the most frequent ones; position 0 under one name, `ANY_TOKEN`.
    A row for each activation and layer: places followed, mean value, share of places massive there, `life`.
    """
    if found.massive.empty:
        return pd.DataFrame(columns=GROWTH)
    marked = _marked(found)
    chosen = _chosen(marked, found.massive, len(corpus.contexts))
    followed = marked[marked["context"].isin(chosen)]
    followed = followed.assign(token_id=followed["token_id"].where(~followed["first"], ANY_TOKEN))
    places = followed[[*LIFE, "context", "position"]].drop_duplicates()
    some, row = corpus.subset(torch.tensor(chosen)), np.searchsorted(chosen, places["context"])
    values = np.empty((len(places), model.layers + 1))
    for part in some.batches(batch_of(some, None)):
        here = (part.start <= row) & (row < part.stop)
        position, dimension = (
            torch.from_numpy(places[of].to_numpy()[here]) for of in ("position", "dimension")
        )
        tap = _Values((torch.from_numpy(row[here] - part.start), position, dimension))
        with hooked(model, tap):
            model.forward(some.inputs(part))
        values[here] = torch.stack(tap.layers, dim=1).numpy()
    counts = places.groupby(LIFE).size()
    means = pd.DataFrame(values, pd.MultiIndex.from_frame(places[LIFE])).groupby(level=LIFE).mean()
    massive = followed.groupby([*LIFE, "layer"]).size().unstack(fill_value=0)
    shares = massive.reindex(columns=means.columns, fill_value=0).div(counts, axis=0)
    text = dict(zip(found.massive["token_id"], found.massive["token"], strict=True)) | {ANY_TOKEN: "any"}
    tables = []
    for key, value in means.iterrows():
        share = shares.loc[key].to_numpy()
        names = dict(zip(LIFE, key, strict=True)) | {"token": text[key[1]], "places": counts[key]}
        rows = {"layer": means.columns, "value": value.to_numpy(), "share": share}
        tables.append(pd.DataFrame(names | rows).assign(**life(value.to_numpy(), share)))
    return pd.concat(tables, ignore_index=True)[GROWTH]


def _marked(found: Outliers) -> pd.DataFrame:
    """List where values are massive: layer, dimension, token_id, first, context, position.

    Of position 0 it is known in which contexts some dimension is massive, and with which tokens each: with all of them.
    """
    columns = ["layer", "dimension", "context", "position", "token_id"]
    places = pd.DataFrame(found.places[:, :5].numpy(), columns=columns)
    at_0 = places.query("position == 0").drop(columns="dimension")
    first = found.massive.loc[found.massive["first"], ["layer", "dimension", "token_id"]]
    first = first.merge(at_0, on=["layer", "token_id"])
    return pd.concat([places.query("position > 0").assign(first=False), first.assign(first=True)])


def _chosen(marked: pd.DataFrame, massive: pd.DataFrame, contexts: int) -> list[int]:
    """Choose contexts with an example of each activation, the frequent first, filled up with evenly spread others."""
    keys = ["layer", *LIFE]
    frequent = massive.sort_values("contexts", ascending=False, kind="stable")
    examples = frequent.merge(marked.groupby(keys, as_index=False)["context"].min(), on=keys, how="left")
    examples["token_id"] = examples["token_id"].where(~examples["first"], ANY_TOKEN)
    examples = examples.drop_duplicates(LIFE)["context"]
    spread = np.linspace(0, contexts - 1, min(FOLLOWED_CONTEXTS, contexts)).round().astype(int)
    return sorted(list(dict.fromkeys([*examples.tolist(), *spread.tolist()]))[:FOLLOWED_CONTEXTS])


def life(value: np.ndarray, share: np.ndarray) -> dict[str, float]:
    """Find where an activation appears and vanishes, NaN for never, and how suddenly it rises.

    value: mean at every layer. share: of its places that are massive there.
    """
    size, layers = np.abs(value), np.flatnonzero(share >= MASSIVE_SHARE)
    first, last = (layers[0], layers[-1]) if len(layers) else (np.nan, len(value) - 1)
    vanishes = np.nan if last == len(value) - 1 else float(last + 1)
    rise = np.diff(size, prepend=0.0).max() / max(size.max(), np.finfo(np.float64).tiny)
    return {"appears": float(first), "vanishes": vanishes, "rise": float(rise)}


EVEN = 0.5 * GAUSSIAN_CONSISTENCY  # consistent: half as even as Gaussian numbers (ours)


@declared("sinks/outliers")
def outliers(study: Study, outcome: Outcome) -> None:
    corpus, run = study.require_corpus(), study.run
    model, seed, texts = study.require_model(), int(run.provenance["seed"]), parts_of(corpus)
    outliers, *parts = (find_outliers(model, text, seed=seed) for text in (corpus, *texts))
    growth = follow(model, corpus, outliers)
    grown = [follow(model, text, part) for text, part in zip(texts, parts, strict=True)]
    flags = ["published", "adaptive", "large_rms", "massive"]
    flagged, heads = (
        table[table[flags].any(axis=1)].reset_index(drop=True)
        for table in (outliers.dimensions, outliers.head_dimensions)
    )
    outcome.tables |= {
        "layers": outliers.layers,
        "dimensions": flagged,
        "massive": position_0_as_one(outliers.massive),
        "growth": growth,
        "head_dimensions": heads,
        "head_massive": position_0_as_one(outliers.head_massive),
    }
    outcome.runs["outliers"] = outliers.numbers
    _read(outcome, outliers)
    judge_consistency(outcome, outliers, parts)
    judge_massive(outcome, (outliers, growth), list(zip(parts, grown, strict=True)))
    sinks = [sinks_of(model, part) for part in texts]
    judge_sinks(outcome, (outliers, run.sinks), list(zip(parts, sinks, strict=True)), corpus)
    draw(outcome, outliers, growth, len(corpus.contexts))


def parts_of(corpus: Corpus) -> list[Corpus]:
    """Split the text into `GROUPS` parts, by whose spread errors are taken; none where one has a single context."""
    group = Groups(len(corpus.contexts)).of(torch.arange(len(corpus.contexts)))
    parts = [corpus.subset((group == number).nonzero().flatten()) for number in range(GROUPS)]
    return parts if min(len(part.contexts) for part in parts) > 1 else []


def sinks_of(model: OpenModel, corpus: Corpus) -> pd.DataFrame:
    """Survey this text for its table of sinks."""
    batch = batch_of(corpus, None)
    stage = Stage("corpus", "reading sinks", lambda states: HeadsPass(model, corpus, 0, batch))
    states = run_stages([stage], lambda what, done, total: None)
    table, _ = sinks_table(states.of("corpus.attention"), text_of_tokens(model, corpus))
    return table


def _estimate(whole: float, of_parts: Sequence[float], contexts: int) -> Estimate:
    """Estimate a share or count of the whole text, with the error of a mean over its parts; missing parts left out."""
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

    large = outliers.dimensions[outliers.dimensions["large_rms"]]
    apart = f"{int(large['massive'].sum())} more carry massive activations after position 0"
    large = large[~large["massive"]]
    if large.empty:
        outcome.cannot_judge("consistent", f"no dimension's RMS stands out in its layer ({apart})")
        return
    estimate = _estimate(even(outliers), [even(part) for part in parts], _contexts(outliers))
    values = {"dimensions": counted(len(large), "dimension"), "lowest": number(large["consistency"].min())}
    values |= {"gaussian": number(GAUSSIAN_CONSISTENCY), "apart": apart}
    outcome.judge("consistent", estimate, even=EVEN, **values)


Followed = tuple[Outliers, pd.DataFrame]
"""What is found in a text, and its massive activations through the layers."""


def _at_delimiters(outliers: Outliers) -> float:
    tokens = _by_token(outliers.massive)
    if tokens.empty:
        return math.nan
    at = tokens["first"] | tokens["token"].map(is_delimiter)
    return float(tokens["places"][at].sum() / tokens["places"].sum())


MASSIVE: dict[str, Callable[[Outliers, pd.DataFrame], float]] = {
    "tokens": lambda each, _: float(each.layers["tokens"].max()),
    "delimiters": lambda each, _: _at_delimiters(each),
    "dimensions": lambda each, _: float(each.massive["dimension"].nunique()),
    "sudden": lambda _, growth: float(growth.drop_duplicates(LIFE)["rise"].median()),
    "stays": lambda _, growth: float(pd.Series(stays(growth)).median()),
}
"""Claim of Sun et al. 2024 on massive activations → its number."""


def judge_massive(outcome: Outcome, whole: Followed, parts: Sequence[Followed] = ()) -> None:
    """Judge what Sun et al. 2024 claim, on massive activations of either rule, where theirs finds any."""
    outliers, growth = whole
    if missing := _nothing(outliers):
        for name in MASSIVE:
            outcome.cannot_judge(name, missing)
        return
    dimensions = sorted(set(outliers.massive["dimension"]))
    width = len(set(outliers.dimensions["dimension"]))
    lives = growth.drop_duplicates(LIFE)
    names = [carrier_name(row.token, row.first) for row in _by_token(outliers.massive).itertuples()]
    values = {"first": percent(float(outliers.layers["tokens_first"].max())), "width": width}
    values |= {
        "carriers": listed(list(dict.fromkeys(names)), 5),
        "dimensions": listed([str(dimension) for dimension in dimensions], 8),
    }
    values |= {"pairs": counted(len(lives), "pair"), "gone": int(lives["vanishes"].notna().sum())}
    for name, measure in MASSIVE.items():
        of_parts = [measure(*part) for part in parts]
        if name == "sudden" and len(set(of_parts)) == 1:
            of_parts = []  # of position 0 with one token, by causality: no context can tell how far off it is
        estimate = _estimate(measure(*whole), of_parts, _contexts(outliers))
        few = {"limit": max(4.0, 0.01 * width)} if name == "dimensions" else {}
        outcome.judge(name, estimate, **values, **few)


def judge_sinks(
    outcome: Outcome,
    whole: tuple[Outliers, pd.DataFrame],
    parts: Sequence[tuple[Outliers, pd.DataFrame]],
    corpus: Corpus,
) -> None:
    """Judge whether massive activations and sinks are at the same tokens, by token and first position."""
    if missing := _nothing(whole[0]) or ("no attention sink in this run" if whole[1].empty else ""):
        for name in ("at-sinks", "sinks-at"):
            outcome.cannot_judge(name, missing)
        return

    def tables(outliers: Outliers, sinks: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
        """Index by (token, first): massive activations; the contexts of the head in which it is a sink most often."""
        caught = sinks.groupby(["token_id", "first"], as_index=False)["contexts"].max()
        return _by_token(outliers.massive), caught

    by_text = [tables(*each) for each in (whole, *parts)]
    for name, one, other, weight in (("at-sinks", 0, 1, "places"), ("sinks-at", 1, 0, "contexts")):
        chance = _chance(by_text[0][other], corpus)
        shares = [_share_among(of[one], of[other], weight) for of in by_text]
        estimate = _estimate(shares[0], shares[1:], len(corpus.contexts))
        outcome.judge(name, estimate, limit=max(0.5, chance), chance=percent(chance))


def _share_among(tokens: pd.DataFrame, others: pd.DataFrame, weight: str) -> float:
    """Compute the share of `tokens`, by `weight`, that are among `others` (NaN of none); position 0 is one place."""
    amount, later = tokens[weight].to_numpy(dtype=np.float64), set(others.loc[~others["first"], "token_id"])
    present = np.where(tokens["first"], bool(others["first"].any()), tokens["token_id"].isin(later))
    return float((amount * present).sum() / amount.sum()) if len(tokens) else math.nan


def _contexts(outliers: Outliers) -> int:
    return int(outliers.numbers["contexts"])


def _nothing(outliers: Outliers) -> str:
    """Say why nothing can be said of massive activations: the published rule finds none; empty: it does."""
    if outliers.layers["massive_published"].any():
        return ""
    massive, others = outliers.massive, "none either"
    if tokens := massive.loc[~massive["first"], "token_id"].nunique() + bool(massive["first"].any()):
        dimensions = counted(massive["dimension"].nunique(), "dimension")
        others = f"{counted(tokens, 'token')} (position 0 as one), {dimensions}"
    sizes = _largest(outliers)
    largest, ratio = float(sizes.max()), float((sizes / typical_rms(outliers)).max())
    return (
        f"no massive activation by the published rule: the largest |x| is {number(largest)}, and no value more than "
        f"{number(ratio)} times the RMS of its layer's median dimension; by comparison with its layer: {others}"
    )


def _largest(outliers: Outliers) -> pd.Series:
    """Return the largest |x| of each row of `dimensions`."""
    return outliers.dimensions[["maximum", "maximum_first"]].max(axis=1)


def typical_rms(outliers: Outliers) -> pd.Series:
    """Return the RMS of the median dimension of each row's layer."""
    return outliers.dimensions["rms"] / outliers.dimensions["rms_ratio"]


def is_delimiter(token: str) -> bool:
    """Return whether a token has no letter and no digit, or is a special one such as ⟨s⟩."""
    inner = token.strip()
    special = len(inner) > 2 and (inner[0], inner[-1]) in {("<", ">"), ("[", "]")}
    return special or not any(character.isalnum() for character in inner)


def stays(growth: pd.DataFrame) -> Floats:
    """Compute the share of layers from the first to the last in which each activation that appears is massive."""
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
    """Compute the share of all tokens of the text that are among these, or stand where they do at position 0."""
    ids = corpus.contexts.numpy()
    present = np.isin(ids, tokens.loc[~tokens["first"], "token_id"].to_numpy())
    present[:, 0] = bool(tokens["first"].any())
    return float(present.mean())


def _read(outcome: Outcome, outliers: Outliers) -> None:
    layers, dimensions, largest = outliers.layers, outliers.dimensions, _largest(outliers)
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
    what = "tokens after position 0 that carry one, layer with most"
    outcome.read(what, f"{carrying}; of position 0 {carrying_first}", "“few”")
    outcome.read("largest |x|", number(float(largest.max())), "above 100")
    place = f"layer {dimensions['layer'][top]}, dimension {dimensions['dimension'][top]}"
    what, paper = "largest |x| over the RMS of its layer's median dimension", "above 1000 times the median"
    outcome.read(what, f"{number(float(ratio[top]))} ({place})", paper)


LINES = 12
TOKENS = 20
SMALLEST = 1e-6  # of the largest value: below it the logarithmic axis of the growth ends
NAMED: dict[str, Any] = {"type": "category", "showgrid": False}  # an axis of dimensions or tokens
TURNED = {"tickangle": -90, "tickfont": {"size": 10}}  # its names, where there are many
DASHES = ("solid", "dash", "dot", "dashdot")


def draw(outcome: Outcome, outliers: Outliers, growth: pd.DataFrame, contexts: int) -> None:
    """Draw all figures of the page, of a text of so many contexts."""
    ratios = _grid(outliers.dimensions, "rms_ratio", "layer", "dimension")
    chosen = largest_columns(ratios)
    titles = "dimension", "layer", "times the median"
    outcome.draw("dimensions", ratio_map(ratios[:, chosen], chosen, titles))
    _growth(outcome, outliers, growth)
    if not outliers.massive.empty:
        _carriers(outcome, outliers, contexts)
    table = outliers.head_dimensions
    largest = table.groupby(["layer", "head"], as_index=False)["rms_ratio"].max()
    grid = _grid(largest, "rms_ratio", "layer", "head")
    flagged = table[table["adaptive"]].drop_duplicates(["layer", "head"])
    names = [head_name(row.layer, row.head) for row in flagged.itertuples()]
    sentence = (
        f"{counted(len(names), 'head')} with an outlier dimension by comparison with the head's own others"
    )
    drawn = ratio_map(grid, range(grid.shape[1]), ("head", "block", "times the median"))
    outcome.draw("heads", drawn, heads=sentence + (f": {listed(names, 8)}" if names else ""))


def ratio_map(ratios: Floats, columns: Sequence[object], titles: tuple[str, str, str]) -> go.Figure:
    """Draw ratios to a median, rows by columns, coloured by their logarithm from 1 up."""
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


def carrier_name(token: str, first: bool) -> str:
    """Put a token in quotation marks; what stands at position 0 is one place, whatever it is."""
    return "position 0" if first else f"“{shown_token(token)}”"


def _grid(table: pd.DataFrame, name: str, rows: str, columns: str) -> Floats:
    return table.pivot(index=rows, columns=columns, values=name).to_numpy(dtype=np.float64)


def _growth(outcome: Outcome, outliers: Outliers, growth: pd.DataFrame) -> None:
    """Draw |value| by layer on a logarithmic axis: a line per massive activation, against the usual magnitudes."""
    by, rising = ["places", "dimension", "layer"], [False, True, True]
    order = growth.sort_values(by, ascending=rising, kind="stable")
    activations = order.groupby(["dimension", "token_id", "token", "first"], sort=False)
    named = {
        (dimension, carrier_name(token, first)): rows["value"].abs().to_numpy(dtype=np.float64)
        for (dimension, _, token, first), rows in activations
    }
    lines: dict[Line, Floats] = {}
    of_dimension: dict[int, int] = {}  # lines drawn so far
    for (dimension, token), values in list(named.items())[:LINES]:
        count = of_dimension[dimension] = of_dimension.get(dimension, -1) + 1
        colour = style.CATEGORIES[list(of_dimension).index(dimension) % (len(style.CATEGORIES) - 1)]
        drawn = Line(f"dimension {dimension}, {token}", colour, DASHES[count % len(DASHES)], marker=5)
        lines[drawn] = values
    layers = outliers.dimensions.groupby("layer")
    references = {
        "RMS of the median dimension": typical_rms(outliers).groupby(outliers.dimensions["layer"]).median(),
        "largest |x|, positions 1 on": layers["maximum"].max(),
        "largest |x| at position 0": layers["maximum_first"].max(),
    }
    for (name, of_layers), dash in zip(references.items(), DASHES[1:], strict=True):
        lines[Line(name, style.GREY, dash, marker=5)] = of_layers.to_numpy(dtype=np.float64)
    threshold, length = outliers.numbers["thresholds"]["massive"], layers.ngroups
    all_values = np.concatenate([*lines.values(), [threshold]])
    top = float(np.nanmax(all_values))
    low = max(float(np.nanmin(all_values[all_values > 0])), SMALLEST * top)
    axes: dict[str, Any] = {
        "xaxis": {"zeroline": False} | style.every_tick(length),
        "yaxis": {"type": "log", "dtick": 1, "range": [np.log10(low / 2), np.log10(2 * top)]},
    }
    positive = [np.where(values > 0, values, np.nan) for values in lines.values()]
    figure = curves(np.arange(length), list(lines), positive, ("layer", "|value|"), height=420, **axes)
    limit = reference([0, length - 1], threshold, f"published threshold, {threshold:g}")
    outcome.draw("growth", figure.add_traces(limit))


def _carriers(outcome: Outcome, outliers: Outliers, contexts: int) -> None:
    """Draw the share of contexts in which a token carries a massive activation, a bar a token, `TOKENS` at most."""
    rows = []
    for _, token_rows in position_0_as_one(outliers.massive).groupby("token_id"):
        name = carrier_name(token_rows["token"].iloc[0], token_rows["first"].iloc[0])
        dimensions = listed([str(dimension) for dimension in sorted(set(token_rows["dimension"]))], 6)
        largest = number(max(token_rows["extreme"], key=abs))
        share = token_rows["contexts"].max() / contexts
        rows.append((name, share, f"dimensions {dimensions}; up to {largest}"))
    rows.sort(key=lambda row: (-row[1], row[0]))
    names, shares, notes = zip(*rows[:TOKENS], strict=True)
    rows_shown = [[for_plotly(name), for_plotly(note)] for name, note in zip(names, notes, strict=True)]
    hover = "%{customdata[0]}: %{x:.1%} of contexts<br>%{customdata[1]}<extra></extra>"
    at = list(range(len(names)))  # numbered, since two tokens may look alike
    shown = bars(np.array(shares), at, "", style.BLUE, hover, orientation="h", customdata=rows_shown)
    down = {"autorange": "reversed", "tickmode": "array", "showgrid": False}
    down |= {"tickvals": at, "ticktext": [for_plotly(name) for name in names]}
    layout = {"yaxis": down, "xaxis": {"tickformat": ".0%", "rangemode": "tozero"}}
    height = 110 + 24 * max(3, len(names))
    outcome.draw("tokens", style.figure([shown], "share of contexts", "", height=height, layout=layout))
