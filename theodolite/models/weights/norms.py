"""Norms around and inside attention, modules or functions: found, left out, and frozen.

A norm of a transformer is x ↦ s(x) · γ ⊙ (x − centre(x)) + β: affine in x but for the scale s(x), one number a
vector. Held at what it was for the vector that the model saw, it is affine. Gain, centring and β are found by calling
the norm, so that no class of norm is named here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from theodolite.attention.inputs import AttentionInputs
from theodolite.errors import WorkError
from theodolite.models.calls import Call, as_sequences, copy_in_dtype, run_until_tap

EXACT = 64 * torch.finfo(torch.float32).eps
"""Relative error allowed of what is exact: many norms and rotations compute in float32 whatever the dtype."""


def with_norms(module: nn.Module) -> str:
    """Return for a refusal which norms are inside a module, in brackets; "" where there are none."""
    names = ", ".join(name for name, _ in norms_inside(module))
    return f" (it has norms inside: {names})" if names else ""


def norms_inside(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """List the norms inside an attention module, by name; those of weights (`spectral_norm`) are none."""
    return [
        (name, child)
        for name, child in module.named_modules()
        if name and "parametrizations" not in name.split(".")
        if "norm" in name.lower().split(".")[-1] or type(child).__name__.endswith("Norm")
    ]


def _is_repeated(output: Tensor, values: Tensor) -> bool:
    repeated = _sorted_values(output.flatten().repeat(len(values) // output.numel()))
    return len(repeated) == len(values) and torch.allclose(repeated, values, rtol=0, atol=1e-4)


def _sorted_values(tensor: Tensor) -> Tensor:
    """Sort the values, scaled to norm 1: equal for tensors that differ in order and scale only."""
    values = tensor.double().flatten().sort().values
    return values / torch.linalg.vector_norm(values).clamp_min(1e-300)


class FunctionNorm(nn.Module):
    """A norm that was called as a function of PyTorch: the same of another tensor, in the dtype of that."""

    def __init__(self, function: Callable[..., Tensor], args: Any, kwargs: Any) -> None:
        super().__init__()
        self._call = function, args, kwargs

    def forward(self, x: Tensor) -> Tensor:
        """Apply the norm."""
        function, args, kwargs = tree_map_only(Tensor, lambda tensor: tensor.to(x), self._call)
        return function(x, *args, **kwargs)


class NormCalls(TorchFunctionMode):
    """While open, `answer` gives what PyTorch's functions of norms give: of the norm, its input, and its output."""

    def __init__(self, answer: Callable[[FunctionNorm, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self._answer = answer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if func not in (functional.layer_norm, functional.rms_norm, functional.normalize):
            return output
        others = dict(kwargs or {})
        x, *rest = args if args else (others.pop("input"),)
        return self._answer(FunctionNorm(func, rest, others), x, output)


class Norms:
    """The norms that a copy of an attention module calls, modules and functions, numbered in that order.

    `calls` are those of the last pass, each norm with its input (None where it is not one tensor) and output; `instead`
    has by number what takes a norm's place; `watched` says whether functions are looked out for, which takes time.
    """

    def __init__(self, module: nn.Module) -> None:
        self.calls: list[tuple[nn.Module, Any, Any]] = []
        self.instead: dict[int, Callable[[Tensor], Tensor]] = {}
        self.watched = True
        self._module, self._own_forward = module, module.forward
        self._running = 0
        for _, norm in norms_inside(module):
            norm.register_forward_pre_hook(self._enter)
            norm.register_forward_hook(self._leave)
        module.forward = self._forward

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        self.calls, self._running = [], 0
        with NormCalls(self._call_function) if self.watched else nullcontext():
            return self._own_forward(*args, **kwargs)

    def _enter(self, _norm: nn.Module, _args: Any) -> None:
        self._running += 1

    def _leave(self, norm: nn.Module, args: Any, output: Any) -> Any:
        self._running -= 1
        return self._called(norm, args[0] if len(args) == 1 else None, output)

    def _call_function(self, norm: FunctionNorm, x: Tensor, output: Tensor) -> Tensor:
        # What a norm that is a module calls is a part of that.
        return output if self._running else self._called(norm, x, output)

    def _called(self, norm: nn.Module, x: Any, output: Any) -> Any:
        instead = self.instead.get(len(self.calls))
        self.calls.append((norm, x, output))
        return output if instead is None else instead(x)

    def leave_out(self, numbers: Sequence[int]) -> None:
        """Let these norms return what they get."""
        self.instead = dict.fromkeys(numbers, nn.Identity())

    def at_tap(self, call: Call) -> list[int]:
        """Find those whose output the tap gets, up to order, scale and repeats: not those between projections."""
        row = torch.randn(1, call.width, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        inputs = run_until_tap(self._module, call, as_sequences(row, self._module))
        tapped_values = [_sorted_values(tensor) for tensor in (inputs.query, inputs.key, inputs.value)]
        return [
            number
            for number, (_, _, output) in enumerate(self.calls)
            if isinstance(output, Tensor) and any(_is_repeated(output, values) for values in tapped_values)
        ]


class FrozenNorm:
    """A norm as it acted on `inputs` (…, width): x ↦ scale · gain ⊙ (x − centre(x)) + bias.

    The scale of each vector is the one that fits best; `WorkError`, with its `name`, where this is not the model's
    `output`. `norm` must act on the last dimension; gains may differ along the others but the first (Cohere's heads).
    """

    def __init__(
        self,
        norm: Callable[[Tensor], Tensor],
        inputs: Tensor,
        output: Tensor,
        name: str,
        error: float = EXACT,
    ) -> None:
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
        off = relative_error(self(inputs), output)
        if not off <= error:
            raise WorkError(f"{name} is no norm with one scale a vector (relative error {off:.1e})")

    def direction(self, x: Tensor) -> Tensor:
        """Compute gain ⊙ (x − centre(x)): what depends on x, not yet scaled."""
        return self.gain * self._centre(x)

    def __call__(self, x: Tensor) -> Tensor:
        """Apply the whole affine function."""
        return self.direction(x) * self.scale + self.bias

    def _centre(self, x: Tensor) -> Tensor:
        return x - x.mean(dim=-1, keepdim=True) if self.centred else x


def frozen_attention(
    module: nn.Module, call: Call, entered: Float[Tensor, "batch positions width"]
) -> tuple[Callable[[Tensor], AttentionInputs], bool]:
    """Return what arrives at the tap as an affine function of an attention module's input, and whether per context.

    Norms inside the module keep the scales they had for what `entered`. If there are some, or a mask is of all
    contexts, batches must be those of `entered`. To be called while `tapped(…, stop_at_tap)` is open; `WorkError` where
    a norm cannot be frozen.
    """
    copied = copy_in_dtype(module, entered.dtype)
    norms = Norms(copied)
    send = functools.partial(run_until_tap, copied, call)
    per_context = False
    try:
        send(entered[:1])
    except WorkError:
        per_context = True
    if per_context or norms.calls:
        send(entered)
    calls = list(norms.calls)
    norms.watched = any(isinstance(norm, FunctionNorm) for norm, _, _ in calls)
    for number, (norm, x, output) in enumerate(calls):
        name = type(norm).__name__
        if x is None or not isinstance(output, Tensor):
            raise WorkError(f"{name} is no norm of one tensor")
        try:
            norms.instead[number] = FrozenNorm(norm, x, output, name)
        except (WorkError, RuntimeError):
            if not isinstance(norm, FunctionNorm):
                raise  # a function may be of a weight: the whole is verified after all
    return send, per_context or bool(calls)


def relative_error(value: Tensor, expected: Tensor) -> float:
    """Compute ‖value − expected‖_F / ‖expected‖_F."""
    difference = torch.linalg.vector_norm(value.double() - expected.double())
    return float(difference / torch.linalg.vector_norm(expected.double()).clamp_min(1e-300))
