"""Theorem 2 of Song & Zhong 2024 as an experiment: does incoherence factorise the kernel K_W(x, y) = exp(xᵀ W y)?

Bases, weights and tokens are drawn as the theorem supposes them; nothing of a model is measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float, Float64
from scipy import stats
from torch import Tensor
from torch.nn import functional

from theodolite.errors import UsageError

_PAIRS = 64
"""Query-key pairs evaluated with each drawn set of weights."""


@dataclass(frozen=True)
class KernelSetting:
    """What the weights and tokens of one experiment are drawn from.

    vectors: sizes of both bases. sparsity: terms of each W_αβ. noise: whether standard normal Z_αβ/√d is added.
    """

    width: int = 128
    vectors: tuple[int, int] = (96, 96)
    sparsity: int = 4
    noise: bool = False


@dataclass(frozen=True)
class FactorisationError:
    """Relative error |K_W(x^q, x^k) / ∏ K_{W_αβ}(…) − 1| of eq. (14), one entry per incoherence; float64.

    A draw's pairs count as one in the mean and its error. bound: `factorisation_bound`, without noise.
    """

    incoherence: Float64[Tensor, " levels"]
    mean: Float64[Tensor, " levels"]
    standard_error: Float64[Tensor, " levels"]
    maximum: Float64[Tensor, " levels"]
    bound: Float64[Tensor, " levels"]

    @property
    def slope(self) -> float:
        """Least-squares slope of ln(mean error) against ln(incoherence): 1 by the theorem, where small."""
        x, y = self.incoherence.log(), self.mean.log()
        x = x - x.mean()
        return float((x * y).sum() / x.square().sum())


def kernel_factorisation(
    incoherences: Sequence[float], setting: KernelSetting, draws: int = 100, seed: int = 0
) -> FactorisationError:
    """How the error of the factorised kernel grows with the incoherence of the two bases.

    Every incoherence sees the same random numbers. With noise the error is flat below some incoherence at a fixed
    width, which says nothing of an upper bound: see `error_growth`.

    Raises:
        UsageError: an incoherence outside [0, 1], or fewer than 2 draws.
    """
    if draws < 2 or not all(0 <= incoherence <= 1 for incoherence in incoherences):
        raise UsageError(
            f"{draws} draws at {list(incoherences)}: give 2 or more, at incoherences from 0 to 1"
        )
    levels = torch.tensor(list(incoherences), dtype=torch.float64)
    error = torch.stack([_drawn(incoherence, setting, draws, seed) for incoherence in levels.tolist()])
    by_draw = error.mean(-1)
    return FactorisationError(
        incoherence=levels,
        mean=by_draw.mean(-1),
        standard_error=by_draw.std(-1) / draws**0.5,
        maximum=error.amax((-2, -1)),
        bound=factorisation_bound(levels, setting.sparsity),
    )


@dataclass(frozen=True)
class ErrorGrowth:
    """Mean relative error over incoherence, where incoherence falls as d^−γ: is it bounded, as O(incoh) says?"""

    exponent: float
    widths: Float64[Tensor, " widths"]
    ratio: Float64[Tensor, "draws widths"]
    largest: Float64[Tensor, " widths"]

    @property
    def growth(self) -> Float64[Tensor, " leave_one_out"]:
        """Least-squares slope of ln(mean ratio) on ln d, one draw left out after the other: 0 or less if bounded."""
        draws = len(self.ratio)
        means = (self.ratio.sum(0) - self.ratio) / (draws - 1)
        x = self.widths.log() - self.widths.log().mean()
        return means.log() @ x / x.square().sum()


def error_growth(
    widths: Sequence[int], exponent: float, setting: KernelSetting, draws: int = 100, seed: int = 0
) -> ErrorGrowth:
    """The error over an incoherence of d^−`exponent` for growing d: the rest of the setting stays, noise included."""
    errors = [
        _drawn(width**-exponent, replace(setting, width=width), draws, seed) / width**-exponent
        for width in widths
    ]
    ratio = torch.stack(errors, dim=-1)
    return ErrorGrowth(exponent, torch.tensor(widths, dtype=torch.float64), ratio.mean(1), ratio.amax((0, 1)))


def factorisation_bound(incoherence: Float[Tensor, "*levels"], sparsity: int) -> Float64[Tensor, "*levels"]:
    """exp(s(8ρ + 4ρ²)) − 1: no relative error of eq. (14) exceeds it, for incoherence ρ and s-sparse weights.

    Of the 16 terms of ln K_W twelve are mismatched: eight with one index wrong, at most s·ρ, four with both, at most
    s·ρ². The proof of Theorem 2 bounds all twelve by s·ρ. Attained where every vector is one of two with ⟨c, t⟩ = ρ.
    """
    rho = incoherence.double()
    return torch.expm1(sparsity * (8 * rho + 4 * rho**2))


def _tilted(first: Tensor, second: Tensor, incoherence: float) -> tuple[Tensor, Tensor]:
    """Unit vectors of two orthogonal spaces, the second leaning towards the first: max |⟨c, t⟩| = `incoherence`."""
    first, second = functional.pad(first, (0, second.shape[1])), functional.pad(second, (first.shape[1], 0))
    towards = first[torch.arange(len(second)) % len(first)]
    return first, (1 - incoherence**2) ** 0.5 * second + incoherence * towards


def sparse_weight(
    left: Float64[Tensor, "left width"],
    right: Float64[Tensor, "right width"],
    sparsity: int,
    generator: torch.Generator,
) -> Float64[Tensor, "width width"]:
    """W = Σ a_k u_k v_kᵀ of s terms (eq. 13), a_k uniform in [−1, 1], u_k and v_k drawn from the two bases."""
    u = left[torch.randint(len(left), (sparsity,), generator=generator)]
    v = right[torch.randint(len(right), (sparsity,), generator=generator)]
    a = 2 * torch.rand(sparsity, generator=generator, dtype=torch.float64) - 1
    return u.mT @ (a[:, None] * v)


def factorisation_log_ratio(
    weights: Float64[Tensor, "2 2 width width"],
    query: Float64[Tensor, "2 pairs width"],
    key: Float64[Tensor, "2 pairs width"],
) -> Float64[Tensor, " pairs"]:
    """ln of K_W(x^q, x^k) / ∏ K_{W_αβ}(x^q_α, x^k_β), with W = Σ W_αβ, x_1 = c, x_2 = t and x = c + t."""
    joint = (query.sum(0) @ weights.sum((0, 1)) * key.sum(0)).sum(-1)
    separate = (query[:, None] @ weights * key).sum((0, 1, -1))
    return joint - separate


def _drawn(incoherence: float, setting: KernelSetting, draws: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([_draw(incoherence, setting, generator) for _ in range(draws)])


def _draw(incoherence: float, setting: KernelSetting, generator: torch.Generator) -> Tensor:
    """Relative errors of one draw of bases and weights, (_PAIRS,)."""
    half = setting.width // 2
    first = _within_span(setting.vectors[0], half, generator)
    second = _within_span(setting.vectors[1], setting.width - half, generator)
    bases = _tilted(first, second, incoherence)
    query, key = (torch.stack([_tokens(basis, generator) for basis in bases]) for _ in range(2))
    of_queries, of_keys = (torch.linalg.qr(tokens.flatten(0, 1).mT).Q for tokens in (query, key))
    pairs = [(left @ of_queries, right @ of_keys) for left in bases for right in bases]
    weights = torch.stack([sparse_weight(*pair, setting.sparsity, generator) for pair in pairs])
    weights = weights.unflatten(0, (2, 2))
    if setting.noise:
        noise = torch.randn(weights.shape, generator=generator, dtype=torch.float64)
        weights = weights + noise / setting.width**0.5
    return torch.expm1(factorisation_log_ratio(weights, query @ of_queries, key @ of_keys)).abs()


def _tokens(basis: Tensor, generator: torch.Generator) -> Tensor:
    """Elements ±u of the extended basis, (_PAIRS, d): those of full length, where errors are largest."""
    index = torch.randint(len(basis), (_PAIRS,), generator=generator)
    sign = 2 * torch.randint(2, (_PAIRS,), generator=generator) - 1
    return basis[index] * sign[:, None]


def _within_span(count: int, width: int, generator: torch.Generator) -> Tensor:
    """`_directions` in orthonormal coordinates of their span, (count, min(count, width))."""
    if width <= count:
        return _directions(count, width, generator)
    lower = torch.randn(count, count, generator=generator, dtype=torch.float64).tril(-1)
    uniform = torch.rand(count, generator=generator, dtype=torch.float64)
    squares = stats.chi2.ppf(uniform.numpy(), width - np.arange(count))
    return functional.normalize(lower + torch.from_numpy(squares).sqrt().diag(), dim=-1)


def _directions(count: int, width: int, generator: torch.Generator) -> Tensor:
    normal = torch.randn(count, width, generator=generator, dtype=torch.float64)
    return functional.normalize(normal, dim=-1)
