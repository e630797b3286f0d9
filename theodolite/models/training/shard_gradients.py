"""Gradients of whole matrices, brought to where each rank's optimizer reads its part.

`WholeParameters` are gathered, differentiated, and forgotten; a `Part` of their gradient is what a rank keeps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, distributed, nn

from theodolite.errors import UsageError
from theodolite.models.training.shards import Place, dimensions_of_heads, gathered, is_dtensor, of_own_heads

if distributed.is_available():
    from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class Part:
    """This rank's part of the gradient of one parameter.

    Attributes:
        parameter: whose it is.
        gradient: of this rank's part; with DeepSpeed of all of it.
    """

    parameter: Tensor
    gradient: Tensor

    @classmethod
    def of(cls, module: nn.Module, parameter: Tensor, gradient: Tensor) -> Part:
        """Of a gradient of all of it (of this rank's heads), while it is gathered; the module holds the parameter."""
        if is_dtensor(parameter):
            gradient = _shard_of(gradient, parameter, module)
        return cls(parameter, gradient)

    def times(self, factor: float | Tensor) -> Part:
        """The same, multiplied."""
        gradient = self.gradient
        if is_dtensor(gradient):
            return replace(self, gradient=_like(gradient.to_local() * factor, gradient))
        return replace(self, gradient=gradient * factor)

    def add(self) -> None:
        """Add it to the gradient that the optimizer reads: before a backward pass, or (DeepSpeed: only) after it."""
        parameter = self.parameter
        if is_of_deepspeed(parameter):
            from deepspeed.utils import safe_get_full_grad, safe_set_full_grad

            before = safe_get_full_grad(parameter)
            safe_set_full_grad(parameter, before + self.gradient.to(before.dtype))
        elif parameter.grad is None:
            parameter.grad = self.gradient.to(parameter.dtype)
        else:
            parameter.grad += self.gradient.to(parameter.dtype)


def is_of_deepspeed(parameter: Tensor) -> bool:
    """Whether the optimizer of DeepSpeed keeps the gradient of a parameter."""
    return hasattr(parameter, "ds_id") or hasattr(parameter, "_hp_mapping")


def check_deepspeed_has_gradients(model: nn.Module) -> None:
    """See that DeepSpeed, if it trains a model, will step by what is added to its gradients now.

    Not where it keeps its optimizer on the CPU: these gradients are always there.

    Raises:
        UsageError: there are none, as before a backward pass and after a step.
    """
    for parameter in model.parameters():
        if (zero3 := getattr(parameter, "_z3_optimizer", None)) is not None:
            offloaded, gradients = zero3.offload_optimizer, zero3.averaged_gradients
        # Of ZeRO 1 and 2 a rank has one where it steps the parameter: some of them, and not the same as other ranks.
        elif (mapping := getattr(parameter, "_hp_mapping", None)) is not None:
            offloaded, gradients = mapping.use_offload, mapping.gradient_dict
        else:
            continue
        if offloaded or any(group is not None for group in gradients.values()):
            return
        raise UsageError(
            "DeepSpeed has gradients between engine.backward(loss) and engine.step() only: call add_gradient() there, "
            "also with accelerate, whose backward() does both"
        )


class WholeParameters:
    """The parameters of some places, whole, while `gathering` is open: plain leaves that the modules then have."""

    def __init__(self, places: Iterable[Place]) -> None:
        self._places = list(dict.fromkeys(places))
        # FSDP2 puts others in their place between a forward pass and its backward one.
        self._dtensors = {
            (module, name): p for module, name in self._places if is_dtensor(p := module._parameters[name])
        }
        self._own: list[Tensor] = []
        self.leaves: list[nn.Parameter] = []

    @property
    def dtensors(self) -> list[Any]:
        """Those of the places, where all of them are."""
        return list(self._dtensors.values()) if len(self._dtensors) == len(self._places) else []

    @contextmanager
    def gathering(self) -> Iterator[None]:
        """To be opened and left by all ranks."""
        with gathered(dict.fromkeys(module for module, _ in self._places)):
            held: list[Any] = [module._parameters[name] for module, name in self._places]
            self._own = [self._dtensors.get(place, p) for place, p in zip(self._places, held, strict=True)]
            owned = zip(self._places, self._own, strict=True)
            self.leaves = [
                nn.Parameter(of_own_heads(p.detach(), module), requires_grad=p.requires_grad)
                for (module, _), p in owned
            ]
            try:
                self._put(self.leaves)
                yield
            finally:
                self._put(held)

    def _put(self, parameters: Iterable[Any]) -> None:
        for (module, name), parameter in zip(self._places, parameters, strict=True):
            module._parameters[name] = parameter

    def parts(self, value: Tensor) -> list[Part]:
        """This rank's of the gradients of a value, as long as they are gathered, for what is trained."""
        trained = [leaf for leaf in self.leaves if leaf.requires_grad]
        owned = zip(self._places, self._own, self.leaves, strict=True)
        holders = [(module, parameter) for (module, _), parameter, leaf in owned if leaf.requires_grad]
        gradients = torch.autograd.grad(value, trained) if trained else ()
        return [
            Part.of(module, parameter, gradient)
            for (module, parameter), gradient in zip(holders, gradients, strict=True)
        ]


def _shard_of(gradient: Tensor, parameter: DTensor, module: nn.Module) -> DTensor:
    """A gradient of this rank's heads as that of a DTensor."""
    mesh, over_heads = parameter.device_mesh, dimensions_of_heads(parameter.device_mesh, module)
    placement: Any
    for dimension, placement in enumerate(parameter.placements):
        if dimension in over_heads:
            if placement.is_replicate():  # keys that all heads share
                distributed.all_reduce(gradient, group=mesh.get_group(dimension))
        elif not placement.is_replicate():
            pieces = gradient.chunk(mesh.size(dimension), placement.dim)
            rank = mesh.get_local_rank(dimension)
            gradient = pieces[rank] if rank < len(pieces) else gradient.narrow(placement.dim, 0, 0)
    return _like(gradient.contiguous(), parameter)


def _like(local: Tensor, dtensor: DTensor) -> DTensor:
    """This rank's part of what is spread as another."""
    return DTensor.from_local(
        local,
        dtensor.device_mesh,
        dtensor.placements,
        run_check=False,
        shape=dtensor.shape,
        stride=dtensor.stride(),
    )
