"""Smoothness of a positional basis: how much of its Gram matrix is low-frequency.

Frequencies are those of the orthonormal type-II discrete cosine transform, as in Song & Zhong 2024, section
3.2. Tokens are rows here; theirs are columns, so our Gram matrix P Pᵀ is their PᵀP.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from theodolite.errors import UsageError


def normalised_gram(p: Float[Tensor, "*batch rows width"]) -> Float64[Tensor, "*batch rows rows"]:
    """Cosines between the rows of P, shape (..., T, T): G = P̄P̄ᵀ (Song & Zhong 2024, eq. 5).

    A zero row has no direction; its row and column in G are zero.
    """
    p = p.double()
    norms = torch.linalg.vector_norm(p, dim=-1, keepdim=True)
    unit = torch.where(norms > 0, p / torch.where(norms > 0, norms, 1.0), 0.0)
    return unit @ unit.mT


def dct2(
    gram: Float[Tensor, "*batch rows columns"], frequencies: int | None = None
) -> Float64[Tensor, "*batch row_frequencies column_frequencies"]:
    """Two-dimensional orthonormal type-II DCT, Ĝ = F G Fᵀ, of the last two dimensions.

    F[s, t] = c_s cos(π s (t + ½)/T) for s, t counted from 0, c_0 = √(1/T), c_s = √(2/T).

    Args:
        gram: (..., T, T); a rectangular matrix is transformed along each side.
        frequencies: only the lowest so many of each side, O(frequencies·T²) in place of O(T³); None: all.

    Raises:
        UsageError: `frequencies` is below 1.
    """
    if frequencies is not None and frequencies < 1:
        raise UsageError(f"frequencies is {frequencies}: ask for at least one")
    gram = gram.double()
    rows, columns = gram.shape[-2:]
    return (
        _dct_matrix(rows, frequencies, gram.device) @ gram @ _dct_matrix(columns, frequencies, gram.device).mT
    )


def low_frequency_ratio(
    gram: Float[Tensor, "*batch rows columns"], cutoffs: Sequence[int] = (1, 3, 5, 10)
) -> Float64[Tensor, "*batch cutoffs"]:
    """Share of the energy Σ Ĝ² in the K×K lowest frequencies, for each cutoff K: (..., len(cutoffs)).

    The ratio of Tables 2 and 3 of Song & Zhong 2024. F is orthogonal, so the whole energy is that of G. A
    cutoff beyond the size gives 1; the zero matrix has no shares and gives NaN.

    Raises:
        UsageError: no cutoff, or one below 1.
    """
    if not cutoffs or min(cutoffs) < 1:
        raise UsageError(f"cutoffs are {tuple(cutoffs)}: give one or more positive numbers")
    gram = gram.double()
    energy = dct2(gram, max(cutoffs)).square().cumsum(-2).cumsum(-1)
    rows, columns = energy.shape[-2:]
    lowest = torch.stack([energy[..., min(k, rows) - 1, min(k, columns) - 1] for k in cutoffs], dim=-1)
    return lowest / gram.square().sum((-2, -1))[..., None]


def _dct_matrix(size: int, frequencies: int | None, device: torch.device) -> Tensor:
    """The lowest rows of the orthonormal DCT-II matrix, (min(frequencies, size), size)."""
    count = size if frequencies is None else min(frequencies, size)
    s = torch.arange(count, dtype=torch.float64, device=device)[:, None]
    t = torch.arange(size, dtype=torch.float64, device=device)
    matrix = torch.cos(math.pi / size * s * (t + 0.5)) * math.sqrt(2 / size)
    matrix[0] = math.sqrt(1 / size)
    return matrix
