"""Covariances of token vectors, streamed.

Each batch is centred on its own mean before the product is taken in float32, and batches are combined in
float64 by the formula of Chan, Golub & LeVeque (1979): so a large common offset costs no digits, and it does not
matter in which order, or on which machine, the batches were seen.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from theodolite.accumulate.sums import LayerSums, State


class SecondMoments(LayerSums):
    """Counts (N), means (N, d) and centred second moments (N, d, d), Σ (x − x̄)(x − x̄)ᵀ, of rows."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__(layers, {"count": (), "mean": (width,), "moment": (width, width)})

    def update(self, layer: int, rows: Float[Tensor, "rows width"]) -> None:
        """Take in rows of one layer."""
        precise = torch.promote_types(rows.dtype, torch.float32)
        mean = rows.mean(dim=0, dtype=torch.float64)
        rounded = mean.to(precise)
        centred = rows.to(precise) - rounded
        count = torch.tensor(float(len(rows)), dtype=torch.float64, device=rows.device)
        # The rows are centred on the rounded mean: what that leaves is known, and taken off again.
        moment = (centred.T @ centred).double()
        moment.addr_(rounded - mean, rounded - mean, alpha=-float(len(rows)))
        self._combine(layer, count, mean, moment)

    def merge(self, other: LayerSums) -> None:
        """Take in what another accumulator has seen."""
        state = other.state()
        for layer in range(self.layers):
            self._combine(layer, state["count"][layer], state["mean"][layer], state["moment"][layer])

    def _combine(self, layer: int, count: Tensor, mean: Tensor, moment: Tensor) -> None:
        own_count, own_mean, own_moment = (
            self.at(name, layer, moment.device) for name in ("count", "mean", "moment")
        )
        total = own_count + count
        if total == 0:
            return
        difference = mean - own_mean
        own_moment += moment
        own_moment.addr_(difference, difference, alpha=float(own_count * count / total))
        own_mean += difference * (count / total)
        own_count.copy_(total)


def covariance(state: State, layer: int) -> Float[Tensor, "width width"]:
    """The covariance (divided by the count) of one layer."""
    return state["moment"][layer] / state["count"][layer]
