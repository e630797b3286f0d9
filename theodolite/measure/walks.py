"""How far second moments are from those of a random walk, min(s, t) Σ: numbers from the sums of `increments`.

Nothing is read, judged or drawn here.
"""

from __future__ import annotations

import math

import pandas as pd
import torch
from torch import Tensor

from theodolite.accumulate.sums import State
from theodolite.accumulate.walks import LAGS, WalkSums
from theodolite.corpus.groups import GROUPS
from theodolite.measure.uncertainty import balanced_halves, half_sample_error

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
