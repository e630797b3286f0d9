"""Measures of models that average the numbers after a separator: error, tag, outlier coordinate, rank, directions.

Of several models at once, each a row of the first dimension (Zhang et al. 2025, section 4). Nothing is trained here.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from theodolite.theory.grouping import variance_explained

RANK_TOLERANCE = 1e-6
"""Of the largest singular value of what a layer writes: directions below it are not written along."""


def unexplained_variance(
    output: Float[Tensor, "models batch"], target: Float[Tensor, "models batch"]
) -> Float[Tensor, " models"]:
    """The mean square error over the mean square of the target: 1 for a model that always answers 0."""
    return (output - target).square().mean(-1) / target.square().mean(-1)


def error_of_ratio(
    parts: Float[Tensor, "models batch"], wholes: Float[Tensor, "models batch"]
) -> Float[Tensor, " models"]:
    """Standard error over sequences of Σ parts / Σ wholes: to first order, that of the mean of what is left by it."""
    left = parts - wholes * (parts.sum(-1) / wholes.sum(-1))[:, None]
    return left.std(-1) / left.shape[-1] ** 0.5 / wholes.mean(-1)


def tag_direction(
    written: Float[Tensor, "models batch length width"],
    tagged: Bool[Tensor, "models batch length"],
    others: Bool[Tensor, "models batch length"],
) -> Float[Tensor, "models width"]:
    """Unit difference of the means of what a layer writes to tagged tokens and to the others (section 4.2)."""
    means = [
        vectors[group].mean(0) - vectors[rest].mean(0)
        for vectors, group, rest in zip(written, tagged, others, strict=True)
    ]
    return torch.nn.functional.normalize(torch.stack(means), dim=-1)


def tag_strength(
    written: Float[Tensor, "models batch length width"],
    tagged: Bool[Tensor, "models batch length"],
    counted: Bool[Tensor, "models batch length"],
) -> Float[Tensor, " models"]:
    """η² of what a layer writes to the counted tokens, grouped by whether they are tagged; in [0, 1]."""
    parts = zip(written, tagged, counted, strict=True)
    return torch.tensor(
        [variance_explained(vectors[chosen], group[chosen].long()) for vectors, group, chosen in parts],
        dtype=torch.float64,
    )


def outlier_ratio(
    hidden: Float[Tensor, "models batch length width"], counted: Bool[Tensor, "models batch length"]
) -> Float[Tensor, " models"]:
    """RMS over the counted tokens of the largest coordinate, over the median RMS of the other coordinates."""
    sizes = (hidden.square() * counted[..., None]).sum((1, 2)) / counted.sum((1, 2))[:, None]
    ordered = sizes.sqrt().sort(-1).values
    return ordered[:, -1] / ordered[:, :-1].median(-1).values


def second_over_first(matrix: Float[Tensor, "*models rows columns"]) -> Float[Tensor, "*models"]:
    """The second singular value over the first: 0 for a matrix of rank one."""
    values = torch.linalg.svdvals(matrix.double())
    return values[..., 1] / values[..., 0]


def random_directions(
    written: Float[Tensor, "models batch length width"], count: int, seed: int
) -> Float[Tensor, "count models width"]:
    """Random unit vectors, uniform in the space that a layer's output spans, of each model.

    Of all directions of the stream, most would take nothing: at width 16 the models write along three.

    Args:
        count: of directions. seed: the same one gives the same directions.
    """
    _, sizes, spanned = torch.linalg.svd(written.double().flatten(1, 2), full_matrices=False)
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(count, *sizes.shape, generator=generator, dtype=torch.float64)
    normal = normal * (sizes > RANK_TOLERANCE * sizes[:, :1])
    directions = torch.einsum("csk,skw->csw", normal, spanned)
    return (directions / directions.norm(dim=-1, keepdim=True)).to(written.dtype)
