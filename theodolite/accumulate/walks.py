"""Sums that describe token vectors as a walk from position to position, by group of contexts.

Position 0 is left out, whose vector is an outlier in most models: the walk is x_1 … x_n, n = T − 1, and has n − 1
increments.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from theodolite.accumulate.sums import LayerSums, State
from theodolite.corpus.groups import GROUPS, Groups

SHOWN_POSITIONS = 64
"""Of the second moments x_s·x_t, evenly chosen."""

MARKS = 6
"""Positions of which whole vectors are kept, at about equal ratios; their pairs have full second moments."""

LAGS = 8
"""Of the autocorrelation of increments."""


class WalkSums(LayerSums):
    """Sums over contexts of products of vectors and of increments, for N layers of width d.

    State: contexts (N, G) by group; gram (N, G, S, S) of x_s·x_t at the positions `shown`; position_sum (N, G, S, d)
    of x_s there; lagged (N, G, LAGS + 1) sums over steps of ε_t·ε_{t+lag}; increments (N, d, d) of εεᵀ over all
    steps, about zero; kept (N, C, M, d), x at the positions `marks` of every context.
    """

    def __init__(self, layers: int, width: int, contexts: int, length: int) -> None:
        self.positions = length - 1
        shown_count = min(self.positions, SHOWN_POSITIONS)
        self.shown = np.unique(np.linspace(0, self.positions - 1, shown_count).round().astype(int)).tolist()
        last = self.positions - 1
        self.marks = sorted({round(step) - 1 for step in np.geomspace(1, last + 1, MARKS)})
        self.groups = Groups(contexts)
        shown = len(self.shown)
        super().__init__(
            layers,
            {
                "contexts": (GROUPS,),
                "gram": (GROUPS, shown, shown),
                "position_sum": (GROUPS, shown, width),
                "lagged": (GROUPS, LAGS + 1),
                "increments": (width, width),
                "kept": (contexts, len(self.marks), width),
            },
        )

    def update(self, layer: int, hidden: Tensor, first_context: int) -> None:
        """Add one layer's vectors, (batch, T, d), of the contexts `first_context …`."""
        walk = hidden[:, 1:].double()
        steps = walk.diff(dim=1)
        for group, part in self.groups.parts(first_context, len(walk)):
            chosen = walk[part][:, self.shown]
            self.add("contexts", layer, torch.tensor(float(len(chosen)), device=walk.device), group)
            self.add("gram", layer, (chosen @ chosen.mT).sum(0), group)
            self.add("position_sum", layer, chosen.sum(0), group)
            steps_of_group = steps[part]
            count = steps_of_group.shape[1]
            lagged = [
                (steps_of_group[:, : count - lag] * steps_of_group[:, lag:]).sum() for lag in range(LAGS + 1)
            ]
            self.add("lagged", layer, torch.stack(lagged), group)
        flat = steps.flatten(0, 1)
        self.add("increments", layer, flat.T @ flat)
        # Every context is seen once, so that adding is putting in place.
        self.at("kept", layer, walk.device)[first_context : first_context + len(walk)] += walk[:, self.marks]

    def covariance(self, state: State, layer: int) -> Tensor:
        """Σ̂ of the increments, their second moment about zero, (d, d)."""
        return state["increments"][layer] / (state["contexts"][layer].sum() * (self.positions - 1))


def simulated_walk(text: WalkSums, state: State, seed: int) -> tuple[WalkSums, State]:
    """Simulate Gaussian random walks with a text's covariance Σ̂ of increments, and sum them in the same way.

    The walks are in the eigenbasis of Σ̂: every number that is read off the sums is the same in any rotated basis.
    """
    layers, contexts, _, width = state["kept"].shape
    sums = WalkSums(layers, width, contexts, text.positions + 1)
    generator = torch.Generator().manual_seed(seed)
    for layer in range(layers):
        scale = torch.linalg.eigvalsh(text.covariance(state, layer)).clamp_min(0).sqrt()
        for context in range(contexts):
            steps = torch.randn(text.positions, width, generator=generator, dtype=torch.float64)
            # x_1 is the first step from zero; in front of it stands the position that is left out.
            walk = torch.cat([torch.zeros(1, width, dtype=torch.float64), (steps * scale).cumsum(0)])
            sums.update(layer, walk[None], context)
    return sums, sums.state()
