"""The weight matrices inside a model's blocks, read and written one at a time, whatever holds them.

They are those of `nn.Linear` and of GPT-2's `Conv1D`, with W_q, W_k and W_v apart where the model fuses them, and the
slices of 3-D parameters that experts multiply by; what chooses experts is left out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from theodolite.errors import UsageError
from theodolite.models.guard import measures
from theodolite.models.opened import OpenModel
from theodolite.models.training.adapters import refuse_replaced_weights
from theodolite.models.weights.weight_map import Projection, find_projections


@dataclass(frozen=True)
class Matrix:
    """One matrix (outputs, inputs) of a block, as `nn.Linear` would hold it.

    Attributes:
        name: "q", "k", "v" (features head by head), or where the block keeps it: "mlp.c_fc".
        expert: which slice of a 3-D parameter, else None.
        parameter: the model's name of the parameter that holds it; the attribute `attribute` of `module`.
        dimension: that of the outputs, 0 or 1, of the parameter or its slice.
        rows: which outputs of the parameter, in the matrix's order; None: all.
    """

    layer: int
    name: str
    expert: int | None
    parameter: str
    module: nn.Module
    attribute: str
    dimension: int
    rows: Int64[Tensor, " outputs"] | None = None

    @property
    def key(self) -> str:
        """The name in the block, with the expert: `mlp.experts.down_proj.3`."""
        return self.name if self.expert is None else f"{self.name}.{self.expert}"

    @property
    def is_of_expert(self) -> bool:
        """True if only the tokens reach it that its expert is chosen for."""
        return self.expert is not None or bool(re.search(r"(^|\.)experts\.\d+\.", self.name))

    @property
    def holder(self) -> Float[Tensor, "_ _"]:
        """The parameter, or the expert's slice of it; writes go through."""
        parameter = getattr(self.module, self.attribute).detach()
        return parameter if self.expert is None else parameter[self.expert]

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        outputs, inputs = self.holder.shape[:: 1 if self.dimension == 0 else -1]
        return (outputs if self.rows is None else len(self.rows)), inputs

    @property
    def _by_output(self) -> tuple[Tensor, Any]:
        weight = self.holder if self.dimension == 0 else self.holder.T
        return weight, slice(None) if self.rows is None else self.rows.to(weight.device)

    def read(self) -> Float[Tensor, "outputs inputs"]:
        """Copy the matrix, row by row in memory."""
        weight, rows = self._by_output
        return weight[rows].clone(memory_format=torch.contiguous_format)

    def write(self, matrix: Float[Tensor, "outputs inputs"]) -> None:
        """Write another matrix into the parameter."""
        weight, rows = self._by_output
        weight[rows] = matrix.detach().to(weight)


@measures("model")
def block_matrices(model: OpenModel) -> list[list[Matrix]]:
    """List the matrices of every block, in the order in which the block names them.

    W_q, W_k and W_v are apart wherever each is entries of one matrix; else the module's matrices stay whole.

    Raises:
        UsageError: weights are quantised, offloaded, carry an adapter, or one serves two modules or layers.
    """
    refuse_replaced_weights(model.root, "pruned")
    if model.structure.shared:
        raise UsageError(f"{model.id}: several layers share one block, which is not pruned")
    names = {module: name for name, module in model.root.named_modules()}
    by_block, owners = [], dict[int, str]()
    for layer in range(model.layers):
        with model.block_present(layer):
            by_block.append(_matrices_of(model, layer, names))
        for matrix in by_block[layer]:
            owner = owners.setdefault(id(getattr(matrix.module, matrix.attribute)), matrix.parameter)
            if owner != matrix.parameter:
                raise UsageError(
                    f"{matrix.parameter} is {owner}: one matrix that serves two modules is not pruned"
                )
    return by_block


