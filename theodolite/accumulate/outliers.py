"""Large values in the residual stream: outlier dimensions and massive activations, counted by dimension."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from theodolite.accumulate.sums import GROUPS, Groups, LayerSums
from theodolite.theory.outliers import Thresholds, median

PUBLISHED = Thresholds()
"""A survey counts by the published thresholds; `theodolite.sinks.outliers` lets the caller set them."""

MASSIVE_COUNTS = ("massive", "massive_first", "massive_contexts")
"""Tokens after position 0, tokens at it, and contexts with at least one after it, that have a massive activation."""


class OutlierCounts(LayerSums):
    """Per residual layer and dimension, over positions 1 … T−1, and apart (`_first`) at position 0.

    State: outlier, massive, massive_first (N, G, d) counts of tokens by group of contexts; massive_contexts (N, G, d),
    contexts with a massive activation after position 0; maximum, maximum_first (N, d) of |x|. The median of the massive
    activations' definition is that of all magnitudes of the same context and layer. `contexts` is how many the
    whole corpus has.
    """

    def __init__(self, layers: int, width: int, contexts: int) -> None:
        counts = ("outlier", *MASSIVE_COUNTS)
        maxima = ("maximum", "maximum_first")
        shapes: dict[str, tuple[int, ...]] = dict.fromkeys(counts, (GROUPS, width))
        super().__init__(layers, shapes | dict.fromkeys(maxima, (width,)), maxima=maxima)
        self.groups = Groups(contexts)

    def update(self, layer: int, hidden: Float[Tensor, "batch positions width"], first_context: int) -> None:
        """Take in one layer's hidden states of contexts `first_context …`."""
        for group, part in self.groups.cache_sized(first_context, len(hidden), hidden.device):
            magnitude = hidden[part].abs()
            maximum = magnitude.amax(dim=(0, 1))
            self.add("maximum_first", layer, magnitude[:, 0].amax(dim=0))
            self.add("maximum", layer, magnitude[:, 1:].amax(dim=(0, 1)))
            largest = float(maximum.max())
            if largest >= PUBLISHED.outlier:
                self.add("outlier", layer, (magnitude[:, 1:] >= PUBLISHED.outlier).sum(dim=(0, 1)), group)
            if largest > PUBLISHED.massive:
                for context in magnitude:
                    self._count_massive(layer, group, context)

    def _count_massive(self, layer: int, group: int, magnitude: Float[Tensor, "positions width"]) -> None:
        threshold = max(PUBLISHED.massive, PUBLISHED.massive_ratio * median(magnitude))
        massive = magnitude > threshold
        self.add("massive_first", layer, massive[0], group)
        self.add("massive", layer, massive[1:].sum(dim=0), group)
        self.add("massive_contexts", layer, massive[1:].any(dim=0), group)
