"""The door to every other module of PyTorch: the functions that it attends with are heard while it runs.

`scaled_dot_product_attention`, `MultiheadAttention` and `flex_attention` hand over queries, keys, values and masks
as they are; attention that a module computes by hand is read from its products (`by_hand.py`). A mode of PyTorch sees
these calls from whichever name they were imported by, and switches the fast paths off that skip them. It is there while
a module of a turned model runs, in whichever thread; whoever attends is the innermost module that runs and reads no
heads.
"""

from __future__ import annotations

import inspect
import math
import sys
import threading
import types
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from theodolite.attention.inputs import AttentionInputs
from theodolite.errors import UsageError
from theodolite.models.doors.answers import answered, innermost_tapped
from theodolite.models.doors.by_hand import ByHand

_turned: dict[nn.Module, frozenset[nn.Module]] = {}
"""The models that are turned to this door, and their modules."""


class _ThisThread(threading.local):
    """The modules that run, the innermost last, and the mode that hears them."""

    def __init__(self) -> None:
        self.running: list[tuple[nn.Module, bool]] = []
        self.mode: _Hearing | None = None

    @property
    def owner(self) -> nn.Module:
        """Whose attention it is that is computed now: of the innermost module that reads no heads already."""
        readers = (module for module, reads_heads in reversed(self.running) if not reads_heads)
        return next(readers, self.running[-1][0])

    def enter(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if not self.running:
            if not _is_turned(module):
                return
            self.mode = _Hearing(self)
            self.mode.__enter__()
        given = args[0] if args else None
        self.running.append((module, isinstance(given, Tensor) and given.ndim >= 4))

    def leave(self, module: nn.Module) -> None:
        if self.running and self.running[-1][0] is module:
            self.running.pop()
            if not self.running:
                self.stop()

    def stop(self) -> None:
        """Hear no more, also after an interrupt that no hook was told of."""
        self.running.clear()
        if self.mode is not None:
            mode, self.mode = self.mode, None
            mode.__exit__(None, None, None)


_here = _ThisThread()


def turn_to_functions(model: nn.Module) -> ExitStack:
    """Let a model's calls of PyTorch's attention be heard; what ends it."""
    with ExitStack() as undo:
        if "torch.nn.attention.flex_attention" in sys.modules or "torch._dynamo" in sys.modules:
            # What is compiled is not heard; flex_attention compiles itself.
            import torch._dynamo

            undo.enter_context(torch.compiler.set_stance("force_eager"))
        with _turning:
            if not _turned:
                _hooks.append(register_module_forward_pre_hook(_here.enter))
                _hooks.append(register_module_forward_hook(_leave, always_call=True))
            _turned[model] = frozenset(model.modules())
        undo.callback(_turn_back, model)
        return undo.pop_all()


_hooks: list[Any] = []
_turning = threading.Lock()


def _leave(module: nn.Module, _args: Any, _output: Any) -> None:
    _here.leave(module)


def _turn_back(model: nn.Module) -> None:
    with _turning:
        del _turned[model]
        if _turned:  # one of them may be running around this one
            return
        while _hooks:
            _hooks.pop().remove()
    _here.stop()


def _is_turned(module: nn.Module) -> bool:
    """Whether a module is of a turned model, or a copy of one of its modules that is looked at in this context."""
    turned = list(_turned.values())  # another thread may turn one meanwhile
    if any(module in modules for modules in turned):
        return True
    looked_at = innermost_tapped()
    return any(not looked_at.isdisjoint(modules) for modules in turned)


class _Hearing(TorchFunctionMode):
    """Hears the calls of one thread while modules run there."""

    def __init__(self, here: _ThisThread) -> None:
        super().__init__()
        self._here = here
        self._by_hand = ByHand()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer what attends, and follow what leads there."""
        kwargs = kwargs or {}
        hear = _HEARD.get(func) or (_hear_flex_attention if getattr(func, "__name__", "") == FLEX else None)
        if hear is not None:
            return hear(self._here.owner, func, *args, **kwargs)
        name = getattr(func, "__name__", "")
        attention = self._by_hand.attention(name, args, kwargs)
        if attention is not None:
            inputs, as_product = attention
            return as_product(answered(self._here.owner, inputs))
        result = func(*args, **kwargs)
        self._by_hand.follow(name, args, kwargs, result)
        return result


def _hear_scaled_dot_product(
    owner: nn.Module,
    _func: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    lead, mask = query.shape[:-2], attn_mask
    if mask is not None:
        mask = mask[(None,) * (query.ndim - mask.ndim)]
    query, key, value = (_of_four(tensor) for tensor in (query, key, value))
    if mask is not None:
        mask = _of_four(mask).expand(-1, -1, query.shape[2], key.shape[2])
    boolean = mask is not None and mask.dtype == torch.bool
    inputs = AttentionInputs(
        query=query,
        key=key,
        value=value,
        scaling=query.shape[-1] ** -0.5 if scale is None else float(scale),
        causal=is_causal and query.shape[2] > 1,
        mask=mask if boolean else None,
        bias=None if boolean else mask,
    )
    output = answered(owner, inputs).transpose(1, 2)
    return output.reshape(*lead, *output.shape[-2:])


def _of_four(tensor: Tensor) -> Tensor:
    """With contexts and heads; of three dimensions, the first is that of contexts."""
    if tensor.ndim == 3:
        return tensor.unsqueeze(1)
    return tensor[(None,) * (4 - tensor.ndim)]


def _hear_multi_head(owner: nn.Module, func: Any, *args: Any, **kwargs: Any) -> Any:
    """PyTorch's own function, by a copy of it whose attention is heard; weights that are asked for are its own."""
    asked = inspect.signature(func).bind(*args, **kwargs)
    asked.apply_defaults()
    weights = func(*args, **kwargs)[1] if asked.arguments["need_weights"] else None

    def attend(*args: Any, **kwargs: Any) -> Tensor:
        return _hear_scaled_dot_product(owner, None, *args, **kwargs)

    names = {
        **func.__globals__,
        "scaled_dot_product_attention": attend,
        "has_torch_function": lambda _: False,
    }
    heard = types.FunctionType(func.__code__, names, func.__name__, func.__defaults__, func.__closure__)
    asked.arguments["need_weights"] = False
    return heard(*asked.args, **asked.kwargs)[0], weights


FLEX = "flex_attention"
"""The name of the operator that `torch.nn.attention.flex_attention` comes down to."""


def _hear_flex_attention(
    owner: nn.Module,
    func: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Tensor],
    block_mask: tuple[Any, ...],
    scale: float,
    *rest: Any,
    **kwargs: Any,
) -> Any:
    from torch.nn.attention.flex_attention import create_mask, noop_mask

    (batch, heads, queries, _), keys = query.shape, key.shape[2]
    mask_mod = block_mask[-1]
    mask = None
    if mask_mod is not noop_mask:
        mask = create_mask(mask_mod, batch, heads, queries, keys, device=query.device)
    _, *statistics = func(query, key, value, score_mod, block_mask, scale, *rest, **kwargs)
    inputs = AttentionInputs(
        query=query,
        key=key,
        value=value,
        scaling=float(scale),
        causal=False,
        mask=mask,
        bias=_added_by(score_mod, owner, (batch, heads, queries, keys), query),
    )
    return answered(owner, inputs).transpose(1, 2), *statistics


def _added_by(score_mod: Callable[..., Tensor], owner: nn.Module, shape: Any, like: Tensor) -> Tensor | None:
    """The bias that a `score_mod` adds; None where it adds nothing.

    Raises:
        UsageError: it does something else to the logits.
    """
    dtype = torch.promote_types(like.dtype, torch.float32)
    places = [torch.arange(size, device=like.device) for size in shape]

    def modified(score: float) -> Tensor:
        grids = torch.meshgrid(*places, indexing="ij")
        flat = [torch.full((math.prod(shape),), score, dtype=dtype, device=like.device)]
        flat += [grid.flatten() for grid in grids]
        return torch.vmap(score_mod)(*flat).view(*shape)

    bias, moved = modified(0.0), modified(2.5)
    if not torch.allclose(moved - bias, torch.full_like(bias, 2.5), rtol=0, atol=1e-5):
        raise UsageError(
            f"{type(owner).__name__} gives flex_attention a score_mod that does more than add a bias to the logits: "
            "it cannot be read"
        )
    return bias if bias.any() else None


_HEARD: dict[Any, Callable[..., Any]] = {
    functional.scaled_dot_product_attention: _hear_scaled_dot_product,
    functional.multi_head_attention_forward: _hear_multi_head,
}
