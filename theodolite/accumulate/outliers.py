"""Large values of a layer: outlier dimensions and massive activations, counted by dimension."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from theodolite.accumulate.sums import LayerSums, cache_sized_groups, contexts_in_cache, token_slices
from theodolite.corpus.groups import GROUPS, Groups
from theodolite.theory.outliers import Thresholds, log_magnitude, massive_activations

PUBLISHED = Thresholds()
"""A survey counts by the published thresholds; `theodolite.sinks.outliers` lets the caller set them."""

MASSIVE_COUNTS = ("massive", "massive_first", "massive_contexts")
"""Tokens after position 0, tokens at it, and contexts with at least one after it, that have a massive activation."""


class LargeValues(LayerSums):
    """Counts and maxima per layer and dimension, over positions 1 … T−1, and apart (`_first`) at position 0.

    With `trailing` special tokens behind the text of every context, these are apart as well (`_last`). Of the `leading`
    tokens before the patches of an image, those from position 1 on are left out.
    """

    thresholds: Thresholds
    trailing: int = 0
    leading: int = 1

    def by_place(self, values: Float[Tensor, "batch positions *rest"] | Tensor) -> dict[str, Tensor]:
        """Return the values of the text (""), and of the tokens that are counted apart, as `token_slices` has them."""
        slices = token_slices(values.shape[1], self.trailing, self.leading)
        return {ending: values[:, positions] for ending, positions in slices.items()}

    def add_magnitudes(
        self,
        layer: int,
        magnitude: Float[Tensor, "batch positions *parts width"],
        group: int | None = None,
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

    def add_massive(
        self,
        layer: int,
        massive: Bool[Tensor, "batch positions *values"],
        name: str = "massive",
        group: int | None = None,
    ) -> None:
        """Count the massive activations of one rule."""
        for ending, values in self.by_place(massive).items():
            self.add(f"{name}{ending}", layer, values.sum(dim=(0, 1)), group)


class OutlierCounts(LargeValues):
    """Count outliers and massive activations of the residual stream by the published thresholds.

    State: tokens (N, G) after position 0 and log_magnitude (N, G, d), sums over these of ln |x|; outlier, massive,
    massive_first (N, G, d) counts of tokens by group of contexts; massive_contexts (N, G, d), contexts with a massive
    activation after position 0; maximum, maximum_first (N, d) of |x|; with `trailing` special tokens behind the text of
    every context massive_last, maximum_last of these. `contexts` is how many the whole corpus has.
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
        for group, part in cache_sized_groups(
            self.groups, first_context, len(hidden), hidden.device, at_once
        ):
            magnitude = hidden[part].abs()
            text = self.by_place(magnitude)[""]
            self.add("tokens", layer, text.new_tensor(text[..., 0].numel(), dtype=torch.float64), group)
            sizes = log_magnitude(text).sum(dim=(0, 1), dtype=torch.float64)
            self.add("log_magnitude", layer, sizes, group)
            if self.add_magnitudes(layer, magnitude, group) > self.thresholds.massive:
                massive = massive_activations(magnitude.unsqueeze(2), self.thresholds).squeeze(2)
                self.add_massive(layer, massive, group=group)
                self.add("massive_contexts", layer, self.by_place(massive)[""].any(dim=1).sum(dim=0), group)
