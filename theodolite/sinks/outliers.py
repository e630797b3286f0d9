"""Outlier dimensions and massive activations of a model on a text: where, and which tokens carry them.

By the published thresholds, which the caller may set, and by rules that compare each layer with itself. Of the
residual stream, and of the outputs of the heads as they are before the output projection.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Int
from torch import Tensor

from theodolite.accumulate.outliers import Activations, LayerBounds, carrier_columns
from theodolite.accumulate.sums import State, marked_places, part_of
from theodolite.attention.inputs import AttentionInputs, attend
from theodolite.corpus.corpus import Corpus
from theodolite.errors import UsageError
from theodolite.jobs.job import Stage, States, Steps, run_stages
from theodolite.models import OpenModel
from theodolite.models.guard import measures
from theodolite.models.texts import text_of_tokens
from theodolite.passes.corpus_pass import CorpusPass, batch_of, check_fit, refuse_nonfinite_stream
from theodolite.system.progress import ShowStage
from theodolite.theory.outliers import Thresholds, outlier_dimensions, outlier_features, typical_magnitude

STREAM, HEADS = "stream", "heads"  # whose values: one part a token, H parts


@dataclass(frozen=True)
class Outliers:
    """Tables of outlier dimensions and massive activations. Layer 0 enters the first block, ℓ leaves block ℓ.

    Attributes:
        layers: one row per residual layer. published, adaptive: outlier dimensions by each rule; massive_published,
            massive_adaptive: dimensions that carry a massive activation anywhere, position 0 included; tokens,
            tokens_first: share of the tokens after position 0, and at it, that carry one. Special tokens that end
            every context ([SEP]) count as no token.
        dimensions: one row for each layer and dimension, positions 1 … T−1. share: of the tokens with |x| ≥ 6; rms,
            rms_ratio: and over the median dimension's; consistency: exp E ln |x| over the RMS, 0.53 for Gaussian
            numbers; z: robust, of E ln |x|; maximum, maximum_first: largest |x|, after position 0 and at it;
            published, adaptive: which rule finds an outlier dimension; large_rms: the rule from data with the RMS in
            place of the typical magnitude; massive: carries a massive activation by either rule, after position 0.
        massive: one row for each layer, dimension and token, at position 0 (`first`) or after it. contexts; places:
            values; published, adaptive: how many of these are massive by each rule; mean, extreme (the largest in
            size) of the values; position: mean.
        head_dimensions, head_massive: the same of the heads' outputs, with `head`; there the published rule asks for
            a share of tokens alone, since a dimension of a head is another one in every layer.
        places: where values of the stream are massive by either rule, a row each by `accumulate.sums.MARKED_COLUMNS`.
        numbers: thresholds, sizes, and what was read, for a provenance.
    """

    layers: pd.DataFrame
    dimensions: pd.DataFrame
    massive: pd.DataFrame
    head_dimensions: pd.DataFrame
    head_massive: pd.DataFrame
    places: Int[Tensor, "places 7"]
    numbers: dict[str, Any]


@measures("model")
def find_outliers(
    model: OpenModel,
    corpus: Corpus,
    *,
    thresholds: Thresholds | None = None,
    seed: int = 0,
    show_progress: ShowStage = lambda what, done, total: None,
) -> Outliers:
    """Find outlier dimensions and massive activations: by one pass of a corpus and one of a small sample of it.

    Args:
        thresholds: of both kinds of rules; None: the published ones, and 1 % of healthy layers.
        seed: of the sample from which the rules from data take each layer's baseline.
        show_progress: told (what is being done, contexts done, contexts in all); it may raise to stop.

    Raises:
        UsageError: the corpus does not fit the model, its layers differ in their heads, or the thresholds make
            everything massive.
        WorkError: hidden states hold NaN or infinite values.
    """
    check_fit(model, corpus)
    if not model.structure.alike:
        what = "its layers differ in number or width of heads, whose outlier dimensions cannot be told by one rule"
        raise UsageError(f"{model.id}: {what}; outliers of the residual stream are in the survey")
    thresholds = thresholds or Thresholds()
    contexts, length = corpus.contexts.shape
    trailing = corpus.trailing(model.tokenizer)
    tokens = len(corpus.tokens)
    order = torch.randperm(contexts, generator=torch.Generator().manual_seed(seed))
    if corpus.lengths is not None:  # a baseline is of one batch: of the length that most tokens are of
        of_length = corpus.lengths.bincount() * torch.arange(length + 1)
        order = order[corpus.lengths[order] == of_length.argmax()]
    order = order[: batch_of(corpus, None)]
    text, weights = text_of_tokens(model, corpus), model.weights()

    def baseline(states: States) -> Steps:
        some = corpus.subset(order.sort().values)
        heads = len(model.attending), model.heads, model.structure.value_width
        sizes = {STREAM: (model.layers + 1, 1, model.width), HEADS: heads}
        level = thresholds.level
        sums = {values: LayerBounds(size, tokens, level, trailing) for values, size in sizes.items()}
        return _OutlierPass(model, some, sums)

    def count(states: States) -> Steps:
        bounds = {values: states.of(f"baseline.{values}")["bounds"] for values in (STREAM, HEADS)}
        sums = {values: Activations(of, thresholds, trailing) for values, of in bounds.items()}
        return _OutlierPass(model, corpus, sums)

    stages = [Stage("baseline", "sizing layers", baseline), Stage("count", "counting outliers", count)]
    states = run_stages(stages, show_progress)
    state, head_state = (states.of(f"count.{values}") for values in (STREAM, HEADS))
    later = tokens - contexts * (1 + trailing)
    dimensions = _dimensions(state, later, thresholds, across_layers=True)
    head_dimensions = _dimensions(head_state, later, thresholds, across_layers=False)
    head_massive = _carriers(head_state, text)
    for table in (head_dimensions, head_massive):
        table["layer"] = np.array(model.attending)[table["layer"].to_numpy(dtype=int)]
    return Outliers(
        layers=_layers(state, dimensions, contexts, later, trailing),
        dimensions=dimensions.drop(columns="head"),
        massive=_carriers(state, text).drop(columns="head"),
        head_dimensions=head_dimensions,
        head_massive=head_massive,
        places=marked_places(part_of(state, "marked"), corpus.rows()),
        numbers={
            "thresholds": dict(vars(thresholds)),
            "contexts": contexts,
            "length": length,
            "baseline_contexts": len(order),
            "corpus": {"name": corpus.name, "sha256": corpus.sha256},
            "model": {"id": model.id, **weights.described()},
            "seed": seed,
        },
    )


class _OutlierPass(CorpusPass):
    """Pass the residual stream (1 part a token) and the outputs of heads of layers that attend (H) to accumulators."""

    def __init__(
        self, model: OpenModel, corpus: Corpus, sums: Mapping[str, LayerBounds | Activations]
    ) -> None:
        super().__init__(model, corpus, 0, batch_of(corpus, None))
        self.accumulators |= sums
        self._sums = sums
        self._place = {layer: place for place, layer in enumerate(model.attending)}

    def begin(self, first: int, ids: Tensor) -> None:
        """Start a batch with contexts `first …`."""
        self.first, self.ids = first, ids

    def stream(self, layer: int, hidden: Tensor) -> None:
        """Take in the residual stream."""
        refuse_nonfinite_stream(layer, hidden)
        self._sums[STREAM].update(layer, hidden[:, :, None], self.ids, self.first)

    def attention(self, layer: int, inputs: AttentionInputs) -> Tensor:
        """Return the model's own output."""
        output = attend(inputs)
        self._sums[HEADS].update(self._place[layer], output, self.ids, self.first)
        return output


