"""The door to every other module of PyTorch: its calls of attention functions are intercepted as it runs.

A mode of PyTorch sees these calls from whichever name they were imported by, and switches the fast paths off that skip
them; attention by hand is read from its products (`by_hand.py`). The mode is on while a module of a model with an open
door runs, in whichever thread.
"""

from __future__ import annotations

import inspect
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import flex_attention
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from theodolite.attention.inputs import AttentionInputs
from theodolite.errors import UsageError
from theodolite.models.doors.answers import answered, innermost
from theodolite.models.doors.by_hand import ByHand, NotFollowed, unfolded
from theodolite.models.guard import eagerly
from theodolite.system.processor import Shared

_open_models: list[frozenset[nn.Module]] = []
"""The modules of models whose door is open."""


class _ThisThread(threading.local):
    """The mode of this thread while a module of an open model runs, and the last attention it could not follow."""

    mode: _Interception | None = None
    not_followed: tuple[nn.Module, NotFollowed] | None = None


_here = _ThisThread()


@contextmanager
def functions_door(model: nn.Module) -> Iterator[None]:
    """Open the door: intercept a model's attention functions, in compiled parts too, which run eagerly."""
    modules = frozenset(model.modules())
    with eagerly(), _HOOKS.entered():
        _open_models.append(modules)
        try:
            yield
        finally:
            _open_models.remove(modules)


