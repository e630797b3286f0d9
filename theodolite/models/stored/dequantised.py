"""Quantised layers as plain ones: the matrix of a layer, read from what the layer answers. No quantiser is known here.

A quantised linear layer answers e_i with column i of its W, whatever it keeps, in the rounding of its own arithmetic:
its activations, where they are rounded too, have a grid of their own largest, on which zeros and ones lie (up to half a
step of 127). A matrix that the layer has itself is taken where its answers are that matrix times its input. Zeros and
ones of several sizes, and random rows, tell whether there is a matrix: with a fixed grid of activations (static scales)
or fewer than eight bits there is none. Refused, too, are files with weights that need a scale where no
`quantization_config` names a quantiser.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float64
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from theodolite.errors import WorkError
from theodolite.models.training.shards import is_dtensor

FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Of safetensors, those that are weights as they are; others wait for what a quantiser does to them."""

SCALE = re.compile(r"[._](scales?(_inv|_\d+)?|SCB|scb|zero_points?|q?zeros|g_idx|absmax|quant_map|amax)$")
"""What a quantiser keeps beside a weight."""

WHAT_TO_DO = "give a dequantised copy (bfloat16 or float32)"

ROWS = 1024
"""Of the identity, sent at once."""

SIZES = (1.0, 0.7, 1 / 3)
"""Of the rows. A fixed grid rounds them differently; none is above one, which more of the fixed ranges would cut."""

EXACT = 2**-6
"""Relative error, in the norm, of answers to zeros and ones: roundings to bfloat16 (2⁻⁹) and half a step of 127."""

EIGHT_BITS = 2**-3
"""The same of answers to random rows, whose entries int8 rounds by 1 % of their root mean square and float8_e4m3 by
3 %, in each of three answers; by four bits it is 15 %."""

OF_WEIGHTS = ("", ".weight", ".input")
"""Before the name of a scale: others (`embed_scale`, `logit_scale`) are a model's own."""

REPACKED = "support_avx512bf16_for_cpu"
"""What bitsandbytes asks, and nobody else has."""

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
    scales = {key for key in tensors if SCALE.search("." + key) and SCALE.sub("", "." + key) in OF_WEIGHTS}
    weights = {key for key in tensors if key in module._parameters or "weight" in key} - scales
    linear = isinstance(getattr(module, "in_features", None), int)
    return any(_is_packed(tensors[key]) or has_own_class(tensors[key]) for key in weights) or bool(
        linear and scales and any("weight" in key and tensors[key].ndim > 1 for key in weights)
    )


def _is_packed(tensor: Tensor) -> bool:
    """Tell whether a matrix is in no type of float; masks and indices are no weights."""
    return tensor.ndim > 1 and tensor.dtype not in (*FLOATS.values(), torch.bool, torch.int64)


def has_own_class(tensor: Tensor) -> bool:
    """Tell whether operations on the tensor are its class's to define (torchao, quanto)."""
    return type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__ and not is_dtensor(tensor)


def refuse_unreadable_layers(named: Iterable[tuple[str, nn.Module]]) -> None:
    """Reject quantised layers that `dequantised` cannot read, by a few rows: `WorkError`."""
    for name, module in named:
        for inner, layer in quantised_layers(module, name):
            with _linear_part(inner, layer) as (answer, width):
                _refuse_nonlinear(inner, layer, answer, width)


def dequantised(name: str, layer: nn.Module) -> nn.Linear:
    """Make a plain layer in float64 that computes what the quantised one does, or raise `WorkError`."""
    with _linear_part(name, layer) as (answer, width):
        _refuse_nonlinear(name, layer, answer, width)
        weight = _own_weight(layer, width)
        if weight is None or not _explains(weight, answer):
            identity = torch.eye(width, dtype=torch.float64)
            weight = torch.cat([answer(rows) for rows in identity.split(ROWS)]).T.contiguous()
            if not _explains(weight, answer):
                raise _unreadable(name, layer, "its answers to e_1, e_2, … do not add up to its others")
    plain = nn.Linear(width, len(weight), bias=False, device="meta", dtype=torch.float64)
    plain.weight = nn.Parameter(weight, requires_grad=False)
    bias = _bias(layer)
    if bias is not None:
        plain.bias = nn.Parameter(bias.detach().to(weight), requires_grad=False)
    return plain.eval()


def _own_weight(layer: nn.Module, width: int) -> Float64[Tensor, "outputs width"] | None:
    """Return the layer's own W, free of the rounding of its answers; None where it has none."""
    weight = getattr(layer, "weight", None)
    if not isinstance(weight, Tensor):
        return None
    with torch.inference_mode(False), torch.no_grad():
        weight = weight.dequantize() if has_own_class(weight) else weight.detach()
    return weight.double() if weight.dtype in FLOATS.values() and weight.shape[1:] == (width,) else None


def _explains(weight: Float64[Tensor, "outputs width"], answer: Answer) -> bool:
    """Tell whether the answers to zeros and ones, and to random rows, are the rows times the weight."""
    width = weight.shape[1]
    for rows, error in ((_zeros_and_ones(width), EXACT), (_normal(width), EIGHT_BITS)):
        answers, expected = answer(rows), rows.to(weight.device) @ weight.T
        if answers.shape != expected.shape or not _norm(answers - expected) <= error * _norm(expected):
            return False
    return True


