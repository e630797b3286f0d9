"""Passes over a model's weights, a layer at a time; no forward pass is made."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float64
from torch import Tensor
from torch.nn import functional

from theodolite.accumulate.second_moments import covariance
from theodolite.accumulate.sums import State
from theodolite.jobs.job import Rows
from theodolite.measure.localization import layer_spectra
from theodolite.measure.position import CUTOFFS, grouped_basis, positional_heads
from theodolite.models import OpenModel
from theodolite.models.calls import NotAffine
from theodolite.models.structure import NoAttention
from theodolite.models.weights.head_weights import NO_MATRIX, HeadWeights
from theodolite.theory.smoothness import Grid

OUTPUT_TITLE = "reading output weights"  # what is said while W_O is read


def widest_output_weights(model: OpenModel, layer: int) -> Float64[Tensor, "heads value_width width"]:
    """Return W_O of one layer's heads, padded with zeros to the model's largest number and width of heads."""
    if layer not in model.attending:
        return torch.zeros(model.heads, model.structure.value_width, model.width, dtype=torch.float64)
    weights = model.output_weights(layer)
    heads, width, _ = weights.shape
    return functional.pad(weights, (0, 0, 0, model.structure.value_width - width, 0, model.heads - heads))


def weights_pass(
    model: OpenModel,
    inputs: State | None = None,
    means: State | None = None,
    leading: int = 1,
    grid: Grid | None = None,
) -> Rows[int]:
    """Return the steps that read spectra, moments and norms of every head, a layer's weights after another's.

    State: `measure.localization.layer_spectra` of all layers; with `means` the argmax_property (L, H) and pwp_shares
    (L, H, cutoffs, 1 + groups), of all groups of contexts and without each; NaN where a layer does not attend or has
    fewer or narrower heads than another. Notes: `spectrum_of`, `scaling` and `heads`, a value a layer.

    `inputs` is the state of `SecondMoments` of what attention reads, for the columns with suffix `_data`; `means`, with
    `leading` and `grid` of `grouped_basis`, that of `Means`.
    """

    def positional(layer: int, weights: HeadWeights | None, means: State) -> State:
        basis = grouped_basis(means, layer, leading, grid)
        # The widths differ where they do not read the stream as it is.
        if weights is None or weights.w_q.shape[1] != basis.p.shape[2]:
            sizes = (model.heads, len(CUTOFFS), 1 + len(basis.p))
            uses = torch.full(sizes, math.nan, dtype=torch.float64)
            return {"argmax_property": uses[:, 0, 0], "pwp_shares": uses}
        argmax, shares = positional_heads(basis, weights.w_q, weights.w_k)
        every = torch.cat([shares.value.unsqueeze(0), shares.without])
        return {"argmax_property": argmax, "pwp_shares": every.permute(1, 2, 0)}

    def read(layer: int) -> State:
        try:
            weights = model.head_weights(layer)
        except (NotAffine, NoAttention):
            weights = None
        steps.notes["spectrum_of"].append(weights.projection if weights else NO_MATRIX)
        steps.notes["scaling"].append(weights.scaling if weights else 1.0)
        if not model.heads_of[layer]:
            weights = None
        sigma = None if inputs is None else covariance(inputs, layer)
        of_heads = layer_spectra(weights, sigma, model.heads_of[layer] or model.heads, model.head_width)
        if means is not None:
            of_heads |= positional(layer, weights, means)
        rows = {}
        for name, values in of_heads.items():
            sizes = [model.heads, *values.shape[1:]]
            if name.startswith("spectrum"):
                sizes[1] = model.head_width
            rows[name] = values.new_full((1, *sizes), math.nan)
            rows[name][0][tuple(map(slice, values.shape))] = values
        return rows

    steps = Rows(range(model.layers), read)
    steps.notes |= {"spectrum_of": [], "scaling": [], "heads": list(model.heads_of)}
    return steps
