"""Norms around and inside attention: found, taken out, made modules where they are functions, and frozen.

A norm of a transformer is x ↦ s(x) · γ ⊙ (x − centre(x)) + β: affine in x but for the scale s(x), one number a
vector. Held at what it was for the vector that the model saw, it is affine. Gain, centring and β are found by calling
the norm, so that no class of norm is named here.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from theodolite.attention.inputs import AttentionInputs
from theodolite.errors import WorkError
from theodolite.models.calls import Call, as_sequences, copy_in_dtype, run_until_tap
from theodolite.models.structure import removed_on_leaving

EXACT = 64 * torch.finfo(torch.float32).eps
"""Relative error allowed of what is exact: many norms and rotations compute in float32 whatever the dtype."""

FUNCTIONS = frozenset({functional.layer_norm, functional.rms_norm, functional.normalize})
"""Norms that a module may call as functions of PyTorch."""


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


def norms_at_tap(module: nn.Module, call: Call) -> list[str]:
    """Name the norms whose output the tap gets, up to order, scale and repeats; those between projections are none."""
    outputs: dict[nn.Module, Tensor] = {}

    def keep(norm: nn.Module, _args: Any, output: Any) -> None:
        if isinstance(output, Tensor):
            outputs[norm] = output

    norms = norms_inside(module)
    hooks = [norm.register_forward_hook(keep) for _, norm in norms]
    row = torch.randn(1, call.width, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    with removed_on_leaving(hooks):
        inputs = run_until_tap(module, call, as_sequences(row, module))
    tapped_values = [_sorted_values(tensor) for tensor in (inputs.query, inputs.key, inputs.value)]
    return [
        name
        for name, norm in norms
        if norm in outputs and any(_is_repeated(outputs[norm], values) for values in tapped_values)
    ]


def _is_repeated(output: Tensor, values: Tensor) -> bool:
    times, left = divmod(len(values), output.numel())
    return not left and torch.allclose(
        _sorted_values(output.flatten().repeat(times)), values, rtol=0, atol=1e-4
    )


def _sorted_values(tensor: Tensor) -> Tensor:
    """Sort the values, scaled to norm 1: equal for tensors that differ in order and scale only."""
    values = tensor.double().flatten().sort().values
    return values / torch.linalg.vector_norm(values).clamp_min(1e-300)


class FunctionNorm(nn.Module):
    """A call of such a function: the same of another tensor, in the dtype of that."""

    def __init__(
        self, function: Callable[..., Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        super().__init__()
        self._function = function
        self.arguments = args, kwargs

    def forward(self, x: Tensor) -> Tensor:
        """Apply the norm."""

        def given(value: Any) -> Any:
            return value.to(x.device, x.dtype) if isinstance(value, Tensor) else value

        args, kwargs = self.arguments
        return self._function(x, *map(given, args), **{name: given(value) for name, value in kwargs.items()})


class NormCalls(TorchFunctionMode):
    """While open, `answer` gives what these functions give: of the function, a tensor, and its other arguments."""

    def __init__(self, answer: Callable[[Callable[..., Tensor], Tensor, Any, Any], Tensor]) -> None:
        super().__init__()
        self._answer = answer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Hand a norm's call on."""
        if func not in FUNCTIONS:
            return func(*args, **(kwargs or {}))
        kwargs = dict(kwargs or {})
        x, *rest = args if args else (kwargs.pop("input"),)
        return self._answer(func, x, tuple(rest), kwargs)


