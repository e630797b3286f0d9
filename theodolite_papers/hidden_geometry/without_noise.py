"""How smooth positional matrices would be without the sampling noise of the text that the positional basis is made of.

Of the bases p, q, r, s of four quarters of the contexts, whose errors are independent, pMqᵀ is on average that of all
text, and so is the energy ⟨pMqᵀ, rMsᵀ⟩; in PMPᵀ itself the errors meet themselves. Where they are independent over
positions they lower a share of low frequencies; errors that neighbouring positions share raise it. What is left without
it has an error too, by leaving out one group of contexts after the other: a share near its limit may be on either side
of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import permutations

import numpy as np
import torch
from jaxtyping import Float64
from torch import Tensor

from theodolite import OpenModel
from theodolite.corpus.groups import GROUPS
from theodolite.estimates import Estimate, Estimates, jackknife_error
from theodolite.measure.uncertainty import balanced_halves
from theodolite.models.head_weights import NotAffine
from theodolite.models.structure import NoAttention
from theodolite.report.data import OF_GROUPS, Floats
from theodolite.theory import dct2
from theodolite_papers.hidden_geometry.resampling import GroupedBasis

QUARTERS = 4

Quarters = Sequence[Float64[Tensor, "*batch positions width"]]


def estimated(basis: GroupedBasis, number: Callable[[GroupedBasis], float]) -> Estimate:
    """A number without noise and its error: see `all_estimated`."""
    return all_estimated(basis, lambda each: (number(each),))[0]


def all_estimated(basis: GroupedBasis, numbers: Callable[[GroupedBasis], Iterable[float]]) -> list[Estimate]:
    """Numbers without noise and their errors, by leaving out one group of contexts after the other (jackknife).

    On average the errors are not too small (Efron & Stein 1981); where noise is most of the basis, they are up to twice
    too large.
    """
    values = []
    for left_out in range(GROUPS):
        kept = (torch.arange(GROUPS) != left_out).double()
        sums, readers = basis.sums * kept[:, None, None], basis.readers * kept[:, None]
        values.append(list(numbers(replace(basis, sums=sums, readers=readers))))
    return [
        Estimate(number, float(error), *OF_GROUPS)
        for number, error in zip(numbers(basis), jackknife_error(values), strict=True)
    ]


def quarters_of(basis: GroupedBasis) -> list[Float64[Tensor, "layers positions width"]]:
    """The positional basis of each quarter of the contexts."""
    return [basis.of((torch.arange(GROUPS) % QUARTERS == quarter).double()) for quarter in range(QUARTERS)]


def shares(rows: Quarters, columns: Quarters, cutoffs: Sequence[int]) -> Float64[Tensor, "*batch cutoffs"]:
    """Share of the energy of the DCT of rows · columnsᵀ in its lowest frequencies, free of noise.

    Args:
        rows, columns: what each quarter of the contexts gives.
        cutoffs: K, of the K × K lowest.

    Returns:
        NaN where no energy is left.
    """
    whole = rows[0].new_zeros(rows[0].shape[:-2])
    lowest = whole[..., None].repeat_interleave(len(cutoffs), -1)
    largest = max(cutoffs)
    for one, two, three, four in permutations(range(QUARTERS)):
        if one > three:  # the same product, with its factors in the other order
            continue
        first, second = rows[one] @ columns[two].mT, rows[three] @ columns[four].mT
        whole = whole + (first * second).sum((-2, -1))
        low = dct2(first, largest) * dct2(second, largest)
        lowest = lowest + torch.stack([low[..., :k, :k].sum((-2, -1)) for k in cutoffs], -1)
    share = (lowest / whole[..., None]).clamp(0, 1)
    return torch.where(whole[..., None] > 0, share, torch.nan)


def low_frequency_without_noise(basis: GroupedBasis, cutoff: int = 10) -> Floats:
    """The share of the normalised Gram matrix, by layer.

    Rows are divided by the lengths that all contexts give, which are too large by the noise, of all positions about
    alike.
    """
    lengths = torch.linalg.vector_norm(basis.of(torch.ones(GROUPS)), dim=-1, keepdim=True)
    quarters = [quarter / lengths for quarter in quarters_of(basis)]
    share: Floats = shares(quarters, quarters, (cutoff,))[..., 0].numpy()
    return share


def gram_shares(basis: GroupedBasis, cutoffs: Sequence[int]) -> Floats:
    """The shares of PPᵀ, (layers, cutoffs)."""
    quarters = quarters_of(basis)
    return np.asarray(shares(quarters, quarters, cutoffs))


def product_shares(basis: GroupedBasis, model: OpenModel, cutoffs: Sequence[int]) -> Floats:
    """The shares of PWPᵀ, W = W_q W_kᵀ of every head that has one, (heads of all layers, cutoffs)."""
    quarters = quarters_of(basis)
    parts = []
    for layer in range(model.layers):
        try:
            weights = model.head_weights(layer)
        except (NotAffine, NoAttention):
            continue
        if weights.w_q.shape[1] == quarters[0].shape[-1]:
            w_q, w_k = (w.double().cpu() for w in (weights.w_q, weights.w_k))
            queries, keys = ([quarter[layer] @ w for quarter in quarters] for w in (w_q, w_k))
            parts.append(shares(queries, keys, cutoffs))
    return np.concatenate(parts) if parts else np.empty((0, len(cutoffs)))


def gram_without_noise(basis: GroupedBasis) -> Float64[Tensor, "layers positions positions"]:
    """PPᵀ on average over pairs of quarters, in which no error meets itself."""
    quarters = quarters_of(basis)
    total = sum(quarters)
    assert isinstance(total, Tensor)
    own = sum(quarter @ quarter.mT for quarter in quarters)
    return (total @ total.mT - own) / (QUARTERS * (QUARTERS - 1))


def noise_bases(basis: GroupedBasis) -> Float64[Tensor, "pairs layers positions width"]:
    """What sampling alone puts into a positional basis: half of the difference between two halves of the contexts.

    In it positions cancel, and of equal groups the noise is exactly as large as in the basis of all contexts, and in
    the same directions. One for each balanced half and its complement.
    """
    halves = balanced_halves()
    pairs = zip(*halves.chunk(2), strict=True)
    return torch.stack([(basis.of(half) - basis.of(complement)) / 2 for half, complement in pairs])


def norms_beyond_noise(norms: Estimates, basis: GroupedBasis) -> Estimates:
    """Relative norms of the positional basis, each less what sampling noise alone has: at least so much is of position.

    λ₁ of a sum is at most the sum of both λ₁, and PPᵀ is on average that of position and that of noise: the squares are
    subtracted, and what is left is no more than position's own.
    """
    noise = torch.linalg.matrix_norm(noise_bases(basis), ord=2).square().mean(0)
    share = noise / torch.linalg.matrix_norm(basis.of(torch.ones(GROUPS)), ord=2).square()
    left = norms.values * np.sqrt(np.clip(1 - share.numpy(), 0, None))
    errors = np.full(left.shape, np.nan) if norms.errors is None else norms.errors
    # d√(r² − s²) = r dr/√(r² − s²); where nothing is left, as large as all that was there.
    grown = errors * norms.values / np.maximum(left, np.maximum(errors, 1e-300))
    return replace(norms, values=left, errors=grown)