def _dimensions(state: State, later: int, thresholds: Thresholds, *, across_layers: bool) -> pd.DataFrame:
    """Tabulate each layer, part (`head`) and dimension; `later` tokens were seen after position 0."""
    layers, parts, width = state["square"].shape
    rms, typical = (state["square"] / later).sqrt(), typical_magnitude(state["log"] / later)
    share = state["outlier"] / later
    # Of all parts of a layer together, so that the level is that of a layer.
    level = thresholds.level / parts
    (z, adaptive), (_, large_rms) = (outlier_dimensions(size, level) for size in (typical, rms))
    published = share >= thresholds.outlier_tokens
    if across_layers:
        published = outlier_features(share[:, 0], thresholds)[:, None]
    columns: dict[str, Tensor] = {
        "share": share,
        "rms": rms,
        "rms_ratio": rms / rms.median(-1, keepdim=True).values,
        "consistency": typical / rms,
        "z": z,
        "maximum": state["maximum"],
        "maximum_first": state["maximum_first"],
        "published": published,
        "adaptive": adaptive,
        "large_rms": large_rms,
        "massive": state["published"] + state["adaptive"] > 0,
    }
    places = np.indices((layers, parts, width)).reshape(3, -1)
    index = dict(zip(("layer", "head", "dimension"), places, strict=True))
    return pd.DataFrame(index | {name: value.flatten().numpy() for name, value in columns.items()})


