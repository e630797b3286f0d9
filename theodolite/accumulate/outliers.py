"""Large values of a layer: outlier dimensions and massive activations, counted by dimension, and who carries them.

A token with a massive activation after the first position may be a hundred times as long as any other: in a mean over
contexts it would decide alone. Such tokens are named, counted, and left out of means and moments.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from theodolite.accumulate.sums import (
    KeyedSums,
    LayerSums,
    Marked,
    State,
    cache_sized,
    cache_sized_groups,
    contexts_in_cache,
    part_of,
    token_slices,
)
from theodolite.corpus.groups import GROUPS, Groups
from theodolite.errors import UsageError
from theodolite.theory.outliers import LayerBaseline, Thresholds, log_magnitude, massive_activations

PUBLISHED = Thresholds()
"""A survey counts by the published thresholds; `theodolite.sinks.outliers` lets the caller set them."""

MASSIVE_COUNTS = ("massive", "massive_first", "massive_contexts")
"""Tokens after position 0, tokens at it, and contexts with at least one after it, that have a massive activation."""


EXCEPTIONAL = 10.0
"""A massive activation is an exception if it is so many times the median of its dimension over the batch's tokens: a
dimension that is huge in all of them is the stream's own (Gemma 3)."""

FADED = replace(PUBLISHED, massive_ratio=PUBLISHED.massive_ratio / 10)
"""For a token that had one at the layer before: at 947 times the median it is no more like the others than at 1,001."""


class LargeValues(LayerSums):
    """Counts and maxima per layer and dimension, over positions 1 … T−1, and apart as `token_slices` has them."""

    thresholds: Thresholds
    trailing: int = 0
    leading: int = 1

    def by_place(self, values: Tensor) -> dict[str, Tensor]:
        """Return the values (batch, positions, …) of the text (""), and of the tokens that are counted apart."""
        slices = token_slices(values.shape[1], self.trailing, self.leading)
        return {ending: values[:, positions] for ending, positions in slices.items()}

    def add_magnitudes(
        self, layer: int, magnitude: Float[Tensor, "batch positions *parts width"], group: int | None = None
    ) -> float:
        """Update maxima and counts of outliers, and return the largest magnitude of all."""
        largest, places = 0.0, self.by_place(magnitude)
        for ending, values in places.items():
            most = values.amax(dim=(0, 1))
            self.add(f"maximum{ending}", layer, most)
            largest = max(largest, float(most.max()))
        if largest >= self.thresholds.outlier:
            self.add("outlier", layer, (places[""] >= self.thresholds.outlier).sum(dim=(0, 1)), group)
        return largest

    def add_massive(self, layer: int, massive: Tensor, name: str, group: int | None = None) -> None:
        """Count the massive activations of one rule, (batch, positions, …)."""
        for ending, values in self.by_place(massive).items():
            self.add(f"{name}{ending}", layer, values.sum(dim=(0, 1)), group)


class OutlierCounts(LargeValues):
    """Count outliers and massive activations of the residual stream by the published thresholds.

    State: tokens (N, G) after position 0 and log_magnitude (N, G, d), sums over these of ln |x|; outlier, massive,
    massive_first (N, G, d) counts of tokens by group of contexts; massive_contexts (N, G, d), contexts with a massive
    activation after position 0; maximum, maximum_first (N, d) of |x|; with `trailing` special tokens behind every
    context massive_last, maximum_last of these. `contexts` is how many the whole corpus has.
    """

    def __init__(self, layers: int, width: int, contexts: int, trailing: int = 0, leading: int = 1) -> None:
        self.trailing, self.leading = trailing, leading
        endings = token_slices(0, trailing, leading)
        counts = ("outlier", "massive_contexts", "log_magnitude", *(f"massive{ending}" for ending in endings))
        maxima = tuple(f"maximum{ending}" for ending in endings)
        shapes: dict[str, tuple[int, ...]] = dict.fromkeys(counts, (GROUPS, width))
        shapes["tokens"] = (GROUPS,)
        super().__init__(layers, shapes | dict.fromkeys(maxima, (width,)), maxima=maxima)
        self.groups = Groups(contexts)
        self.thresholds = PUBLISHED

    def update(self, layer: int, hidden: Float[Tensor, "batch positions width"], first_context: int) -> None:
        """Add one layer's hidden states of contexts `first_context …`."""
        at_once = contexts_in_cache(hidden[0].numel())
        parts = cache_sized_groups(self.groups, first_context, len(hidden), hidden.device, at_once)
        for group, part in parts:
            magnitude = hidden[part].abs()
            text = self.by_place(magnitude)[""]
            self.add("tokens", layer, text.new_tensor(text[..., 0].numel(), dtype=torch.float64), group)
            sizes = log_magnitude(text).sum(dim=(0, 1), dtype=torch.float64)
            self.add("log_magnitude", layer, sizes, group)
            if self.add_magnitudes(layer, magnitude, group) > self.thresholds.massive:
                massive = massive_activations(magnitude.unsqueeze(2), self.thresholds).squeeze(2)
                self.add_massive(layer, massive, "massive", group)
                self.add("massive_contexts", layer, self.by_place(massive)[""].any(dim=1).sum(dim=0), group)


