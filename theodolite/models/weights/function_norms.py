"""Norms that a module calls as functions of PyTorch, made modules of their own: found, taken out and frozen as these.

A function that is called by a norm which is a module is none of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

FUNCTIONS = frozenset({functional.layer_norm, functional.rms_norm, functional.normalize})


class FunctionNorm(nn.Module):
    """A call of such a function: the same of another tensor, in the dtype of that."""

    def __init__(
        self, function: Callable[..., Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        super().__init__()
        self._function = function
        self.told(args, kwargs)

    def told(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Be the norm of another call."""
        self._args, self._kwargs = args, kwargs

    def forward(self, x: Tensor) -> Tensor:
        """The norm."""

        def given(value: Any) -> Any:
            return value.to(x.device, x.dtype) if isinstance(value, Tensor) else value

        args, kwargs = map(given, self._args), {name: given(value) for name, value in self._kwargs.items()}
        return self._function(x, *args, **kwargs)


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


def make_norms_modules(module: nn.Module, norms: Iterable[nn.Module]) -> None:
    """From its next pass on, each such call in a copy of a module is one of a module in it, by its turn."""
    turns = _Turns(module)
    for norm in norms:
        norm.register_forward_pre_hook(turns.enter)
        norm.register_forward_hook(turns.leave, always_call=True)
    module.forward = functools.partial(turns.run, module.forward)


class _Turns:
    def __init__(self, module: nn.Module) -> None:
        self._module, self._turn, self._inside = module, 0, 0

    def enter(self, *_: Any) -> None:
        self._inside += 1

    def leave(self, *_: Any) -> None:
        self._inside -= 1

    def run(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._turn = self._inside = 0
        with NormCalls(self._answer):
            return forward(*args, **kwargs)

    def _answer(self, function: Callable[..., Tensor], x: Tensor, args: Any, kwargs: Any) -> Tensor:
        if self._inside:
            return function(x, *args, **kwargs)
        name = f"function_norm_{self._turn}"
        self._turn += 1
        if name not in self._module._modules:
            self._module.add_module(name, FunctionNorm(function, args, kwargs))
        norm = self._module.get_submodule(name)
        if isinstance(norm, FunctionNorm):
            norm.told(args, kwargs)
        return norm(x)
