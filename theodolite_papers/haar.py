"""Draw uniformly random rotations."""

from __future__ import annotations

import torch
from jaxtyping import Float64
from torch import Tensor


def haar_rotation(
    width: int, generator: torch.Generator, device: torch.device | str = "cpu"
) -> Float64[Tensor, "width width"]:
    """Draw an orthogonal matrix uniformly (Haar): QR of a normal matrix with the diagonal of R positive.

    Drawn by a CPU generator, whatever the device of the result.
    """
    normal = torch.randn(width, width, generator=generator, dtype=torch.float64).to(device)
    q, r = torch.linalg.qr(normal)
    return q * torch.where(r.diagonal() < 0, -1.0, 1.0)
