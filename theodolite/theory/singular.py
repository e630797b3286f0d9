"""Measure rank by singular values: ScreeNOT, and the largest singular value alone, quickly.

ScreeNOT is written here, batched in torch, because every layer of every survey needs it; the reference
package (`screenot`) is what the tests compare with.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor
from torch.nn import functional

from theodolite.errors import UsageError


@dataclass(frozen=True)
class ScreeNOT:
    """Rank of a low-rank signal in noise of unknown covariance.

    rank: number of singular values above the threshold, of the batch's shape.
    threshold: in the matrix's units.
    singular_values: decreasing, (..., min(n, m)).
    """

    rank: Int64[Tensor, "*batch"]
    threshold: Float64[Tensor, "*batch"]
    singular_values: Float64[Tensor, "*batch values"]


def screenot(matrix: Tensor, k: int = 20) -> ScreeNOT:
    """Find the optimal hard threshold for singular values of (..., n, m) matrices (Donoho, Gavish & Romanov 2023).

    Strategy "i" of the reference package: the k leading singular values are replaced by a tail that continues
    the others as noise would, z_{−l} = z_{−k−1} + (1 − ((l−1)/k)^⅔)/(2^⅔ − 1)·(z_{−k−1} − z_{−2k−1}). With z
    this pseudo-noise, γ = min(n/m, m/n), φ(y) = mean of y/(y² − z²) and D = φ·(γφ + (1−γ)/y), the threshold
    is the one y > max z with y D′(y)/D(y) = −4, found to full precision. A threshold below the rounding of the SVD
    is raised to it, so that a matrix of exact low rank has that rank.

    Args:
        k: an upper bound on the signal's rank; 2k + 1 must be below min(n, m), or k 0.

    Raises:
        UsageError: k is negative or too large for the matrix; the message says what fits.
    """
    rows, columns = matrix.shape[-2:]
    size = min(rows, columns)
    if k < 0 or (k > 0 and 2 * k + 1 >= size):
        largest = max(0, (size - 2) // 2)
        raise UsageError(f"k is {k} for a {rows}×{columns} matrix: give k between 0 and {largest}")
    return screenot_of_values(torch.linalg.svdvals(matrix.double()), (rows, columns), k)


def screenot_of_values(values: Float[Tensor, "*batch size"], shape: tuple[int, int], k: int) -> ScreeNOT:
    """Compute `screenot` from the singular values of (n, m) matrices, decreasing and exact to float64's rounding."""
    noise, ratio = values.double(), min(shape) / max(shape)
    if k:  # the k leading values are imputed from the next k + 1
        outer, inner = noise[..., k, None], noise[..., 2 * k, None]
        steps = torch.arange(k, dtype=noise.dtype, device=noise.device) / k
        excess = (1 - steps ** (2 / 3)) / (2 ** (2 / 3) - 1)
        noise = torch.cat([outer + excess * (outer - inner), noise[..., k:]], dim=-1)
    edge = noise[..., 0]
    squares = (noise / torch.where(edge > 0, edge, 1.0)[..., None]).square()
    # In units of the noise's edge the root lies in (1, √3]: y φ′/φ is a weighted mean of −(y² + z²)/(y² − z²) ≥ −2 at
    # y = √3, and y D′/D one of 2 y φ′/φ and y φ′/φ − 1. Without noise it is 0.
    low, high = torch.ones_like(edge), torch.full_like(edge, math.sqrt(3))
    for _ in range(54):  # halvings of [1, √3]: more than the 53 bits of a float64
        middle = (low + high) / 2
        y = middle[..., None]
        gaps = y.square() - squares
        phi = (y / gaps).mean(-1)
        slope = -((y.square() + squares) / gaps.square()).mean(-1)
        weight = ratio * phi + (1 - ratio) / middle
        derivative = slope * weight + phi * (ratio * slope - (1 - ratio) / middle.square())
        below = middle * derivative < -4 * phi * weight
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    rounding = torch.finfo(torch.float64).eps * max(shape) * values[..., 0]
    threshold = torch.maximum(high * edge, rounding)
    return ScreeNOT((values > threshold[..., None]).sum(-1), threshold, values)


