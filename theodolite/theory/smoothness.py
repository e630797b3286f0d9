"""Measure how smooth a positional basis is: how much of its Gram matrix is low-frequency, and how much must be.

Frequencies are those of the orthonormal type-II discrete cosine transform, as in Song & Zhong 2024, section
3.2. Tokens are rows here; theirs are columns, so our Gram matrix P Pᵀ is their PᵀP. This module must not know
where a matrix comes from.

Positions may be those of a grid of R rows and C columns, row after row (T = R·C), as the patches of an image are. Their
frequencies are pairs (r, c), and F is F_R ⊗ F_C, the transform in two dimensions. What the paper says of the K lowest
frequencies of a line holds of those K² with r < K and c < K, as many as there are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from theodolite.errors import UsageError

Grid = tuple[int, int]
"""Rows and columns of positions that lie in a plane."""


@dataclass(frozen=True)
class SmoothnessBound:
    """Both sides of Theorem 1 of Song & Zhong 2024, of the Gram matrix's batch shape (and one entry a k).

    bound: 6/(8k)^m · ‖Δ^{(m,m)}G̃‖_max, as printed.
    attained: ‖G − F_k B (F_k B)ᵀ‖_op / T.
    """

    bound: Float64[Tensor, "*batch"]
    attained: Float64[Tensor, "*batch"]


def normalised_gram(p: Float[Tensor, "*batch rows width"]) -> Float64[Tensor, "*batch rows rows"]:
    """Compute the cosines between the rows of P, (..., T, T): G = P̄P̄ᵀ (Song & Zhong 2024, eq. 5).

    A zero row has no direction; its row and column in G are zero.
    """
    unit = unit_rows(p)
    return unit @ unit.mT


def unit_rows(p: Float[Tensor, "*batch rows width"]) -> Float64[Tensor, "*batch rows width"]:
    """Scale the rows of P to length 1 (P̄), or zero where one has no direction."""
    p = p.double()
    norms = torch.linalg.vector_norm(p, dim=-1, keepdim=True)
    return torch.where(norms > 0, p / torch.where(norms > 0, norms, 1.0), 0.0)


def dct2(
    gram: Float[Tensor, "*batch rows columns"], frequencies: int | None = None
) -> Float64[Tensor, "*batch row_frequencies column_frequencies"]:
    """Transform the last two dimensions by the orthonormal type-II DCT: Ĝ = F G Fᵀ.

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
    """Compute the share of the energy Σ Ĝ² in the K×K lowest frequencies, for each cutoff K: (..., len(cutoffs)).

    The ratio of Tables 2 and 3 of Song & Zhong 2024. F is orthogonal, so the whole energy is that of G. A
    cutoff beyond the size gives 1; the zero matrix has no shares and gives NaN.

    Raises:
        UsageError: no cutoff, or one below 1.
    """
    _check_cutoffs(cutoffs)
    gram = gram.double()
    lowest = _corner_energies(dct2(gram, max(cutoffs)), cutoffs)
    return lowest / gram.square().sum((-2, -1))[..., None]


def product_low_frequency_ratio(
    left: Float[Tensor, "*batch rows width"],
    right: Float[Tensor, "*batch columns width"],
    cutoffs: Sequence[int] = (1, 3, 5, 10),
    grid: Grid | None = None,
) -> Float64[Tensor, "*batch cutoffs"]:
    """Compute `low_frequency_ratio` of A Bᵀ for thin A and B, in O(T·width²) and without the T×T product.

    The low frequencies are those of (F_K A)(F_K B)ᵀ, the whole energy is ‖A Bᵀ‖_F² = ⟨AᵀA, BᵀB⟩. With a `grid`, whose
    positions the rows of both are, the lowest are K² on either side: Σ over r, c, r', c' < K of Ĝ²[(r, c), (r', c')].

    Raises:
        UsageError: no cutoff, or one below 1.
    """
    _check_cutoffs(cutoffs)
    left, right = left.double(), right.double()
    most = max(cutoffs)
    low_left, low_right = lowest_frequencies(left, most, grid), lowest_frequencies(right, most, grid)
    energy = ((left.mT @ left) * (right.mT @ right)).sum((-2, -1))
    counts = [frequencies_below(cutoff, left.shape[-2], grid) for cutoff in cutoffs]
    return _corner_energies(low_left @ low_right.mT, counts) / energy[..., None]


