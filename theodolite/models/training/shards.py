"""Read and differentiate weights that are spread over ranks: whole, one module at a time, by all ranks together.

Of `fully_shard` (FSDP2) and tensor parallelism the parameters are DTensors; those of ZeRO 3 are with DeepSpeed. Under
tensor parallelism a rank has whole heads: its matrices stay its own, and what it taps is joined.
"""

from __future__ import annotations

import copy
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeGuard

import torch
from torch import Tensor, distributed, nn

from theodolite.attention.inputs import AttentionInputs
from theodolite.errors import UsageError

if distributed.is_available():
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

ParameterPlace = tuple[nn.Module, str]
"""Where a parameter is: a module, and the name under which it holds it."""

_Tap = Callable[[nn.Module, AttentionInputs], Tensor]

_head_groups: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()
"""Of every module of a tensor-parallel model its process group."""

_has_own_heads: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()
"""Of attention modules and those inside of them, whether each rank computes some of the heads."""


def is_dtensor(tensor: Any) -> TypeGuard[DTensor]:
    """Tell whether a tensor is a DTensor, which says how it is spread."""
    return distributed.is_available() and isinstance(tensor, DTensor)


def is_part(parameter: Tensor) -> bool:
    """Tell whether a rank holds, or may hold, a part of a parameter."""
    return is_dtensor(parameter) or hasattr(parameter, "ds_id")


def is_spread(model: nn.Module) -> bool:
    """Tell whether weights are spread over ranks: all must then run the model, and read its weights, together."""
    return any(map(is_part, model.parameters()))


def register_spread(outermost: nn.Module) -> None:
    """Learn how a model's weights are spread, on all ranks; `UsageError` of FSDP1."""
    if not distributed.is_available() or not distributed.is_initialized():
        return
    if any(isinstance(module, FullyShardedDataParallel) for module in outermost.modules()):
        raise UsageError(
            "FullyShardedDataParallel (FSDP1) keeps weights in flat tensors, which are not read: shard the model with "
            "fully_shard (FSDP2)"
        )
    group = _parallel_group(outermost)
    for module in outermost.modules() if group is not None else ():
        _head_groups[module] = group


def parallel_group(model: nn.Module) -> Any:
    """Return the process group whose ranks run a model on the same contexts, tensor parallel, or None."""
    return _head_groups.get(model)


def head_group(module: nn.Module) -> Any:
    """Return the group of an attention module, or a part of it, of which each rank has some of the heads; or None."""
    return _head_groups.get(module) if _has_own_heads.get(module) else None


def _parallel_group(model: nn.Module) -> Any:
    """Find the tensor-parallel group: of parameters that are DTensors still after FSDP2 has gathered its own."""
    sharded = _sharded(model)
    if not sharded:
        return _split(model.parameters())
    for module in sharded:
        if any(p.device_mesh.ndim > 1 for p in _own_parameters(module)):
            module.unshard()
            group = _split(_own_parameters(module))
            module.reshard()
            if group is not None:
                return group
    return None


def _own_parameters(module: nn.Module) -> list[DTensor]:
    """List the DTensors of a module, without those of modules inside that FSDP2 gathers apart."""
    own = [p for p in module.parameters(recurse=False) if is_dtensor(p)]
    inside = (child for child in module.children() if not isinstance(child, FSDPModule))
    return own + [p for child in inside for p in _own_parameters(child)]


def _split(parameters: Iterable[Tensor]) -> Any:
    """Find the group over which the first DTensor that not all ranks have whole is split, or None."""
    spread = (p for p in parameters if is_dtensor(p) and not all(of.is_replicate() for of in p.placements))
    return next((p.device_mesh.get_group() for p in spread), None)


def gathering_entry(outermost: nn.Module, inner: nn.Module) -> nn.Module | None:
    """Return the module whose call gathers the weights: the outermost of FSDP, else the model; None: any part."""
    around = next((module for module in _sharded(outermost) if inner in module.modules()), None)
    gathers = _sharded(inner) or any(hasattr(p, "ds_id") for p in inner.parameters())
    return around if around is not None else inner if gathers else None


@contextmanager
def as_sharded(model: nn.Module) -> Iterator[None]:
    """Shard again, on leaving, what FSDP2 had sharded: it keeps the root's weights after a pass."""
    try:
        yield
    finally:
        for module in _sharded(model):
            module.reshard()


