"""Spectra, regimes and predicted propagation, from heads' weights and the covariance of what they read.

One row a head. Source: Bao et al. 2024; the entropy bound is Zhai et al. 2023, Theorem 3.1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from theodolite.accumulate.sums import State
from theodolite.measure.column import ATTENTION, SHARE, SIGNED, SPECTRUM, SPECTRUM_DATA, Array, Column, gives
from theodolite.measure.publications import BAO, ZHAI
from theodolite.models.weights.head_weights import BEFORE_NORM, EXACT, NO_MATRIX, HeadWeights
from theodolite.theory.entropy import entropy_lower_bound
from theodolite.theory.propagation import propagation_finite
from theodolite.theory.regimes import UNDEFINED, regime_margins
from theodolite.theory.spectrum import core_eigenvalues, qk_moments, qk_spectral_norm

_spectral = partial(Column, "heads", range=SIGNED, group=SPECTRUM)
_size = partial(Column, "heads", group=SPECTRUM, decades=True)
_PLACES = ("section 4", "eq. 8", "eq. 6", "Lemma 2")
_section, _spread, _concentration, _rule = (partial(_spectral, source=f"{BAO}, {place}") for place in _PLACES)

_MOMENTS = (
    _section(
        "trace", "tr W, the sum of the eigenvalues. Positive: queries prefer similar keys.", short="trace"
    ),
    _section(
        "trace_of_square",
        "tr W², the sum of squared eigenvalues; negative where rotation outweighs stretching.",
        title="trace of the square",
    ),
    _size(
        "frobenius_squared",
        "‖W‖²_F = tr WᵀW, the size of the matrix. The term that LocAteR penalises.",
        source=f"{BAO}, section 6",
        title="squared Frobenius norm",
    ),
    _spread("mean", "tr W/d, over all d eigenvalues.", title="spectrum mean"),
    _spread(
        "variance",
        "tr W²/d − (tr W/d)²: the variance of the eigenvalues' real parts less the mean square of their imaginary "
        "parts. Small around a mean away from 0: localized attention without collapse.",
        title="spectrum variance",
        short="variance",
    ),
    _concentration("xi", "tr W/√tr W². Empty where tr W² is negative: use `xi_symmetric` there.", title="ξ"),
    _size("eta", "√tr W²/λ. Empty where tr W² is negative.", "λ = 1 / scaling.", f"{BAO}, eq. 6", "η"),
    _concentration(
        "xi_symmetric",
        "tr W/√tr W² of the symmetric part of W. Sign: late (+) or early (−); size: concentration of the spectrum.",
        "Always defined; `regime` is read off this one and `eta_symmetric`.",
        title="ξ of the symmetric part",
        short="ξ sym.",
    ),
    _size(
        "eta_symmetric",
        "√tr W²/λ of the symmetric part of W: the scale of the spectrum. Large: the signal vanishes.",
        "λ = 1 / scaling.",
        f"{BAO}, eq. 6",
        "η of the symmetric part",
        short="η sym.",
    ),
    _rule(
        "r",
        "tr W/λ. Far beyond ±2 with a small η the signal localizes in the middle; near 0 it is uniform.",
        title="r = ξη",
        short="r",
    ),
)
MOMENTS = tuple(column.name for column in _MOMENTS)

_OF_WEIGHTS = (
    _rule(
        "regime",
        "Where signal should propagate: early, middle or late positions, all equally (uniform), none (vanishing).",
        f"`{UNDEFINED}` where `spectrum_of` is not `{EXACT}`.",
        title="predicted regime",
        kind="name",
        short="regime",
    ),
    _rule(
        "regime_margin",
        "How far what decides the regime is from the next threshold: 0.02 is borderline, 0.3 clear.",
        "Empty where undefined.",
        title="margin of the regime",
        range=SHARE,
    ),
    *_MOMENTS,
)

# Bao et al. 2024 state their results for W = W_QK Σ; the same columns with the text's own Σ̂ carry `_data`.
_OF_DATA = tuple(
    replace(
        column,
        name=f"{column.name}_data",
        title=f"{column.title} (with Σ̂)",
        meaning=f"{column.meaning} Here W = W_QK Σ̂, with the covariance of the tokens in this text.",
        group=SPECTRUM_DATA,
    )
    for column in _OF_WEIGHTS
)


def layer_spectra(
    weights: HeadWeights | None, covariance: Float[Tensor, "width width"] | None, heads: int, head_width: int
) -> dict[str, Tensor]:
    """Compute what the localization measures need of one layer's weights, H rows each.

    `layer_moments`; spectrum (H, d_h, 2), eigenvalues as real and imaginary parts; spectral_norm (H), as `logit_norm`
    gives it. With a covariance of the attention module's input, all but the last also for W_QK Σ, with suffix `_data`.
    All is NaN where queries and keys are no affine function of the input, without weights. Where these are not `exact`,
    the spectrum is that of the projections.
    """
    spectra = {"spectral_norm": logit_norm(weights, heads)}
    for suffix, sigma in (("", None), ("_data", covariance)):
        if suffix and sigma is None:
            continue
        moments = layer_moments(weights, heads, sigma)
        if weights is None:
            spectrum = _unknown(heads)[:, None, None].expand(heads, head_width, 2)
        else:
            eigenvalues = core_eigenvalues(moments.pop("core"), "W_QK or Σ" if suffix else "W_QK")
            spectrum = torch.view_as_real(eigenvalues).cpu()
        moments["spectrum"] = spectrum
        spectra |= {name + suffix: moment for name, moment in moments.items()}
    return spectra


def layer_moments(
    weights: HeadWeights | None, heads: int, covariance: Float[Tensor, "width width"] | None = None
) -> dict[str, Tensor]:
    """Compute `MOMENTS` and `form_squared` (H) of W_QK, or W_QK Σ, and its core; NaN and no core without weights."""
    names = (*MOMENTS, "form_squared")
    if weights is None:
        return dict.fromkeys(names, _unknown(heads))
    moments = qk_moments(weights.w_q, weights.w_k, covariance, temperature=1 / weights.scaling)
    return {"core": moments.core, **{name: getattr(moments, name).cpu() for name in names}}


def logit_norm(weights: HeadWeights | None, heads: int) -> Float[Tensor, " heads"]:
    """Compute ‖W_QK‖₂ · scaling, the spectral norm of the logits' matrix; NaN where no matrix gives the logits."""
    if weights is None or not weights.exact:
        return _unknown(heads)
    return (qk_spectral_norm(weights.w_q, weights.w_k) * weights.scaling).cpu()


