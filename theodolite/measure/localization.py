"""From head weights, and the covariance of what they read, to spectra, regimes and predicted propagation.

One row a head. Source: Bao et al. 2024; the entropy bound is Zhai et al. 2023, Theorem 3.1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from theodolite.accumulate.sums import State
from theodolite.models.weights.head_weights import HeadWeights
from theodolite.theory.entropy import entropy_lower_bound
from theodolite.theory.propagation import propagation_finite
from theodolite.theory.regimes import UNDEFINED, regime_margins
from theodolite.theory.spectrum import qk_eigenvalues, qk_moments, qk_spectral_norm

MOMENTS = (
    "trace",
    "trace_of_square",
    "frobenius_squared",
    "mean",
    "variance",
    "xi",
    "eta",
    "xi_symmetric",
    "eta_symmetric",
    "r",
)


def layer_spectra(
    weights: HeadWeights | None,
    covariance: Float[Tensor, "width width"] | None,
    heads: int,
    head_width: int,
) -> dict[str, Tensor]:
    """What the localization measures need of one layer's weights, H rows each.

    `layer_moments`; spectrum (H, d_h, 2), eigenvalues as real and imaginary parts; spectral_norm (H), as `logit_norm`
    gives it. With a covariance, all but the last also for W_QK Σ, with suffix `_data`.

    Args:
        weights: None for a layer whose queries and keys are no affine function of its input: all is NaN. Where they
            are not `exact`, the spectrum is that of the projections, and what would follow for the logits is NaN.
        covariance: of the attention module's input.
        heads, head_width: of a layer that has no weights.
    """
    spectra = {"spectral_norm": logit_norm(weights, heads)}
    for suffix, sigma in (("", None), ("_data", covariance)):
        if suffix and sigma is None:
            continue
        spectra |= {name + suffix: moment for name, moment in layer_moments(weights, heads, sigma).items()}
        if weights is None:
            spectra["spectrum" + suffix] = _unknown(heads)[:, None, None].expand(heads, head_width, 2)
        else:
            spectrum = qk_eigenvalues(weights.w_q, weights.w_k, sigma)
            spectra["spectrum" + suffix] = torch.view_as_real(spectrum).cpu()
    return spectra


def layer_moments(
    weights: HeadWeights | None, heads: int, covariance: Float[Tensor, "width width"] | None = None
) -> dict[str, Float[Tensor, " heads"]]:
    """The moments of `MOMENTS` and `form_squared` of W_QK Σ; NaN without weights."""
    names = (*MOMENTS, "form_squared")
    if weights is None:
        return dict.fromkeys(names, _unknown(heads))
    moments = qk_moments(weights.w_q, weights.w_k, covariance, temperature=1 / weights.scaling)
    return {name: getattr(moments, name).cpu() for name in names}


def logit_norm(weights: HeadWeights | None, heads: int) -> Float[Tensor, " heads"]:
    """‖W_QK‖₂ · scaling, the spectral norm of the logits' matrix; NaN where no matrix gives the logits."""
    if weights is None or not weights.exact:
        return _unknown(heads)
    return (qk_spectral_norm(weights.w_q, weights.w_k) * weights.scaling).cpu()


def localization_tables(
    state: State, exact: Sequence[bool], scalings: Sequence[float], length: int | None
) -> tuple[dict[str, list[Any]], dict[str, Tensor]]:
    """From the `layer_spectra` of all layers, stacked, to columns of the heads table and their arrays.

    Args:
        exact: of each layer, whether its matrix gives the logits; else regimes and propagation are left open.
        scalings: of each layer's logits.
        length: T, for the predicted propagation; None: there is none.
    """
    columns: dict[str, list[float | str]] = {}
    arrays: dict[str, Tensor] = {}
    known = torch.tensor(exact)
    for suffix in ("", "_data"):
        if "trace" + suffix not in state:
            continue
        own = {name: state[name + suffix] for name in (*MOMENTS, "form_squared")}
        margins = regime_margins(own["xi_symmetric"], own["eta_symmetric"])
        columns |= {name + suffix: own[name].flatten().tolist() for name in MOMENTS}
        columns["regime" + suffix] = np.where(known[:, None], margins.name, UNDEFINED).flatten().tolist()
        margin = torch.as_tensor(margins.margin).masked_fill(~known[:, None], math.nan)
        columns["regime_margin" + suffix] = margin.flatten().tolist()
        arrays["spectrum" + suffix] = state["spectrum" + suffix]
        if length is not None:
            temperature = (1 / torch.tensor(scalings, dtype=torch.float64))[:, None].expand_as(own["trace"])
            predicted = propagation_finite(
                own["trace"], own["form_squared"], own["trace_of_square"], length, temperature
            )
            arrays["propagation_predicted" + suffix] = predicted.masked_fill(~known[:, None, None], math.nan)
    return columns, arrays


def entropy_bound(
    gram_norm: float,
    spectral_norm: Float[Tensor, " heads"],
    visible_keys: Float[Tensor, " queries"],
    readers: Float[Tensor, " queries"],
) -> Float[Tensor, " heads"]:
    """The exact lower bound on the mean attention entropy, in nats; NaN where the norm is.

    ν = ‖XXᵀ‖₂ · ‖W_QK‖₂ · scaling, with the largest ‖XXᵀ‖₂ of any context, so that the bound holds for each. The
    bound of a query is that for as many keys as it sees (all, those up to it, or a window's), and the head's is
    their mean over queries, of which each position has as many as contexts have it (`readers`).
    """
    nu = (gram_norm * spectral_norm)[:, None]
    # Where a layer does not attend, no query sees a key, and the bound is NaN as its norm is.
    return entropy_lower_bound(nu, visible_keys.clamp_min(1)) @ (readers / readers.sum())


def _unknown(heads: int) -> Float[Tensor, " heads"]:
    return torch.full((heads,), math.nan, dtype=torch.float64)
