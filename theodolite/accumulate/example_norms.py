"""Norms of single tokens of the first contexts, to be shown on their pictures."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from theodolite.accumulate.sums import LayerSums


class ExampleNorms(LayerSums):
    """State: norm (N, E, T), ‖h‖₂ of each token of the first E contexts in N residual layers."""

    def __init__(self, layers: int, length: int, examples: int) -> None:
        super().__init__(layers, {"norm": (examples, length)})
        self.examples = examples

    def update(self, layer: int, hidden: Float[Tensor, "batch positions width"], first_context: int) -> None:
        """Take in one layer's hidden states of contexts `first_context …`."""
        shown = hidden[: max(0, self.examples - first_context)]
        if len(shown):
            norms = torch.linalg.vector_norm(shown, dim=-1, dtype=torch.float64)
            self.at("norm", layer, hidden.device)[first_context : first_context + len(shown)] = norms
