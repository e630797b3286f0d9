"""Name the shape of a head's propagation curve.

Lemma 2 of Bao et al. 2024 gives limits in ξ and η. A real head is at no limit, so the name is read off the
corrected curve ρ(θ) itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from theodolite.theory.propagation import propagation

Numbers = float | Sequence[float] | NDArray[np.floating] | Tensor

VANISHING = "vanishing"
REGIMES = ("uniform", "early-site", "late-site", "middle-site", VANISHING)
"""The names that `regime` gives, besides `UNDEFINED`."""

UNDEFINED = "undefined"
"""What `regime` says of a head whose ξ or η is NaN, as an asymmetric W_QK with tr(W²) < 0 has."""

# Vanishing: no position propagates in one draw out of ten. At ξ = 0 that is η > 13.7, since ρ(½) = ½ erf(√6/η) there.
VANISHING_LEVEL = 0.1
# Uniform: (max ρ − min ρ)/max ρ is at most this. Bao et al. call |ξ| ≤ 1 relatively uniform "regardless of η" (section
# 4, below Fig. 2); the largest spread of the corrected curve at |ξ| = 1, over all η, is 0.7064. At |ξ| = 1.5 it is at
# least 0.766 for every η, so what is meant as localized is not called uniform.
UNIFORM_SPREAD = 0.71
# Late (early) site: ρ at the last (first) position keeps at least this share of the maximum; otherwise the curve has
# come down again and the site is the middle. In Lemma 2's limit ρ(1) is 1 for r < 2, ½ for r = 2 and 0 for r > 2.
END_SHARE = 0.5
BINS = 16  # of a measured curve, whose single positions are shares of few contexts
_POSITIONS = 129  # odd, so that θ = ½ is on the grid: as |r| grows the middle site narrows to it
# Of what decides between regimes: max ρ, (max ρ − min ρ)/max ρ, ρ(1)/max ρ and ρ(0)/max ρ.
_THRESHOLDS = (VANISHING_LEVEL, UNIFORM_SPREAD, END_SHARE, END_SHARE)


@dataclass(frozen=True)
class RegimeMargins:
    """The regime of every head and how clear it is, arrays of the broadcast shape of ξ and η.

    name: as `regime` gives it.
    margin: the distance of the nearest threshold (of max ρ, (max ρ − min ρ)/max ρ, ρ(1)/max ρ or ρ(0)/max ρ) that would
        change the name if its quantity alone crossed it: 0.02 is a name by a hair. NaN where undefined.
    """

    name: np.ndarray
    margin: np.ndarray


def regime(xi: Numbers, eta: Numbers) -> np.ndarray:
    """Name the regime of each pair, one of `REGIMES`, in an array of the inputs' broadcast shape.

    Decided in this order: vanishing, uniform, then the site where the curve stands. A head with zero logits (η = 0,
    ξ NaN) is uniform; any other NaN gives `UNDEFINED`. Use the moments of the symmetric part: they are always defined.

    Raises:
        UsageError: an η is negative.
    """
    return regime_margins(xi, eta).name


def regime_margins(xi: Numbers, eta: Numbers) -> RegimeMargins:
    """Name the regimes, and say by how much: arguments and errors as of `regime`."""
    quantities = _quantities(xi, eta)
    decisions, undefined = _decisions(quantities), np.asarray(np.isnan(quantities[0]))
    name = _names(decisions, undefined)
    distances = []
    for place, threshold in enumerate(_THRESHOLDS):
        crossed = decisions.copy()
        crossed[place] = ~crossed[place]
        renamed = _names(crossed, undefined) != name
        distances.append(np.where(renamed, np.abs(quantities[place] - threshold), np.inf))
    return RegimeMargins(name, np.where(undefined, np.nan, np.min(distances, axis=0)))


def regime_of_curve(curve: NDArray[np.floating] | Tensor) -> np.ndarray:
    """Name the regime of a measured curve by the thresholds of `regime`, from its means in `BINS` bins.

    Args:
        curve: ρ_1 … ρ_T, (heads, T); positions that are NaN (beyond a window) are left out, and a head that has no
            other is `UNDEFINED`.
    """
    values = torch.as_tensor(curve, dtype=torch.float64)
    bins = np.array_split(np.arange(values.shape[1]), min(BINS, values.shape[1]))
    binned = torch.stack([values[:, positions].nanmean(1) for positions in bins], 1).numpy()
    undefined = np.isnan(binned).all(1)
    quantities = np.full((4, len(binned)), np.nan)
    for head in np.flatnonzero(~undefined):
        row = binned[head][np.isfinite(binned[head])]
        quantities[:, head] = _of_extremes(row.max(), row.min(), row[0], row[-1])
    return _names(_decisions(quantities), undefined)


def _quantities(xi: Numbers, eta: Numbers) -> NDArray[np.float64]:
    """Compute what decides of the corrected curve, in the order of `_THRESHOLDS`, along a new first dimension."""
    given = (of.detach().cpu() if isinstance(of, Tensor) else of for of in (xi, eta))
    xi, eta = np.broadcast_arrays(*(np.asarray(of, dtype=np.float64) for of in given))
    silent = eta == 0
    theta = torch.linspace(0, 1, _POSITIONS, dtype=torch.float64)
    curve = propagation(
        theta, torch.from_numpy(np.where(silent, 0.0, xi)), torch.from_numpy(np.where(silent, 1.0, eta))
    ).numpy()
    curve = np.where(silent[..., None], 1.0, curve)
    return _of_extremes(curve.max(-1), curve.min(-1), curve[..., 0], curve[..., -1])


def _of_extremes(highest: Any, lowest: Any, first: Any, last: Any) -> NDArray[np.float64]:
    """Compute what decides from the largest, smallest, first and last values of curves."""
    # Where ρ underflows to zero everywhere the signal has vanished, and the shares do not matter.
    scale = np.where(highest == 0, 1.0, highest)
    return np.stack([highest, (highest - lowest) / scale, last / scale, first / scale])


def _decisions(quantities: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Decide vanishing, uniform, late and early, each by its own threshold alone, along the first dimension."""
    level, spread, last, first = quantities
    return np.stack(
        [level < VANISHING_LEVEL, spread <= UNIFORM_SPREAD, last >= END_SHARE, first >= END_SHARE]
    )


def _names(decisions: NDArray[np.bool_], undefined: NDArray[np.bool_]) -> np.ndarray:
    """Name each head by the first decision that holds."""
    names = [UNDEFINED, VANISHING, "uniform", "late-site", "early-site"]
    return np.select([undefined, *decisions], names, default="middle-site")
