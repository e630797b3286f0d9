"""Is a head's weight matrix a positional part plus a diagonal? Eq. (9) of Song & Zhong 2024, in numbers.

W = W_q W_kᵀ · scaling = V L Vᵀ + D + noise, V the right singular vectors of the positional basis P, and D diagonal.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float64
from torch import Tensor

from theodolite.errors import UsageError
from theodolite.theory import qk_moments
from theodolite.theory.haar import haar_rotation

CORNERS = (5, 10, 20, 40, 60)
"""Sizes K of the corner; the paper sees K ≈ 20 in its figure 4."""

SHOWN = 60
"""Side of the maps: `top_num` of the published code, the axes of figures 4 and 26–29."""

_SEED = 0
"""Of the random rotations: every layer and every run is compared with the same ones."""


@dataclass(frozen=True)
class RotatedEnergy:
    """Where the energy Σ entries² of W_rot = Vᵀ(W − D)V lies, for each head; float64.

    threshold: τ = √(2 ln d²) · std of W_rot's entries (the published code rounds the deviation to three decimals).
    surviving, surviving_energy: how many entries exceed τ, and their share of the energy. corner_surviving: share of
    theirs in the K × K corner, NaN where none survives. corner_energy: of all energy, without threshold.
    """

    threshold: Float64[Tensor, "*stack"]
    surviving: Float64[Tensor, "*stack"]
    surviving_energy: Float64[Tensor, "*stack"]
    corner_surviving: Float64[Tensor, "*stack corners"]
    corner_energy: Float64[Tensor, "*stack corners"]


@dataclass(frozen=True)
class Decoupling:
    """Eq. (9) of Song & Zhong 2024 for the heads of one layer, against random rotations.

    diagonal: share of ‖W‖_F² in D = diag(W). diagonal_random: the same expected in a Haar-random basis,
    ((tr W)² + ‖W‖_F² + tr W²)/((d + 2)‖W‖_F²). aligned: with V as given, (heads, …). random: with random rotations in
    its place, (rotations, heads, …). rotated_map, diagonal_map: |W_rot| above the threshold, and |D|: figure 4, blue
    and red.
    """

    diagonal: Float64[Tensor, " heads"]
    diagonal_random: Float64[Tensor, " heads"]
    aligned: RotatedEnergy
    random: RotatedEnergy
    rotated_map: Float64[Tensor, "heads shown shown"]
    diagonal_map: Float64[Tensor, "heads shown"]


def decouple(
    w_q: Tensor, w_k: Tensor, v: Tensor, scaling: float, corners: Sequence[int] = CORNERS, rotations: int = 5
) -> Decoupling:
    """Energy of every head in D and in the corner of V, against Haar-random rotations (Song & Zhong 2024, 5.1).

    A random corner holds K²/d² of the energy. `corner_energy` is the number to compare: few entries survive at random.

    w_q, w_k: factors of W, (H, d, d_h). v: orthogonal (d, d), the right singular vectors of P. scaling: of the logit.
    corners: K. rotations: how many random bases, at least 2.

    Raises:
        UsageError: V is not orthogonal, or there are too few rotations for a standard deviation.
    """
    w_q, w_k, v = w_q.double(), w_k.double(), v.to(w_q.device).double()
    if not torch.allclose(v.mT @ v, torch.eye(len(v), dtype=v.dtype, device=v.device), rtol=0.0, atol=1e-4):
        raise UsageError("v is not orthogonal: give all right singular vectors as columns")
    if rotations < 2:
        raise UsageError(f"rotations is {rotations}: a standard deviation needs at least 2")
    heads, width = w_q.shape[:2]
    moments = qk_moments(w_q, w_k)
    w_q = w_q * scaling
    diagonal = (w_q * w_k).sum(-1)

    shown = min(SHOWN, width)
    rotated_map = w_q.new_empty(heads, shown, shown)
    aligned = []
    for head in range(heads):
        rotated = _rotate(w_q[head], w_k[head], diagonal[head], v)
        energy = _energy(rotated, corners)
        aligned.append(energy)
        corner = rotated[:shown, :shown].abs()
        rotated_map[head] = torch.where(corner > energy.threshold, corner, 0.0)

    generator = torch.Generator().manual_seed(_SEED)
    random = []
    for _ in range(rotations):
        basis = haar_rotation(width, generator, w_q.device)
        energies = [_energy(_rotate(w_q[h], w_k[h], diagonal[h], basis), corners) for h in range(heads)]
        random.append(_stack(energies))
    expected = moments.trace.square() + moments.frobenius_squared + moments.trace_of_square
    return Decoupling(
        diagonal=diagonal.square().sum(-1) / (moments.frobenius_squared * scaling**2),
        diagonal_random=expected / ((width + 2) * moments.frobenius_squared),
        aligned=_stack(aligned),
        random=_stack(random),
        rotated_map=rotated_map,
        diagonal_map=diagonal[:, :shown].abs(),
    )


def corner_energy(
    w_q: Float64[Tensor, "heads width d_h"],
    w_k: Float64[Tensor, "heads width d_h"],
    v: Float64[Tensor, "*bases width corner"],
) -> Float64[Tensor, "*bases heads"]:
    """Share of the energy of W − D in the corner of other bases, as `RotatedEnergy.corner_energy`."""
    diagonal = (w_q * w_k).sum(-1)
    corner = _rotate(w_q, w_k, diagonal, v[..., None, :, :])
    whole = qk_moments(w_q, w_k).frobenius_squared - diagonal.square().sum(-1)
    return corner.square().sum((-2, -1)) / whole


def _rotate(w_q: Tensor, w_k: Tensor, diagonal: Tensor, v: Tensor) -> Tensor:
    """Vᵀ(W − D)V, without W."""
    rotated = (v.mT @ w_q) @ (v.mT @ w_k).mT
    return rotated.sub_(v.mT @ (diagonal[..., None] * v))


def _energy(rotated: Tensor, corners: Sequence[int]) -> RotatedEnergy:
    threshold = math.sqrt(2 * math.log(rotated.numel())) * rotated.std(correction=0)
    squares = rotated.square()
    survivors = torch.where(rotated.abs() > threshold, squares, 0.0)
    energy, surviving = squares.sum(), survivors.sum()
    return RotatedEnergy(
        threshold=threshold,
        surviving=survivors.count_nonzero().double(),
        surviving_energy=surviving / energy,
        corner_surviving=torch.stack([survivors[:k, :k].sum() for k in corners]) / surviving,
        corner_energy=torch.stack([squares[:k, :k].sum() for k in corners]) / energy,
    )


def _stack(parts: Sequence[RotatedEnergy]) -> RotatedEnergy:
    names = [field.name for field in dataclasses.fields(RotatedEnergy)]
    return RotatedEnergy(**{name: torch.stack([getattr(part, name) for part in parts]) for name in names})