def _matrices_of(model: OpenModel, layer: int, names: dict[nn.Module, str]) -> list[Matrix]:
    projections = _projections(model, layer)
    matrices: list[Matrix] = []
    for path, module in model.structure.blocks[layer].named_modules():
        # Or weighs a shared one: `gate`, but not `gate_proj`.
        chooses_experts = any(re.fullmatch(".*(router|gate|gating)", part) for part in path.split("."))
        if isinstance(module, nn.Linear | Conv1D) and not chooses_experts:
            dimension = 1 if isinstance(module, Conv1D) else 0
            whole = Matrix(layer, path, None, f"{names[module]}.weight", module, "weight", dimension)
            inside = {name: at for name, at in projections.items() if at.module is module}
            matrices += _split_by_projection(whole, inside)
        transposed = getattr(module, "is_transposed", None)  # as transformers says of experts
        for name, value in module.named_parameters(recurse=False):
            if value.ndim == 3 and transposed is not None:
                place = f"{names[module]}.{name}", module, name, int(transposed)
                matrices += [Matrix(layer, f"{path}.{name}", expert, *place) for expert in range(len(value))]
    return matrices


def left_dense(model: OpenModel, matrices: Sequence[Matrix]) -> dict[str, int]:
    """Count the entries, by name, of what else the blocks multiply by: routers, experts of an unknown kind."""
    pruned = {matrix.parameter for matrix in matrices}
    inside = {id(parameter) for block in model.structure.blocks for parameter in block.parameters()}
    return {
        name: weight.numel()
        for name, weight in model.root.named_parameters()
        if id(weight) in inside and weight.ndim >= 2 and name not in pruned and not name.endswith("bias")
    }


@contextmanager
def one_expert_at_a_time(model: nn.Module) -> Iterator[None]:
    """Let experts multiply by their slices one after the other, not in one grouped product, while open."""
    if not isinstance(model, PreTrainedModel) or not model._can_set_experts_implementation():
        yield
        return
    before = model.config._experts_implementation
    model.set_experts_implementation("eager")
    try:
        yield
    finally:
        model.set_experts_implementation(before)


# function → its inputs and its matrix among its arguments (place and name), and whether the matrix is (outputs, inputs)
_PRODUCTS: dict[Any, tuple[tuple[int, str], tuple[int, str], bool]] = {
    functional.linear: ((0, "input"), (1, "weight"), True),
    torch.addmm: ((1, "mat1"), (2, "mat2"), False),
    torch.matmul: ((0, "input"), (1, "other"), False),
    torch.mm: ((0, "input"), (1, "mat2"), False),
    Tensor.matmul: ((0, "self"), (1, "other"), False),
    Tensor.mm: ((0, "self"), (1, "mat2"), False),
    Tensor.__matmul__: ((0, "self"), (1, "other"), False),
}


class TappedProducts(TorchFunctionMode):
    """While open, `on_product` is given the vectors (…, inputs) and the matrix (outputs, inputs) of every product."""

    def __init__(self, on_product: Callable[[Tensor, Tensor], None]) -> None:
        super().__init__()
        self._on_product = on_product

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _PRODUCTS:
            *places, outputs_first = _PRODUCTS[func]
            inputs, matrix = (args[at] if at < len(args) else kwargs[name] for at, name in places)
            if matrix.ndim == 2:
                self._on_product(inputs, matrix if outputs_first else matrix.T)
        return func(*args, **kwargs)


def _projections(model: OpenModel, layer: int) -> dict[str, Projection]:
    for name, parameter in model.structure.blocks[layer].named_parameters():
        if parameter.is_meta:
            raise UsageError(
                f"layer {layer}: {name} is offloaded: read it as it runs (theodolite prune --stream, open_streamed)"
            )
    if layer in model.calls:
        with suppress(UsageError):
            (of_layer,) = find_projections(
                model.root, model.structure, model.calls, [layer], replacing=True, maps=model.weight_maps
            )
            return of_layer.by_name
    return {}


def _split_by_projection(whole: Matrix, projections: dict[str, Projection]) -> list[Matrix]:
    """Return a module's matrix, or the projections in it and what is left of it."""
    free = torch.ones(whole.shape[0], dtype=torch.bool)
    parts = []
    for name, projection in projections.items():
        rows = projection.rows.features
        if free[rows].all():  # else it shares its rows with another: keys that are values, too
            free[rows] = False
            parts.append(replace(whole, name=name, rows=rows))
    if not parts:
        return [whole]
    if free.any():
        parts.append(replace(whole, name=f"{whole.name}.rest", rows=free.nonzero().flatten()))
    if len(parts) == 1 and parts[0].rows is not None and bool((parts[0].rows.diff() == 1).all()):
        return [replace(parts[0], rows=None)]
    return parts