@contextmanager
def not_repacked(model: nn.Module) -> Iterator[None]:
    """Let passes leave bitsandbytes' 4-bit layers as they are while open.

    On a CPU that multiplies in bfloat16, their first pass in evaluation mode rounds their scales to it, for good.
    """
    layers: list[Any] = [m for m in model.modules() if getattr(m, REPACKED, False)]
    for layer in layers:
        setattr(layer, REPACKED, False)
    try:
        yield
    finally:
        for layer in layers:
            setattr(layer, REPACKED, True)


@contextmanager
def without_cast_warnings() -> Iterator[None]:
    """Keep bitsandbytes' 8-bit layers from saying at each call that they round their inputs, while open."""

    def is_other(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith("MatMul8bitLt: inputs will be cast")

    logger = logging.getLogger("bitsandbytes.autograd._functions")
    logger.addFilter(is_other)
    try:
        yield
    finally:
        logger.removeFilter(is_other)


@contextmanager
def _linear_part(name: str, layer: nn.Module) -> Iterator[tuple[Answer, int]]:
    """Yield the layer as a function of rows, without its bias while open, and the width of its input."""
    width = getattr(layer, "in_features", None)
    if not isinstance(width, int):
        raise _unreadable(name, layer, "it does not say how wide its input is")
    tensors = [*layer.parameters(), *layer.buffers()]
    device = next((tensor.device for tensor in tensors if not tensor.is_meta), torch.device("cpu"))
    with _without_bias(layer), without_cast_warnings():
        dtype = _dtype_of(name, layer, torch.zeros(1, width, device=device))

        def answer(rows: Tensor) -> Tensor:
            with torch.inference_mode(False), torch.no_grad():
                return layer(rows.to(device, dtype)).double()

        if answer(torch.zeros(1, width)).any():
            raise _unreadable(name, layer, "it adds something to its product")
        yield answer, width


@contextmanager
def _without_bias(layer: nn.Module) -> Iterator[None]:
    """Take the bias away while open, which would round the layer's answers. Its tensors may be in any mapping."""
    if _bias(layer) is None:
        yield
        return
    held = "_parameters" if "bias" in layer._parameters else "_buffers"
    tensors = getattr(layer, held)
    setattr(layer, held, {**tensors, "bias": None})
    try:
        yield
    finally:
        setattr(layer, held, tensors)


def _dtype_of(name: str, layer: nn.Module, rows: Tensor) -> torch.dtype:
    """Find the widest dtype in which the layer can be asked."""
    reason = ""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        try:
            with torch.inference_mode(False), torch.no_grad():
                layer(rows.to(dtype))
            return dtype
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError, TypeError, AssertionError, AttributeError, ImportError) as error:
            reason = reason or str(error).partition("\n")[0] or type(error).__name__
    raise _unreadable(name, layer, reason)


def _refuse_nonlinear(name: str, layer: nn.Module, answer: Answer, width: int) -> None:
    """Raise `WorkError` where answers do not add up, or not at every size."""
    ones, normal = _zeros_and_ones(width), _normal(width)
    for first, second, error in ((ones, 1 - ones, EXACT), (normal, normal.flip(0), EIGHT_BITS)):
        rows = torch.cat([first, second, first + second])
        first, second, both = torch.stack([answer(size * rows) / size for size in SIZES]).chunk(3, dim=1)
        if not _norm(first[0] + second[0] - both) <= error * _norm(both):
            raise _unreadable(
                name, layer, "its answers do not add up, as where activations are rounded to a fixed grid"
            )


def _unreadable(name: str, layer: nn.Module, why: str) -> WorkError:
    kind = f"{type(layer).__name__} of {type(layer).__module__}"
    return WorkError(f"{name} is quantised ({kind}), and its weight cannot be read: {why}; {WHAT_TO_DO}")


def _bias(layer: nn.Module) -> Tensor | None:
    return layer._parameters.get("bias", layer._buffers.get("bias"))


def _zeros_and_ones(width: int) -> Float64[Tensor, "4 width"]:
    return (_normal(width) > 0).double()


def _normal(width: int) -> Float64[Tensor, "4 width"]:
    return torch.randn(4, width, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor))


def kinds_of(path: str | Path) -> dict[str, str]:
    """Read the type of each tensor of a safetensors file; none of a damaged one, which is refused when loaded."""
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
    except SafetensorError:
        return {}


def refuse_quantised_files(source: str | Path, model: nn.Module, files: Iterable[str | Path]) -> None:
    """Reject files whose weights need a scale to decode, where no quantiser is named: `WorkError`."""
    if getattr(model.config, "quantization_config", None):
        return
    kinds = {name: kind for path in files for name, kind in kinds_of(path).items()}
    parameters = {f".{kind_of_name(name)}" for name, _ in model.named_parameters()}

    def is_parameter(name: str) -> bool:
        """Tell whether the model has such a parameter, with or without the prefix of its backbone."""
        dotted = f".{kind_of_name(name)}"
        return any(dotted.endswith(parameter) or parameter.endswith(dotted) for parameter in parameters)

    for name, kind in kinds.items():
        weight = SCALE.sub("", name)
        scales = weight != name and any(weight + end in kinds for end in ("", ".weight", ".qweight"))
        if kind not in FLOATS and (name.endswith("weight") or is_parameter(name)):
            what = f"is {kind}"
        elif scales and not is_parameter(name):
            what = f"scales {weight}"
        else:
            continue
        raise WorkError(
            f"{source}: tensor {name} {what}, and config.json has no quantization_config: {WHAT_TO_DO}"
        )


def kind_of_name(name: str) -> str:
    """Strip the numbers of layers and experts from a name."""
    return re.sub(r"\.\d+(?=\.)", ".#", name)
