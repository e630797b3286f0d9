"""Passes over a model's weights, a layer at a time; no forward pass is made."""

from __future__ import annotations

import math
from typing import Any

import torch
from jaxtyping import Float64
from torch import Tensor
from torch.nn import functional

from theodolite.accumulate.second_moments import covariance
from theodolite.accumulate.sums import State
from theodolite.measure.localization import layer_spectra
from theodolite.measure.position import CUTOFFS, grouped_basis, positional_heads
from theodolite.models import OpenModel
from theodolite.models.calls import NotAffine
from theodolite.models.guard import measures
from theodolite.models.structure import NoAttention
from theodolite.models.weights.head_weights import NO_MATRIX, HeadWeights
from theodolite.system.progress import Progress
from theodolite.theory.smoothness import Grid

OUTPUT_TITLE = "reading output weights"
"""What is said while W_O is read."""


def widest_output_weights(model: OpenModel, layer: int) -> Float64[Tensor, "heads value_width width"]:
    """Return W_O of one layer's heads, padded with zeros to the model's largest number and width of heads."""
    if layer not in model.attending:
        return torch.zeros(model.heads, model.structure.value_width, model.width, dtype=torch.float64)
    weights = model.output_weights(layer)
    heads, width, _ = weights.shape
    return functional.pad(weights, (0, 0, 0, model.structure.value_width - width, 0, model.heads - heads))


class WeightsPass:
    """Spectra, moments and norms of every head, and what heads make of the positional basis.

    State: `measure.localization.layer_spectra` of all layers, stacked; with `means` the argmax_property (L, H) and
    pwp_shares (L, H, cutoffs, 1 + groups), of all groups of contexts and without each; NaN where a layer does not
    attend or has fewer or narrower heads than another. Notes: `spectrum_of`, `scaling` and `heads`, a value a layer.

    Args:
        inputs: the state of `SecondMoments` of what attention reads, for the columns with suffix `_data`.
        means: the state of `Means`, for the positional columns.
        leading, grid: as for `grouped_basis`.
    """

    def __init__(
        self,
        model: OpenModel,
        inputs: State | None = None,
        means: State | None = None,
        leading: int = 1,
        grid: Grid | None = None,
    ) -> None:
        self.model = model
        self.leading, self.grid = leading, grid
        self.inputs, self.means = inputs, means
        self.total = model.layers
        self.notes: dict[str, Any] = {"spectrum_of": [], "scaling": [], "heads": list(model.heads_of)}
        self._state: State = {}

    def state(self) -> State:
        """Return all layers; NaN where a layer is not read yet."""
        return self._state

    def restore(self, state: State) -> None:
        """Continue from what `state` gave."""
        self._state = {name: values.clone() for name, values in state.items()}

    @measures("self.model")
    def run(self, progress: Progress) -> None:
        """Read the layers that are left; a layer's weights go before the next one's come."""
        for layer in range(progress.done, progress.total):
            progress.checkpoint(layer)
            try:
                weights = self.model.head_weights(layer)
            except (NotAffine, NoAttention):
                weights = None
            if self.model.heads_of[layer]:
                self._read(layer, weights)
            self.notes["spectrum_of"].append(weights.projection if weights else NO_MATRIX)
            self.notes["scaling"].append(weights.scaling if weights else 1.0)
        progress.checkpoint(progress.total)

    def _read(self, layer: int, weights: HeadWeights | None) -> None:
        model = self.model
        sigma = None if self.inputs is None else covariance(self.inputs, layer)
        of_heads = layer_spectra(weights, sigma, model.heads_of[layer], model.head_width)
        if self.means is not None:
            of_heads |= self._positional(layer, weights, self.means)
        for name, values in of_heads.items():
            if name not in self._state:
                sizes = [model.heads, *values.shape[1:]]
                if name.startswith("spectrum"):
                    sizes[1] = model.head_width
                self._state[name] = values.new_full((self.total, *sizes), math.nan)
            # Copied: a small tensor that is kept would pin the heap around it.
            self._state[name][layer][tuple(map(slice, values.shape))] = values

    def _positional(self, layer: int, weights: HeadWeights | None, means: State) -> State:
        basis = grouped_basis(means, layer, self.leading, self.grid)
        if (
            weights is None or weights.w_q.shape[1] != basis.p.shape[2]
        ):  # they do not read the stream as it is
            empty = torch.full((self.model.heads_of[layer],), math.nan, dtype=torch.float64)
            uses = empty.new_full((len(empty), len(CUTOFFS), 1 + len(basis.p)), math.nan)
            return {"argmax_property": empty, "pwp_shares": uses}
        argmax, shares = positional_heads(basis, weights.w_q, weights.w_k)
        every = torch.cat([shares.value.unsqueeze(0), shares.without])
        return {"argmax_property": argmax, "pwp_shares": every.permute(1, 2, 0)}