NAMED_CONTEXTS, NAMED_TOKENS = 256, 8
"""Tokens are named in the first contexts, and of each context and layer the first."""


def massive_tokens(
    hidden: Float[Tensor, "batch positions width"],
    text: slice,
    before: Bool[Tensor, "batch positions"] | None = None,
) -> Bool[Tensor, "batch positions"] | None:
    """Mark the text's tokens with exceptional massive activations (Sun et al. 2024), or `FADED` ones after `before`."""
    largest = hidden.abs().amax(dim=-1)
    contexts = (largest[:, text] > PUBLISHED.massive).any(dim=1).nonzero().flatten()
    if not len(contexts):
        return None
    values = hidden[contexts].abs()
    massive = massive_activations(values.unsqueeze(2), PUBLISHED).squeeze(2)[:, text]
    if before is not None:
        again = before[contexts].any(dim=1)  # the median of a context is dear: only where there was one
        faded = massive_activations(values[again].unsqueeze(2), FADED).squeeze(2)[:, text]
        massive[again] |= faded & before[contexts[again], text].unsqueeze(-1)
    dimensions = massive.any(dim=1).any(dim=0).nonzero().flatten()
    typical = hidden[:, text, dimensions].abs().flatten(0, 1).median(dim=0).values
    exceptional = massive[..., dimensions] & (values[:, text, dimensions] > EXCEPTIONAL * typical)
    marked = torch.zeros_like(largest, dtype=torch.bool)
    marked[contexts, text] = exceptional.any(dim=-1)
    return marked if marked.any() else None


def without(
    hidden: Float[Tensor, "batch positions width"],
    left_out: Bool[Tensor, "batch positions"] | None,
    text: slice,
) -> Iterator[tuple[int, Float[Tensor, "contexts rows width"]]]:
    """Yield a batch's texts without tokens left out, in runs of whole contexts; with each, which context is first."""
    start = 0
    if left_out is not None:
        for context in left_out.any(dim=1).nonzero().flatten().tolist():
            if context > start:
                yield start, hidden[start:context, text]
            yield context, hidden[context, text][~left_out[context, text]].unsqueeze(0)
            start = context + 1
    if start < len(hidden):
        yield start, hidden[start:, text]


class MassiveTokens(LayerSums):
    """Counts and names of the tokens with massive activations, which are left out of a layer's means and moments.

    State: count (N); named, by (layer, context, position, token id): the largest `value` and its `dimension`.
    """

    def __init__(self, layers: int) -> None:
        named = KeyedSums(4, {"value": (), "dimension": ()})
        super().__init__(layers, {"count": ()}, keyed={"named": named})

    def update(
        self,
        layer: int,
        hidden: Float[Tensor, "batch positions width"],
        marked: Bool[Tensor, "batch positions"],
        ids: Int[Tensor, "batch positions"],
        first_context: int,
    ) -> None:
        """Add the marked tokens of contexts `first_context …`."""
        context, position = marked.nonzero(as_tuple=True)
        vectors = hidden[context, position].double().cpu()
        context, position = context.cpu(), position.cpu()
        absolute = context + first_context
        self.add("count", layer, torch.tensor(float(len(vectors)), dtype=torch.float64))
        shown = (absolute < NAMED_CONTEXTS) & (marked.cpu().cumsum(dim=1)[context, position] <= NAMED_TOKENS)
        dimension = vectors.abs().argmax(dim=1)
        value = vectors.gather(1, dimension[:, None]).flatten()
        token = ids.cpu()[context, position]
        keys = torch.stack([torch.full_like(context, layer), absolute, position, token], dim=1)
        named = self.keyed["named"]
        named.add(named.rows(keys[shown]), {"value": value[shown], "dimension": dimension[shown]})


MOST_ROWS = 1_000_000
"""Massive activations are few. Thresholds that make so many of them would fill the memory with a list of them."""

KEY = ("layer", "part", "dimension", "token_id", "first")  # what carriers are told apart by


