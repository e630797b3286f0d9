"""Norms with their scale frozen, and attention modules made affine by freezing the norms inside them.

A norm of a transformer is x ↦ s(x) · γ ⊙ (x − centre(x)) + β: affine in x but for the scale s(x), one number a
vector. Held at what it was for the vector that the model saw, it is affine, and what the parts of that vector
become adds up. Gain, centring and β are found by calling the norm, so that no class of norm is named here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from theodolite.attention.inputs import AttentionInputs
from theodolite.errors import WorkError
from theodolite.models.head_weights import Call, copy_in_dtype, norms_inside, run_until_tap
from theodolite.models.structure import first_tensor

EXACT = 64 * torch.finfo(torch.float32).eps
"""Relative error allowed of what is exact: many norms and rotations compute in float32 whatever the dtype."""


class FrozenNorm(nn.Module):
    """A norm as it acted on `given` (…, width): x ↦ scale · gain ⊙ (x − centre(x)) + bias.

    The scale of each vector is the one that fits the norm's output for it best; how well is for the caller to
    compare. `norm` must act on the last dimension; gains may differ along the others but the first (Cohere's
    differ from head to head).
    """

    def __init__(self, norm: Callable[[Tensor], Tensor], given: Tensor) -> None:
        super().__init__()
        first = given[:1]
        signs = 1.0 - 2.0 * (torch.arange(first.shape[-1], device=first.device, dtype=first.dtype) % 2)
        signs = signs.expand_as(first)
        self.bias = norm(torch.zeros_like(first))
        answer = norm(signs) - self.bias
        # One constant added to all values: nothing changes where the norm subtracts their mean.
        shifted = norm(signs + 3.0) - self.bias
        self.centred = bool((shifted - answer).abs().max() <= 1e-3 * answer.abs().max())
        self.gain = answer / self._centre(signs)
        direction, moved = self.direction(given), norm(given) - self.bias
        squared = torch.linalg.vecdot(direction, direction).clamp_min(torch.finfo(given.dtype).tiny)
        self.scale = (torch.linalg.vecdot(direction, moved) / squared).unsqueeze(-1)

    def direction(self, x: Tensor) -> Tensor:
        """gain ⊙ (x − centre(x)): what depends on x, not yet scaled."""
        return self.gain * self._centre(x)

    def forward(self, x: Tensor) -> Tensor:
        """The whole affine function."""
        return self.direction(x) * self.scale + self.bias

    def _centre(self, x: Tensor) -> Tensor:
        return x - x.mean(dim=-1, keepdim=True) if self.centred else x


class FrozenAttention:
    """Queries and keys of an attention module as an affine function of its input, for one call of it.

    Args:
        module: the attention module; a copy of it in the dtype of `entered` is used.
        call: the arguments of the call.
        entered: what entered (batch, positions, d); norms inside the module keep the scales they had for it.

    `per_context` says that such norms are there: then batches must be those of `entered`.

    Raises:
        WorkError: a norm inside cannot be frozen: it is of another form, or its weights are elsewhere.
    """

    def __init__(
        self, module: nn.Module, call: Call, entered: Float[Tensor, "batch positions width"]
    ) -> None:
        self._module = copy_in_dtype(module, entered.dtype)
        self._call = call
        # Where the weights are elsewhere there is no copy, and the module works in its own dtype.
        self._dtype = entered.dtype if self._module is not module else first_tensor(*call).dtype
        norms = dict(norms_inside(self._module))
        self.per_context = bool(norms)
        if norms:
            if self._module is module:
                raise WorkError("there are norms inside, and the weights are not here to be copied")
            self._freeze(norms, entered)

    def _freeze(self, norms: dict[str, nn.Module], entered: Tensor) -> None:
        calls: dict[str, tuple[Tensor, Tensor]] = {}

        def keep(name: str) -> Callable[..., None]:
            def hook(_module: nn.Module, args: tuple[Tensor, ...], output: Any) -> None:
                calls[name] = (args[0], output)

            return hook

        hooks = [norm.register_forward_hook(keep(name)) for name, norm in norms.items()]
        try:
            self(entered)
        finally:
            for hook in hooks:
                hook.remove()
        for name, (given, result) in calls.items():
            frozen = FrozenNorm(norms[name], given)
            error = relative_error(frozen(given), result)
            if not error <= EXACT:
                raise WorkError(
                    f"{type(norms[name]).__name__} is no norm with one scale a vector (relative error {error:.1e})"
                )
            self._module.set_submodule(name, frozen)

    def __call__(self, hidden: Float[Tensor, "batch positions width"]) -> AttentionInputs:
        """What arrives at the tap, while `tapped(…, stop_at_tap)` is open."""
        return run_until_tap(self._module, self._call, hidden.to(self._dtype))


def relative_error(got: Tensor, expected: Tensor) -> float:
    """‖got − expected‖_F / ‖expected‖_F."""
    difference = torch.linalg.vector_norm(got.double() - expected.double())
    return float(difference / torch.linalg.vector_norm(expected.double()).clamp_min(1e-300))