def by_gram_matrix(
    matrix: Float[Tensor, "rows columns"], count: int
) -> tuple[Float64[Tensor, " values"], Float64[Tensor, "columns count"]]:
    """Find singular values and so many leading right directions, largest first, from the smaller Gram matrix.

    Several times as fast as an SVD. Values below √ε of the largest are not seen, and are 0.
    """
    matrix = matrix.double()
    rows, columns = matrix.shape
    wide = rows <= columns
    spectrum = torch.linalg.eigh(matrix @ matrix.T if wide else matrix.T @ matrix)
    squares, vectors = spectrum.eigenvalues.flip(0), spectrum.eigenvectors.flip(1)[:, :count]
    seen = squares > torch.finfo(torch.float64).eps * max(rows, columns) * squares[:1]
    values = torch.where(seen, squares.clamp_min(0).sqrt(), 0.0)
    return values, functional.normalize(matrix.T @ vectors, dim=0) if wide else vectors


def largest_singular_value(
    x: Tensor, tolerance: float = 1e-6, iterations: int = 64
) -> Float64[Tensor, "*batch"]:
    """Compute ‖X‖₂ of each matrix in (..., T, d), by Golub-Kahan-Lanczos with full reorthogonalisation.

    Passes over x are in its own dtype (half precisions in float32), the small bidiagonal problem in float64.
    Each matrix stops by itself when the residual ‖Xᵀu − σv‖ of the leading Ritz triple is below
    tolerance·σ; the error of σ is then of second order in the tolerance. No gradient.

    Args:
        x: NaN or infinite entries give NaN.
        iterations: most steps, two passes over x each.
    """
    x = x.detach() if x.dtype in (torch.float32, torch.float64) else x.detach().float()
    # The rows are summed by weights that start the process: the mean row, which hidden states lean to, and ten per cent
    # of seeded noise, which keeps every direction in play where the mean is zero or another singular vector.
    noise = torch.randn(x.shape[-2], generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    start = (1 + 0.1 * noise).to(x)
    # One by one: each stays in cache over its passes, and bmm of thin operands takes three times as long on CPUs.
    matrices = x.reshape(math.prod(x.shape[:-2]), *x.shape[-2:])
    values = [_lanczos(matrix, start, tolerance, iterations) for matrix in matrices]
    return torch.tensor(values, dtype=torch.float64, device=x.device).reshape(x.shape[:-2])


def _lanczos(x: Tensor, weights: Tensor, tolerance: float, iterations: int) -> float:
    """Find the largest Ritz value of x (T, d) in the Krylov space of xᵀ·weights."""
    steps = min(iterations, *x.shape)
    left, right = x.new_empty(steps, x.shape[0]), x.new_empty(steps, x.shape[1])
    bidiagonal = torch.zeros(steps, steps, dtype=torch.float64)
    value = 0.0
    direction = weights @ x
    length = direction.norm().item()
    for j in range(steps):
        if not math.isfinite(length):
            return math.nan
        if length == 0:
            break
        if j:
            bidiagonal[j - 1, j] = length
        right[j] = direction / length
        image = x @ right[j]
        image -= (left[:j] @ image) @ left[:j]
        pivot = image.norm().item()
        bidiagonal[j, j] = pivot
        if not math.isfinite(pivot):
            return math.nan
        leading = torch.linalg.svd(bidiagonal[: j + 1, : j + 1])
        value = leading.S[0].item()
        if pivot == 0:
            break
        left[j] = image / pivot
        direction = left[j] @ x
        direction -= (right[: j + 1] @ direction) @ right[: j + 1]
        length = direction.norm().item()
        if length * abs(leading.U[j, 0].item()) <= tolerance * value:
            break
    return value