class Activations(LargeValues):
    """Count outliers and massive activations by the caller's thresholds, and by comparison with the layer itself.

    State, (N, parts, width) each: square, the sum of x²; log, of ln |x|; maximum and maximum_first of |x|; outlier,
    published, published_first, adaptive, adaptive_first, counts of values that are outliers, and massive by each rule.
    massive_tokens and massive_tokens_first (N): tokens with a massive value in any dimension by either rule. With
    `trailing` special tokens behind every context, what is counted at these has names in _last. carriers, by `KEY`: see
    `carrier_columns`. A part is a token of the residual stream, or a head.

    `bounds`: |x| above which a value is massive by comparison with its layer (`LayerBaseline.bounds`).
    """

    def __init__(
        self, bounds: Float[Tensor, "layers parts width"], thresholds: Thresholds, trailing: int = 0
    ) -> None:
        layers, parts, width = bounds.shape
        self.trailing = trailing
        endings = token_slices(0, trailing)
        rules = (f"{rule}{ending}" for rule in ("published", "adaptive") for ending in endings)
        sums = ("square", "log", "outlier", *rules)
        maxima = tuple(f"maximum{ending}" for ending in endings)
        shapes: dict[str, tuple[int, ...]] = dict.fromkeys(sums + maxima, (parts, width))
        shapes |= {f"massive_tokens{ending}": () for ending in endings}
        counts = ("contexts", "places", "published", "adaptive", "value_sum", "position_sum")
        largest = ("highest", "deepest")
        keyed = KeyedSums(len(KEY), dict.fromkeys((*counts, *largest), ()), largest)
        self.marked = Marked()
        super().__init__(layers, shapes, maxima, {"carriers": keyed, "marked": self.marked})
        self.bounds = bounds
        self.thresholds = thresholds

    def update(
        self,
        layer: int,
        hidden: Float[Tensor, "batch positions parts width"],
        ids: Int[Tensor, "batch positions"],
        first_context: int,
    ) -> None:
        """Add one layer's values of contexts `first_context …`; `UsageError` where a million kinds are massive."""
        bounds = self.bounds[layer].to(hidden.device)
        for batch_slice in cache_sized(len(hidden), hidden.device):
            values = hidden[batch_slice]
            values = values.to(torch.promote_types(values.dtype, torch.float32))
            magnitude = values.abs()
            later = self.by_place(magnitude)[""].flatten(0, 1)
            # float32 sums of one context, float64 between contexts. Squares of float32 overflow from 1.8e19 on.
            self.add("square", layer, torch.linalg.vector_norm(later, dim=0).double().square())
            self.add("log", layer, log_magnitude(later).sum(0))
            self.add_magnitudes(layer, magnitude)
            published, adaptive = massive_activations(magnitude, self.thresholds), magnitude > bounds
            either = published | adaptive
            if not either.any():
                continue
            self.add_massive(layer, published, "published")
            self.add_massive(layer, adaptive, "adaptive")
            self.add_massive(layer, either.flatten(2).any(-1), "massive_tokens")
            places, carriers = either.nonzero().cpu(), self.keyed["carriers"]
            if len(places) + len(carriers) > MOST_ROWS:
                raise UsageError(
                    f"more than {MOST_ROWS} kinds of massive activations by layer {layer}: thresholds this low make "
                    "everything massive; give higher ones"
                )
            context, position, part, dimension = places.unbind(dim=1)
            token, first = ids[batch_slice].cpu()[context, position], (position == 0).long()
            keys = torch.stack([torch.full_like(part, layer), part, dimension, token, first], dim=1)
            rows, value = carriers.rows(keys), values[either]
            sums = {
                "places": torch.ones(len(rows)),
                "published": published[either],
                "adaptive": adaptive[either],
                "value_sum": value,
                "position_sum": position,
                "highest": value,
                "deepest": -value,
            }
            if values.shape[2] == 1:  # of heads, nobody asks which tokens
                number = first_context + batch_slice.start + context
                self.marked.mark(layer, dimension, number, position, token)
            carriers.add(rows, sums)
            carriers.count_contexts(rows, context)


def carrier_columns(state: State) -> dict[str, Tensor]:
    """Return `KEY` and the counts of the tokens with massive values in a dimension of a part of a layer.

    `contexts`; `places`, values that are massive by either rule, `published` and `adaptive` by each; `value_sum` and
    `position_sum` over these; `extreme`, the largest in size with its sign (of two as large the positive one).
    """
    sums = part_of(state, "carriers")
    keys = dict(zip(KEY, sums.pop("keys").unbind(dim=1), strict=True))
    highest, deepest = (sums.pop(name) for name in ("highest", "deepest"))
    extreme = torch.where(highest >= deepest, highest, -deepest)
    return keys | sums | {"extreme": extreme}


class LayerBounds(LayerSums):
    """Each layer's |x| above which a value is massive, from one batch (`LayerBaseline.bounds`).

    State: bounds (layers, parts, width), which is `shape`. Position 0 and `trailing` special tokens are left out;
    `tokens` are looked at in all.
    """

    def __init__(self, shape: tuple[int, int, int], tokens: int, level: float, trailing: int) -> None:
        super().__init__(shape[0], {"bounds": shape[1:]})
        self._tokens, self._level, self._trailing = tokens, level, trailing

    def update(self, layer: int, hidden: Tensor, ids: Tensor, first_context: int) -> None:
        """Compute the bounds of a layer."""
        tokens = hidden[:, 1 : hidden.shape[1] - self._trailing].flatten(0, 1)
        baseline = LayerBaseline.of(tokens.to(torch.promote_types(hidden.dtype, torch.float32)))
        self.at("bounds", layer, hidden.device).copy_(baseline.bounds(self._tokens, self._level))
