"""Norms with their scale frozen, and attention modules made affine by freezing the norms inside them.

A norm of a transformer is x ↦ s(x) · γ ⊙ (x − centre(x)) + β: affine in x but for the scale s(x), one number a
vector. Held at what it was for the vector that the model saw, it is affine, and what the parts of that vector
become adds up. Gain, centring and β are found by calling the norm, so that no class of norm is named here.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from theodolite.attention.inputs import AttentionInputs
from theodolite.errors import WorkError
from theodolite.models.calls import Call
from theodolite.models.structure import removed_on_leaving
from theodolite.models.weights.copies import copy_in_dtype, norms_inside, run_until_tap
from theodolite.models.weights.function_norms import FunctionNorm, make_norms_modules

EXACT = 64 * torch.finfo(torch.float32).eps
"""Relative error allowed of what is exact: many norms and rotations compute in float32 whatever the dtype."""


class FrozenNorm(nn.Module):
    """A norm as it acted on `inputs` (…, width): x ↦ scale · gain ⊙ (x − centre(x)) + bias.

    The scale of each vector is the one that fits the norm's output for it best; `verified` checks how well. `norm`
    must act on the last dimension; gains may differ along the others but the first (Cohere's differ from head to head).
    """

    def __init__(self, norm: Callable[[Tensor], Tensor], inputs: Tensor) -> None:
        super().__init__()
        first = inputs[:1]
        signs = 1.0 - 2.0 * (torch.arange(first.shape[-1], device=first.device, dtype=first.dtype) % 2)
        signs = signs.expand_as(first)
        self.bias = norm(torch.zeros_like(first))
        answer = norm(signs) - self.bias
        # One constant added to all values: nothing changes where the norm subtracts their mean.
        shifted = norm(signs + 3.0) - self.bias
        self.centred = bool((shifted - answer).abs().max() <= 1e-3 * answer.abs().max())
        self.gain = answer / self._centre(signs)
        direction, moved = self.direction(inputs), norm(inputs) - self.bias
        squared = torch.linalg.vecdot(direction, direction).clamp_min(torch.finfo(inputs.dtype).tiny)
        self.scale = (torch.linalg.vecdot(direction, moved) / squared).unsqueeze(-1)

    def direction(self, x: Tensor) -> Tensor:
        """gain ⊙ (x − centre(x)): what depends on x, not yet scaled."""
        return self.gain * self._centre(x)

    def forward(self, x: Tensor) -> Tensor:
        """The whole affine function."""
        return self.direction(x) * self.scale + self.bias

    @classmethod
    def verified(
        cls, norm: Callable[[Tensor], Tensor], inputs: Tensor, output: Tensor, name: str, tolerance: float
    ) -> FrozenNorm:
        """The norm frozen at `inputs`, once it was found to give the `output` that the model had.

        Raises:
            WorkError: it does not, to a relative error of `tolerance`; `name` is the norm's class.
        """
        frozen = cls(norm, inputs)
        error = relative_error(frozen(inputs), output)
        if not error <= tolerance:
            raise WorkError(f"{name} is no norm with one scale a vector (relative error {error:.1e})")
        return frozen

    def _centre(self, x: Tensor) -> Tensor:
        return x - x.mean(dim=-1, keepdim=True) if self.centred else x


class _InTurn(nn.Module):
    """One module after the other, call by call: a norm of queries and keys alike (Llama 4) is another one for each."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        super().__init__()
        self._next = itertools.cycle(modules).__next__

    def forward(self, x: Tensor) -> Tensor:
        """What the module gives whose turn it is."""
        return self._next()(x)


class FrozenAttention:
    """Queries and keys of an attention module as an affine function of its input, for one call of it.

    Args:
        module: the attention module; a copy of it in the dtype of `entered` is used.
        call: the arguments of the call.
        entered: what entered (batch, positions, d); norms inside the module keep the scales they had for it.

    `per_context` says that such norms are there, or that a mask is of all contexts: then batches must be those of
    `entered`.

    Raises:
        WorkError: a norm inside cannot be frozen: it is of another form, or its weights are elsewhere.
    """

    def __init__(
        self, module: nn.Module, call: Call, entered: Float[Tensor, "batch positions width"]
    ) -> None:
        self._module = copy_in_dtype(module, entered.dtype)
        self._call = call
        # Where the weights are elsewhere there is no copy, and the module works in its own dtype.
        self._dtype = entered.dtype if self._module is not module else call.entered.dtype
        if self._module is not module:
            make_norms_modules(self._module, [norm for _, norm in norms_inside(self._module)])
        reads_one = self._reads(entered[:1])
        norms = {norm: name for name, norm in norms_inside(self._module)}
        self.per_context = bool(norms) or not reads_one
        if norms:
            if self._module is module:
                raise WorkError("there are norms inside, and the weights are not here to be copied")
            self._freeze(norms, entered)

    def _freeze(self, norms: dict[nn.Module, str], entered: Tensor) -> None:
        calls: dict[nn.Module, list[tuple[Tensor, Tensor]]] = {}

        def keep(norm: nn.Module, args: tuple[Tensor, ...], output: Any) -> None:
            if len(args) != 1 or not isinstance(output, Tensor):
                raise WorkError(f"{type(norm).__name__} is no norm of one tensor")
            calls.setdefault(norm, []).append((args[0], output))

        with removed_on_leaving([norm.register_forward_hook(keep) for norm in norms]):
            self(entered)
        for norm, of_norm in calls.items():
            name = type(norm).__name__
            try:
                frozen = [
                    FrozenNorm.verified(norm, inputs, output, name, EXACT) for inputs, output in of_norm
                ]
            except (WorkError, RuntimeError):
                if not isinstance(norm, FunctionNorm):
                    raise
                continue  # of a weight, say: the whole is verified after all
            self._module.set_submodule(norms[norm], frozen[0] if len(frozen) == 1 else _InTurn(frozen))

    def _reads(self, hidden: Tensor) -> bool:
        try:
            self(hidden)
        except WorkError:
            return False
        return True

    def __call__(self, hidden: Float[Tensor, "batch positions width"]) -> AttentionInputs:
        """What arrives at the tap, while `tapped(…, stop_at_tap)` is open."""
        return run_until_tap(self._module, self._call, hidden.to(self._dtype))


def relative_error(value: Tensor, expected: Tensor) -> float:
    """‖value − expected‖_F / ‖expected‖_F."""
    difference = torch.linalg.vector_norm(value.double() - expected.double())
    return float(difference / torch.linalg.vector_norm(expected.double()).clamp_min(1e-300))
