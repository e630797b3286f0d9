"""Text read as a walk from token to token: sums by group of contexts, and how near they are to those of a random walk.

Position 0 is left out, whose vector is an outlier in most models: the walk is x_1 … x_n, n = T − 1, and has n − 1
increments.
"""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from theodolite.accumulate.sums import LayerSums, State
from theodolite.corpus.groups import GROUPS, Groups
from theodolite.measure.uncertainty import balanced_halves, half_sample_error

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


MEASURES = {
    "r_squared": "R² of τ·min(s, t) for E[x_s·x_t], τ fitted",
    "r_squared_centred": "the same, each position's mean over contexts taken off",
    "correlation": "correlation of E[x_s·x_t] with min(s, t), s ≠ t",
    "trace_ratio": "τ over E‖x_{t+1} − x_t‖²",
    "autocorrelation": "autocorrelation of successive increments",
    "growth": "exponent of the growth of E‖x_t‖² with t",
    "frobenius": "‖E[x_s x_tᵀ] − min(s, t) Σ̂‖_F / ‖E[x_s x_tᵀ]‖_F, median over pairs",
    "cosine": "cosine between E[x_s x_tᵀ] and Σ̂, median over pairs",
}
"""What is read off one layer. A true walk has 1, 1, near 1, 1, 0, 1, 0, 1."""


def walk_table(sums: WalkSums, state: State) -> pd.DataFrame:
    """One row per layer: `MEASURES`, each with its standard error `…_se` over contexts.

    Errors are from balanced halves of the groups of contexts, NaN below eight contexts. Σ̂ is held in those of
    `frobenius` and `cosine`: it is known from n − 1 times as many vectors.
    """
    halves = balanced_halves()
    enough = bool((state["contexts"][0] > 0).all())
    rows = []
    for layer in range(len(state["contexts"])):
        measures = _measures(sums, state, layer, torch.ones(GROUPS, dtype=torch.float64))
        errors = dict.fromkeys(measures, math.nan)
        if enough:
            parts = [_measures(sums, state, layer, half) for half in halves]
            table = torch.tensor([list(part.values()) for part in parts], dtype=torch.float64)
            errors = dict(zip(measures, half_sample_error(table).tolist(), strict=True))
        rows.append({"layer": layer} | measures | {f"{name}_se": error for name, error in errors.items()})
    return pd.DataFrame(rows)


def mean_gram(state: State, layer: int, chosen: Tensor | None = None) -> Tensor:
    """E[x_s·x_t] at the shown positions, (S, S), over the groups of weight 1 in `chosen` (None: all)."""
    weights = torch.ones(GROUPS, dtype=torch.float64) if chosen is None else chosen
    return torch.tensordot(weights, state["gram"][layer], dims=1) / (weights @ state["contexts"][layer])


def autocorrelations(sums: WalkSums, state: State, layer: int, chosen: Tensor | None = None) -> Tensor:
    """E[ε_t·ε_{t+lag}] / E‖ε_t‖² for lags 0 … LAGS. Independent vectors have −½ at lag 1, a walk has 0."""
    weights = torch.ones(GROUPS, dtype=torch.float64) if chosen is None else chosen
    steps = sums.positions - 1 - torch.arange(LAGS + 1, dtype=torch.float64)
    mean = (weights @ state["lagged"][layer]) / steps
    return mean / mean[0]


def steps_shared(sums: WalkSums) -> Tensor:
    """min(s, t) at the shown positions, (S, S); the first position that is not left out has s = 1."""
    at = torch.tensor(sums.shown, dtype=torch.float64) + 1
    return torch.minimum(at[:, None], at)


def fitted_trace(gram: Tensor, shared: Tensor) -> Tensor:
    """τ of the least squares fit of τ·min(s, t)."""
    return (gram * shared).sum() / shared.square().sum()


