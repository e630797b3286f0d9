"""Large values in the residual stream: outlier dimensions and massive activations, counted by dimension."""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from theodolite.accumulate.sums import GROUPS, Groups, LayerSums

OUTLIER_MAGNITUDE = 6.0
"""|x| from which a value is an outlier (Dettmers et al. 2022, LLM.int8())."""

MASSIVE_MAGNITUDE = 100.0
MASSIVE_RATIO = 1000.0
"""A massive activation exceeds both 100 and 1000 × the median magnitude (Sun et al. 2024)."""


class Outliers(LayerSums):
    """Per residual layer and dimension, over positions 1 … T−1, and apart (`_first`) at position 0.

    State: outlier, massive, massive_first (N, G, d) counts of tokens by group of contexts; maximum, maximum_first
    (N, d) of |x|. The median of the massive activations' definition is that of all magnitudes of the same context
    and layer. `contexts` is how many the whole corpus has.
    """

    def __init__(self, layers: int, width: int, contexts: int) -> None:
        counts, maxima = ("outlier", "massive", "massive_first"), ("maximum", "maximum_first")
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
            if largest >= OUTLIER_MAGNITUDE:
                self.add("outlier", layer, (magnitude[:, 1:] >= OUTLIER_MAGNITUDE).sum(dim=(0, 1)), group)
            if largest > MASSIVE_MAGNITUDE:
                for context in magnitude:
                    self._count_massive(layer, group, context)

    def _count_massive(self, layer: int, group: int, magnitude: Float[Tensor, "positions width"]) -> None:
        threshold = max(MASSIVE_MAGNITUDE, MASSIVE_RATIO * _median(magnitude))
        massive = magnitude > threshold
        self.add("massive_first", layer, massive[0], group)
        self.add("massive", layer, massive[1:].sum(dim=0), group)


def _median(values: Tensor) -> float:
    """The lower median, as torch has it; numpy's selection is ten times faster on a CPU."""
    if values.device.type != "cpu":
        return float(values.median())
    flat = values.flatten().to(torch.promote_types(values.dtype, torch.float32)).numpy()
    middle = (len(flat) - 1) // 2
    return float(np.partition(flat, middle)[middle])