@contextmanager
def _global_hooks() -> Iterator[None]:
    """Hook all modules, once for all threads: warning filters that two restore in their own order would stay."""
    with warnings.catch_warnings():
        # They fire twice for a compiled module and the one inside of it, which does no harm here.
        warnings.filterwarnings("ignore", r"Using `torch\.compile\(module\)` when there are global hooks")
        warnings.filterwarnings("ignore", r"flex_attention called without torch\.compile")
        handles = [register_module_forward_pre_hook(_enter)]
        handles.append(register_module_forward_hook(_leave, always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            _stop()  # also after an interrupt that no hook was told of


_HOOKS = Shared(_global_hooks)


def _enter(module: nn.Module, args: tuple[Any, ...]) -> None:
    if _here.mode is None and _is_open(module):
        _here.mode = _Interception()
        _here.mode.__enter__()
    if _here.mode is not None:
        _here.mode.enter(module, args)


def _leave(module: nn.Module, _args: Any, _output: Any) -> None:
    if _here.mode is not None and _here.mode.running[-1][0] is module:
        _here.mode.running.pop()
        if not _here.mode.running:
            _stop()


def _stop() -> None:
    mode, _here.mode = _here.mode, None
    if mode is not None:
        mode.__exit__(None, None, None)


def attention_not_followed() -> tuple[nn.Module, NotFollowed] | None:
    """Return the module whose attention could not be followed and where, since the last call in this thread."""
    known, _here.not_followed = _here.not_followed, None
    return known


def _is_open(module: nn.Module) -> bool:
    """Tell whether a module belongs to an open model, or is a copy of such a module that is tapped in this context."""
    models = list(_open_models)  # another thread may open one meanwhile
    if any(module in modules for modules in models):
        return True
    tap = innermost()
    return tap is not None and any(not tap.modules.isdisjoint(modules) for modules in models)


class _Interception(TorchFunctionMode):
    """Intercepts the calls of one thread while a module of an open model runs there.

    Attributes:
        running: the modules that run, the innermost last, each with whether it is given heads already.
        read: the first two dimensions of what entered first.
    """

    def __init__(self) -> None:
        super().__init__()
        self.running: list[tuple[nn.Module, bool]] = []
        self.read: tuple[int, ...] = ()
        self._masks: dict[tuple[int, ...], tuple[Tensor, Any]] = {}  # of flex_attention in this pass
        self._by_hand = ByHand()

    def enter(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Note that a module begins to run."""
        given = args[0] if args and isinstance(args[0], Tensor) else None
        if not self.read and given is not None:
            row = given.ndim < 2 or (given.ndim == 2 and given.is_floating_point())
            self.read = (1, *given.shape[:1]) if row else tuple(given.shape[:2])
        # What has no weights is given queries, keys and values that another module makes.
        reads_heads = (given is not None and given.ndim >= 4) or next(module.parameters(), None) is None
        self.running.append((module, reads_heads))

    @property
    def owner(self) -> nn.Module:
        """The module whose attention is computed now: the innermost one that is not given heads."""
        readers = (module for module, reads_heads in reversed(self.running) if not reads_heads)
        return next(readers, self.running[-1][0])

    def contexts(self, queries: int) -> int | None:
        """Return how many contexts are read, by what entered first and the number of queries, or None; of a row 1."""
        if len(self.read) < 2:
            return None
        first, second = self.read
        if 1 != first != queries == first * second:
            return 1
        return second if first == queries else first

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer calls that compute attention; follow what other functions do to logits."""
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if func is functional.scaled_dot_product_attention:
            return self.scaled_dot_product(*args, **kwargs)
        if func is functional.multi_head_attention_forward:
            return _multi_head(func, *args, **kwargs)
        if name == "flex_attention":  # the operator that the function of that name comes down to
            return self._flex(*args, **kwargs)
        attention = self._by_hand.attention(name, args, kwargs, self.contexts)
        if isinstance(attention, NotFollowed):
            if attention.weights or _here.not_followed is None:
                _here.not_followed = self.owner, attention
        elif attention is not None:
            inputs, as_product = attention
            return as_product(answered(self.owner, inputs))
        result = func(*args, **kwargs)
        self._by_hand.follow(name, args, kwargs, result)
        return result

    def scaled_dot_product(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Answer a call of `scaled_dot_product_attention`."""
        lead, mask, contexts = query.shape[:-2], attn_mask, self.contexts(query.shape[-2])
        if mask is not None:
            sizes = query.shape[-2], key.shape[-2]
            if len(lead) == 2:
                mask = mask[(None,) * (4 - mask.ndim)].expand(-1, -1, *sizes)
            else:
                mask = _of_four(mask.expand(*lead, *sizes), contexts)
        query, key, value = (_of_four(tensor, contexts) for tensor in (query, key, value))
        bias: Tensor | None = None
        if mask is not None and mask.dtype != torch.bool:
            mask, bias = None, mask
        scaling = query.shape[-1] ** -0.5 if scale is None else float(scale)
        causal = is_causal and query.shape[2] > 1
        inputs = AttentionInputs(query, key, value, scaling, causal, mask, bias=bias)
        output = answered(self.owner, inputs).transpose(1, 2)
        return output.reshape(*lead, *output.shape[-2:])

    def _flex(self, query: Tensor, key: Tensor, value: Tensor, *how: Any) -> Any:
        score_mod, block_mask, scale, kernel_options, *_ = how
        if score_mod is not flex_attention._identity:
            raise UsageError(
                f"{type(self.owner).__name__} gives flex_attention a score_mod, which is not read: hide keys by its "
                "block_mask"
            )
        mask = self._mask_of(block_mask, query, key.shape[2])
        output = answered(self.owner, AttentionInputs(query, key, value, float(scale), False, mask))
        others = (None for name in ("OUTPUT_LOGSUMEXP", "OUTPUT_MAX") if name in kernel_options)
        return output.transpose(1, 2), *others

    def _mask_of(self, block_mask: tuple[Any, ...], query: Tensor, keys: int) -> Tensor | None:
        """Build the dense mask of a block mask; once a pass where all layers are given the same."""
        mask_mod, queries = block_mask[-1], query.shape[2]
        if mask_mod is flex_attention.noop_mask:
            return None
        blocks = next(part for part in block_mask if isinstance(part, Tensor))
        place = id(mask_mod), id(blocks), queries, keys
        if place not in self._masks:
            # It has one of contexts or heads where it is that of all.
            contexts, heads = blocks.shape[:2]
            mask = flex_attention.create_mask(mask_mod, contexts, heads, queries, keys, device=query.device)
            self._masks[place] = mask, block_mask  # which must not be freed before: another might have its id
        return self._masks[place][0]


def _of_four(tensor: Tensor, contexts: int | None) -> Tensor:
    """Return queries, keys or values with separate dimensions for contexts and heads."""
    if tensor.ndim == 3:
        return tensor.reshape(*unfolded(len(tensor), contexts), *tensor.shape[1:])
    return tensor.flatten(1, -3) if tensor.ndim > 4 else tensor[(None,) * (4 - tensor.ndim)]


class _InterceptingMask(Tensor):
    """A mask that intercepts the attention call it is given to.

    `multi_head_attention_forward` asks at its beginning whether it is overridden, by a mode or by one of its tensors
    but the masks, and then calls attention in the same state. Its mask alone is asked again, in that call.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not functional.scaled_dot_product_attention:
            return super().__torch_function__(func, types, args, kwargs or {})
        query, key, value, mask, *rest = args
        assert _here.mode is not None  # it handed the function on that calls this one
        return _here.mode.scaled_dot_product(query, key, value, mask.as_subclass(Tensor), *rest)


def _multi_head(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Run PyTorch's own function with a mask that intercepts its attention; weights that are asked for are its own."""
    call = inspect.signature(func).bind(*args, **kwargs)
    call.apply_defaults()
    arguments = call.arguments
    weights = func(*args, **kwargs)[1] if arguments["need_weights"] else None
    query, key, mask = (arguments[name] for name in ("query", "key", "attn_mask"))
    mask = query.new_zeros(len(query), len(key)) if mask is None else mask
    arguments |= {"attn_mask": mask.as_subclass(_InterceptingMask), "is_causal": False, "need_weights": False}
    return func(*call.args, **call.kwargs)[0], weights