def make_norms_modules(module: nn.Module) -> Callable[[], None]:
    """Turn each such call in a copy of a module, from its next pass on, into a module in it, by its turn.

    Returns:
        A function that undoes it: a pass in which PyTorch's functions are watched takes longer.
    """
    own_forward = module.forward
    running: list[nn.Module] = []  # norms that are modules, in this pass
    turns = itertools.count()

    def answer(function: Callable[..., Tensor], x: Tensor, args: Any, kwargs: Any) -> Tensor:
        if running:
            return function(x, *args, **kwargs)
        name = f"function_norm_{next(turns)}"
        if name not in module._modules:
            module.add_module(name, FunctionNorm(function, args, kwargs))
        norm = module.get_submodule(name)
        if isinstance(norm, FunctionNorm):
            norm.arguments = args, kwargs
        return norm(x)

    def forward(*args: Any, **kwargs: Any) -> Any:
        nonlocal turns
        turns = itertools.count()
        running.clear()
        with NormCalls(answer):
            return own_forward(*args, **kwargs)

    for _, norm in norms_inside(module):
        norm.register_forward_pre_hook(lambda norm, _: running.append(norm))
        norm.register_forward_hook(lambda *_: running.remove(_[0]), always_call=True)
    module.forward = forward
    return lambda: setattr(module, "forward", own_forward)


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
        """Compute gain ⊙ (x − centre(x)): what depends on x, not yet scaled."""
        return self.gain * self._centre(x)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the whole affine function."""
        return self.direction(x) * self.scale + self.bias

    @classmethod
    def verified(
        cls, norm: Callable[[Tensor], Tensor], inputs: Tensor, output: Tensor, name: str, tolerance: float
    ) -> FrozenNorm:
        """Freeze the norm at `inputs`; `WorkError`, with its `name`, unless it then gives the model's `output`."""
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
        """Run the module whose turn it is."""
        return self._next()(x)


def frozen_attention(
    module: nn.Module, call: Call, entered: Float[Tensor, "batch positions width"]
) -> tuple[Callable[[Tensor], AttentionInputs], bool]:
    """Return what arrives at the tap as an affine function of an attention module's input, and whether per context.

    Norms inside the module keep the scales they had for what `entered`. If there are some, or a mask is of all
    contexts, batches must be those of `entered`. To be called while `tapped(…, stop_at_tap)` is open; `WorkError` where
    a norm cannot be frozen.
    """
    copied = copy_in_dtype(module, entered.dtype)
    # Where the weights are elsewhere there is no copy, and the module works in its own dtype.
    dtype = entered.dtype if copied is not module else call.entered.dtype
    no_functions = make_norms_modules(copied) if copied is not module else None

    def send(hidden: Tensor) -> AttentionInputs:
        return run_until_tap(copied, call, hidden.to(dtype))

    per_context = False
    try:
        send(entered[:1])
    except WorkError:
        per_context = True
    norms = {norm: name for name, norm in norms_inside(copied)}
    if not norms:
        if no_functions:
            no_functions()
        return send, per_context
    if copied is module:
        raise WorkError("there are norms inside, and the weights are not here to be copied")
    calls: dict[nn.Module, list[tuple[Tensor, Tensor]]] = {}

    def keep(norm: nn.Module, args: tuple[Tensor, ...], output: Any) -> None:
        if len(args) != 1 or not isinstance(output, Tensor):
            raise WorkError(f"{type(norm).__name__} is no norm of one tensor")
        calls.setdefault(norm, []).append((args[0], output))

    with removed_on_leaving([norm.register_forward_hook(keep) for norm in norms]):
        send(entered)
    for norm, of_norm in calls.items():
        name = type(norm).__name__
        try:
            frozen = [FrozenNorm.verified(norm, x, output, name, EXACT) for x, output in of_norm]
        except (WorkError, RuntimeError):
            if not isinstance(norm, FunctionNorm):
                raise
            continue  # of a weight, say: the whole is verified after all
        copied.set_submodule(norms[norm], frozen[0] if len(frozen) == 1 else _InTurn(frozen))
    return send, True


def relative_error(value: Tensor, expected: Tensor) -> float:
    """Compute ‖value − expected‖_F / ‖expected‖_F."""
    difference = torch.linalg.vector_norm(value.double() - expected.double())
    return float(difference / torch.linalg.vector_norm(expected.double()).clamp_min(1e-300))
