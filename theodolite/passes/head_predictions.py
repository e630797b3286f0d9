"""Predict every head's signal propagation ρ_1 … ρ_T from the spectra of its weights, for tokens that walk at random.

Predictions are from W_QK alone, from W_QK Σ̂ with the covariance of what the head reads, and from W_QK Σ̂ with that of
its increments.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float64
from torch import Tensor

from theodolite.errors import WorkError
from theodolite.models import OpenModel
from theodolite.models.guard import measures
from theodolite.passes.run import Run
from theodolite.passes.walk_pass import TextWalk
from theodolite.theory.propagation import propagation_finite
from theodolite.theory.regimes import UNDEFINED, regime
from theodolite.theory.spectrum import qk_moments

SUFFIX = {"weights": "", "text": "_data"}
"""Of the survey's columns and arrays, for the two predictions that it has."""


@dataclass(frozen=True)
class Prediction:
    """The prediction from one source for all heads, in the order of the table `heads`.

    Attributes:
        curve: ρ_1 … ρ_T, (heads, T); NaN where the family's queries and keys have no W_QK.
        regime: (heads,), its name by the source's ξ and η.
        eta: (heads,), √tr(W²)/λ of the symmetric part.
    """

    curve: Float64[Tensor, "heads positions"]
    regime: np.ndarray
    eta: Float64[Tensor, " heads"]


def from_survey(run: Run, source: str) -> Prediction:
    """Return the survey's own prediction, from `weights` or from `text`."""
    suffix = SUFFIX[source]
    layer, head = (torch.tensor(run.heads[name].to_numpy()) for name in ("layer", "head"))
    return Prediction(
        run.arrays[f"propagation_predicted{suffix}"][layer, head].double(),
        run.heads[f"regime{suffix}"].to_numpy(),
        torch.tensor(run.heads[f"eta_symmetric{suffix}"].to_numpy(dtype=np.float64)),
    )


@measures("model")
def from_increments(model: OpenModel, walk: TextWalk, length: int) -> Prediction:
    """Predict from the second moment of the increments x_{t+1} − x_t of each attention module's input.

    Args:
        walk: what `read_walk` has seen of a text. length: T of the predicted curves.
    """
    curves, names, etas = [], [], []
    for layer in model.attending:
        try:
            weights = model.head_weights(layer)
        except WorkError:
            weights = None
        if weights is None or not weights.exact:
            heads = model.heads_of[layer]
            curves.append(torch.full((heads, length), torch.nan, dtype=torch.float64))
            names += [UNDEFINED] * heads
            etas.append(torch.full((heads,), torch.nan, dtype=torch.float64))
            continue
        sigma = walk.inputs.covariance(walk.input_state, layer)
        temperature = 1 / weights.scaling
        moments = qk_moments(weights.w_q, weights.w_k, sigma, temperature)
        curves.append(
            propagation_finite(
                moments.trace, moments.form_squared, moments.trace_of_square, length, temperature
            )
        )
        names += regime(moments.xi_symmetric, moments.eta_symmetric).tolist()
        etas.append(moments.eta_symmetric)
    return Prediction(torch.cat(curves).cpu(), np.array(names), torch.cat(etas).cpu())