@contextmanager
def gathered(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Let ZeRO 3 make the parameters of some modules whole while open. To be called by all ranks."""
    of_zero = [p for module in modules for p in module.parameters(recurse=False) if hasattr(p, "ds_id")]
    if not of_zero:
        yield
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters(of_zero):
        yield


def of_own_heads(tensor: Tensor, module: nn.Module) -> Tensor:
    """Make a DTensor whole, but for heads of other ranks, differentiably; other tensors are returned as they are."""
    if not is_dtensor(tensor):
        return tensor
    mesh, ranks_of, group = tensor.device_mesh, distributed.get_process_group_ranks, head_group(module)
    dimensions = range(mesh.ndim if group is not None else 0)
    over_heads = {dim for dim in dimensions if ranks_of(mesh.get_group(dim)) == ranks_of(group)}
    placements = [p if dim in over_heads else Replicate() for dim, p in enumerate(tensor.placements)]
    # Keys that all heads share have their gradient from all of them.
    of_gradient = [
        Partial() if dim in over_heads and p.is_replicate() else p for dim, p in enumerate(placements)
    ]
    return tensor.redistribute(placements=placements).to_local(grad_placements=of_gradient)


def whole_copy(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Copy a module with whole weights (those of this rank's heads, in `memo`), which gathers none as it runs.

    FSDP2's class of a module refuses to be copied: its state is copied into an empty one of its class before.
    """
    sharded = _sharded(module)
    for child in sharded:
        kind: Any = next(kind for kind in type(child).__mro__[1:] if not issubclass(kind, FSDPModule))
        memo[id(child)] = kind.__new__(kind)
    for child in module.modules():
        for name, value in vars(child).items():
            if name.endswith("_hooks") and any(map(_is_foreign, value.values())):
                own = ((key, hook) for key, hook in value.items() if not _is_foreign(hook))
                memo[id(value)] = OrderedDict(own)
            elif name.startswith("__composable_api"):
                memo[id(value)] = value
    for child in sharded:
        memo[id(child)].__setstate__(copy.deepcopy(vars(child), memo))
    copied = copy.deepcopy(module, memo)
    for child in copied.modules():
        if _is_foreign(vars(child).get("forward")):
            del child.forward
    if module in _has_own_heads:
        _has_own_heads[copied] = _has_own_heads[module]
    return copied


def _sharded(model: nn.Module) -> list[Any]:
    """List the modules of a model that FSDP2 has sharded."""
    return [m for m in model.modules() if distributed.is_available() and isinstance(m, FSDPModule)]


def _is_foreign(function: Any) -> bool:
    """Tell whether a function gathers weights around a module's own `forward`."""
    while inner := getattr(function, "func", None) or getattr(function, "hook", None):
        function = inner
    return (getattr(function, "__module__", None) or "").startswith(
        ("torch.distributed", "transformers.distributed", "deepspeed")
    )


def of_all_heads(model: nn.Module, tap: _Tap) -> _Tap:
    """Wrap a tap: it gets the heads of all ranks where they are spread; this rank keeps its part of the output."""
    group = parallel_group(model)
    if group is None:
        return tap

    def gathering(module: nn.Module, inputs: AttentionInputs) -> Tensor:
        mesh = inputs.query.device_mesh if is_dtensor(inputs.query) else None
        local: dict[str, Any] = {
            name: tensor.to_local()
            for name in ("query", "key", "value", "mask", "bias", "sink")
            if is_dtensor(tensor := getattr(inputs, name))
        }
        inputs = replace(inputs, **local)
        if module not in _has_own_heads:
            # Ranks that compute the same attention have the same queries.
            sums = joined_heads(inputs.query.double().sum().reshape(1), group)
            split = bool((sums != sums[0]).any())
            _has_own_heads.update((child, split) for child in module.modules())
        if not _has_own_heads[module]:
            return tap(module, inputs)
        own = inputs.query.shape[1]
        output = tap(module, _joined(inputs, group))
        mine = output.unflatten(2, (-1, own))[:, :, distributed.get_rank(group)]
        return mine if mesh is None else DTensor.from_local(mine, mesh, [Shard(2)], run_check=False)

    return gathering


def joined_heads(tensor: Tensor, group: Any, dimension: int = -1) -> Tensor:
    """Concatenate what each rank of a group has of its heads; without a group, return the tensor."""
    if group is None:
        return tensor
    sent = tensor.to(torch.uint8) if tensor.dtype == torch.bool else tensor.contiguous()
    parts = [torch.empty_like(sent) for _ in range(distributed.get_world_size(group))]
    distributed.all_gather(parts, sent, group=group)
    return torch.cat(parts, dim=dimension).to(tensor.dtype)


def _joined(inputs: AttentionInputs, group: Any) -> AttentionInputs:
    heads, names = inputs.query.shape[1], ["query", "key", "value"]
    of_pairs = [name for name in ("mask", "bias") if getattr(inputs, name) is not None]
    names += [name for name in of_pairs if getattr(inputs, name).shape[1] == heads]
    joined: dict[str, Any] = {name: joined_heads(getattr(inputs, name), group, 1) for name in names}
    sink = None if inputs.sink is None else joined_heads(inputs.sink, group, 0)
    return replace(inputs, **joined, sink=sink)


GradientShard = tuple[Tensor, Tensor]
"""A parameter, and a rank's shard of its gradient; with DeepSpeed all of it."""


def add_to_gradient(parameter: Tensor, gradient: Tensor) -> None:
    """Add to the gradient that the optimizer reads: of DeepSpeed after a backward pass only."""
    if is_of_deepspeed(parameter):
        from deepspeed.utils import safe_get_full_grad, safe_set_full_grad

        before = safe_get_full_grad(parameter)
        safe_set_full_grad(parameter, before + gradient.to(before.dtype))
    elif parameter.grad is None:
        parameter.grad = gradient.to(parameter.dtype)
    else:
        parameter.grad += gradient.to(parameter.dtype)


def is_of_deepspeed(parameter: Tensor) -> bool:
    """Tell whether the optimizer of DeepSpeed keeps the gradient of a parameter."""
    return hasattr(parameter, "ds_id") or hasattr(parameter, "_hp_mapping")


def check_deepspeed_has_gradients(model: nn.Module) -> None:
    """Raise `UsageError` where DeepSpeed will not step by gradients that are added now: before a backward pass, say."""
    for parameter in model.parameters():
        if (zero3 := getattr(parameter, "_z3_optimizer", None)) is not None:
            offloaded, gradients = zero3.offload_optimizer, zero3.averaged_gradients
        # Of ZeRO 1 and 2 a rank has one where it steps the parameter: some of them, and not the same as other ranks.
        elif (mapping := getattr(parameter, "_hp_mapping", None)) is not None:
            offloaded, gradients = mapping.use_offload, mapping.gradient_dict
        else:
            continue
        if offloaded or any(group is not None for group in gradients.values()):
            return  # with the optimizer on the CPU they are always there
        raise UsageError(
            "DeepSpeed has gradients between engine.backward(loss) and engine.step() only: call add_gradient() there, "
            "also with accelerate, whose backward() does both"
        )


class GatheredParameters:
    """Replaces the parameters of some modules by whole ones while `gathering` is open."""

    def __init__(self, places: Iterable[ParameterPlace]) -> None:
        self._places = list(dict.fromkeys(places))
        # FSDP2 puts others in their place between a forward pass and its backward one.
        self._dtensors = {
            (module, name): p for module, name in self._places if is_dtensor(p := module._parameters[name])
        }
        self._leaves: list[tuple[Tensor, Tensor]] = []

    @property
    def are_dtensors(self) -> bool:
        """True if all of the parameters are DTensors."""
        return len(self._dtensors) == len(self._places)

    @contextmanager
    def gathering(self) -> Iterator[None]:
        """Make the modules' parameters whole while open. To be opened and left by all ranks."""
        with gathered(dict.fromkeys(module for module, _ in self._places)):
            held: list[Any] = [module._parameters[name] for module, name in self._places]
            self._leaves = []
            try:
                with torch.enable_grad():
                    for (module, name), parameter in zip(self._places, held, strict=True):
                        parameter = leaf = self._dtensors.get((module, name), parameter)
                        if not is_dtensor(leaf):  # DeepSpeed must not see that its own is differentiated
                            leaf = parameter.detach().requires_grad_(parameter.requires_grad)
                        module._parameters[name] = of_own_heads(leaf, module)  # type: ignore[assignment]
                        self._leaves.append((parameter, leaf))
                yield
            finally:
                for (module, name), parameter in zip(self._places, held, strict=True):
                    module._parameters[name] = parameter

    def gradients(self, value: Tensor) -> list[GradientShard]:
        """Differentiate a value while the parameters are gathered, by those that are trained."""
        trained = [(parameter, leaf) for parameter, leaf in self._leaves if leaf.requires_grad]
        gradients = torch.autograd.grad(value, [leaf for _, leaf in trained]) if trained else ()
        return [(parameter, gradient) for (parameter, _), gradient in zip(trained, gradients, strict=True)]