def _measures(sums: WalkSums, state: State, layer: int, chosen: Tensor) -> dict[str, float]:
    shared = steps_shared(sums)
    gram = mean_gram(state, layer, chosen)
    contexts = chosen @ state["contexts"][layer]
    mean = torch.tensordot(chosen, state["position_sum"][layer], dims=1) / contexts
    # The mean of C contexts holds a C-th of their covariance.
    centred = (gram - mean @ mean.T) * contexts / (contexts - 1).clamp_min(1)
    apart = ~torch.eye(len(gram), dtype=torch.bool)
    at = shared.diagonal().log()
    norms = gram.diagonal().log()
    steps = (chosen @ state["lagged"][layer])[0] / (contexts * (sums.positions - 1))
    frobenius, cosine = second_moment_errors(sums, state, layer, chosen)
    return {
        "r_squared": _r_squared(gram, shared),
        "r_squared_centred": _r_squared(centred, shared),
        "correlation": float(torch.corrcoef(torch.stack([gram[apart], shared[apart]]))[0, 1]),
        "trace_ratio": float(fitted_trace(gram, shared) / steps),
        "autocorrelation": float(autocorrelations(sums, state, layer, chosen)[1]),
        "growth": float(((at - at.mean()) * norms).sum() / (at - at.mean()).square().sum()),
        "frobenius": float(frobenius.nanmedian()),
        "cosine": float(cosine.nanmedian()),
    }


def _r_squared(gram: Tensor, shared: Tensor) -> float:
    """1 − the squared error of the best τ·min(s, t) over that of the best constant; negative where that is better."""
    residual = gram - fitted_trace(gram, shared) * shared
    return float(1 - residual.square().sum() / (gram - gram.mean()).square().sum())


def second_moment_errors(
    sums: WalkSums, state: State, layer: int, chosen: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """‖M − min(s, t) Σ̂‖_F / ‖M‖_F and cos(M, Σ̂) of M = E[x_s x_tᵀ], for every pair s ≤ t of the marks.

    ‖M‖_F² is taken over pairs of different contexts, (x_s·x'_s)(x_t·x'_t), so that the noise of few contexts in d²
    entries does not add to it. An estimate below zero counts as zero.
    """
    weights = torch.ones(GROUPS, dtype=torch.float64) if chosen is None else chosen
    contexts = len(state["kept"][layer])
    vectors = state["kept"][layer][weights[sums.groups.of(torch.arange(contexts))] > 0]
    sigma = sums.covariance(state, layer)
    count = len(vectors)
    products = torch.einsum("cmd,emd->mce", vectors, vectors)
    diagonal = products.diagonal(dim1=1, dim2=2)
    first, second = torch.triu_indices(len(sums.marks), len(sums.marks))
    norm = (products[first] * products[second]).sum((1, 2)) - (diagonal[first] * diagonal[second]).sum(1)
    norm = (norm / max(1, count * (count - 1))).clamp_min(0)
    inner = torch.einsum("cmd,cmd->m", vectors[:, first] @ sigma, vectors[:, second]) / count
    shared = torch.tensor(sums.marks, dtype=torch.float64)[first] + 1  # the smaller of both: first ≤ second
    size = sigma.square().sum()
    error = (norm - 2 * shared * inner + shared.square() * size).clamp_min(0)
    return (error / norm).sqrt(), (inner / (norm * size).sqrt()).clamp(-1, 1)


def pair_table(sums: WalkSums, state: State) -> pd.DataFrame:
    """One row per layer and pair of marked positions: both errors of the full second moments."""
    first, second = torch.triu_indices(len(sums.marks), len(sums.marks))
    marks = torch.tensor(sums.marks) + 1
    rows = []
    for layer in range(len(state["contexts"])):
        frobenius, cosine = second_moment_errors(sums, state, layer)
        columns = {"s": marks[first], "t": marks[second], "frobenius": frobenius, "cosine": cosine}
        rows.append(pd.DataFrame({"layer": layer} | {name: value.numpy() for name, value in columns.items()}))
    return pd.concat(rows, ignore_index=True)
