"""The hidden states of a few contexts, stored whole, so that later stages need no forward pass of the model."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from theodolite.accumulate.sums import LayerSums


class KeptStreams(LayerSums):
    """State: stream (L, S, T, d), what enters each block in the S contexts `kept` (numbers in the corpus, ascending).

    In the dtype of the model. Contexts of fewer tokens are zero behind their end.
    """

    def __init__(
        self, layers: int, length: int, width: int, kept: Int[Tensor, " sampled"], dtype: torch.dtype
    ) -> None:
        super().__init__(layers, {"stream": (len(kept), length, width)}, dtype=dtype)
        self.kept = kept

    def update(self, layer: int, hidden: Float[Tensor, "batch positions width"], first_context: int) -> None:
        """Keep one layer's hidden states of those of contexts `first_context …` that are kept."""
        place = (self.kept >= first_context) & (self.kept < first_context + len(hidden))
        if layer < self.layers and place.any():
            stream = self.at("stream", layer, hidden.device)
            stream[place.to(hidden.device), : hidden.shape[1]] = hidden[
                (self.kept[place] - first_context).to(hidden.device)
            ].to(stream.dtype)
