"""Large values of a layer: outlier dimensions and massive activations, counted by dimension."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from theodolite.accumulate.sums import GROUPS, Groups, LayerSums
from theodolite.theory.outliers import Thresholds, massive_activations

PUBLISHED = Thresholds()
"""A survey counts by the published thresholds; `theodolite.sinks.outliers` lets the caller set them."""

MASSIVE_COUNTS = ("massive", "massive_first", "massive_contexts")
"""Tokens after position 0, tokens at it, and contexts with at least one after it, that have a massive activation."""

MAXIMA = ("maximum", "maximum_first")


class LargeValues(LayerSums):
    """Counts and maxima per layer and dimension, over positions 1 … T−1, and apart (`_first`) at position 0."""

    thresholds: Thresholds

    def add_magnitudes(
        self,
        layer: int,
        magnitude: Float[Tensor, "batch positions *parts width"],
        group: int | None = None,
    ) -> float:
        """Take in maxima and outliers; returns the largest magnitude of all."""
        first, later = magnitude[:, 0].amax(dim=0), magnitude[:, 1:].amax(dim=(0, 1))
        self.add("maximum_first", layer, first)
        self.add("maximum", layer, later)
        largest = float(torch.maximum(first, later).max())
        if largest >= self.thresholds.outlier:
            self.add("outlier", layer, (magnitude[:, 1:] >= self.thresholds.outlier).sum(dim=(0, 1)), group)
        return largest

    def add_massive(
        self,
        layer: int,
        massive: Bool[Tensor, "batch positions *values"],
        name: str = "massive",
        group: int | None = None,
    ) -> None:
        """Count the massive activations of one rule."""
        self.add(name, layer, massive[:, 1:].sum(dim=(0, 1)), group)
        self.add(f"{name}_first", layer, massive[:, 0].sum(dim=0), group)


class OutlierCounts(LargeValues):
    """Of the residual stream, by the published thresholds.

    State: outlier, massive, massive_first (N, G, d) counts of tokens by group of contexts; massive_contexts (N, G, d),
    contexts with a massive activation after position 0; maximum, maximum_first (N, d) of |x|. `contexts` is how many
    the whole corpus has.
    """

    def __init__(self, layers: int, width: int, contexts: int) -> None:
        shapes: dict[str, tuple[int, ...]] = dict.fromkeys(("outlier", *MASSIVE_COUNTS), (GROUPS, width))
        super().__init__(layers, shapes | dict.fromkeys(MAXIMA, (width,)), maxima=MAXIMA)
        self.groups = Groups(contexts)
        self.thresholds = PUBLISHED

    def update(self, layer: int, hidden: Float[Tensor, "batch positions width"], first_context: int) -> None:
        """Take in one layer's hidden states of contexts `first_context …`."""
        for group, part in self.groups.cache_sized(first_context, len(hidden), hidden.device):
            magnitude = hidden[part].abs()
            if self.add_magnitudes(layer, magnitude, group) > self.thresholds.massive:
                massive = massive_activations(magnitude.unsqueeze(2), self.thresholds).squeeze(2)
                self.add_massive(layer, massive, group=group)
                self.add("massive_contexts", layer, massive[:, 1:].any(dim=1).sum(dim=0), group)