def _layers(state: State, dimensions: pd.DataFrame, contexts: int, later: int, trailing: int) -> pd.DataFrame:
    counts = dimensions.groupby("layer", as_index=False)[["published", "adaptive"]].sum()
    for rule in ("published", "adaptive"):
        anywhere = (state[rule] + state[f"{rule}_first"]) > 0
        if trailing:
            anywhere |= state[f"{rule}_last"] > 0
        counts[f"massive_{rule}"] = anywhere.sum((1, 2)).numpy()
    counts["tokens"] = (state["massive_tokens"] / later).numpy()
    counts["tokens_first"] = (state["massive_tokens_first"] / contexts).numpy()
    return counts


def _carriers(state: State, text: Callable[[int], str]) -> pd.DataFrame:
    """Tabulate each layer, part (`head`), dimension and token with a massive value; the most frequent first."""
    table = pd.DataFrame({name: values.numpy() for name, values in carrier_columns(state).items()})
    integers = [name for name in table if name not in ("value_sum", "extreme")]
    table = table.astype(dict.fromkeys(integers, np.int64)).rename(columns={"part": "head"})
    table["mean"] = table["value_sum"] / table["places"]
    table["position"] = table["position_sum"] / table["places"]
    table["first"] = table["first"].astype(bool)
    table["token"] = pd.Series([text(token) for token in table["token_id"]], dtype="object").astype(str)
    order = ["layer", "head", "dimension", "token_id", "token", "first", "contexts", "places"]
    order += ["published", "adaptive", "mean", "extreme", "position"]
    by = ["layer", "head", "dimension", "contexts", "token_id"]
    return table[order].sort_values(by, ascending=[name != "contexts" for name in by], ignore_index=True)


def position_0_as_one(massive: pd.DataFrame) -> pd.DataFrame:
    """Sum all tokens at position 0 into one row: nearly every context begins with another one."""
    first = massive[massive["first"]]
    if not len(first):
        return massive
    place = [name for name in ("layer", "head", "dimension") if name in massive]
    summed = first.assign(mean=first["mean"] * first["places"]).groupby(place, as_index=False)
    counts = dict.fromkeys(("contexts", "places", "published", "adaptive", "mean", "position"), "sum")
    one = summed.agg(counts | {"extreme": lambda values: max(values, key=abs)})
    one = one.assign(mean=one["mean"] / one["places"], token_id=-1, token="any", first=True)
    together = [table for table in (massive[~massive["first"]], one[list(massive)]) if len(table)]
    by = [*place, "contexts", "token_id"]
    return pd.concat(together).sort_values(
        by, ascending=[name != "contexts" for name in by], ignore_index=True
    )
