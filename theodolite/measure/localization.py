"""From head weights, and the covariance of what they read, to spectra, regimes and predicted propagation.

One row a head. Source: Bao et al. 2024; the entropy bound is Zhai et al. 2023, Theorem 3.1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from theodolite.theory.entropy import entropy_lower_bound
from theodolite.theory.propagation import propagation_finite
from theodolite.theory.regimes import UNDEFINED, regime_margins
from theodolite.theory.spectrum import QKMoments, qk_eigenvalues, qk_moments, qk_spectral_norm

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


@dataclass(frozen=True)
class LayerWeights:
    """One layer's query and key factors, and whether they are `exact`: their product gives the logits.

    They are not where the family normalises queries and keys after projecting them: then the spectrum is that of
    the projections, and what would follow for the logits is left open.
    """

    w_q: Float[Tensor, "heads width head_width"]
    w_k: Float[Tensor, "heads width head_width"]
    scaling: float
    exact: bool


@dataclass
class Localization:
    """Columns (one value a head) and arrays (layers stacked) of the localization measures, filled by layers."""

    columns: dict[str, list[float | str]] = field(default_factory=dict)
    arrays: dict[str, list[Tensor]] = field(default_factory=dict)
    spectral_norm: list[Tensor] = field(default_factory=list)

    def add_layer(
        self,
        weights: LayerWeights | None,
        covariance: Float[Tensor, "width width"] | None,
        *,
        heads: int,
        head_width: int,
        length: int | None,
    ) -> None:
        """Measure one layer.

        Args:
            weights: None for a layer whose queries and keys are no affine function of
                its input; its columns are then NaN.
            covariance: of the attention module's input, for the columns with suffix `_data`; or None.
            heads, head_width: shape of the NaN columns.
            length: T, for the predicted propagation; or None.
        """
        self._add(weights, None, "", heads, head_width, length)
        if covariance is not None:
            self._add(weights, covariance, "_data", heads, head_width, length)
        if weights is None or not weights.exact:
            self.spectral_norm.append(torch.full((heads,), math.nan, dtype=torch.float64))
        else:
            self.spectral_norm.append(qk_spectral_norm(weights.w_q, weights.w_k) * weights.scaling)

    def stacked(self) -> dict[str, Tensor]:
        """The arrays, leading with layers."""
        return {name: torch.stack(values) for name, values in self.arrays.items()}

    def _add(
        self,
        weights: LayerWeights | None,
        covariance: Tensor | None,
        suffix: str,
        heads: int,
        head_width: int,
        length: int | None,
    ) -> None:
        nan = torch.full((heads,), math.nan, dtype=torch.float64)
        if weights is None:
            values: dict[str, list[float | str]] = {name: nan.tolist() for name in MOMENTS}
            values |= {"regime": [UNDEFINED] * heads, "regime_margin": nan.tolist()}
            spectrum = nan[:, None, None].expand(heads, head_width, 2)
            predicted = nan[:, None].expand(heads, length or 0)
        else:
            moments = qk_moments(weights.w_q, weights.w_k, covariance, temperature=1 / weights.scaling)
            values = {name: getattr(moments, name).tolist() for name in MOMENTS}
            named = regime_margins(moments.xi_symmetric, moments.eta_symmetric)
            values |= {"regime": named.name.tolist(), "regime_margin": named.margin.tolist()}
            spectrum = torch.view_as_real(qk_eigenvalues(weights.w_q, weights.w_k, covariance))
            predicted = _predicted(moments, weights.scaling, length)
            if not weights.exact:
                values |= {"regime": [UNDEFINED] * heads, "regime_margin": nan.tolist()}
                predicted = torch.full_like(predicted, math.nan)
        for name, column in values.items():
            self.columns.setdefault(name + suffix, []).extend(column)
        self.arrays.setdefault("spectrum" + suffix, []).append(spectrum)
        if length is not None:
            self.arrays.setdefault("propagation_predicted" + suffix, []).append(predicted)


def _predicted(moments: QKMoments, scaling: float, length: int | None) -> Tensor:
    if length is None:
        return torch.empty(0)
    return propagation_finite(
        moments.trace, moments.form_squared, moments.trace_of_square, length, temperature=1 / scaling
    )


def entropy_bound(
    gram_norm: float, spectral_norm: Float[Tensor, " heads"], visible_keys: Float[Tensor, " queries"]
) -> Float[Tensor, " heads"]:
    """The exact lower bound on the mean attention entropy, in nats; NaN where the norm is.

    ν = ‖XXᵀ‖₂ · ‖W_QK‖₂ · scaling, with the largest ‖XXᵀ‖₂ of any context, so that the bound holds for each. The
    bound of a query is that for as many keys as it sees (all, those up to it, or a window's), and the head's is
    their mean.
    """
    nu = (gram_norm * spectral_norm)[:, None]
    return entropy_lower_bound(nu, visible_keys).mean(dim=-1)
