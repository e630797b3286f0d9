"""Measure how smooth a positional basis is: how much of its Gram matrix is low-frequency.

Frequencies are those of the orthonormal type-II discrete cosine transform, as in Song & Zhong 2024, section
3.2. Tokens are rows here; theirs are columns, so our Gram matrix P Pᵀ is their PᵀP.

Positions may be those of a grid of R rows and C columns, row after row (T = R·C), as the patches of an image are. Their
frequencies are pairs (r, c), and F is F_R ⊗ F_C. What the paper says of the K lowest frequencies of a line holds of
those K² with r < K and c < K, as many as there are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from theodolite.errors import UsageError

Grid = tuple[int, int]  # rows and columns of positions that lie in a plane


def normalised_gram(p: Float[Tensor, "*batch rows width"]) -> Float64[Tensor, "*batch rows rows"]:
    """Compute the cosines between the rows of P, (..., T, T): G = P̄P̄ᵀ (Song & Zhong 2024, eq. 5); 0 of zero rows."""
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

    F[s, t] = c_s cos(π s (t + ½)/T) for s, t counted from 0, c_0 = √(1/T), c_s = √(2/T). `frequencies`: only the lowest
    so many of each side, O(frequencies·T²) in place of O(T³); None: all.
    """
    rows, columns = (_dct_matrix(size, frequencies, gram.device) for size in gram.shape[-2:])
    return rows @ gram.double() @ columns.mT


def low_frequency_ratio(
    gram: Float[Tensor, "*batch rows columns"], cutoffs: Sequence[int] = (1, 3, 5, 10)
) -> Float64[Tensor, "*batch cutoffs"]:
    """Compute the share of the energy Σ Ĝ² in the K×K lowest frequencies, for each cutoff K: (..., len(cutoffs)).

    The ratio of Tables 2 and 3 of Song & Zhong 2024. A cutoff beyond the size gives 1; the zero matrix NaN.
    """
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
    """
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


def sinusoidal(length: int, width: int) -> Float64[Tensor, "length width"]:
    """Make the fixed positional encoding of Vaswani et al. 2017, section 3.5, positions 0 … length − 1.

    Columns 2i and 2i + 1 are sin and cos of position/10000^{2i/width}. Appendix B.1 of Song & Zhong 2024 prints another
    exponent, see docs/errata.md. Not centred.

    Raises:
        UsageError: the length is below 1, or the width not a positive even number.
    """
    if length < 1 or width < 2 or width % 2:
        raise UsageError(f"length is {length} and width {width}: give a length from 1 and an even width")
    exponent = torch.arange(0, width, 2, dtype=torch.float64) / width
    angle = torch.arange(length, dtype=torch.float64)[:, None] / 10000**exponent
    return torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(-2)


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
