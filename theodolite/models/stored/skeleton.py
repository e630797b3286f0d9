"""A model without its weights: everything that its config decides, before one tensor of the checkpoint is read.

Its parameters are on the meta device, which holds shapes and no numbers; the buffers that it computes by itself (angles
of rotary positions) are there. To see who calls the attention, and with what, a forward pass is run while each
parameter is one row repeated (stride 0), which takes no memory whatever the shape. No checkpoint is known here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from theodolite.models.guard import MAKING


def build_skeleton(model: PreTrainedModel) -> PreTrainedModel:
    """A model that is on the meta device, as `from_pretrained` has it before it loads a tensor; it is changed."""
    model.config._experts_implementation = "eager"  # the others take no matrices with rows repeated
    for parameter in model.parameters():
        parameter._is_hf_initialized = True  # type: ignore[attr-defined]  # so that buffers only are computed
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.zeros_like(buffer, device="cpu")
    with MAKING:
        model.initialize_weights()
    return model.eval().requires_grad_(False)


@contextmanager
def filled_with_rows(model: nn.Module, scale: float) -> Iterator[None]:
    """While open, every tensor that a checkpoint holds is one row repeated, of numbers up to `scale`; 0 gives zeros."""
    filled_with: dict[Tensor, Tensor] = {}  # parameters that are tied stay so
    stored = stored_tensors(model)
    for tensors, name, tensor in stored:
        tensors[name] = filled_with.setdefault(tensor, _repeated(tensor, scale))
    try:
        with _OneRow():
            yield
    finally:
        restore_tensors(stored)


StoredTensor = tuple[dict[str, Any], str, Tensor]
"""Where a module has a tensor: its dictionary, the name in it, and what is there."""


def stored_tensors(module: nn.Module) -> list[StoredTensor]:
    """The parameters of a module, and those of its buffers that checkpoints hold, if they are floating-point."""
    return [
        (tensors, name, tensor)
        for child in module.modules()
        for tensors, computed in (
            (child._parameters, set()),
            (child._buffers, child._non_persistent_buffers_set),
        )
        for name, tensor in tensors.items()
        if tensor is not None and name not in computed and tensor.is_floating_point()
    ]


def restore_tensors(stored: list[StoredTensor]) -> None:
    """Let the modules have the tensors again that `stored_tensors` found."""
    for tensors, name, tensor in stored:
        tensors[name] = tensor


def _repeated(tensor: Tensor, scale: float) -> Tensor:
    # Cosines: norms would take a constant out.
    row = scale * torch.arange(tensor.shape[-1] if tensor.ndim else 1).cos()
    filled = row.to(tensor.dtype).expand(tensor.shape) if tensor.ndim else row[0].to(tensor.dtype)
    return nn.Parameter(filled, requires_grad=False) if isinstance(tensor, nn.Parameter) else filled


class _OneRow(TorchFunctionMode):
    """Products with a matrix that is one row repeated: the first output is computed, and repeated.

    BLAS would copy the matrix to where its rows have places of their own, which for the largest takes long.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute one output of `linear` where all rows of the weight are the same."""
        kwargs = kwargs or {}
        if func is functional.linear and len(args) >= 2 and args[1].ndim == 2 and not args[1].stride(0):
            row = functional.linear(args[0], args[1][:1])
            bias = args[2] if len(args) > 2 else kwargs.get("bias")
            rows = row.expand(*row.shape[:-1], len(args[1]))
            return rows.clone() if bias is None else rows + bias
        return func(*args, **kwargs)
