"""Names for the shapes that the propagation curve of a head can take.

Lemma 2 of Bao et al. 2024 gives limits in ξ and η. A real head is at no limit, so the name is read off the
corrected curve ρ(θ) itself. This module must not compute the curve in any other way than `propagation`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from theodolite.theory.propagation import propagation

Numbers = float | Sequence[float] | NDArray[np.floating] | Tensor
"""What `regime` reads."""

REGIMES = ("uniform", "early-site", "late-site", "middle-site", "vanishing")
"""The names that `regime` gives, besides `UNDEFINED`."""

UNDEFINED = "undefined"
"""What `regime` says of a head whose ξ or η is NaN, as an asymmetric W_QK with tr(W²) < 0 has."""

VANISHING_LEVEL = 0.1
"""Vanishing: no position propagates in one draw out of ten. At ξ = 0 that is η > 13.7, since
ρ(½) = ½ erf(√6/η) there."""

UNIFORM_SPREAD = 0.71
"""Uniform: (max ρ − min ρ)/max ρ is at most this. Bao et al. call |ξ| ≤ 1 relatively uniform "regardless of
η" (section 4, below Fig. 2); the largest spread of the corrected curve at |ξ| = 1, over all η, is 0.7064.
At |ξ| = 1.5 it is at least 0.766 for every η, so what is meant as localized is not called uniform."""

END_SHARE = 0.5
"""Late (early) site: ρ at the last (first) position keeps at least this share of the maximum; otherwise the
curve has come down again and the site is the middle. In Lemma 2's limit ρ(1) is 1 for r < 2, ½ for r = 2 and
0 for r > 2, so one half puts the boundary where the lemma has it."""

_POSITIONS = 129
"""An odd number, so that θ = ½ is on the grid: as |r| grows the middle site narrows to it."""


def regime(xi: Numbers, eta: Numbers) -> np.ndarray:
    """Names of the regimes, one of `REGIMES` for each pair, in an array of the inputs' broadcast shape.

    Decided in this order: vanishing, uniform, then the site where the curve stands (the constants say how).
    A head with zero logits (η = 0, ξ NaN) is uniform; any other NaN gives `UNDEFINED`. Use the moments of the
    symmetric part, which are always defined.

    Args:
        xi, eta: numbers, numpy arrays or tensors that broadcast to one shape, for example (L, H).
    """
    xi, eta = np.broadcast_arrays(_as_array(xi), _as_array(eta))
    silent = eta == 0
    theta = torch.linspace(0, 1, _POSITIONS, dtype=torch.float64)
    curve = propagation(
        theta, torch.from_numpy(np.where(silent, 0.0, xi)), torch.from_numpy(np.where(silent, 1.0, eta))
    ).numpy()
    highest, lowest, first, last = curve.max(-1), curve.min(-1), curve[..., 0], curve[..., -1]
    return np.select(
        [
            silent,
            np.isnan(highest),
            highest < VANISHING_LEVEL,
            highest - lowest <= UNIFORM_SPREAD * highest,
            last >= END_SHARE * highest,
            first >= END_SHARE * highest,
        ],
        ["uniform", UNDEFINED, "vanishing", "uniform", "late-site", "early-site"],
        default="middle-site",
    )


def _as_array(values: Numbers) -> NDArray[np.float64]:
    if isinstance(values, Tensor):
        values = values.detach().cpu().numpy()
    return np.asarray(values, dtype=np.float64)