def lowest_frequencies(
    p: Float[Tensor, "*batch rows width"], frequencies: int, grid: Grid | None = None
) -> Float64[Tensor, "*batch low width"]:
    """Compute the lowest rows of the orthonormal type-II DCT of P along its rows, as many as there are.

    With a `grid`, those of the frequencies (r, c) with both below `frequencies`, ordered by the larger of the two, so
    that the first `frequencies_below(K, …)` rows are those below K.
    """
    p = p.double()
    if grid is None:
        return _dct_matrix(p.shape[-2], frequencies, p.device) @ p
    spectrum = grid_frequencies(p, frequencies, grid)
    row, column = torch.meshgrid(*(torch.arange(n) for n in spectrum.shape[-3:-1]), indexing="ij")
    order = torch.maximum(row, column).flatten().argsort(stable=True)
    return spectrum.flatten(-3, -2)[..., order.to(p.device), :]


def grid_frequencies(
    p: Float[Tensor, "*batch positions width"], frequencies: int, grid: Grid
) -> Float64[Tensor, "*batch row_frequencies column_frequencies width"]:
    """Compute P's lowest frequencies (r, c) over a grid: Σ over rows i, columns j of F_R[r, i] F_C[c, j] P[(i, j)]."""
    rows, columns = (_dct_matrix(size, frequencies, p.device) for size in grid)
    return torch.einsum("ri,cj,...ijd->...rcd", rows, columns, p.double().unflatten(-2, grid))


def frequencies_below(cutoff: int, positions: int, grid: Grid | None = None) -> int:
    """Count the frequencies below a cutoff: of a line of positions, or of a grid with both below it."""
    return math.prod(min(cutoff, size) for size in grid or (positions,))


def smoothness_bound(gram: Tensor, k: int | Sequence[int], m: int) -> SmoothnessBound:
    """Compute both sides of Theorem 1 of Song & Zhong 2024: a Gram matrix with bounded differences is smooth.

    G̃ is G reflected at half samples to 2T×2T (their eq. 6), Δ^{(1,1)} the periodic mixed difference times T²
    (eq. 7). F_k holds f_s[t] = cos(π(s − 1)(t − ½)/T), s = 1 … k, t = 1 … T (the printed f_s swaps frequency
    and position), and B is the proof's: F_k B (F_k B)ᵀ = Π G Π with Π the projection onto F_k.

    When the bound holds. Write d_j = 2T sin(πj/2T), so 2j ≤ d_j ≤ πj, and H = Δ^{(m,m)}G̃.

    - The proof assumes G·1 = 0. Then Parseval's identity gives attained ≤ ‖H‖_max/(d_1 d_k)^m, which is the
      printed bound or less for every m ≤ 7; for k near T the printed one fails at large m. (The printed proof
      rests on |γ_j| ≤ 1/8j, which is false, and on differences times (2T)²: see docs/errata.md.)
    - Where G·1 ≠ 0, G and its centred form have the same H: a difference removes every constant, so H says
      nothing of the row means g = G·1/T, whose high frequencies g_J stay in the error, by at most √(|g_J|²/T).
      For general G that has no bound in H, and the printed one fails.
    - Rows of norm 1 (`normalised_gram`) determine their means, g_t = (1 + ḡ − G^c_tt)/2 with G^c the centred
      G, and then attained ≤ ((d_1 d_k)^−m + ½ d_k^−m) ‖H‖_max: the printed bound for m = 1, and for m = 2 if
      k ≤ 0.7 T; for larger m the same rate k^−m with another constant.

    Rounding of G, ε, enters the differences as up to (2T)^{2m} ε: at T = 512 and m = 3, ε = 1e-16 is seen.

    Args:
        gram: symmetric positive semidefinite (..., T, T).
        k: how many frequencies, 1 … T; of several, the results have one more dimension, (..., len(k)).
        m: order of the difference, from 1.

    Raises:
        UsageError: the matrix is not square, or k or m is out of range.
    """
    size = gram.shape[-1] if gram.ndim else 0
    several = (k,) if isinstance(k, int) else tuple(k)
    if gram.ndim < 2 or gram.shape[-2] != size:
        raise UsageError(f"gram has shape {tuple(gram.shape)}: give a square (..., T, T)")
    if not several or min(several) < 1 or max(several) > size:
        raise UsageError(f"k is {k}: give numbers from 1 to {size}, the size of the Gram matrix")
    if m < 1:
        raise UsageError(f"m is {m}: a difference has an order of at least 1")
    gram = gram.double()
    factors = torch.tensor([6 / (8 * count) ** m for count in several], dtype=torch.float64)
    bound = _largest_difference(gram, m)[..., None] * factors.to(gram.device)
    spectrum = dct2(gram)
    errors = []
    for count in several:  # the corner of Ĝ is what Π G Π keeps
        beyond = spectrum.clone()
        beyond[..., :count, :count] = 0
        errors.append(torch.linalg.eigvalsh(beyond).abs().amax(-1))
    attained = torch.stack(errors, dim=-1) / size
    if isinstance(k, int):
        return SmoothnessBound(bound=bound[..., 0], attained=attained[..., 0])
    return SmoothnessBound(bound=bound, attained=attained)


