"""Quantised layers as plain ones: the matrix of a layer, read from what the layer answers. No quantiser is known here.

A quantised linear layer answers e_i with column i of its W, in the rounding of its own arithmetic: activations, where
they are rounded too, have a grid of their own largest, on which zeros and ones lie (up to half a step of 127). Zeros
and ones of several sizes, and random rows, tell whether there is a matrix: with a fixed grid of activations (static
scales) or fewer than eight bits there is none.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from jaxtyping import Float64
from torch import Tensor, nn

from theodolite.errors import WorkError
from theodolite.models.training.shards import is_dtensor

FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Of safetensors, those that are weights as they are; others wait for what a quantiser does to them."""

SCALE = re.compile(r"[._](scales?(_inv|_\d+)?|SCB|scb|zero_points?|q?zeros|g_idx|absmax|quant_map|amax)$")
"""What a quantiser keeps beside a weight."""

WHAT_TO_DO = "give a dequantised copy (bfloat16 or float32)"

EXACT = 2**-6
"""Relative error, in the norm, of answers to zeros and ones: roundings to bfloat16 (2⁻⁹) and half a step of 127."""

Answer = Callable[[Tensor], Float64[Tensor, "rows outputs"]]
"""What a layer makes of rows, without its bias."""


def quantised_layers(module: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the quantised submodules with their names, outermost first."""
    if is_quantised(module):
        yield name, module
        return
    for inner, child in module.named_children():
        yield from quantised_layers(child, f"{name}.{inner}" if name else inner)


def holds_quantised_layers(model: nn.Module) -> bool:
    """Tell whether a model has quantised layers."""
    return next(quantised_layers(model), None) is not None


def is_quantised(module: nn.Module) -> bool:
    """Tell whether the module has a weight of no float type or of its own class, or is linear with scales."""
    held = [*module._parameters.items(), *module._buffers.items()]
    tensors = {key: tensor for key, tensor in held if tensor is not None}
    # Scales of other names (`embed_scale`, `logit_scale`) are a model's own.
    of_weights = ("", ".weight", ".input")
    scales = {key for key in tensors if SCALE.search("." + key) and SCALE.sub("", "." + key) in of_weights}
    weights = {key for key in tensors if key in module._parameters or "weight" in key} - scales
    matrices = {key for key in weights if tensors[key].ndim > 1}
    no_packing = (*FLOATS.values(), torch.bool, torch.int64)  # of weights, masks and indices
    has_own_classes = any(has_own_class(tensors[key]) for key in weights)
    if has_own_classes or any(tensors[key].dtype not in no_packing for key in matrices):
        return True
    is_linear = isinstance(getattr(module, "in_features", None), int)
    return is_linear and bool(scales) and any("weight" in key for key in matrices)


def has_own_class(tensor: Tensor) -> bool:
    """Tell whether operations on the tensor are its class's to define (torchao, quanto)."""
    return type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__ and not is_dtensor(tensor)


def dequantised(name: str, layer: nn.Module) -> nn.Linear:
    """Make a plain layer in float64 that computes what the quantised one does, or raise `WorkError`."""
    width = getattr(layer, "in_features", None)
    if not isinstance(width, int):
        raise _unreadable(name, layer, "it does not say how wide its input is")
    bias = layer._parameters.get("bias", layer._buffers.get("bias"))
    held = "_parameters" if "bias" in layer._parameters else "_buffers"
    tensors = getattr(layer, held)  # in a mapping of any kind
    # Without the bias, which would round the layer's answers.
    setattr(layer, held, {key: None if key == "bias" else tensor for key, tensor in tensors.items()})
    try:
        answer = _answers(name, layer, width)
        weight = next((each for each in _matrices(layer, width, answer) if _explains(each, answer)), None)
    finally:
        setattr(layer, held, tensors)
    if weight is None:
        why = "its answers do not add up, as where activations are rounded to a fixed grid"
        raise _unreadable(name, layer, why)
    plain = nn.Linear(width, len(weight), bias=False, device="meta", dtype=torch.float64)
    plain.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        plain.bias = nn.Parameter(bias.detach().to(weight), requires_grad=False)
    return plain.eval()


def _matrices(layer: nn.Module, width: int, answer: Answer) -> Iterator[Float64[Tensor, "outputs width"]]:
    """Yield the layer's own W, free of the rounding of its answers, where it has one; and W by its answers to e_i."""
    own = getattr(layer, "weight", None)
    if isinstance(own, Tensor):
        with torch.inference_mode(False), torch.no_grad():
            own = own.dequantize() if has_own_class(own) else own.detach()
        if own.dtype in FLOATS.values() and own.shape[1:] == (width,):
            yield own.double()
    identity = torch.eye(width, dtype=torch.float64)
    yield torch.cat([answer(rows) for rows in identity.split(1024)]).T.contiguous()


def _explains(weight: Float64[Tensor, "outputs width"], answer: Answer) -> bool:
    """Tell whether the answers to zeros and ones, and to random rows, of several sizes are these times the weight."""
    normal = torch.randn(4, weight.shape[1], generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    # Of random rows int8 rounds by 1 % of their root mean square and float8_e4m3 by 3 %; four bits by 9 % or more.
    for rows, error in (((normal > 0).double(), EXACT), (normal, 2**-4)):
        expected = rows.to(weight.device) @ weight.T
        # A fixed grid rounds sizes differently; none is above one, which more of the fixed ranges would cut.
        for size in (1.0, 0.7, 1 / 3):
            answers = answer(size * rows) / size
            if answers.shape != expected.shape:
                return False
            off = torch.linalg.vector_norm(answers - expected)
            if not off <= error * torch.linalg.vector_norm(expected):
                return False
    return True


@contextmanager
def kept_as_quantised(model: nn.Module) -> Iterator[None]:
    """Let passes leave bitsandbytes' 4-bit layers as they are while open, and its 8-bit ones warn of nothing.

    On a CPU that multiplies in bfloat16, the first pass of 4-bit layers in evaluation mode rounds their scales to it,
    for good; 8-bit ones say at each call that they round their inputs.
    """
    layers: list[Any] = [m for m in model.modules() if getattr(m, "support_avx512bf16_for_cpu", False)]
    logger = logging.getLogger("bitsandbytes.autograd._functions")
    with ExitStack() as undo:
        logger.addFilter(_is_no_cast)
        undo.callback(logger.removeFilter, _is_no_cast)
        for layer in layers:
            undo.enter_context(patch.object(layer, "support_avx512bf16_for_cpu", False))
        yield


def _is_no_cast(record: logging.LogRecord) -> bool:
    return "inputs will be cast" not in record.getMessage()


def _answers(name: str, layer: nn.Module, width: int) -> Answer:
    """Return the layer as a function of rows, asked in the widest dtype that it takes."""
    tensors = [*layer.parameters(), *layer.buffers()]
    device = next((tensor.device for tensor in tensors if not tensor.is_meta), torch.device("cpu"))

    def answer(rows: Tensor, dtype: torch.dtype) -> Tensor:
        with torch.inference_mode(False), torch.no_grad():
            return layer(rows.to(device, dtype)).double()

    reason = ""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        try:
            answer(torch.zeros(1, width), dtype)
            return functools.partial(answer, dtype=dtype)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError, TypeError, AssertionError, AttributeError, ImportError) as error:
            reason = reason or str(error).partition("\n")[0] or type(error).__name__
    raise _unreadable(name, layer, reason)


def _unreadable(name: str, layer: nn.Module, why: str) -> WorkError:
    kind = f"{type(layer).__name__} of {type(layer).__module__}"
    return WorkError(f"{name} is quantised ({kind}), and its weight cannot be read: {why}; {WHAT_TO_DO}")
