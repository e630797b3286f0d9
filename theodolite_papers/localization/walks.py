"""Simulate attention over random walks, for W_QK with a given eigenspectrum (Bao et al. 2024, Fig. 5)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from theodolite.attention.piecewise import empirical_propagation
from theodolite_papers.haar import haar_rotation

UNIFORM_EDGE = 2.5
"""R of the anisotropic Σ = RᵀR/d has entries from Unif(−2.5, 2.5) (Bao et al. 2024, section 5)."""

COVARIANCES = ("isotropic", "anisotropic")


@dataclass(frozen=True)
class WalkSetting:
    """Sizes of the simulation, as in the paper, and pairs of mean and scale, which it does not print: these are ours.

    length: T tokens per walk. walks: for each W_QK. draws: W_QK for each pair. means, scales: of the eigenvalues
    w ~ N(mean, scale²) of W_QK; every mean with every scale is a pair.
    """

    width: int = 128
    length: int = 40
    walks: int = 300
    draws: int = 10
    means: tuple[float, ...] = (0.0, 0.1, 0.3, 1.0)
    scales: tuple[float, ...] = (0.1, 0.5, 2.0)

    @property
    def pairs(self) -> list[tuple[float, float]]:
        """(mean, scale), the scales of one mean together."""
        return list(product(self.means, self.scales))

    @property
    def temperature(self) -> float:
        """λ = √d, “commonly” (section 2); the paper does not say what its simulation takes."""
        return math.sqrt(self.width)


@dataclass(frozen=True)
class Simulation:
    """The counts of a simulation of P pairs and D draws of W_QK for each, and the exact spectra.

    Attributes:
        propagates: (P, D, T), share of the walks in which token i propagates to the last query.
        entropy: (P, D), mean over walks of the entropy of softmax(ω) in nats, ω the logits of the last query.
        entropy_variance: (P, D), its variance over walks.
        eigenvalues: (P, D, d), of Σ^½ W_QK Σ^½, not divided by λ.
        walks: how many walks a W_QK had.
    """

    propagates: Tensor
    entropy: Tensor
    entropy_variance: Tensor
    eigenvalues: Tensor
    walks: int

    @property
    def propagation(self) -> Tensor:
        """ρ_1 … ρ_T of every pair, (P, T): mean over draws."""
        return self.propagates.mean(1)

    def propagation_errors(self) -> tuple[Tensor, Tensor]:
        """Compute the standard errors of `propagation`: of the walks alone, with these W_QK; of the draws."""
        return (
            over_walks(self.propagates * (1 - self.propagates) * self.walks / (self.walks - 1), self.walks),
            over_draws(self.propagates),
        )

    def entropy_errors(self) -> tuple[Tensor, Tensor]:
        """Compute these two standard errors of the mean entropy of every pair, (P,) each."""
        return over_walks(self.entropy_variance, self.walks), over_draws(self.entropy)


def over_walks(variance: Tensor, walks: int) -> Tensor:
    """Give the standard error of a mean over draws (dimension 1), each itself a mean over walks of this variance."""
    return (variance.mean(1) / (walks * variance.shape[1])).sqrt()


def over_draws(values: Tensor) -> Tensor:
    """Give the standard error of the mean over draws (dimension 1) from their own spread."""
    return values.std(1) / math.sqrt(values.shape[1])


def simulate_walks(setting: WalkSetting, covariance: str, seed: int) -> Simulation:
    """Simulate random walks and count which tokens propagate.

    x_1 ~ N(0, Σ), x_{t+1} ~ N(x_t, Σ) (Assumption 1); W_QK = B diag(w) Bᵀ with B a uniformly random orthogonal
    matrix; ω = X W_QK x_T/λ. Every draw has its own walks, B and standard normal z; w = mean + scale · z, so
    that pairs differ by mean and scale and not by luck. Σ is drawn once.

    covariance: "isotropic" (Σ = I) or "anisotropic" (Σ = RᵀR/d, R ~ Unif(−2.5, 2.5)).
    """
    generator = torch.Generator().manual_seed(seed)
    width = setting.width
    uniform = torch.rand(width, width, generator=generator, dtype=torch.float64)
    # Rows of independent normals times `root` have covariance rootᵀ root = Σ.
    root = torch.eye(width, dtype=torch.float64)
    if covariance == "anisotropic":
        root = (2 * uniform - 1) * UNIFORM_EDGE / math.sqrt(width)
    drawn = [_draw(setting, root, generator) for _ in range(setting.draws)]
    propagates, entropy, variance, eigenvalues = (torch.stack(part, 1) for part in zip(*drawn, strict=True))
    return Simulation(propagates, entropy, variance, eigenvalues, setting.walks)


def _draw(
    setting: WalkSetting, root: Tensor, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Draw one W_QK a pair, on the same walks: shares (P, T), entropy (P), its variance (P), eigenvalues (P, d)."""
    size = setting.walks, setting.length, setting.width
    steps = torch.randn(size, generator=generator, dtype=torch.float64)
    tokens = (steps @ root).cumsum(1)
    basis = haar_rotation(setting.width, generator)
    standard = torch.randn(setting.width, generator=generator, dtype=torch.float64)
    rows = []
    for mean, scale in setting.pairs:
        w_qk = (basis * (mean + scale * standard)) @ basis.T
        logits = (tokens @ (tokens[:, -1:] @ w_qk).mT).squeeze(-1) / setting.temperature
        entropy = torch.special.entr(logits.softmax(-1)).sum(-1)
        rows.append(
            (
                empirical_propagation(logits).double().mean(0),
                entropy.mean(),
                entropy.var(),
                torch.linalg.eigvalsh(root @ w_qk @ root.T),  # those of Σ^½ W_QK Σ^½, as root = QΣ^½
            )
        )
    shares, means, variances, eigenvalues = (torch.stack(part) for part in zip(*rows, strict=True))
    return shares, means, variances, eigenvalues
