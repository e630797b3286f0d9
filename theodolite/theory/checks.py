"""Check the theory's arguments in one line each: lengths, λ > 0, real and finite numbers, Σ = Σᵀ.

NaN stands for "undefined" throughout the theory and is let through, except as a temperature. Values that cannot be
looked at, as inside `torch.func.vmap` and `torch.compile`, are not checked.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor

from theodolite.errors import UsageError

# Of a Σ summed in float32, as a share of its largest entry.
_LEAST_ROUNDING = 16 * torch.finfo(torch.float32).eps


def holds(condition: Tensor) -> bool:
    """Tell whether a condition holds everywhere; true where there are no values to see (vmap, compilation, meta)."""
    if torch.compiler.is_compiling():
        return True
    try:
        return bool(condition.all())
    except RuntimeError:  # so vmap and meta tensors say, and have no public name to be asked by
        return True


def check_length(length: Any) -> None:
    """Raise UsageError where a context of `length` tokens does not exist."""
    if operator.index(length) < 1:
        raise UsageError(f"length is {length}: a context has at least one token")


def checked_temperature(temperature: float | Tensor, device: torch.device) -> Tensor:
    """Check that λ is positive, and give it as float64."""
    scale = torch.as_tensor(temperature, dtype=torch.float64, device=device)
    if not holds(scale.detach() > 0):
        raise UsageError(f"temperature is {scale.min().item():g}: give a positive number")
    return scale


def check_real(name: str, values: Any, instead: str = "give real numbers") -> None:
    """Raise UsageError unless it is a tensor of real numbers."""
    if not isinstance(values, Tensor):
        raise UsageError(f"{name} is a {type(values).__name__}: give a tensor")
    if values.is_complex():
        raise UsageError(f"{name} is complex: {instead}")


def check_finite(name: str, values: Tensor) -> None:
    """Raise UsageError where there is NaN or infinity, of which LAPACK makes errors that name nothing."""
    if not holds(values.detach().isfinite()):
        raise UsageError(f"{name} holds NaN or infinity: give finite numbers")


def check_covariance(covariance: Tensor) -> None:
    """Raise UsageError unless Σ (..., d, d) is symmetric up to rounding; one that is not finite passes."""
    sigma = covariance.detach().double()
    rounding = max(_LEAST_ROUNDING, 4 * torch.finfo(torch.result_type(covariance, 0.0)).eps)
    apart, size = (values.abs().amax((-2, -1)) for values in (sigma - sigma.mT, sigma))
    if not holds(~(apart > rounding * size)):
        raise UsageError("covariance is not symmetric: give Σ = Σᵀ, as (Σ + Σᵀ)/2")