@gives(
    _spectral(
        "spectrum_of",
        "Which matrix the spectrum is of.",
        f"`{EXACT}`; `{BEFORE_NORM}` where queries and keys are normalised after projecting (Qwen 3): no matrix gives "
        f"the logits; `{NO_MATRIX}` where none gives queries and keys either (DeepSeek's inner norms).",
        kind="name",
        offered=False,
    ),
    *_OF_WEIGHTS,
    *_OF_DATA,
    Array("spectrum", "(L, H, d_h, 2)", "Eigenvalues of W_QK, real and imaginary parts; d − d_h more are 0."),
    Array("spectrum_data", "(L, H, d_h, 2)", "The same of W_QK Σ̂."),
    Array(
        "propagation_predicted", "(L, H, T)", "ρ of a random walk at finite T, from W_QK's first two moments."
    ),
    Array("propagation_predicted_data", "(L, H, T)", "The same from W_QK Σ̂."),
)
def localization_tables(
    weights: State, spectrum_of: Sequence[str], scalings: Sequence[float], length: int | None = None
) -> dict[str, Any]:
    """Compute moments and regimes, L · H values each, and arrays, from the `layer_spectra` of all layers, stacked.

    `spectrum_of` and `scalings` are of each layer: without a matrix of the logits, regimes and propagation stay open,
    and so does propagation without T, the `length`.
    """
    known = torch.tensor([kind == EXACT for kind in spectrum_of])
    results: dict[str, Any] = {"spectrum_of": np.repeat(spectrum_of, weights["trace"].shape[1]).tolist()}
    for suffix in ("", "_data"):
        if "trace" + suffix not in weights:
            continue
        moments = {name: weights[name + suffix] for name in (*MOMENTS, "form_squared")}
        margins = regime_margins(moments["xi_symmetric"], moments["eta_symmetric"])
        results |= {name + suffix: moments[name].flatten().tolist() for name in MOMENTS}
        results["regime" + suffix] = np.where(known[:, None], margins.name, UNDEFINED).flatten().tolist()
        margin = torch.as_tensor(margins.margin).masked_fill(~known[:, None], math.nan)
        results["regime_margin" + suffix] = margin.flatten().tolist()
        results["spectrum" + suffix] = weights["spectrum" + suffix]
        if length is not None:
            trace, form, square = (moments[name] for name in ("trace", "form_squared", "trace_of_square"))
            temperature = (1 / torch.tensor(scalings, dtype=torch.float64))[:, None].expand_as(trace)
            predicted = propagation_finite(trace, form, square, length, temperature)
            results["propagation_predicted" + suffix] = predicted.masked_fill(~known[:, None, None], math.nan)
    return results


@gives(
    Column(
        "heads",
        "entropy_bound",
        "Lower bound on the mean entropy from the norms of the tokens and of W_QK. Near 0 it is vacuous.",
        "Exact, averaged over queries by the number of keys they see; for heads without biases and rotation; empty "
        "where `spectrum_of` is not `projection`.",
        f"{ZHAI}, Theorem 3.1 (exact form)",
        unit="nats",
        group=ATTENTION,
    )
)
def entropy_bounds(weights: State, attention: State, gram_norm: Tensor) -> dict[str, list[float]]:
    """Compute `entropy_bound`, L · H values, in nats; `gram_norm` (L) is the largest ‖XXᵀ‖₂ of a layer's inputs.

    ν = ‖XXᵀ‖₂ · ‖W_QK‖₂ · scaling. The bound of a query is that for as many keys as it sees, and the head's is their
    mean over queries, of which each position has `readers`; NaN where ν is.
    """
    nu = gram_norm[:, None] * weights["spectral_norm"]
    # Where a layer does not attend, no query sees a key, and the bound is NaN as its norm is.
    of_queries = entropy_lower_bound(nu[:, :, None], attention["visible_keys"].clamp_min(1)[:, None])
    readers = attention["readers"] / attention["readers"].sum(dim=1, keepdim=True)
    return {"entropy_bound": (of_queries @ readers[:, :, None]).flatten().tolist()}


def _unknown(heads: int) -> Float[Tensor, " heads"]:
    return torch.full((heads,), math.nan, dtype=torch.float64)
