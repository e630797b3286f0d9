"""From a finished pass, and from weights alone, to a `Run`: every table, every array, where they come from."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pandas as pd
import torch
from jaxtyping import Int
from torch import Tensor

from theodolite.accumulate.attention import SINK_THRESHOLD
from theodolite.accumulate.outliers import MASSIVE_COUNTS
from theodolite.accumulate.second_moments import covariance
from theodolite.accumulate.sums import State
from theodolite.errors import UsageError, WorkError
from theodolite.logits.attribution import PATTERNS, attribution_table, pattern_scores_of
from theodolite.logits.constituents import SPLIT_CONTEXTS, sampled_shares
from theodolite.measure.geometry import geometry, outlier_rows
from theodolite.measure.heads import examples_table, head_arrays, head_columns, sinks_table
from theodolite.measure.localization import LayerWeights, Localization, entropy_bound
from theodolite.measure.positional import COLUMNS as POSITIONAL
from theodolite.measure.positional import positional_heads
from theodolite.measure.uncertainty import standard_errors
from theodolite.models import OpenModel
from theodolite.models.head_weights import HeadWeights, NotAffine
from theodolite.passes.corpus_pass import ShowProgress
from theodolite.passes.provenance import describe_model, describe_pass, token_text
from theodolite.passes.run import Run
from theodolite.passes.survey_pass import OnePass

OUTLIER_COLUMNS = ["layer", "dimension", "share", "maximum", "maximum_first", *MASSIVE_COUNTS]


def survey_result(done: OnePass, fingerprint: dict[str, Any], seconds: float) -> Run:
    """All tables and arrays of a pass over the whole corpus."""
    model, corpus = done.model, done.corpus
    contexts, length = corpus.contexts.shape
    residual, inputs = done.residual.state(), done.inputs.state()
    _refuse_overflow(residual)
    _refuse_overflow(inputs)
    attention, outliers = done.attention_statistics.state(), done.outliers.state()
    kept = (done.sample.slot >= 0).nonzero().flatten()
    labels = _telling(corpus.labels)[kept]
    means = done.means.state()
    layers, arrays = geometry(means, residual, outliers, done.sample, labels)
    layers |= standard_errors(
        means, done.sketches.state(), outliers, done.sample, labels, arrays["context_cluster"]
    )
    mean, pos = arrays["mean"], arrays["positional_basis"]
    shares = sampled_shares(model, corpus.contexts, mean, pos, done.seed)
    positional: dict[str, list[float]] = {name: [] for name in POSITIONAL}

    def add_positional(layer: int, weights: HeadWeights | None) -> None:
        empty = dict.fromkeys(POSITIONAL, [math.nan] * model.heads)
        normed = shares.normed[layer]
        found = weights and positional_heads(pos[layer], mean[layer], weights.w_q, weights.w_k, normed)
        for name, values in (found or empty).items():
            positional[name] += values

    localization, projections = localize(model, inputs, length, tell=add_positional)
    arrays |= localization.stacked() | head_arrays(attention)
    layerwise = zip(
        attention["gram_norm"], localization.spectral_norm, attention["visible_keys"], strict=True
    )
    bounds = [entropy_bound(float(gram_norm), norm, keys) for gram_norm, norm, keys in layerwise]
    measured: dict[str, list[float]] = head_columns(attention)
    measured["entropy_bound"] = torch.cat(bounds).tolist()
    scores = pattern_scores_of(model, length, done.seed)
    measured["induction"] = scores[:, PATTERNS.index("induction")].flatten().tolist()
    measured |= positional | shares.columns
    attributed, not_attributed = attribution_table(model, scores, mean, pos, done.seed)
    refused = not_attributed | shares.refused
    text = token_text(model)
    examples = corpus.contexts[: done.attention_statistics.examples]
    described = describe_pass(model, corpus, done.seed, fingerprint, seconds)
    described["counts"] |= {
        "sampled_contexts": done.sample.size,
        "split_contexts": min(contexts, SPLIT_CONTEXTS),
    }
    return Run(
        layers=pd.DataFrame({"layer": range(model.layers + 1), **layers}),
        heads=heads_table(model, localization, projections, measured),
        sinks=sinks_table(attention, text),
        outliers=pd.DataFrame(outlier_rows(outliers, contexts, length), columns=OUTLIER_COLUMNS),
        examples=examples_table(attention, examples, SINK_THRESHOLD, text),
        arrays=arrays,
        provenance=describe_model(model)
        | described
        | {"constituents_refused": {str(layer): why for layer, why in sorted(refused.items())}},
        constituents=shares.table,
        attribution=attributed,
    )


def spectra_result(model: OpenModel, fingerprint: dict[str, Any], show_progress: ShowProgress) -> Run:
    """The heads table and the spectra from weights alone; all other tables are empty.

    Raises:
        UsageError: no head of the model has a query-key matrix.
    """
    localization, projections = localize(model, None, None, show_progress)
    if set(projections) == {"none"}:
        raise UsageError(f"{model.id}: queries and keys are no affine function of their input in any layer")
    heads = heads_table(model, localization, projections, {})
    empty = pd.DataFrame()
    provenance = describe_model(model) | {"fingerprint": fingerprint}
    return Run(empty, heads, empty, empty, empty, localization.stacked(), provenance)


def localize(
    model: OpenModel,
    inputs: State | None,
    length: int | None,
    show_progress: ShowProgress = lambda done, total: None,
    tell: Callable[[int, HeadWeights | None], None] = lambda layer, weights: None,
) -> tuple[Localization, list[str]]:
    """Spectra of every head, with the covariance of the attention inputs where `inputs` gives it.

    `tell` gets each layer's weights, None where they cannot be read: they are read once, and not kept.
    Also says of each layer what the spectra are of: "projection", "projection before norm" or "none".
    """
    localization = Localization()
    projections = []
    for layer in range(model.layers):
        show_progress(layer, model.layers)
        try:
            head = model.head_weights(layer)
        except NotAffine:
            weights = None
            projections.append("none")
            tell(layer, None)
        else:
            tell(layer, head)
            weights = LayerWeights(head.w_q, head.w_k, head.scaling, exact=head.projection == "projection")
            projections.append(head.projection)
            del head
        localization.add_layer(
            weights,
            None if inputs is None else covariance(inputs, layer),
            heads=model.heads,
            head_width=model.head_width,
            length=length,
        )
        del weights  # a layer's go before the next one's come
    show_progress(model.layers, model.layers)
    return localization, projections


def _refuse_overflow(moments: State) -> None:
    finite = moments["moment"].isfinite().all(dim=(1, 2))
    if not finite.all():
        layer = int((~finite).nonzero()[0])
        raise WorkError(f"the squares of layer {layer}'s vectors overflow: try --dtype float64")


def heads_table(
    model: OpenModel,
    localization: Localization,
    projections: list[str],
    measured: dict[str, list[float]],
) -> pd.DataFrame:
    """One row a head: what `localize` gave, and columns of L · H values each."""
    layers, heads = range(model.layers), range(model.heads)
    index = {
        "layer": [layer for layer in layers for _ in heads],
        "head": [head for _ in layers for head in heads],
        "spectrum_of": [projections[layer] for layer in layers for _ in heads],
    }
    return pd.DataFrame({**index, **localization.columns, **measured})


def _telling(labels: Int[Tensor, " contexts"]) -> Int[Tensor, " contexts"]:
    """The labels, or none where all contexts have one, such as the name of the only file: it tells nothing apart."""
    return labels if len(labels[labels >= 0].unique()) > 1 else torch.full_like(labels, -1)