def sinusoidal(length: int, width: int) -> Float64[Tensor, "length width"]:
    """Make the fixed positional encoding of Vaswani et al. 2017, section 3.5, positions 0 … length − 1.

    Columns 2i and 2i + 1 are sin and cos of position/10000^{2i/width}: a pair shares its frequency, so that
    the Gram matrix depends on the distance alone. Appendix B.1 of Song & Zhong 2024 prints another exponent,
    see docs/errata.md. Not centred.

    Raises:
        UsageError: the length is below 1, or the width not a positive even number.
    """
    if length < 1 or width < 2 or width % 2:
        raise UsageError(f"length is {length} and width {width}: give a length from 1 and an even width")
    exponent = torch.arange(0, width, 2, dtype=torch.float64) / width
    angle = torch.arange(length, dtype=torch.float64)[:, None] / 10000**exponent
    return torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(-2)


def _largest_difference(gram: Tensor, m: int) -> Tensor:
    """Compute ‖Δ^{(m,m)}G̃‖_max, of the batch's shape, from (T + m + 1)² entries of G̃.

    Along each axis the m-th difference of a half-sample symmetric sequence is symmetric or antisymmetric
    about (m − 1)/2 and about T + (m − 1)/2, so that ⌊m/2⌋ … ⌊m/2⌋ + T hold all its magnitudes.
    """
    size = gram.shape[-1]
    index = torch.arange(m // 2 - m, m // 2 + size + 1, device=gram.device) % (2 * size)
    index = torch.minimum(index, 2 * size - 1 - index)
    difference = gram.index_select(-2, index).index_select(-1, index)
    for _ in range(m):
        difference = difference.diff(dim=-2).diff(dim=-1) * size**2
    return difference.abs().amax((-2, -1))


def _check_cutoffs(cutoffs: Sequence[int]) -> None:
    if not cutoffs or min(cutoffs) < 1:
        raise UsageError(f"cutoffs are {tuple(cutoffs)}: give one or more positive numbers")


def _corner_energies(spectrum: Tensor, cutoffs: Sequence[int]) -> Tensor:
    """Compute Σ Ĝ² over the K×K lowest frequencies for each K, (..., len(cutoffs)); beyond the size: all of them."""
    energy = spectrum.square().cumsum(-2).cumsum(-1)
    rows, columns = energy.shape[-2:]
    return torch.stack([energy[..., min(k, rows) - 1, min(k, columns) - 1] for k in cutoffs], dim=-1)


def _dct_matrix(size: int, frequencies: int | None, device: torch.device) -> Tensor:
    """Return the lowest rows of the orthonormal DCT-II matrix, (min(frequencies, size), size)."""
    count = size if frequencies is None else min(frequencies, size)
    s = torch.arange(count, dtype=torch.float64, device=device)[:, None]
    t = torch.arange(size, dtype=torch.float64, device=device)
    matrix = torch.cos(math.pi / size * s * (t + 0.5)) * math.sqrt(2 / size)
    matrix[0] = math.sqrt(1 / size)
    return matrix
